"""The runs of a comparison that is stopped or killed save and end, and the same command resumes
them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fp8stack.analysis.compare import runs
from fp8stack.training.run_folder import RunFolder
from tests.analysis.compare.test_comparison import SMALL, InProcess, report, stand_in
from tests.conftest import TINY, losses, metrics
from tests.faults.processes import Child, run_ranks
from tests.support import halting_child

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


def state_of(process: int) -> str:
    """The state of a process: T if it is stopped by a signal, X if it is gone (Linux)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_pending(number: int, process: int) -> bool:
    """Whether a signal waits for a process that stands still (Linux)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(mask >> (number - 1) & 1)


@contextmanager
def halting(rank: int) -> Iterator[None]:
    """A change to a process: runs that it starts stop after their fifth step."""

    class Halting(subprocess.Popen):
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__([words[0], halting_child.__file__, *words[3:]], **options)

    with patch.object(runs, "subprocess", stand_in(Halting)):
        yield


@pytest.mark.full
def test_a_stopped_comparison_saves_says_how_to_go_on_and_comes_to_the_same(
    command, tmp_path, monkeypatch
):
    flags = ["--recipes", "fp32,current", "--seeds", "1", *SMALL]
    process = Child(["compare", "--out", "c", *flags], tmp_path, change=halting)
    run = tmp_path / "c" / "runs" / "fp32-seed0"
    log = run / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= halting_child.STEP)
    trainer = trainer_of(process.pid)
    wait_until(lambda: state_of(trainer) == "T")
    process.signal(signal.SIGINT)
    wait_until(lambda: is_pending(signal.SIGTERM, trainer))
    os.kill(trainer, signal.SIGCONT)
    ended = process.wait(600)
    printed = ended.stdout + ended.stderr
    assert ended.code == 75, printed
    assert "Go on with:\n  fp8stack compare --recipes fp32,current" in printed
    assert "Traceback" not in printed
    done = metrics(run)[-1]["step"]
    # While another thread takes the signal, the main thread may train a step.
    assert halting_child.STEP <= done < 12
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
    assert report(tmp_path / "c")["recipes"][0]["verdict"] == "baseline, 1 of 1 seeds to do"
    monkeypatch.setattr(runs, "subprocess", stand_in(InProcess))
    assert command("compare", "--out", "c", *flags) == 0
    evaluated = ["--set", "eval_every=1", "--set", "final_eval_windows=16"]
    assert command("pretrain", "--out", "r", "--recipe", "fp32", *SMALL, *evaluated) == 0
    assert losses(run) == losses(tmp_path / "r")
    rows = report(tmp_path / "c")["recipes"]
    assert [row["verdict"] for row in rows] == ["baseline", "not known yet: 1 pair"]


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
    assert state_of(trainer) in "ZX"
    assert ended.code == 0, ended
    assert f"fp32, seed 0: waiting for another process that trains in {run}\n" in ended.stdout
    assert [row["status"] for row in report(tmp_path / "c")["runs"]] == ["done", "done"]
    printed = (tmp_path / "c" / "logs" / "fp32-seed0.txt").read_text()
    assert "resumed from" in printed  # the first saved when its comparison was gone
    twin = ["pretrain", "--recipe", "fp32", "--out", "r", *RUN]
    assert run_ranks(twin, tmp_path, 1)[0].code == 0
    assert losses(run) == losses(tmp_path / "r")
