"""`fp8stack conform` finds every fault that is put into what computes."""

from __future__ import annotations

import re

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Context
from fp8stack.precision import probe
from tests.analysis.conform.conform_faults import FAULTS, report_with

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = Context(probe("cpu"), quick=True)


def failed(report: dict) -> list[str]:
    return [f"{row['group']}: {row['check']}" for row in report["rows"] if row["verdict"] == "FAIL"]


def test_there_are_faults_of_every_group() -> None:
    assert len(FAULTS) >= 20
    assert {only.partition(":")[0] for only, _ in FAULTS.values()} == set(suite.GROUPS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_with(FAULTS[name], CONTEXT, monkeypatch)
    assert failed(report)
    for row in report["rows"]:  # by its numbers, not because something could not run
        assert "failed" not in row, row
        if name == "rounded towards zero":
            assert re.match(r"\d+ of \d+ differ: scale 1: x = \S+: ", row["why"]), row


@pytest.mark.slow
def test_fifty_runs_of_other_inputs_raise_no_false_alarm() -> None:
    alarms = {}
    for seed in range(1, 51):
        if failures := failed(suite.run(Context(CONTEXT.hardware, quick=True, seed=seed))):
            alarms[seed] = failures
    assert alarms == {}
