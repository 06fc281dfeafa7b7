"""Casts by ml_dtypes and scales by exact fractions, peers of the oracle in NumPy.

`fp8stack.analysis.conform.oracles` has the rules of every quantizer. Tests compare it with these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}
OWN_FORMATS = [
    name for name in (f"e{x}m{y}" for x in range(1, 8) for y in range(8 - x)) if name not in MAX
]
"""The formats `eXmY` that hardware and checkpoints do not have."""
FLT_MAX = float(np.finfo(np.float32).max)
FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Number = float | np.float32

# The same examples on every run, however slow the machine.
STEADY = settings(derandomize=True, deadline=None, database=None, max_examples=100)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype in this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to_numpy(x: Tensor) -> np.ndarray:
    """`x` as float32: exact for every dtype that a cast takes."""
    return x.detach().to(torch.float32).numpy()


def codes(data: Tensor) -> np.ndarray:
    """The bytes of a tensor of eight-bit numbers."""
    return data.view(torch.uint8).numpy()


def values_by_definition(name: str) -> list[Fraction | float]:
    """The value of each code of one's own format `eXmY`, by the definition in docs/numerics.md:
    exact, or inf or NaN."""
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    eight_bits, bias = exponent_bits + mantissa_bits == 7, 2 ** (exponent_bits - 1) - 1
    ieee = eight_bits and exponent_bits > 1 and mantissa_bits > 0
    values: list[Fraction | float] = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
        value: Fraction | float = fraction * Fraction(2) ** (max(exponent, 1) - bias)
        if ieee and exponent == 2**exponent_bits - 1:
            value = float("nan") if mantissa else float("inf")
        elif eight_bits and code == 127:
            value = float("nan")
        values.append(value)
    return values + [-value for value in values]


def decoded(name: str) -> np.ndarray:
    """The float32 values of all codes of a format of at most eight bits, by ml_dtypes if it has the
    format."""
    if name not in ML_DTYPES:
        values = np.array(values_by_definition(name), np.float32)
        values[len(values) // 2] = -0.0
        return values
    return (
        np.arange(2 ** BITS.get(name, 8), dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float32)
    )


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def nearest_codes(scaled: np.ndarray, name: str) -> np.ndarray:
    """The codes of float32 values, saturated, by ml_dtypes; NaN is 0x7F, or the largest value."""
    held = np.clip(np.where(np.isnan(scaled), 0, scaled), -MAX[name], MAX[name])
    bits = held.astype(np.float32).astype(ML_DTYPES[name]).view(np.uint8)
    nan = 0x7F if BITS[name] == 8 else (1 << BITS[name] - 1) - 1
    return np.where(np.isnan(scaled), np.uint8(nan), bits)


def fp8_codes(x: np.ndarray, scale: np.ndarray | Number, name: str) -> np.ndarray:
    """`nearest_codes` of the product of two float32 arrays."""
    assert x.dtype == np.float32
    with np.errstate(all="ignore"):
        return nearest_codes(x * np.float32(scale), name)
