"""Signals as requests: a run stops between two steps, not within one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Within, SIGINT, SIGTERM and SIGHUP ask for a stop after the step; a second SIGINT
    interrupts."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        # Unbuffered: the signal may have come in the middle of a print.
        os.write(2, b"\nstopping after this step; Ctrl-C again to quit at once\n")

    signals = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    old = {number: signal.signal(number, handle) for number in signals if number is not None}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
