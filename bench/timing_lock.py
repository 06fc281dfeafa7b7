"""A lock to hold while measuring times, so that long background work pauses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8stack.common.io import lock

_USER = os.getuid() if hasattr(os, "getuid") else 0
PATH = Path(tempfile.gettempdir()) / f"fp8stack-timing-{_USER}.lock"


@contextmanager
def timing() -> Iterator[None]:
    """A context for measuring times. Several processes may be in it at once: their tables show the
    load of the others."""
    with PATH.open("a") as file:
        lock(file.fileno(), shared=True)
        yield


def held_by_another() -> bool:
    """Whether another process measures times now."""
    with PATH.open("a") as file:
        return not lock(file.fileno())
