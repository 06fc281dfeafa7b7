"""The number of CPU threads, and the way they wait for each other on a busy machine."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from fp8stack.cli import main
from fp8stack.training import threads
from tests.conftest import TINY, losses


@pytest.mark.capability("D10")
def test_a_run_keeps_the_threads_that_were_asked_for_and_repeats_its_losses_when_resumed(
    command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    pretrain = ["pretrain", "--out", "run", "--recipe", "fp32", "--threads", "3", *TINY]
    assert command(*pretrain) == 0
    assert torch.get_num_threads() == 3
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["threads"] == 3
    shutil.copytree("run", "cut")
    torch.set_num_threads(1)
    assert command("pretrain", "--resume", "cut/checkpoints/step-000008") == 0
    assert torch.get_num_threads() == 3
    assert losses(Path("cut")) == losses(Path("run"))
    assert "threads 3 ->" not in capsys.readouterr().out
    longer = ["--steps", "13", "--out", "run", "--resume", "auto", "--threads", "2"]
    assert command("pretrain", *longer) == 0
    assert torch.get_num_threads() == 2
    assert "threads 3 -> 2: sums may round differently" in capsys.readouterr().out
    for words in (["generate", "run", "--tokens", "2"], ["eval", "run", "--windows", "1"]):
        assert command(*words, "--threads", "1") == 0
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("variables", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_the_command_sets_how_long_threads_spin_unless_the_user_does(variables, count, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ.get("GOMP_SPINCOUNT") == count
