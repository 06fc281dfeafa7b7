"""Runs one after the other, each in a process of its own, and what is shown meanwhile.

It must not know what the runs came to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from rich.console import Console

from fp8stack.compare.settings import Comparison, Job
from fp8stack.io import storage_errors
from fp8stack.terminal import say

POLL_S = 0.5
LINES = 10
"""How many lines tell of a run's progress where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: its exit code, and its last line if that is not 0."""

    exit: int
    error: str


class Progress(Protocol):
    """Where the progress of runs is shown."""

    def note(self, text: str) -> None:
        """Print a line that stays."""
        ...

    def step(self, text: str, share: float) -> None:
        """Show how far a run is; `share` of its steps are done."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainProgress:
    """A line each time that a tenth of a run is done."""

    def __init__(self) -> None:
        self.shown = 0

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.shown = 0
        say(text)

    def step(self, text: str, share: float) -> None:
        """See `Progress.step`."""
        if int(share * LINES) > self.shown:
            self.shown = int(share * LINES)
            say(text)

    def close(self) -> None:
        """See `Progress.close`."""


class RichProgress:
    """One line that changes; notes scroll by above."""

    def __init__(self, console: Console) -> None:
        self.status = console.status("")
        self.status.start()

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.status.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, text: str, share: float) -> None:
        """See `Progress.step`."""
        self.status.update(text.replace("[", r"\["))

    def close(self) -> None:
        """See `Progress.close`."""
        self.status.stop()


def open_progress() -> Progress:
    """A display that fits where stdout goes."""
    return RichProgress(Console()) if sys.stdout.isatty() else PlainProgress()


def train(
    comparison: Comparison,
    job: Job,
    requested: Callable[[], bool],
    show: Callable[[str, float], None],
) -> Ended:
    """Train one run, or go on with it where it was cut.

    The process has a session of its own, so that a Ctrl-C reaches it once, from here: after the
    first it saves and ends, after the second it ends at once.

    Args:
        comparison: what the run is part of.
        job: the run.
        requested: whether all is to stop.
        show: is told the run's progress, a line and the share of its steps that are done.
    """
    folder, log = comparison.folder(job), comparison.out / "logs" / f"{job.name}.txt"
    command = [
        *(sys.executable, "-m", "fp8stack", "pretrain"),
        *("--config", str(comparison.out / "base.toml"), "--recipe", job.source),
        *("--seed", str(job.seed), "--out", str(folder.path), "--resume", "auto"),
    ]
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, requested, _follow(folder.metrics, comparison.config.steps, show))
        except BaseException:  # a second Ctrl-C
            process.kill()
            process.wait()
            raise
    return Ended(exit=process.returncode, error=_last_line(log) if process.returncode else "")


def _wait(
    process: subprocess.Popen[bytes], requested: Callable[[], bool], look: Callable[[], None]
) -> None:
    """Wait for the process to end; ask it to, once, if that is requested."""
    asked = False
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            look()
        if requested() and not asked:
            asked = True
            process.terminate()


def _follow(
    metrics: Path, steps: int, show: Callable[[str, float], None]
) -> Callable[[], None]:  # fmt: skip
    """A function that looks how far the run that writes to `metrics` is, and shows it."""
    begin: list[tuple[int, float]] = []
    seen = [_last_step(metrics)[0]]  # of an earlier start

    def look() -> None:
        step, loss = _last_step(metrics)
        now = time.monotonic()
        if step == seen[0]:
            return
        seen[0] = step
        if not begin or step < begin[0][0]:
            begin[:] = [(step, now)]
        first, since = begin[0]
        left = "n/a"
        if step > first:
            left = str(timedelta(seconds=round((now - since) / (step - first) * (steps - step))))
        told = "n/a" if loss is None else f"{loss:.4f}"
        show(f"step {step}/{steps} | loss {told} | ETA {left}", step / steps)

    return look


def _last_step(metrics: Path) -> tuple[int, float | None]:
    """The last step in a file of metrics that may be written to, and its loss."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 8192))
            lines = stream.read().split(b"\n")
    except OSError:
        return 0, None
    for line in reversed(lines[:-1]):  # what follows the last newline is not whole
        try:
            row = json.loads(line)
            return int(row["step"]), row.get("loss")
        except (ValueError, KeyError, TypeError):
            continue
    return 0, None


def _last_line(log: Path) -> str:
    """The line that a failed run ended with."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    return written[-1].removeprefix("fp8stack: ") if written else ""
