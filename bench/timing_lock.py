"""A lock that whoever measures times holds, so that long work in the background pauses."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATH = Path(tempfile.gettempdir()) / f"fp8stack-timing-{os.getuid()}.lock"


@contextmanager
def timing() -> Iterator[None]:
    """Within, times are measured. Several may at once: they see each other in their tables."""
    with PATH.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def held_by_another() -> bool:
    """Whether times are measured now, by a process other than this one."""
    with PATH.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
