"""Saves that are cut short, by a kill (R2) or for want of room on the disk (R4)."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_rows import CASES


def test_a_run_killed_within_a_save_goes_on_and_leaves_nothing_over(tmp_path: Path) -> None:
    case = CASES["R2"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == case.short


def test_a_full_disk_leaves_the_checkpoint_before_as_it_was(tmp_path: Path) -> None:
    case = CASES["R4"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == case.short
