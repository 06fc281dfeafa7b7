"""Set torch's precision of float32 products, exact or rounded to TF32 or bfloat16, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Multiply float32 matrices in the precision `name` (see torch.set_float32_matmul_precision),
    then restore the process's own. Compiled code cannot switch."""
    backends: Any = torch.backends
    if torch.compiler.is_compiling():
        yield
        return
    try:
        before: Any = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends sets CUDA and oneDNN differently, which has no name
        before = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
    if before == name:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        if isinstance(before, str):
            torch.set_float32_matmul_precision(before)
        else:
            backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = before


exact_matmul = partial(matmul_precision, "highest")
"""Multiply float32 matrices exactly for a while."""
