"""A lock that whoever measures times holds, so that long work in the background pauses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8stack.io import lock

_USER = os.getuid() if hasattr(os, "getuid") else 0
PATH = Path(tempfile.gettempdir()) / f"fp8stack-timing-{_USER}.lock"


@contextmanager
def timing() -> Iterator[None]:
    """Within, times are measured. Several may at once: they see each other in their tables."""
    with PATH.open("a") as file:
        lock(file.fileno(), shared=True)
        yield


def held_by_another() -> bool:
    """Whether times are measured now, by a process other than this one."""
    with PATH.open("a") as file:
        return not lock(file.fileno())
