"""Launchers start and restart runs; variables that they leave behind change nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, losses, metrics
from tests.faults.processes import Child, checkpoints, last_step, tensors
from tests.faults.twins import SMALL, TEXT


def _run(folder: Path, **environment: str) -> list[tuple]:
    """The losses of a run with these variables."""
    folder.mkdir()
    words = ["pretrain", "--recipe", "delayed", "--out", "r", *TINY]
    ended = Child(words, folder, environment=environment).wait()
    assert ended.code == 0, ended.stderr
    return losses(folder / "r")


@pytest.mark.full
def test_the_environment_of_accelerate_changes_neither_precision_nor_batch(tmp_path):
    launched = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_USE_FSDP": "true",
    }
    assert _run(tmp_path / "launched", **launched) == _run(tmp_path / "plain")


def test_processes_that_srun_started_without_torchrun_are_refused(command, refused, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    refused("pretrain", *TINY, message="torchrun")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert command("pretrain", *TINY, "--steps", "1") == 0


def test_deepspeed_is_refused_by_name(refused, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    refused("pretrain", *TINY, message="DeepSpeed")


def _launch(words: list[str], folder: Path) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text(TEXT)
    inherited = {key: text for key, text in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        words, cwd=folder, env={**inherited, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _ended(launcher: subprocess.Popen[str]) -> str:
    """Wait for a launcher and its ranks, and return their output."""
    try:
        return launcher.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def _words(steps: int) -> list[str]:
    words = ["pretrain", "--data", "text.txt", "--recipe", "delayed", *SMALL, "--out", "r"]
    return [*words, "--steps", str(steps), "--save-every", "50", "--set", "sample_tokens=0"]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _rank_1(launcher: int) -> int:
    """The process of rank 1 that a launcher started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError("there is no rank 1")


@pytest.mark.slow
def test_torchrun_starts_a_run_again_when_a_rank_is_killed_and_it_goes_on(tmp_path):
    run = tmp_path / "r"
    launcher = _launch([*TORCHRUN, "--max-restarts", "1", "-m", "fp8stack", *_words(150)], tmp_path)
    until = time.monotonic() + 600
    while last_step(run) < 60 and launcher.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(_rank_1(launcher.pid), signal.SIGKILL)
    printed = _ended(launcher)
    assert launcher.returncode == 0, printed
    assert "torchrun started this again: going on as with --resume auto" in printed
    assert "resumed from" in printed
    assert [row["step"] for row in metrics(run) if "loss" in row] == [*range(1, 151)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_accelerate_launch_starts_ranks_as_well(parallel, tmp_path):
    # Its --cpu starts one process, whatever --num_processes says (or wants mpirun): accelerate 1.x.
    flags = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    flags += " --dynamo_backend no --main_process_port 0 -m fp8stack"
    words = [sys.executable, "-m", "accelerate.commands.launch", *flags.split()]
    launcher = _launch([*words, *_words(60), "--parallel", parallel], tmp_path)
    printed = _ended(launcher)
    assert launcher.returncode == 0, printed
    assert last_step(tmp_path / "r") == 60
    saved = tensors(checkpoints(tmp_path / "r")[-1])
    assert {"rng:cpu", "rng:cpu.1"} <= saved.keys()  # of both ranks
    assert printed.count("done: validation loss") == 1
