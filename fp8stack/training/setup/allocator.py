"""Settings of memory allocators for training: glibc's on a CPU, torch's on a GPU."""

import ctypes
import os
import sys
from typing import Any

import torch

# From glibc's malloc.h. The largest threshold that glibc takes for mapping a block is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TORCHS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first since torch 2.10
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


def expand_segments(device: str) -> bool:
    """Have torch's CUDA allocator grow its segments in place, so that blocks of changing sizes
    leave no gaps between segments. Returns whether it was done: not for `device` "cpu", nor after
    CUDA is initialised, nor where the environment sets the allocator itself.
    """
    begun: Any = torch.cuda.is_initialized  # it has no types
    if device == "cpu" or torch.version.cuda is None or begun():
        return False
    if any(name in os.environ for name in _TORCHS):
        return False
    os.environ[_TORCHS[0]] = "expandable_segments:True"
    return True
