"""The benchmark of a busy machine: what it keeps, goes on with, makes again and judges."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import busy
from fp8stack.errors import UserError

KNOWN: dict[str, Any] = {
    f"{case} | {arm}": {"0": 8.0, "1": 6.0, "2": 4.0 if arm == busy.AFTER else 0.1, "4": 1.0}
    for case in busy.STEPS
    for arm in busy.ARMS
} | {
    f"{busy.FIRST} | {arm} | {way}": seconds
    for arm, found in {busy.BEFORE: (20.0, None, None), busy.AFTER: (20.0, 50.0, 101.0)}.items()
    for way, seconds in zip(busy.WAYS, found, strict=True)
}


def report_of(known: dict[str, Any]) -> dict[str, Any]:
    rows = busy.rows_of(known)
    facts = {"machine": {"machine": "a CPU"}, "settings": {}, "command": "python -m bench busy"}
    return facts | {"results": rows, "bars": busy.bars(rows)}


def test_ratios_are_of_the_quiet_machine_and_held_to_the_bars() -> None:
    found = report_of(KNOWN)
    assert [(bar["found"], bar["holds"]) for bar in found["bars"]] == [
        (0.5, True), (0.5, True), (2.5, True), (5.05, False),
    ]  # fmt: skip
    text = busy.table(found)
    assert "4.00 (0.50)" in text
    assert "| 20.0 s (1.00) | too long | too long |" in text
    assert "| 20.0 s (1.00) | 50.0 s (2.50) | 101.0 s (5.05) |" in text
    assert len(busy.figure(found).axes) == 2


def arguments(kept: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    busy.add_arguments(parser)
    return parser.parse_args(["--kept", str(kept), *words])


def test_it_goes_on_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def steps_of(case: str, arm: str, seconds: float) -> dict[str, float]:
        made.append(f"{case} | {arm}")
        return KNOWN[made[-1]]

    def first_command(arm: str, way: str, steps: int, limit: int) -> float | None:
        made.append(f"{busy.FIRST} | {arm} | {way}")
        return KNOWN[made[-1]]

    monkeypatch.setattr(busy, "steps_of", steps_of)
    monkeypatch.setattr(busy, "first_command", first_command)
    monkeypatch.setattr(busy, "undisturbed", lambda job: job())
    kept = tmp_path / "kept.jsonl"
    with pytest.raises(UserError, match=f"{len(KNOWN)} of {len(KNOWN)} are left"):
        busy.measure(arguments(kept, "--minutes", "-1"))
    first, *_ = KNOWN
    kept.write_text(json.dumps({"name": first, "found": KNOWN[first]}) + "\n")
    found = busy.measure(arguments(kept))
    assert made == list(KNOWN)[1:]
    assert found["results"] == busy.rows_of(KNOWN)
    made.clear()
    assert busy.measure(arguments(kept))["results"] == found["results"]
    assert made == []


@pytest.mark.parametrize(("others", "tries"), [([0.1], 1), ([0.5, 0.3, 0.1], 3)])
def test_a_measurement_that_others_disturbed_is_made_again(
    others: list[float], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0, "busy": 0.0, "children": 0.0}
    monkeypatch.setattr(busy.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(busy, "_busy_s", lambda: clock["busy"])
    monkeypatch.setattr(busy, "_children_s", lambda: clock["children"])
    made = iter(others)

    def job() -> int:
        clock["now"] += 10
        clock["children"] += 15  # of two cores
        clock["busy"] += 15 + 10 * next(made)
        return len(others)

    assert busy.undisturbed(job) == tries
    assert next(made, None) is None
    made = iter([0.3] * 9)
    with pytest.raises(UserError, match="Go on when it is quiet"):
        busy.undisturbed(job)
