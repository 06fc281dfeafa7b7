"""A run that is asked to stop saves, says so by its exit code, and goes on to the same end (R3)."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_rows import CASES


def test_a_run_that_is_signalled_at_any_moment_saves_and_goes_on(tmp_path: Path) -> None:
    case = CASES["R3"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == case.short
