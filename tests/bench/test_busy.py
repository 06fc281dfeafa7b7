"""The benchmark of a busy machine: results that it continues, repeats and judges."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.cells import Cells, Clocks
from bench.cost import busy
from tests.conftest import refusal

KNOWN: dict[str, Any] = {
    f"{case} | {arm}": {"0": 8.0, "1": 6.0, "2": 4.0 if arm == busy.AFTER else 0.1, "4": 1.0}
    for case in busy.STEPS
    for arm in busy.ARMS
} | {
    f"{busy.FIRST} | {arm} | {way}": seconds
    for arm, times in {busy.BEFORE: (20.0, None, None), busy.AFTER: (20.0, 50.0, 101.0)}.items()
    for way, seconds in zip(busy.WAYS, times, strict=True)
}


def test_ratios_are_of_the_quiet_machine_and_held_to_the_bars():
    rows = busy.rows_of(KNOWN)
    facts = {"machine": {"machine": "a CPU"}, "settings": {}, "command": "python -m bench busy"}
    bars = busy.bars(rows)
    assert [(bar["found"], bar["holds"]) for bar in bars] == [
        (0.5, True), (0.5, True), (2.5, True), (5.05, False),
    ]  # fmt: skip
    measured = {**facts, "results": rows, "bars": bars}
    text = busy.table(measured)
    assert "4.00 (0.50)" in text
    assert "| 20.0 s (1.00) | too long | too long |" in text
    assert "| 20.0 s (1.00) | 50.0 s (2.50) | 101.0 s (5.05) |" in text
    assert len(busy.figure(measured).axes) == 2


def test_it_goes_on_with_what_was_measured(tmp_path, monkeypatch):
    measured: list[str] = []

    def seconds_of(*name: str) -> Any:
        measured.append(" | ".join(name))
        return KNOWN[measured[-1]]

    def measure(*words: str) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        busy.add_arguments(parser)
        arguments = parser.parse_args(words)
        arguments.cells = Cells(tmp_path / "cells.jsonl", "here")
        return busy.measure(arguments)

    monkeypatch.setattr(busy, "steps_of", lambda case, arm, seconds: seconds_of(case, arm))
    monkeypatch.setattr(
        busy, "first_command", lambda arm, way, steps, limit: seconds_of(busy.FIRST, arm, way)
    )
    monkeypatch.setattr(busy, "undisturbed", lambda job: job())
    assert f"{len(KNOWN)} of {len(KNOWN)} are left" in refusal(measure, "--minutes", "-1")
    assert measure()["results"] == busy.rows_of(KNOWN)
    assert measured == list(KNOWN)
    measured.clear()
    assert measure("--minutes", "-1")["results"] == busy.rows_of(KNOWN)
    assert measured == []


@pytest.mark.parametrize(("disturbances", "tries"), [([0.1], 1), ([0.5, 0.3, 0.1], 3)])
def test_a_measurement_that_others_disturbed_is_made_again(disturbances, tries, monkeypatch):
    now = [Clocks(0.0, 0.0, 0.0)]
    monkeypatch.setattr(busy, "clocks", lambda: now[-1])
    remaining = iter(disturbances)

    def job() -> int:
        wall, spent, own_seconds = now[-1]  # 15 seconds of two cores are its own
        now.append(Clocks(wall + 10, spent + 15 + 10 * next(remaining), own_seconds + 15))
        return len(disturbances)

    assert busy.undisturbed(job) == tries
    assert next(remaining, None) is None
    remaining = iter([0.3] * 9)
    assert "Go on when it is quiet" in refusal(busy.undisturbed, job)
