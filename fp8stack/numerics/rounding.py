"""FP8, FP6 and FP4 values in float32: what a cast would give, without its bytes.

An emulated GEMM multiplies these. They equal the bytes of `quantized`, `cast` and `blocks` to the
bit (only the sign of a zero may differ), and cost a few passes over chunks that stay in the cache.

How a value is rounded: adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times the value's own
power of two leaves just `mantissa_bits` of mantissa, to nearest even, by float32's own addition.
That power is not let below the format's smallest normal, which keeps the subnormals' fixed step.

Eager code on a CPU works in place, chunk by chunk, and leaves out what it can see to be needless.
Elsewhere there is one expression for all cases: a compiler fuses it with what comes before and
after, and a GPU is asked for no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.formats import FORMATS, Format, Quantizer, ScaleRounding, fp8_format
from fp8stack.numerics.blocks import MX_BLOCK, in_memory, trimmed
from fp8stack.numerics.cast import amax, inverse, magnitude
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import (
    Scales,
    check_arguments,
    e8m0_scales,
    float_scales,
    given_scale,
    scales_of,
)
from fp8stack.numerics.random import RandomBits

# 512 KiB of float32: two such chunks stay in the L2 cache, and the cost of a call is small beside.
CHUNK = 1 << 17
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
# Beyond these a power of two times the magic number, or a scale, leaves float32's normal range.
_LARGE, _SMALL = 2.0**100, 2.0**-100

Block = tuple[int, int]


class Rounded(NamedTuple):
    """A matrix as an emulated GEMM takes it.

    Attributes:
        values: float32 of the shape of the matrix; with a Hadamard transform, the reduced dimension
            is padded to a multiple of the transform's size. NaN where the matrix has NaN.
        factor: float32, what the GEMM's output is multiplied by for this operand: 0-dim, or for
            block = "row" one for each row of the operand as its GEMM reduces it; None if the values
            carry their scales.
    """

    values: Tensor
    factor: Tensor | None


def round_to(
    x: Tensor,
    quantizer: Quantizer,
    dim: int,
    generator: RandomBits | None = None,
    *,
    scale: Tensor | None = None,
    saturates: bool = True,
) -> Rounded:
    """The values of `quantize(x, quantizer, dim)` in float32.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        quantizer: how it is quantized.
        dim: what the GEMM reduces over: 1 the columns, 0 the rows.
        generator: the bits for stochastic rounding, by the place in `x`.
        scale: float32, 0-dim, for one scale per tensor: needed for delayed scaling.
        saturates: False where the caller knows that no `|x * scale|` exceeds the format's largest
            value; for one scale per tensor.

    Raises:
        ValueError: no generator or no scale where one is needed, or a scale for blocks.
    """
    check_arguments(quantizer, generator, scale)
    dim, dtype = dim % 2, x.dtype
    if quantizer.hadamard:
        x, dtype = hadamard(x, quantizer.hadamard, dim), torch.bfloat16
    if not quantizer.per_tensor:
        return _round_both(x, quantizer, [dim], [block_of(x, quantizer, dim)], dtype, generator)[0]
    if scale is None:
        largest = amax(x)
        scale = scales_of(largest, quantizer, dtype).into
        saturates = _whole(x) or not bool(largest.isfinite())
    if not quantizer.stochastic:
        return Rounded(round_to_fp8(x, scale, quantizer.format, saturates), inverse(scale))
    scales = given_scale(scale)
    values = round_scaled(padded(x, 1, 1), (1, 1), scales, FORMATS[quantizer.format], generator)
    return Rounded(values, scales.factor)


def round_both(
    x: Tensor,
    along: Quantizer,
    across: Quantizer,
    generators: tuple[RandomBits | None, RandomBits | None] = (None, None),
) -> tuple[Rounded, Rounded]:
    """`round_to` with dims 1 and 0: for GEMMs that reduce over the columns and over the rows.

    Equal to two calls, and cheaper where the two quantizers are alike.
    """
    if along.turns and along == across:
        both = round_to(x, along, 1, generators[0])
        return both, both
    if along.blocks is None or not _alike(along, across) or _whole(x):
        return round_to(x, along, 1, generators[0]), round_to(x, across, 0, generators[1])
    blocks = [block_of(x, along, 1), block_of(x, across, 0)]
    one, other = _round_both(x, along, [1, 0], blocks, x.dtype, None)
    return one, other


def round_to_fp8(x: Tensor, scale: Tensor, format: str = "e4m3", saturates: bool = True) -> Tensor:
    """The values of `cast_to_fp8(x, scale, format)`, still multiplied by `scale`: float32.

    Args:
        x: any shape, float32, bfloat16 or float16.
        scale: float32, 0-dim.
        format: "e4m3" or "e5m2".
        saturates: False where the caller knows that no `|x * scale|` exceeds fp8_max.
    """
    target = fp8_format(format)
    if _whole(x):
        return _round(x.to(torch.float32) * scale, target)
    source = x.contiguous().to(torch.float32).view(-1)
    result = torch.empty_like(source)
    scratch = torch.empty(min(CHUNK, source.numel()), dtype=torch.int32)
    for start in range(0, source.numel(), CHUNK):
        part = result[start : start + CHUNK]
        torch.mul(source[start : start + CHUNK], scale, out=part)
        _round_in_place(part, scratch[: part.numel()], target, saturates)
    return result.view(x.shape)


def round_to_mxfp8(
    x: Tensor,
    dims: Sequence[int],
    format: str = "e4m3",
    scale_rounding: ScaleRounding = "rceil",
) -> list[Tensor]:
    """The values of `quantize_mxfp8(x, dim)` for each of `dims`: float32, of the shape of `x`.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        dims: 0 and 1, or one of them; both at once cost less than one after the other.
        format: "e4m3" or "e5m2".
        scale_rounding: see `quantize_mxfp8`.
    """
    blocks = [(MX_BLOCK, 1) if dim % 2 == 0 else (1, MX_BLOCK) for dim in dims]
    scales_of = partial(e8m0_scales, format=format, rounding=scale_rounding)
    # Rounded up, a scale leaves room for its whole block; the other rules saturate.
    return _round_blocks(x, blocks, fp8_format(format), scales_of, True, scale_rounding != "rceil")


def round_to_blocks(
    x: Tensor, blocks: Sequence[Block], format: str = "e4m3", power_of_two: bool = True
) -> list[Tensor]:
    """The values of `quantize_blocks(x, block)` for each of `blocks`: float32, the shape of `x`.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        blocks: such as (1, 128) and (128, 1), together or alone.
        format: "e4m3" or "e5m2".
        power_of_two: see `quantize_blocks`.
    """
    scales_of = partial(float_scales, dtype=x.dtype, format=format, power_of_two=power_of_two)
    return _round_blocks(x, blocks, fp8_format(format), scales_of, power_of_two, False)


def _alike(one: Quantizer, other: Quantizer) -> bool:
    """Whether two quantizers differ in their blocks alone, and share passes."""
    return (
        not (one.stochastic or other.stochastic or one.hadamard or other.hadamard)
        and None not in (one.blocks, other.blocks)
        and (one.format, one.scale, one.scale_rounding, one.eps)
        == (other.format, other.scale, other.scale_rounding, other.eps)
    )


def block_of(x: Tensor, quantizer: Quantizer, dim: int) -> Block:
    """Rows and columns that share a scale: a block, or a row along `dim`."""
    across, along = quantizer.blocks or (1, max(1, x.shape[dim]))
    return (across, along) if dim == 1 else (along, across)


def _round_both(
    x: Tensor,
    quantizer: Quantizer,
    dims: Sequence[int],
    blocks: Sequence[Block],
    dtype: torch.dtype,
    generator: RandomBits | None,
) -> list[Rounded]:
    """The matrix `x`, transformed if it is to be, rounded in each of `blocks`, for `dims`."""
    factors: list[Tensor | None] = []

    def scales(largest: Tensor) -> Scales:
        found = scales_of(largest, quantizer, dtype)
        factors.append(found.factor)
        return found

    power_of_two = quantizer.scale in ("power_of_two", "e8m0") and quantizer.blocks is not None
    saturates = quantizer.scale == "e4m3" or (
        quantizer.scale == "e8m0" and quantizer.scale_rounding != "rceil"
    )
    values = _round_blocks(
        x,
        blocks,
        FORMATS[quantizer.format],
        scales,
        power_of_two,
        saturates,
        generator if quantizer.stochastic else None,
    )
    if quantizer.block == "row" and not x.numel():  # no column has no amax, and yet an output
        factors = [torch.ones(x.shape[1 - dim], device=x.device) for dim in dims]
    return [Rounded(*both) for both in zip(values, factors, strict=True)]


def _round_blocks(
    x: Tensor,
    blocks: Sequence[Block],
    target: Format,
    scales_of: Callable[[Tensor], Scales],
    power_of_two: bool,
    saturates: bool,
    generator: RandomBits | None = None,
) -> list[Tensor]:
    """The matrix `x` rounded to `target` times the scale of its blocks, for each of `blocks`.

    Args:
        scales_of: the scales, from the amaxes of the blocks, [n0, 1, n1, 1].
        power_of_two: whether the scales are powers of two.
        saturates: whether a scale may leave too little room for its block.
        generator: rounds at random.
    """
    source = padded(x, max(b0 for b0, _ in blocks), max(b1 for _, b1 in blocks))
    if _whole(x):
        largest = [
            magnitude(blocked(source, block)).amax(dim=(1, 3), keepdim=True)
            if x.numel()
            else _block_amaxes(source, [block])[0]
            for block in blocks
        ]
        scales = [scales_of(in_memory(amaxes)) for amaxes in largest]
        rounded = [
            _round_whole(source, block, each, target, generator)
            for block, each in zip(blocks, scales, strict=True)
        ]
        return [_trimmed(values, x) for values in rounded]
    largest = _block_amaxes(source, blocks)
    tame = all(map(_ordinary, largest))
    if not tame:
        largest = [
            torch.where(amaxes.isnan(), amax_without_nan(source, block), amaxes)
            if bool(amaxes.isnan().any())
            else amaxes
            for amaxes, block in zip(largest, blocks, strict=True)
        ]
    scales = [scales_of(amaxes) for amaxes in largest]
    if tame and power_of_two and generator is None:
        inv_scales = [each.out for each in scales if each.out is not None]
        rounded = _round_in_blocks(source, blocks, inv_scales, target, saturates)
    else:
        rounded = [
            round_scaled(source, block, each, target, generator, saturates or not tame)
            for block, each in zip(blocks, scales, strict=True)
        ]
    return [_trimmed(values, x) for values in rounded]


def _whole(x: Tensor) -> bool:
    """Whether `x` is treated as one expression, not chunk by chunk."""
    return torch.compiler.is_compiling() or x.device.type != "cpu"


def _round(scaled: Tensor, target: Format) -> Tensor:
    """`scaled`, float32, saturated and rounded to `target`, as one expression."""
    values = scaled.clamp(-target.max, target.max)
    smallest = target.min_normal * _magic(target)
    if values.device.type == "cpu":
        # inductor's vectors cannot look at bits. Veltkamp's splitting (Dekker, 1971) rounds to the
        # nearest with sums alone, here to even at ties: the tests try every mantissa.
        split = values * (2.0 ** (23 - target.mantissa_bits) + 1)
        rounded = split - (split - values)
        return torch.where(
            values.abs() < target.min_normal, (values + smallest) - smallest, rounded
        )
    # Compilers for GPUs make one operation of a product and a sum; here a limit stands in between.
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    spacing = (power * _magic(target)).clamp_min(smallest)
    return (values + spacing) - spacing


def _round_whole(
    source: Tensor, block: Block, scales: Scales, target: Format, generator: RandomBits | None
) -> Tensor:
    """The matrix `source` rounded to `target`, as one expression."""
    scaled = blocked(source, block) * in_memory(scales.into)
    if generator is None:
        rounded = _round(scaled, target)
    else:
        bits = generator.bits(*source.shape).view(scaled.shape)
        rounded = _round_at_random(scaled.clamp(-target.max, target.max), bits, target)
    if scales.out is not None:
        rounded = rounded * in_memory(scales.out)
    return rounded.view_as(source)


def round_scaled(
    source: Tensor,
    block: Block,
    scales: Scales,
    target: Format,
    generator: RandomBits | None,
    saturates: bool = True,
) -> Tensor:
    """The matrix `source` rounded to `target`, multiplied by the scales before and after."""
    if _whole(source):
        return _round_whole(source, block, scales, target, generator)
    result = torch.empty_like(source)
    rows = _chunk_rows(source, [block])
    scratch = torch.empty_like(source[:rows], dtype=torch.int32)
    for start in range(0, source.shape[0], rows):
        out = result[start : start + rows]
        blocks = blocked(out, block)
        into = of_chunk(scales.into, block, start, rows)
        torch.mul(blocked(source[start : start + rows], block), into, out=blocks)
        if generator is None:
            _round_in_place(out, scratch[: out.shape[0]], target, saturates)
        else:
            bits = generator.rows(start, *out.shape)
            out.copy_(_round_at_random(out.clamp_(-target.max, target.max), bits, target))
        if scales.out is not None:
            blocks.mul_(of_chunk(scales.out, block, start, rows))
    return result


def _round_in_place(values: Tensor, scratch: Tensor, target: Format, saturates: bool) -> None:
    """Round the scaled float32 `values` to `target`."""
    if saturates:
        values.clamp_(-target.max, target.max)
    spacing = _spacing(values, scratch, target).clamp_min_(target.min_normal * _magic(target))
    values.add_(spacing).sub_(spacing)


def _round_at_random(values: Tensor, bits: Tensor, target: Format) -> Tensor:
    """`values`, float32 and clamped, rounded to `target`: away from zero where the random number is
    below the place between the two neighbours times 2^32, rounded up. All of it is exact."""
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = (power * 2.0**-target.mantissa_bits).clamp_min(float(target.min_subnormal or 0))
    per_step = ((254 << 23) - step.view(torch.int32)).view(torch.float32)  # 1 / step
    steps = values * per_step
    below = steps.trunc()
    threshold = ((steps - below).abs() * 2.0**32).ceil()
    away = (bits < threshold.to(torch.int64)).to(torch.float32)
    return (below + away.copysign(steps)) * step


def _round_in_blocks(
    source: Tensor,
    blocks: Sequence[Block],
    inv_scales: Sequence[Tensor],
    target: Format,
    saturates: bool,
) -> list[Tensor]:
    """The matrix `source` rounded to `target` times each of `inv_scales`, powers of two, one per
    block.

    A power of two commutes with rounding, so the values are rounded where they stand.
    """
    smallest = [inv_scale * (target.min_normal * _magic(target)) for inv_scale in inv_scales]
    results = [torch.empty_like(source) for _ in blocks]
    rows = _chunk_rows(source, blocks)
    scratch = torch.empty_like(source[:rows], dtype=torch.int32)
    floor = torch.empty_like(source[:rows])
    for start in range(0, source.shape[0], rows):
        part = source[start : start + rows]
        spacing = _spacing(part, scratch[: part.shape[0]], target)
        here = floor[: part.shape[0]]
        for block, least, inv_scale, result in zip(
            blocks, smallest, inv_scales, results, strict=True
        ):
            out = result[start : start + rows]
            lower = of_chunk(least, block, start, rows)
            torch.maximum(blocked(spacing, block), lower, out=blocked(here, block))
            torch.add(part, here, out=out)
            out.sub_(here)
            if saturates:
                limit = of_chunk(inv_scale, block, start, rows) * target.max
                blocked(out, block).clamp_(-limit, limit)
    return results


def _spacing(values: Tensor, scratch: Tensor, target: Format) -> Tensor:
    """The magic number of each of the float32 `values`, in the memory of the int32 `scratch`."""
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=scratch)
    return scratch.view(torch.float32).mul_(_magic(target))


def _magic(target: Format) -> float:
    return float(1.5 * 2.0 ** (23 - target.mantissa_bits))


def _block_amaxes(source: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """The amax of each block of a matrix, a NaN included: float32 [n0, 1, n1, 1] for each size.

    By integers: the bits of magnitudes are ordered as the magnitudes are, NaN above all.
    """
    bits = source.view(torch.int32)
    results = [bits.new_zeros(len(bits) // b0, 1, bits.shape[1] // b1, 1) for b0, b1 in blocks]
    if not source.numel():
        return [result.view(torch.float32) for result in results]
    rows = _chunk_rows(source, blocks)
    scratch = torch.empty_like(bits[:rows])
    for start in range(0, source.shape[0], rows):
        part = bits[start : start + rows]
        masked = scratch[: part.shape[0]]
        torch.bitwise_and(part, _MAGNITUDE, out=masked)
        for block, result in zip(blocks, results, strict=True):
            here = of_chunk(result, block, start, rows)
            found = torch.amax(blocked(masked, block), dim=(1, 3), keepdim=True)
            torch.maximum(here, found, out=here)  # of a block of all rows there are several parts
    return [result.view(torch.float32) for result in results]


def amax_without_nan(source: Tensor, block: Block) -> Tensor:
    """The amax of each block, NaN ignored."""
    return magnitude(blocked(source, block)).amax(dim=(1, 3), keepdim=True)


def blocked(matrix: Tensor, block: Block) -> Tensor:
    """A contiguous matrix as [n0, b0, n1, b1], a view; of a part of a block of all rows too."""
    (rows, columns), (b0, b1) = matrix.shape, block
    b0 = min(b0, max(1, rows))
    return matrix.view(rows // b0, b0, columns // b1, b1)


def of_chunk(scales: Tensor, block: Block, start: int, rows: int) -> Tensor:
    """The scales, [n0, 1, n1, 1] or 0-dim, of `rows` rows from `start` on."""
    if scales.ndim == 0 or scales.shape[0] == 1:
        return scales
    return scales[start // block[0] : (start + rows) // block[0]]


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix `x` in float32, contiguous, with zeros up to a multiple in both dimensions."""
    padding = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    return F.pad(x.to(torch.float32), padding) if any(padding) else x.to(torch.float32).contiguous()


def _trimmed(values: Tensor, x: Tensor) -> Tensor:
    """`values` without the padding, contiguous."""
    return values if values.shape == x.shape else trimmed(values, x.shape)


def _chunk_rows(matrix: Tensor, blocks: Sequence[Block]) -> int:
    """How many rows to treat at a time: whole blocks, about as many elements as a chunk has; for
    blocks of all rows any number."""
    tallest = max(1 if b0 >= len(matrix) else b0 for b0, _ in blocks)
    return max(1, CHUNK // max(1, matrix[:1].numel()) // tallest) * tallest


def _ordinary(largest: Tensor) -> bool:
    """Whether every block's amax is 0 or far from the ends of float32's range (and no NaN)."""
    tame = (largest == 0) | ((largest > _SMALL) & (largest < _LARGE))
    return bool(tame.all())
