"""glibc's allocator, told to keep what a training step frees and asks for again."""

from __future__ import annotations

import ctypes
import os
import sys

# From glibc's malloc.h. The largest threshold that glibc takes for mapping a block is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SETTINGS = {_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_THRESHOLD: 32 * 2**20}


def keep_freed_memory() -> bool:
    """Stop glibc from handing freed memory back to the system, which faults it in again page by
    page in the next step. Returns whether it was done: on Linux, unless the environment sets
    MALLOC_* itself.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    return mallopt is not None and all(mallopt(key, value) for key, value in _SETTINGS.items())
