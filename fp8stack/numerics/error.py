"""The error of a quantization: shares of elements that are clipped or become zero, and noise.

The functions return all figures of a matrix as one tensor on its device, see `FIGURES`. On a GPU
the host waits for none of them. Sums are float64, which holds the square of any float32. The
quantized values come from `scales.round_blocks` and equal the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer, named_format
from fp8stack.numerics.blocks import block_sizes, split_into_blocks
from fp8stack.numerics.cast import amax
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import check_arguments
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.scales import round_blocks, scale_blocks

FIGURES = (
    *("amax", "saturated", "underflow", "nonfinite", "signal", "noise", "largest"),
    *("zero_blocks", "least_scale", "largest_scale"),
)
"""The figures in the tensors that this file returns, float64 [10]:

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
# Elements of a chunk: what fits the cache of a CPU's core; on a GPU, float64 chunks that are small
# compared with the activations of a pass.
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

    With a Hadamard transform they describe the transformed matrix, compared with itself in
    bfloat16.

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
    target, sizes = quantizer.element, block_sizes(quantizer, 2, dim)
    if sizes[0] >= len(x):
        sizes[0] = 0  # a block of all rows, which are not padded
    blocks, computed_amaxes, scales, _ = scale_blocks(x, quantizer, sizes, dtype, scale)
    amaxes = amax(x) if computed_amaxes is None else computed_amaxes
    into, out = scales.into, scales.out
    if out is not None and quantizer.scale == "e4m3":
        # A block whose scale rounded to zero is lost to zero, not clipped.
        into = torch.where((out == 0) & (amaxes > 0), 0.0, into)
    largest = (amaxes * into).max()
    last_step = 2.0 ** (math.floor(math.log2(target.max)) - target.mantissa_bits)
    limit = target.max + last_step / 2
    clips = largest.device.type != "cpu" or float(largest) > limit
    # Chunks are rows of blocks or, where a block has all rows, rows of blocks that share scales.
    height = sizes[0] or 1
    step = _rows_of_chunk(x, height) // height
    sums, survivors = [], []
    for index, chunk in enumerate(torch.split(blocks, step, 0 if sizes[0] else 1)):
        of_chunk: Any = slice(index * step, (index + 1) * step) if sizes[0] else ...
        chunk_into, chunk_out = into[of_chunk], None if out is None else out[of_chunk]
        bits = None
        if quantizer.stochastic and generator is not None:
            first_row = index * step * height
            drawn = replace(generator, first_row=generator.first_row + first_row)
            rows = min(step * height, len(x) - first_row)
            bits, _ = split_into_blocks(drawn.bits(rows, x.shape[1]), sizes)
        rounded = round_blocks(chunk, chunk_into, chunk_out, target, bits)
        clipped = chunk.new_zeros(())
        if clips:  # a comparison with NaN is false
            clipped = ((chunk * chunk_into).abs() > limit).sum()
        factor = scales.factor
        if quantizer.blocks is None:
            # Divided in float64, so that the figures hold no error but the values'.
            factor = (1.0 / chunk_into.to(torch.float64)).expand(chunk.shape)
        else:
            survivors.append(rounded.ne(0).sum(dim=(1, 3), keepdim=True))
        sums.append([clipped, *_losses(chunk, rounded, factor)])
    emptied = amaxes.new_zeros((), dtype=torch.float64)
    if survivors:
        counts = torch.cat(survivors) if sizes[0] else torch.stack(survivors).sum(0)
        emptied = ((counts == 0) & (amaxes > 0)).sum(dtype=torch.float64)
    used = (amaxes * into > 0) | ~(amaxes > 0).any()
    least = torch.where(used, into, torch.inf).min()
    most = torch.where(used, into, 0.0).max()
    of_blocks = amaxes.max(), largest, emptied / amaxes.numel(), least, most
    return _figures(x, sums, *of_blocks)


def joint_error(figures: Sequence[Tensor], elements: Sequence[int]) -> Tensor:
    """The figures of several matrices as of one.

    Args:
        figures: the figures of each matrix, see `FIGURES`.
        elements: the number of elements of each. Matrices without elements do not count. Shares,
            that of blocks too, are means over elements.
    """
    counted = [pair for pair in zip(figures, elements, strict=True) if pair[1]]
    if not counted:
        return figures[0]
    stacked = torch.stack([of_matrix for of_matrix, _ in counted])
    total = sum(elements)
    # Filled on the device: copying a list of numbers there would wait for it.
    weights = torch.stack([stacked.new_full((), count / total) for _, count in counted])
    joint = dict(zip(FIGURES, stacked.unbind(1), strict=True))
    for name, column in joint.items():
        if name in ("signal", "noise"):
            joint[name] = column.sum()
        elif name == "least_scale":
            joint[name] = column.min()
        elif name in ("amax", "largest", "largest_scale"):
            joint[name] = column.max()
        else:
            joint[name] = (column * weights).sum()
    return torch.stack(list(joint.values()))


def cast_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The figures of `x.to(dtype)`, a float format without a scale: what overflows to inf counts as
    saturated, and its noise is infinite. `x` and the result are as in `quantization_error`."""
    if not x.numel():
        return torch.zeros(len(FIGURES), dtype=torch.float64, device=x.device)
    sums = []
    for rows in torch.split(x, _rows_of_chunk(x)):
        chunk = rows.to(torch.float32)
        values = chunk.to(dtype).to(torch.float32)
        sums.append([values.isinf().sum(), *_losses(chunk, values, None)])
    size = amax(x.to(torch.float32))
    scale = torch.ones_like(size)
    return _figures(x, sums, size, size, x.new_zeros(()), scale, scale)


def sqnr_db(signal: float, noise: float) -> float | None:
    """The signal-to-quantization-noise ratio in dB; None where there is no signal or no noise, or
    where one is not finite."""
    usable = 0 < signal < math.inf and 0 < noise < math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if usable else None


def headroom_bits(largest: float, format: str) -> float | None:
    """The distance in bits from the largest scaled magnitude to a format's maximum, negative if it
    is clipped; None for zeros and values that are not finite."""
    if not 0 < largest < math.inf:
        return None
    target = named_format(format)
    assert target is not None
    return math.log2(target.max) - math.log2(largest)


def _figures(x: Tensor, sums: list[list[Tensor]], size: Tensor, *of_scales: Tensor) -> Tensor:
    """`FIGURES` from the counts of clipped elements and the results of `_losses` for each chunk of
    `x`; `size` is its amax, and `of_scales` are the figures from `largest` on."""
    columns = zip(*sums, strict=True)
    totals = [torch.stack([figure.double() for figure in column]).sum() for column in columns]
    clipped, lost, nonfinite, signal, noise = totals
    shares = [count / x.numel() for count in (clipped, lost, nonfinite)]
    figures = [size, *shares, signal, noise, *of_scales]
    return torch.stack([figure.to(torch.float64) for figure in figures])


def _rows_of_chunk(x: Tensor, height: int = 1) -> int:
    """The rows of a chunk of the matrix `x`, a multiple of `height`."""
    elements = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    return max(1, elements // x.shape[1] // height) * height


def _losses(source: Tensor, values: Tensor, factor: Tensor | None) -> list[Tensor]:
    """Counts of elements that became zero and that are not finite, and in float64 the sums of
    squares of the finite elements and of their errors. `values` times `factor` is the result of the
    cast."""
    source, values = source.reshape(-1), values.reshape(-1)
    exact, decoded = source.to(torch.float64), values.to(torch.float64)
    factor = decoded.new_ones(()) if factor is None else factor
    error = torch.addcmul(exact, decoded, factor.reshape(-1) if factor.ndim else factor, value=-1)
    lost = _nonzeros(source) - _nonzeros(values)
    signal, noise = torch.dot(exact, exact), torch.dot(error, error)
    nonfinite = source.new_zeros(())
    # No finite float32 makes a sum of squares in float64 that is not finite.
    if source.device.type != "cpu" or not math.isfinite(float(signal)):
        finite = torch.isfinite(exact)
        exact, error = (torch.where(finite, t, 0.0) for t in (exact, error))
        signal, noise = torch.dot(exact, exact), torch.dot(error, error)
        nonfinite = finite.numel() - finite.sum()
    return [lost, nonfinite, signal, noise]


def _nonzeros(x: Tensor) -> Tensor:
    """The number of elements that are not zero, exact up to 2^24. On a CPU `count_nonzero` takes 20
    times as long if many zeros are at random places, as after a ReLU."""
    flags = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.ne(x, 0, out=flags).sum()
