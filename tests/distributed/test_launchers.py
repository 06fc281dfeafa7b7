"""What launchers leave in the environment changes no precision, and what is piped greps well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, Command, losses

STEP = re.compile(
    r"step \d+/12 \| loss \d+\.\d{4} \| lr \S+ \| grad norm \d+\.\d\d \| \d+ ms \| \S+ tok/s \| "
    r"MFU [^|]+ \| \d+\.\d\d GiB \| delayed-emulated \| ETA \S+"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody launched, and what it printed."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "out.txt").write_text(run(folder))
    return folder


def run(folder: Path, **environment: str) -> str:
    words = [sys.executable, "-m", "fp8stack", "pretrain", "--recipe", "delayed", "--out", "r"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*words, *TINY], cwd=folder, env=variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


def test_the_environment_of_accelerate_changes_neither_precision_nor_batch(
    plain: Path, tmp_path: Path
) -> None:
    launched = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_USE_FSDP": "true",
    }
    run(tmp_path, **launched)
    assert losses(tmp_path / "r") == losses(plain / "r")


def test_a_piped_run_is_plain_text_with_a_step_a_line(plain: Path) -> None:
    text = (plain / "out.txt").read_text()
    assert "\033" not in text
    assert "\r" not in text
    lines = text.split("sample:")[0].splitlines()  # a sample holds what the model writes
    assert all(line.isascii() and line.isprintable() for line in lines)
    steps = [line for line in lines if line.startswith("step ") and " | " in line]
    assert len(steps) == 12
    assert all(STEP.fullmatch(line) for line in steps)
    evaluations = [line for line in lines if ": validation loss" in line]
    assert [re.sub(r"\d\.\d{4}", "LOSS", line) for line in evaluations] == [
        "step 6: validation loss LOSS",
        "step 12: validation loss LOSS",
    ]


def test_processes_that_srun_started_without_torchrun_are_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert command("pretrain", *TINY) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "torchrun" in said
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert command("pretrain", *TINY, "--steps", "1") == 0


def test_deepspeed_is_refused_by_name(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert command("pretrain", *TINY) == 2
    assert "DeepSpeed" in capsys.readouterr().err
