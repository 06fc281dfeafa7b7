"""Data that are bad, or go bad while they are read, are named with their place before their use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, Command, metrics
from tests.faults.bounded import command as in_child
from tests.faults.input_data import BEFORE, FAULTS, MEANWHILE, good, problem

# Children are forked, and threads are not.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_file_and_the_place_are_named(fault: str, tmp_path: Path) -> None:
    assert problem(tmp_path, fault) == ""


@pytest.mark.parametrize("fault", MEANWHILE)
def test_they_are_named_by_processes_that_read_ahead_too(fault: str, tmp_path: Path) -> None:
    assert problem(tmp_path, fault, workers=2) == ""


def test_a_run_whose_data_go_bad_ends_with_what_it_learnt_saved(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8stack.training.loop import _Loop

    path = good(tmp_path / "a.bin")
    advance = _Loop.advance

    def then_shrink(self: _Loop, step: int, tokens_BT: torch.Tensor) -> None:
        advance(self, step, tokens_BT)
        if step == 6:
            with path.open("r+b") as stream:
                stream.truncate(100)

    monkeypatch.setattr(_Loop, "advance", then_shrink)
    words = ["--data", "a.bin", "--recipe", "fp32", "--set", "model_overrides.vocabulary=300"]
    ended = in_child(["pretrain", "--out", "r", *TINY, *words], tmp_path)
    assert (ended.code, ended.is_one_line) == (2, True), ended.stderr
    assert "a.bin shrank while in use" in ended.stderr
    assert [row["step"] for row in metrics(tmp_path / "r")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "r" / "checkpoints" / "step-000006").is_dir()
    good(path)
    assert command("pretrain", "--resume", "r") == 0
    assert metrics(tmp_path / "r")[-1]["step"] == 12


def test_every_fault_is_done_to_a_file_that_was_good(tmp_path: Path) -> None:
    """Else a fault could be found for another reason than the one it is for."""
    BEFORE["no fault"] = (lambda path: None, ())
    try:
        assert problem(tmp_path, "no fault").startswith("exit 0")
    finally:
        del BEFORE["no fault"]
