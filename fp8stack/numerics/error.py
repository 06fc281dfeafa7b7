"""What a quantization does to a tensor: clipped, lost to zero, noise.

The functions give all figures of a matrix as one tensor on its device, `FIGURES`; nothing there is
read by the host but on a CPU, which has it anyway. Sums are float64, in which no float32 squared
leaves the range. The casts are those of `rounding`, which equal the bytes of `cast` and `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.formats import FORMATS, Format, ScaleRounding, fp8_format
from fp8stack.numerics.blocks import (
    MX_BLOCK,
    block_scale,
    e8m0_code,
    e8m0_multiplier,
    split_into_blocks,
)
from fp8stack.numerics.cast import amax, magnitude
from fp8stack.numerics.rounding import round_to_blocks, round_to_fp8, round_to_mxfp8

FIGURES = ("amax", "saturated", "underflow", "nonfinite", "signal", "noise", "largest")
"""What the tensors of this file hold, float64 [7]:

amax: the largest magnitude, NaN ignored.
saturated: the share of elements that clipping changes by more than rounding could: those whose
    scaled magnitude is above fp8_max and half of the last step (464 for E4M3, 61440 for E5M2), an
    inf too.
underflow: the share of elements that were not zero and became zero.
nonfinite: the share of inf and NaN.
signal, noise: the sums of x^2 and of (x - q / scale)^2 over the finite elements.
largest: the largest scaled magnitude; of all blocks, if there are several.
"""
_MAXIMA = ("amax", "largest")  # of the parts of a matrix; the others are sums
_SHARES = ("saturated", "underflow", "nonfinite")
# In the cache of a CPU's core; on a GPU small beside what a pass keeps, in float64 too.
_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 24


class _Cast(NamedTuple):
    """A part of a matrix after its cast.

    `values`, float32, times `factor` are what the cast left; `amax` is that of the part, `largest`
    the largest scaled magnitude, `clipped` how many elements were, None for none.
    """

    values: Tensor
    factor: Tensor | None
    amax: Tensor
    largest: Tensor
    clipped: Tensor | None


def tensor_error(x: Tensor, scale: Tensor, format: str = "e4m3") -> Tensor:
    """The figures of a cast with one scale.

    Args:
        x: a matrix, float32, bfloat16, float16 or float64, which counts as float32.
        scale: float32, 0-dim; multiplies into FP8.
        format: "e4m3" or "e5m2".

    Returns:
        float64 [7], see `FIGURES`.

    Raises:
        ValueError: an unknown format.
    """
    target = fp8_format(format)
    inv_scale = 1.0 / scale.to(torch.float64)

    def cast(part: Tensor) -> _Cast:
        size = amax(part)
        largest = size * scale  # a float32 product, as in the cast
        clipped = _clipped(lambda: part.to(torch.float32) * scale, largest, target)
        saturates = part.device.type != "cpu" or not float(largest) <= target.max
        values = round_to_fp8(part, scale, format, saturates)
        return _Cast(values, inv_scale, size, largest, clipped)

    return _figures(x, cast)


def mxfp8_error(x: Tensor, format: str = "e4m3", scale_rounding: ScaleRounding = "rceil") -> Tensor:
    """The figures of `quantize_mxfp8(x)`: blocks of 32 along the columns, over which the GEMM of
    the forward pass reduces. Arguments and result are as in `tensor_error`."""

    def multiplier(largest: Tensor, dtype: torch.dtype) -> Tensor:
        return e8m0_multiplier(e8m0_code(largest, format, scale_rounding))

    def values(part: Tensor) -> Tensor:
        return round_to_mxfp8(part, (1,), format, scale_rounding)[0]

    return _figures(x, _in_blocks((1, MX_BLOCK), multiplier, values, fp8_format(format)))


def block_error(
    x: Tensor, block: tuple[int, int] = (1, 128), format: str = "e4m3", power_of_two: bool = True
) -> Tensor:
    """The figures of `quantize_blocks(x, block)`. Arguments and result are as in `tensor_error`."""

    def scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
        return block_scale(largest, dtype, format, power_of_two)

    def values(part: Tensor) -> Tensor:
        return round_to_blocks(part, [block], format, power_of_two)[0]

    return _figures(x, _in_blocks(block, scale, values, fp8_format(format)), block[0])


def cast_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The figures of `x.to(dtype)`, a float format without a scale: what overflows to inf counts as
    saturated, and its noise is infinite. Arguments and result are as in `tensor_error`."""

    def cast(part: Tensor) -> _Cast:
        values = part.to(dtype).to(torch.float32)
        size = amax(part)
        return _Cast(values, None, size, size, values.isinf().sum())

    return _figures(x, cast)


def sqnr_db(signal: float, noise: float) -> float | None:
    """The signal-to-quantization-noise ratio in dB; None where there is no signal or no noise, or
    where one is not finite."""
    usable = 0 < signal < math.inf and 0 < noise < math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if usable else None


def headroom_bits(largest: float, format: str) -> float | None:
    """How many bits a format's maximum is above the largest scaled magnitude, negative where that
    is clipped; None for zeros and what is not finite."""
    if not 0 < largest < math.inf:
        return None
    return math.log2(FORMATS[format].max) - math.log2(largest)


def _figures(x: Tensor, cast: Callable[[Tensor], _Cast], height: int = 1) -> Tensor:
    """The figures of a matrix, whose parts of a multiple of `height` rows are cast alike."""
    parts = [_figures_of_part(part, cast(part)) for part in _parts(x, height)]
    if not parts:
        return torch.zeros(len(FIGURES), dtype=torch.float64, device=x.device)
    whole = []
    for name, found in zip(FIGURES, zip(*parts, strict=True), strict=True):
        known = [value for value in found if value is not None]
        column = torch.stack(known) if known else torch.zeros(1, device=x.device)
        column = column.to(torch.float64)
        value = column.max() if name in _MAXIMA else column.sum()
        whole.append(value / x.numel() if name in _SHARES else value)
    return torch.stack(whole)


def _parts(x: Tensor, height: int) -> Iterator[Tensor]:
    """The matrix `x` in parts of rows, each contiguous."""
    if x.dtype == torch.float64:
        x = x.to(torch.float32)
    rows, columns = x.shape
    if not x.numel():
        return
    chunk = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // columns // height) * height
    for start in range(0, rows, step):
        yield x[start : start + step].contiguous()


def _figures_of_part(part: Tensor, after: _Cast) -> tuple[Tensor | None, ...]:
    """`FIGURES`, with counts in place of shares; None is a count of 0."""
    exact, decoded = (t.reshape(-1).to(torch.float64) for t in (part, after.values))
    factor = decoded.new_ones(()) if after.factor is None else after.factor
    error = torch.addcmul(exact, decoded, factor, value=-1)
    lost = _nonzeros(part) - _nonzeros(after.values)
    signal, noise = torch.dot(exact, exact), torch.dot(error, error)
    nonfinite = None
    # No finite float32 makes a sum of squares in float64 that is not finite.
    if part.device.type != "cpu" or not math.isfinite(float(signal)):
        finite = torch.isfinite(exact)
        exact, error = (torch.where(finite, t, 0.0) for t in (exact, error))
        signal, noise = torch.dot(exact, exact), torch.dot(error, error)
        nonfinite = finite.numel() - finite.sum()
    return after.amax, after.clipped, lost, nonfinite, signal, noise, after.largest


def _nonzeros(x: Tensor) -> Tensor:
    """How many elements are not zero, exact up to 2^24: a CPU's `count_nonzero` takes 20 times as
    long where zeros are many and at random, as after a ReLU."""
    found = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.ne(x, 0, out=found).sum()


def _clipped(scaled: Callable[[], Tensor], largest: Tensor, target: Format) -> Tensor | None:
    """How many of the `scaled` elements, whose largest magnitude is known, saturate; None: none."""
    last_step = 2.0 ** (math.floor(math.log2(target.max)) - target.mantissa_bits)
    limit = target.max + last_step / 2
    if largest.device.type == "cpu" and float(largest) <= limit:
        return None
    return (scaled().abs() > limit).sum()  # a comparison with NaN is false


def _in_blocks(
    block: Sequence[int],
    scale_of: Callable[[Tensor, torch.dtype], Tensor],
    values_of: Callable[[Tensor], Tensor],
    target: Format,
) -> Callable[[Tensor], _Cast]:
    """The cast of a part whose blocks have a scale each, by their amax and the part's dtype."""

    def cast(part: Tensor) -> _Cast:
        blocks, _ = split_into_blocks(part, block)
        amaxes = magnitude(blocks).amax(dim=(1, 3), keepdim=True)
        scale = scale_of(amaxes, part.dtype)
        largest = (amaxes * scale).max()
        clipped = _clipped(lambda: blocks.to(torch.float32) * scale, largest, target)
        return _Cast(values_of(part), None, amaxes.max(), largest, clipped)

    return cast
