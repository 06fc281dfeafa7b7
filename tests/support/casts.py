"""The ways in which a cast of an emulated GEMM is computed on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fp8stack.numerics import fused

WAYS = ("expressions", "one sweep", "many tiles")
"""No numba; the default; and work shared by threads in tiles as small as blocks allow."""


@contextmanager
def cast_by(way: str) -> Iterator[None]:
    """Cast in one of `WAYS`."""
    assert fused.why_not() is None
    threads = torch.get_num_threads()
    if way == "expressions":
        with mock.patch.object(fused, "implementation", return_value=None):
            yield
    elif way == "one sweep":
        yield
    else:
        fused._plan.cache_clear()
        torch.set_num_threads(3)
        with mock.patch.multiple(fused, _ALONE=0, _TILE=1, _TALL_TILE=1):
            yield
        torch.set_num_threads(threads)
        fused._plan.cache_clear()
