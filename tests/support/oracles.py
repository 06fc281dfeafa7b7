"""References that share no code with fp8stack: numpy float32, ml_dtypes and exact fractions.

Of fp8stack there is `Quantizer` alone, the names of what is asked for.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from fp8stack.formats import Quantizer

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
MAX = FP8_MAX | {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}
MAX_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
POWERS_OF_TWO = [Fraction(2) ** (code - 127) for code in range(255)]  # E8M0's values
FLT_MAX = float(np.finfo(np.float32).max)
FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# The same examples on every run, however slow the machine.
STEADY = settings(derandomize=True, deadline=None, database=None, max_examples=100)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's default dtype is another one for a while."""
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


def decoded(name: str) -> np.ndarray:
    """The float32 values of all codes of a format of at most eight bits, by ml_dtypes."""
    return (
        np.arange(2 ** BITS.get(name, 8), dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float32)
    )


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def fp8_codes(x: np.ndarray, scale: np.ndarray | float, name: str) -> np.ndarray:
    """The bytes of the saturated product of two float32 arrays; NaN is 0x7F."""
    assert x.dtype == np.float32
    with np.errstate(all="ignore"):
        scaled = x * np.float32(scale)
        held = np.clip(scaled, -FP8_MAX[name], FP8_MAX[name])
    bits = held.astype(ML_DTYPES[name]).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(0x7F), bits)


def rceil_code(amax: float, name: str) -> int:
    """The E8M0 code of the smallest power of two that is not below `amax / fp8_max`."""
    with np.errstate(all="ignore"):
        ratio = np.float32(amax) * np.float32(1 / FP8_MAX[name])
    if np.isinf(ratio):
        return 254
    return bisect_left(POWERS_OF_TWO, Fraction(float(ratio)))


def block_amax(block: np.ndarray) -> np.float32:
    """The largest magnitude, NaN ignored."""
    numbers = np.abs(block[~np.isnan(block)])
    return numbers.max() if numbers.size else np.float32(0)


def mxfp8(x: np.ndarray, dim: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scale codes of 1x32 blocks along `dim`, rounded up, one block after another."""
    rows = np.moveaxis(x, dim, -1)
    data = np.zeros(rows.shape, np.uint8)
    scales = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 32)), np.uint8)
    for index in np.ndindex(scales.shape):
        here = (*index[:-1], slice(32 * index[-1], 32 * index[-1] + 32))
        code = rceil_code(block_amax(rows[here]), name)
        scales[index] = code
        data[here] = fp8_codes(rows[here], 2.0 ** (127 - code), name)
    return np.moveaxis(data, -1, dim), np.moveaxis(scales, -1, dim)


def scale_of(
    amax: float, name: str, power_of_two: bool = False, overflow: float = FLT_MAX
) -> np.float32:
    """`fp8_max / amax` in float32, 1 for an amax of 0 or inf."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(MAX[name]) / np.float32(amax)
    if np.isinf(scale):
        scale = np.float32(overflow)
    if power_of_two:  # frexp's mantissa is in [0.5, 1)
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
    return np.float32(scale)


def blocked(
    x: np.ndarray, block: tuple[int, int], name: str, power_of_two: bool, overflow: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and inverse scales of the blocks of a matrix, one block after another."""
    high, wide = block
    data = np.zeros(x.shape, np.uint8)
    inv_scale = np.zeros((-(-x.shape[0] // high), -(-x.shape[1] // wide)), np.float32)
    for row, column in np.ndindex(inv_scale.shape):
        here = (slice(row * high, row * high + high), slice(column * wide, column * wide + wide))
        scale = scale_of(block_amax(x[here]), name, power_of_two, overflow)
        data[here] = fp8_codes(x[here], scale, name)
        inv_scale[row, column] = np.float32(1) / scale
    return data, inv_scale


def nearest_codes(scaled: np.ndarray, name: str) -> np.ndarray:
    """The codes of float32 values, saturated, by ml_dtypes; NaN is 0x7F, or the largest value."""
    held = np.clip(np.where(np.isnan(scaled), 0, scaled), -MAX[name], MAX[name])
    bits = held.astype(np.float32).astype(ML_DTYPES[name]).view(np.uint8)
    nan = 0x7F if BITS[name] == 8 else (1 << BITS[name] - 1) - 1
    return np.where(np.isnan(scaled), np.uint8(nan), bits)


def random_codes(scaled: np.ndarray, name: str, bits: np.ndarray) -> np.ndarray:
    """The codes of float32 values rounded at random: to the neighbour farther from zero where the
    random number is below the place between the neighbours times 2^32, rounded up. Exact: the
    spacings are powers of two and the places have 24 bits."""
    values = decoded(name)
    grid = values[: 1 << BITS[name] - 1]
    grid = grid[np.isfinite(grid)].astype(np.float64)
    size = np.abs(np.clip(np.where(np.isnan(scaled), 0, scaled), -MAX[name], MAX[name]))
    size = size.astype(np.float64)
    below = np.searchsorted(grid, size, side="right") - 1
    above = np.minimum(below + 1, len(grid) - 1)
    gap = np.where(above > below, grid[above] - grid[below], 1.0)
    threshold = np.ceil((size - grid[below]) / gap * 2.0**32).astype(np.int64)
    code = np.where(bits < threshold, above, below)
    code = code + (np.signbit(scaled).astype(int) << BITS[name] - 1)
    nan = 0x7F if BITS[name] == 8 else (1 << BITS[name] - 1) - 1
    return np.where(np.isnan(scaled), nan, code).astype(np.uint8)


def mx_code(amax: float, name: str, rounding: str) -> int:
    """The E8M0 code of a block's scale by any of the three rules, in exact arithmetic."""
    limit, mantissa = MAX[name], {"e4m3": 3, "e5m2": 2, "e2m1": 1, "e2m3": 3, "e3m2": 2}[name]
    if rounding == "rceil":
        with np.errstate(all="ignore"):
            ratio = np.float32(amax) * np.float32(1 / limit)
        return 254 if np.isinf(ratio) else bisect_left(POWERS_OF_TWO, Fraction(float(ratio)))
    largest = int(np.floor(np.log2(limit)))
    if np.isinf(amax):
        return 255 - largest
    if amax == 0:
        return 0
    fraction, exponent = np.frexp(np.float64(amax))  # fraction in [1/2, 1)
    exponent = max(int(exponent) - 1, -127)  # float32's subnormals count as its smallest exponent
    if rounding == "even" and exponent > -127:
        steps = Fraction(float(fraction)) * 2 ** (mantissa + 1) + Fraction(1, 2)
        exponent += int(steps) == 2 ** (mantissa + 1)
    return min(max(exponent - largest + 127, 0), 254)


class ByHand(NamedTuple):
    """What `by_hand` made: codes one to an element, the scales that multiply in and out, one to an
    element, and the factor of the tensor."""

    codes: np.ndarray
    into: np.ndarray
    out: np.ndarray
    factor: np.float32
    stored: np.ndarray


def by_hand(
    x: np.ndarray, quantizer: Quantizer, dim: int, overflow: float, bits: np.ndarray | None = None
) -> ByHand:
    """A matrix through a quantizer without a Hadamard transform, one block after another."""
    whole = block_amax(x)
    rows, columns = x.shape
    match quantizer.block:
        case "tensor":
            block = x.shape
        case "row":
            block = (1, columns) if dim == 1 else (rows, 1)
        case across, along:
            block = (across, along) if dim == 1 else (along, across)
    overflow = FLT_MAX if isinstance(quantizer.block, str) else overflow
    f32 = np.float32
    with np.errstate(all="ignore"):
        g = np.minimum(f32(2688) / whole, f32(FLT_MAX)) if whole else f32(1)
        g = g if g else f32(1)
    into, out = np.zeros(x.shape, f32), np.zeros(x.shape, f32)
    stored = np.zeros((-(-rows // block[0]), -(-columns // block[1])), f32)
    for i, j in np.ndindex(stored.shape):
        here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        largest = block_amax(x[here])
        if quantizer.scale == "e8m0":
            code = mx_code(float(largest), quantizer.format, quantizer.scale_rounding)
            into[here], out[here] = f32(2.0 ** (127 - code)), f32(2.0 ** (code - 127))
            stored[i, j] = code
        elif quantizer.scale == "e4m3":
            with np.errstate(all="ignore"):
                exact = np.minimum(largest * (g * f32(1 / 6)), f32(448))
                scale = exact.astype(ML_DTYPES["e4m3"]).astype(f32)
                encode = np.minimum(f32(1) / (scale * (f32(1) / g)), f32(FLT_MAX))
            into[here], out[here], stored[i, j] = encode, scale, scale
        else:
            if largest < f32(quantizer.eps):
                largest = f32(quantizer.eps)
            power = quantizer.scale == "power_of_two"
            scale = scale_of(float(largest), quantizer.format, power, overflow)
            into[here], out[here] = scale, f32(1) / scale
            stored[i, j] = f32(1) / scale
    with np.errstate(all="ignore"):
        scaled = x * into
        factor = whole * f32(1 / 2688) if quantizer.scale == "e4m3" else f32(1)
    name = quantizer.format
    made = nearest_codes(scaled, name) if bits is None else random_codes(scaled, name, bits)
    return ByHand(made, into, out, factor, stored)


class PythonSlot:
    """One slot of Transformer Engine's algorithm, in plain Python: a list of past amaxes."""

    def __init__(self, name: str, length: int, margin: int, algorithm: str) -> None:
        self.target = np.float32(FP8_MAX[name] * 2.0**-margin)
        self.past = [0.0] * (length - 1)
        self.algorithm = algorithm
        self.recorded, self.scale = 0.0, 1.0

    def update(self) -> None:
        last, self.recorded = self.recorded, 0.0
        if last == 0.0:
            return
        largest = last if self.algorithm == "most_recent" else max([*self.past, last])
        self.past = [*self.past, last][1:]
        if np.isfinite(largest):
            with np.errstate(over="ignore"):
                self.scale = min(float(self.target / np.float32(largest)), FLT_MAX)
