"""Training runs, each in its own process."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8stack.common.io import parse_json, storage_errors
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.run_folder import RunFolder

POLL_S = 0.5
LINES = 10  # progress lines per run
TAIL_BYTES = 8192  # of the metrics, which hold the last row

Show = Callable[[int, float | None, float | None], None]
"""Called for each tenth of a run, with its last step and loss and the seconds per step; None if not
known."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a run: its exit code, its last line if the exit code is not 0, and its wall time,
    None if an earlier start began it."""

    exit: int
    error: str
    seconds: float | None = None


def train(
    run: RunConfig, base: Path, log: Path, requested: Callable[[], bool], show: Show
) -> Ended:
    """Train a run in a new process, or resume it.

    The process has its own session, so that Ctrl-C reaches it only through this process. After the
    first Ctrl-C it saves and ends, after the second it is killed. It also saves and ends if this
    process is killed.

    Args:
        base: the run file with the keys that all runs share.
        log: the file to append what the run prints to.
        requested: returns whether to stop.
        show: is called with the progress.
    """
    folder = RunFolder(Path(run.out or ""))
    begun, began = folder.holds_run, time.monotonic()
    words = ["--config", str(base), "--recipe", run.recipe, "--seed", str(run.seed)]
    words += ["--out", str(folder.path), "--resume", "auto"]
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with (
        stream,
        subprocess.Popen(
            [sys.executable, "-m", "fp8stack.cli.child", "pretrain", *words],
            stdin=subprocess.PIPE,  # closes when this process ends; the run then saves and ends
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait(process, requested, _follow(folder.metrics, run.steps, show))
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
    shown_step, first, since = _last_step(metrics)[0], 0, 0.0  # the last step of an earlier start

    def look() -> None:
        nonlocal shown_step, first, since
        (step, loss), now = _last_step(metrics), time.monotonic()
        if step != shown_step and not first:
            first, since = step, now
        if LINES * step // steps > LINES * shown_step // steps:
            shown_step = step
            show(step, loss, (now - since) / (step - first) if step > first else None)

    return look


def _last_step(metrics: Path) -> tuple[int, float | None]:
    """The last step in a metrics file and its loss. The run may be writing to the file."""
    lines: list[bytes] = []
    with suppress(OSError), metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = stream.read().split(b"\n")[:-1]  # the text after the last newline is incomplete
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            row = parse_json(line, metrics.name)
            return int(row["step"]), row.get("loss")
    return 0, None
