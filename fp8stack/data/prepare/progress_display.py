"""The progress of a preparation: a bar on a terminal, else a plain line now and then."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

from rich.progress import DownloadColumn

from fp8stack.common.progress import Bar
from fp8stack.common.screen import Screen
from fp8stack.common.terminal import is_terminal, say

LINE_EVERY_S = 10.0


class ProgressDisplay:
    """Shows the progress of `work` on files of `total` bytes (0: unknown); `done` bytes were
    processed before."""

    def __init__(
        self, work: str, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.work, self.total, self._begin, self._clock = work, total, done, clock
        self._started = self._shown_s = clock()
        self._bar: Bar | None = None
        if is_terminal(sys.stdout):
            self._bar = Bar(work, DownloadColumn(), total or None, done, Screen(lasting=True))
            self._bar.start()

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, line: str = "") -> None:
        """Show that `done` bytes of the files were read, with more in `line`."""
        if self._bar is not None:
            self._bar.line = line or None
            self._bar.show(done)
        elif self._clock() - self._shown_s >= LINE_EVERY_S:
            self._shown_s = self._clock()
            say(self.describe(done, line))

    def describe(self, done: int, line: str) -> str:
        """The plain line."""
        elapsed_s, total = max(self._clock() - self._started, 1e-9), self.total
        share = f"{100 * done / total:.1f} % of {total / 1e6:,.1f} MB" if total else ""
        fields = [self.work, share or f"{done / 1e6:,.1f} MB", *([line] if line else [])]
        if done > self._begin:
            speed = (done - self._begin) / elapsed_s
            fields.append(f"{speed / 1e6:.1f} MB/s")
            if total:
                fields.append(f"ETA {timedelta(seconds=round((total - done) / speed))}")
        return " | ".join(fields)
