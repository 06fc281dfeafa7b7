"""The error of a quantization: shares of elements that are clipped or become zero, and noise.

The functions return all figures of a matrix as one tensor on its device, see `FIGURES`. On a GPU
the host waits for none of them. Sums are float64, which holds the square of any float32. The
quantized values come from `rounding` and equal the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer, named_format
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
    target = quantizer.element
    sizes = [1, 1] if quantizer.per_tensor else block_sizes(quantizer, x.shape, dim)
    # A block of all rows spans several chunks.
    tall = sizes[0] >= len(x) > 1
    height = 1 if tall else sizes[0]
    if quantizer.per_tensor:
        amaxes = amax(x.to(torch.float32))
    else:
        chunk_amaxes = [block_amax(_blocks(chunk, sizes)) for _, chunk in _parts(x, height)]
        amaxes = torch.stack(chunk_amaxes).amax(0) if tall else torch.cat(chunk_amaxes)
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
    survivors = torch.zeros((), dtype=torch.int64, device=x.device)
    for start, chunk in _parts(x, height):
        blocks = _blocks(chunk, sizes)
        chunk_blocks = slice(None)
        if amaxes.ndim and len(amaxes) > 1:
            chunk_blocks = slice(start // height, start // height + len(blocks))
        into = scales.into[chunk_blocks] if amaxes.ndim else scales.into
        out = None if scales.out is None else scales.out[chunk_blocks]
        bits = None
        if quantizer.stochastic and generator is not None:
            drawn = replace(generator, first_row=generator.first_row + start)
            bits = _blocks(drawn.bits(*chunk.shape), sizes)
        rounded = round_scaled(blocks, Scales(into, into, out, None), target, bits)
        clipped = emptied = chunk.new_zeros(())
        if clips:  # a comparison with NaN is false
            clipped = ((blocks * into).abs() > limit).sum()
        factor = scales.factor
        if quantizer.blocks is None:
            # Divided in float64, so that the figures hold no error but the values'.
            factor = (1.0 / into.to(torch.float64)).expand(blocks.shape)
        else:
            count = rounded.ne(0).sum(dim=(1, 3), keepdim=True)
            survivors = survivors + count if tall else count
            if not tall or start + len(chunk) == len(x):
                emptied = ((survivors == 0) & (amaxes[chunk_blocks] > 0)).sum()
        sums.append([clipped, *_losses(blocks, rounded, factor), emptied])
    used = (amaxes * scales.into > 0) | ~(amaxes > 0).any()
    least = torch.where(used, scales.into, torch.inf).min()
    most = torch.where(used, scales.into, 0.0).max()
    return _figures(x, sums, amaxes.max(), largest, amaxes.numel(), least, most)


def _blocks(rows: Tensor, sizes: list[int]) -> Tensor:
    """Some rows in blocks, padded with zeros, which change no figure. If a block spans all rows,
    these rows are one block."""
    return split_into_blocks(rows, [min(sizes[0], len(rows)), sizes[1]])[0]


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
    for _, chunk in _parts(x, 1):
        values = chunk.to(dtype).to(torch.float32)
        sums.append([values.isinf().sum(), *_losses(chunk, values, None), chunk.new_zeros(())])
    size = amax(x.to(torch.float32))
    scale = torch.ones_like(size)
    return _figures(x, sums, size, size, 1, scale, scale)


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


def _figures(
    x: Tensor, sums: list[list[Tensor]], size: Tensor, largest: Tensor, blocks: int, *ends: Tensor
) -> Tensor:
    """`FIGURES` from the counts of clipped elements, the results of `_losses` and the counts of
    blocks that became all zero, for each chunk of `x`."""
    columns = zip(*sums, strict=True)
    totals = [torch.stack([figure.double() for figure in column]).sum() for column in columns]
    clipped, lost, nonfinite, signal, noise, emptied = totals
    shares = [count / x.numel() for count in (clipped, lost, nonfinite)]
    figures = [size, *shares, signal, noise, largest, emptied / blocks, *ends]
    return torch.stack([figure.to(torch.float64) for figure in figures])


def _parts(x: Tensor, height: int) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the matrix `x` of a multiple of `height` rows, with the index of their first row:
    float32, contiguous."""
    rows, columns = x.shape
    chunk = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // columns // height) * height
    for start in range(0, rows, step):
        yield start, x[start : start + step].to(torch.float32).contiguous()


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
