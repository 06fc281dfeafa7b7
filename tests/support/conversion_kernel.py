"""A kernel that converts numbers, and what of its results in the interpreter is not a GPU's.
Import it where Triton interprets kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl

from fp8stack import numerics


@triton.jit
def _larger(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def _convert(x, bf16, e4m3, e5m2, largest, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    values = tl.load(x + place)
    tl.store(bf16 + place, values.to(tl.bfloat16))
    tl.store(e4m3 + place, values.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(e5m2 + place, values.to(tl.float8e5).to(tl.uint8, bitcast=True))
    numbers = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    tl.store(largest, tl.reduce(numbers, 0, _larger))


def differences() -> list[str]:
    """Wrong conversions of ties between neighbours of all formats, numbers beside them, numbers
    that are too large, and NaN; and a wrong reduction by a function."""
    codes = torch.arange(0, 1 << 32, 1 << 19).int()
    x = torch.cat([codes, codes + 1, codes - 1, codes + (1 << 15)]).view(torch.float32)
    bf16 = torch.empty(len(x), dtype=torch.bfloat16)
    e4m3, e5m2 = torch.empty(2, len(x), dtype=torch.uint8)
    largest = torch.empty(1)
    _convert[(1,)](x, bf16, e4m3, e5m2, largest, SIZE=len(x))
    with np.errstate(invalid="ignore"):
        exact = torch.from_numpy(x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32))
    wrong = {"bfloat16": bf16.float() != exact}
    for name, actual in (("e4m3", e4m3), ("e5m2", e5m2)):
        wrong[name] = actual != numerics.cast_to_fp8(x, torch.ones(()), name).view(torch.uint8)
    lines = [f"{name} of {v}" for name in wrong for v in x[wrong[name] & ~x.isnan()].tolist()]
    expected = x[x.isfinite()].max()
    return lines + [f"a maximum of {largest.item()}"] * bool(largest != expected)
