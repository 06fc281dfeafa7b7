"""What a quantization does to a tensor: clipped, lost to zero, noise.

The functions give all figures of a matrix as one tensor on its device, `FIGURES`; nothing there is
read by the host but on a CPU, which has it anyway. Sums are float64, in which no float32 squared
leaves the range. The values are those of `rounding`, which equal the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fp8stack.formats import FORMATS, Quantizer
from fp8stack.numerics.blocks import block_amax, block_sizes, split_into_blocks
from fp8stack.numerics.cast import amax
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import check_arguments
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import round_scaled
from fp8stack.numerics.scales import Scales, given_scale, scales_of

FIGURES = (
    *("amax", "saturated", "underflow", "nonfinite", "signal", "noise", "largest"),
    *("zero_blocks", "least_scale", "largest_scale"),
)
"""What the tensors of this file hold, float64 [10]:

amax: the largest magnitude, NaN ignored.
saturated: the share of elements that clipping changes by more than rounding could: those whose
    scaled magnitude is above the format's maximum and half of its last step (464 for E4M3, 61440
    for E5M2, 7 for E2M1), an inf too.
underflow: the share of elements that were not zero and became zero.
nonfinite: the share of inf and NaN.
signal, noise: the sums of x^2 and of (x - q / scale)^2 over the finite elements.
largest: the largest scaled magnitude; of all blocks, if there are several.
zero_blocks: the share of blocks that became all zero and were not; 0 where there are no blocks.
least_scale, largest_scale: the range of the scales that multiply into the format, of blocks that
    are not all zero if there are such; 1 without scales.
"""
# In the cache of a CPU's core; on a GPU small beside what a pass keeps, in float64 too.
_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 24


def quantization_error(
    x: Tensor,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    dim: int = 1,
    generator: RandomBits | None = None,
) -> Tensor:
    """The figures of `quantize(x, quantizer, dim, generator, scale=scale)`.

    With a Hadamard transform they are those of the transformed matrix, against itself in bfloat16.

    Args:
        x: a matrix, float32, bfloat16, float16 or float64, which counts as float32.
        quantizer: how it is quantized.
        scale: float32, 0-dim; multiplies into the format. See `quantize`.
        dim: what the GEMM reduces over: 1 the columns, 0 the rows.
        generator: the bits for stochastic rounding.

    Returns:
        float64 [10], see `FIGURES`.

    Raises:
        ValueError: as `quantize`.
    """
    check_arguments(quantizer, generator, scale)
    dim, dtype = dim % 2, x.dtype
    if not x.numel():
        return torch.zeros(len(FIGURES), dtype=torch.float64, device=x.device)
    if quantizer.hadamard:
        x, dtype = hadamard(x, quantizer.hadamard, dim), torch.bfloat16
    target = FORMATS[quantizer.format]
    sizes = [1, 1] if quantizer.per_tensor else block_sizes(quantizer, x.shape, dim)
    # A block of all rows has several parts.
    tall = sizes[0] >= len(x) > 1
    height = 1 if tall else sizes[0]
    if quantizer.per_tensor:
        amaxes = amax(x.to(torch.float32))
    else:
        found = [block_amax(_blocks(part, sizes)) for _, part in _parts(x, height)]
        amaxes = torch.stack(found).amax(0) if tall else torch.cat(found)
    scales = given_scale(scale) if scale is not None else scales_of(amaxes, quantizer, dtype)
    if scales.out is not None and quantizer.scale == "e4m3":
        # A block whose scale rounded to zero is lost to zero, not clipped.
        lost = (scales.out == 0) & (amaxes > 0)
        scales = scales._replace(into=torch.where(lost, 0.0, scales.into))
    largest = (amaxes * scales.into).max()
    last_step = 2.0 ** (math.floor(math.log2(target.max)) - target.mantissa_bits)
    limit = target.max + last_step / 2
    clips = largest.device.type != "cpu" or float(largest) > limit
    sums = []
    for start, part in _parts(x, height):
        blocks = _blocks(part, sizes)
        here = slice(None)
        if amaxes.ndim and len(amaxes) > 1:
            here = slice(start // height, start // height + len(blocks))
        into = scales.into[here] if amaxes.ndim else scales.into
        out = None if scales.out is None else scales.out[here]
        bits = None
        if quantizer.stochastic and generator is not None:
            drawn = replace(generator, first_row=generator.first_row + start)
            bits = _blocks(drawn.bits(*part.shape), sizes)
        rounded = round_scaled(blocks, Scales(into, into, out, None), target, bits)
        clipped = emptied = part.new_zeros(())
        if clips:  # a comparison with NaN is false
            clipped = ((blocks * into).abs() > limit).sum()
        factor = scales.factor
        if quantizer.blocks is None:
            # One in float64, which has no error beside that of the values.
            factor = (1.0 / into.to(torch.float64)).expand(blocks.shape)
        else:
            left = rounded.ne(0).sum(dim=(1, 3), keepdim=True)
            emptied = ((left == 0) & (amaxes[here] > 0)).sum()
        sums.append([clipped, *_losses(blocks, rounded, factor), emptied])
    used = (amaxes * scales.into > 0) | ~(amaxes > 0).any()
    least = torch.where(used, scales.into, torch.inf).min()
    most = torch.where(used, scales.into, 0.0).max()
    return _figures(x, sums, amaxes.max(), largest, amaxes.numel(), least, most)


def _blocks(part: Tensor, sizes: list[int]) -> Tensor:
    """Some rows in blocks, with zeros up to whole ones, which change no figure; those of a block of
    all rows are one."""
    return split_into_blocks(part, [min(sizes[0], len(part)), sizes[1]])[0]


def cast_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The figures of `x.to(dtype)`, a float format without a scale: what overflows to inf counts as
    saturated, and its noise is infinite. `x` and the result are as in `quantization_error`."""
    if not x.numel():
        return torch.zeros(len(FIGURES), dtype=torch.float64, device=x.device)
    sums = []
    for _, part in _parts(x, 1):
        values = part.to(dtype).to(torch.float32)
        sums.append([values.isinf().sum(), *_losses(part, values, None), part.new_zeros(())])
    size = amax(x.to(torch.float32))
    one = torch.ones_like(size)
    return _figures(x, sums, size, size, 1, one, one)


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


def _figures(
    x: Tensor, sums: list[list[Tensor]], size: Tensor, largest: Tensor, blocks: int, *ends: Tensor
) -> Tensor:
    """`FIGURES` from the sums of the parts of `x`: of clipped elements, what `_losses` gives, and
    blocks that became all zero."""
    columns = zip(*sums, strict=True)
    whole = [torch.stack([one.double() for one in column]).sum() for column in columns]
    clipped, lost, nonfinite, signal, noise, emptied = whole
    shares = [count / x.numel() for count in (clipped, lost, nonfinite)]
    found = [size, *shares, signal, noise, largest, emptied / blocks, *ends]
    return torch.stack([figure.to(torch.float64) for figure in found])


def _parts(x: Tensor, height: int) -> Iterator[tuple[int, Tensor]]:
    """The matrix `x` in parts of a multiple of `height` rows, each with its first row: float32,
    contiguous."""
    rows, columns = x.shape
    chunk = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // columns // height) * height
    for start in range(0, rows, step):
        yield start, x[start : start + step].to(torch.float32).contiguous()


def _losses(part: Tensor, values: Tensor, factor: Tensor | None) -> list[Tensor]:
    """How many elements of a part became zero and are not finite; the sums of the squares of the
    others and of their errors, in float64. `values` times `factor` are what the cast left."""
    part, values = part.reshape(-1), values.reshape(-1)
    exact, decoded = part.to(torch.float64), values.to(torch.float64)
    factor = decoded.new_ones(()) if factor is None else factor
    error = torch.addcmul(exact, decoded, factor.reshape(-1) if factor.ndim else factor, value=-1)
    lost = _nonzeros(part) - _nonzeros(values)
    signal, noise = torch.dot(exact, exact), torch.dot(error, error)
    nonfinite = part.new_zeros(())
    # No finite float32 makes a sum of squares in float64 that is not finite.
    if part.device.type != "cpu" or not math.isfinite(float(signal)):
        finite = torch.isfinite(exact)
        exact, error = (torch.where(finite, t, 0.0) for t in (exact, error))
        signal, noise = torch.dot(exact, exact), torch.dot(error, error)
        nonfinite = finite.numel() - finite.sum()
    return [lost, nonfinite, signal, noise]


def _nonzeros(x: Tensor) -> Tensor:
    """How many elements are not zero, exact up to 2^24: a CPU's `count_nonzero` takes 20 times as
    long where zeros are many and at random, as after a ReLU."""
    found = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.ne(x, 0, out=found).sum()
