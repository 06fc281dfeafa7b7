"""The runs of a killed comparison save and end, and the same command resumes them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8stack.training.run_folder import RunFolder
from tests.conftest import TINY, losses
from tests.faults.processes import Child, run_ranks

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux")

SETS = [word for item in TINY[10:] if item != "--set" for word in ("--set", item)]
RUN = ["--batch", "4", "--context", "32", *SETS, "--steps", "60", "--set", "save_every=60"]
RUN += ["--set", "eval_every=30", "--set", "final_eval_windows=4"]
WORDS = ["compare", "--recipes", "fp32,bf16", "--seeds", "1", "--out", "c", *RUN]


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trainer_of(process: int) -> int:
    """The process that a comparison's process has started to train in (Linux)."""
    ids = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return next(int(x) for x in ids if b"pretrain" in Path(f"/proc/{x}/cmdline").read_bytes())


def is_alive(process: int) -> bool:
    """Whether a process runs or is stopped (Linux)."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_killed_comparison_leaves_no_process_and_the_same_command_goes_on(tmp_path):
    run = tmp_path / "c" / "runs" / "fp32-seed0"
    killed = Child(WORDS, tmp_path)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
    trainer = trainer_of(killed.pid)
    os.kill(trainer, signal.SIGSTOP)  # else it might be over before it is noticed
    killed.signal(signal.SIGKILL)
    assert killed.wait().code == -signal.SIGKILL
    again = Child(WORDS, tmp_path)  # while the run of the first is still there
    wait_until(lambda: b"waiting for another process" in again.printed or not again.is_alive)
    assert RunFolder(run).is_running
    os.kill(trainer, signal.SIGCONT)
    ended = again.wait()
    assert not is_alive(trainer)
    assert ended.code == 0, ended
    assert f"fp32, seed 0: waiting for another process that trains in {run}\n" in ended.stdout
    report = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [row["status"] for row in report["runs"]] == ["done", "done"]
    printed = (tmp_path / "c" / "logs" / "fp32-seed0.txt").read_text()
    assert "resumed from" in printed  # the first saved when its comparison was gone
    twin = ["pretrain", "--recipe", "fp32", "--out", "r", *RUN]
    assert run_ranks(twin, tmp_path, 1)[0].code == 0
    assert losses(run) == losses(tmp_path / "r")


@pytest.mark.slow
def test_two_comparisons_do_not_work_in_one_folder(tmp_path):
    first = Child([*WORDS, "--steps", "100000"], tmp_path)
    wait_until((tmp_path / "c" / "runs").exists)
    second = run_ranks([*WORDS, "--steps", "100000"], tmp_path, 1)[0]
    first.signal(signal.SIGTERM)
    assert first.wait().code == 75
    assert second.code == 2
    message = f"Another process compares in {tmp_path / 'c'}. Wait for it or give another --out."
    assert second.stderr == f"fp8stack: {message}\n"
