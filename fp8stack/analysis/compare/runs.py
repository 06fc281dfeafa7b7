"""Training runs, each in its own process, with a progress display."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.text import Text

from fp8stack.analysis.compare.settings import Comparison, Job
from fp8stack.common.io import parse_json, storage_errors
from fp8stack.common.screen import Screen
from fp8stack.common.terminal import is_terminal, printable, say
from fp8stack.training.run_folder import RunFolder

POLL_S = 0.5
LINES = 10  # progress lines per run without a terminal

Show = Callable[[str, float, float | None], None]
"""Called with the progress of a run: a line, the share of its steps that are done, and the seconds
per step, None if not known yet."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a run: its exit code, its last line if the exit code is not 0, and its wall time,
    None if an earlier start began it."""

    exit: int
    error: str
    seconds: float | None = None


class Progress:
    """Displays the progress of runs: a status line on a terminal, otherwise a printed line for each
    tenth of a run."""

    def __init__(self) -> None:
        self._status = Screen(lasting=True).status("") if is_terminal(sys.stdout) else None
        self._shown = 0

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._shown = 0
        if self._status is None:
            say(text)
        else:
            self._status.console.print(printable(text), soft_wrap=True)

    def step(self, text: str, share: float) -> None:
        """Show the progress of a run; `share` of its steps are done."""
        if self._status is not None:
            self._status.update(Text(printable(text)))
        elif int(share * LINES) > self._shown:
            self._shown = int(share * LINES)
            say(text)


def train(comparison: Comparison, job: Job, requested: Callable[[], bool], show: Show) -> Ended:
    """Train a run in a new process, or resume it. `requested` returns whether to stop; `show` is
    called with the progress.

    The process has its own session, so that Ctrl-C reaches it only through this process. After the
    first Ctrl-C it saves and ends, after the second it is killed. It also saves and ends if this
    process is killed.
    """
    folder, log = comparison.folder(job), comparison.out / "logs" / f"{job.name}.txt"
    begun, began = folder.holds_run, time.monotonic()
    command = [
        *(sys.executable, "-m", "fp8stack.cli.child", "pretrain"),
        *(
            "--config",
            str(comparison.out / "base.toml"),
            "--recipe",
            comparison.recipes[job.recipe],
        ),
        *("--seed", str(job.seed), "--out", str(folder.path), "--resume", "auto"),
    ]
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with (
        stream,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process ends; the run then saves and ends
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait(process, requested, _follow(folder.metrics, comparison.config.steps, show))
        except BaseException:  # a second Ctrl-C
            process.kill()
            raise
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    error = last.removeprefix("fp8stack: ") if process.returncode else ""
    seconds = None if begun else round(time.monotonic() - began, 1)
    return Ended(exit=process.returncode, error=error, seconds=seconds)


def wait_until_idle(folder: RunFolder, requested: Callable[[], bool]) -> None:
    """Wait until no other process trains in `folder` or a stop is requested. The process may be
    about to end because its comparison was killed."""
    while folder.is_running and not requested():
        time.sleep(POLL_S)


def _wait(
    process: subprocess.Popen[bytes], requested: Callable[[], bool], look: Callable[[], None]
) -> None:
    """Wait for the process to end, and terminate it once a stop is requested."""
    is_stopping = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return
        look()
        if requested() and not is_stopping:
            is_stopping = True
            process.terminate()


def _follow(metrics: Path, steps: int, show: Show) -> Callable[[], None]:
    """A function that shows the progress of the run that writes to `metrics`."""
    begin: list[tuple[int, float]] = []
    shown_step = [_last_step(metrics)[0]]  # the last step of an earlier start

    def look() -> None:
        step, loss = _last_step(metrics)
        now = time.monotonic()
        if step == shown_step[0]:
            return
        shown_step[0] = step
        if not begin or step < begin[0][0]:
            begin[:] = [(step, now)]
        first, since = begin[0]
        pace_s = (now - since) / (step - first) if step > first else None
        eta = "n/a" if pace_s is None else timedelta(seconds=round(pace_s * (steps - step)))
        loss_text = "" if loss is None else f" | loss {loss:.4f}"
        show(f"step {step}/{steps}{loss_text} | ETA {eta}", step / steps, pace_s)

    return look


def _last_step(metrics: Path) -> tuple[int, float | None]:
    """The last step in a metrics file and its loss. The run may be writing to the file."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 8192))
            lines = stream.read().split(b"\n")
    except OSError:
        return 0, None
    for line in reversed(lines[:-1]):  # the text after the last newline is incomplete
        with suppress(ValueError, KeyError, TypeError):
            row = parse_json(line, metrics.name)
            return int(row["step"]), row.get("loss")
    return 0, None
