"""`fp8stack conform` finds every fault that is put into what computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Context, Facts
from fp8stack.precision import load_recipe, probe
from tests.analysis.conform.conform_faults import (
    CONTEXT,
    FAULTS,
    OF_RECIPE,
    OF_WEIGHTS,
    OWN,
    Put,
    report_with,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_found(fault: tuple[str, Put], context: Context, patch: pytest.MonkeyPatch) -> Facts:
    """A fault is found by its numbers, not because something could not run."""
    report = report_with(fault, context, patch)
    assert report["counts"]["FAIL"] > 0
    assert not any("traceback" in row for row in report["rows"]), report["rows"]
    return report


def test_there_are_faults_of_every_group_and_the_documents_count_them() -> None:
    assert {only.partition(":")[0] for only, _ in FAULTS.values()} == set(suite.GROUPS)
    page = (Path(__file__).parents[3] / "docs/conform.md").read_text()
    faults = {*FAULTS, *OF_WEIGHTS, *OF_RECIPE}
    assert len(faults) == len(FAULTS) + len(OF_WEIGHTS) + len(OF_RECIPE)
    assert f"Tests break {len(faults)} functions one at a time; `conform` finds each." in page


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = assert_found(FAULTS[name], CONTEXT, monkeypatch)
    if name == "rounded towards zero":
        difference = r"\d+ of \d+ differ: e4m3, .*, scale 1: rowwise of \S+: .0x..., not "
        assert re.match(difference, report["rows"][0]["why"])


@pytest.mark.parametrize("name", OF_RECIPE)
def test_a_fault_of_ones_own_format_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    context = Context(probe("cpu"), quick=True, recipe=load_recipe(str(tmp_path / "own.toml")))
    assert_found(OF_RECIPE[name], context, monkeypatch)


@pytest.mark.slow
def test_fifty_runs_of_other_inputs_raise_no_false_alarm() -> None:
    alarms = {}
    for seed in range(1, 51):
        report = suite.run(Context(CONTEXT.hardware, quick=True, seed=seed))
        if failures := [row for row in report["rows"] if row["verdict"] == "FAIL"]:
            alarms[seed] = failures
    assert alarms == {}
