"""FP8 values in float32: what a cast would give, with no float8 tensor.

An emulated GEMM multiplies these. They equal the casts of `cast` and `blocks` to the bit (only
the sign of a zero may differ), and cost a few passes over chunks that stay in the cache.

How a value is rounded: adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times the value's own
power of two leaves just `mantissa_bits` of mantissa, to nearest even, by float32's own addition.
That power is not let below the format's smallest normal, which keeps the subnormals' fixed step.

Eager code on a CPU works in place, chunk by chunk, and leaves out what it can see to be needless.
Elsewhere there is one expression for all cases: a compiler fuses it with what comes before and
after, and a GPU is asked for no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.formats import Format, ScaleRounding, fp8_format
from fp8stack.numerics.blocks import (
    MX_BLOCK,
    block_scale,
    dequantize_blocks,
    dequantize_mxfp8,
    e8m0_code,
    e8m0_multiplier,
    e8m0_value,
    quantize_blocks,
    quantize_mxfp8,
)
from fp8stack.numerics.cast import inverse, magnitude

# 512 KiB of float32: two such chunks stay in the L2 cache, and the cost of a call is small beside.
CHUNK = 1 << 17
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
# Beyond these a power of two times the magic number, or a scale, leaves float32's normal range.
_LARGE, _SMALL = 2.0**100, 2.0**-100


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
        if saturates:
            part.clamp_(-target.max, target.max)
        spacing = _spacing(part, scratch[: part.numel()], target).clamp_min_(
            target.min_normal * _magic(target)
        )
        part.add_(spacing).sub_(spacing)
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
    source = _padded(x, MX_BLOCK)
    if _whole(x):

        def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
            codes = e8m0_code(largest, format, scale_rounding)
            return e8m0_multiplier(codes), e8m0_value(codes)

        return [_trimmed(_round_whole(source, block, format, scales_of), x) for block in blocks]
    amaxes = _block_amaxes(source, blocks)
    if not all(map(_ordinary, amaxes)):
        return [
            dequantize_mxfp8(*quantize_mxfp8(x, dim, format, scale_rounding), dim) for dim in dims
        ]
    scales = [e8m0_value(e8m0_code(largest, format, scale_rounding)) for largest in amaxes]
    # Rounded up, a scale leaves room for its whole block; the other rules saturate.
    rounded = _round_blocks(source, blocks, scales, format, saturates=scale_rounding != "rceil")
    return [_trimmed(values, x) for values in rounded]


def round_to_blocks(
    x: Tensor, blocks: Sequence[tuple[int, int]], format: str = "e4m3", power_of_two: bool = True
) -> list[Tensor]:
    """The values of `quantize_blocks(x, block)` for each of `blocks`: float32, the shape of `x`.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        blocks: such as (1, 128) and (128, 1), together or alone.
        format: "e4m3" or "e5m2".
        power_of_two: see `quantize_blocks`.
    """
    source = _padded(x, max(max(block) for block in blocks))
    if _whole(x):

        def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
            scale = block_scale(largest, x.dtype, format, power_of_two)
            return scale, inverse(scale)

        return [_trimmed(_round_whole(source, block, format, scales_of), x) for block in blocks]
    amaxes = _block_amaxes(source, blocks)
    if not all(map(_ordinary, amaxes)):
        return [
            dequantize_blocks(*quantize_blocks(x, block, format, power_of_two), block)
            for block in blocks
        ]
    scales = [block_scale(largest, x.dtype, format, power_of_two) for largest in amaxes]
    if power_of_two:
        inverses = [1.0 / scale for scale in scales]
        rounded = _round_blocks(source, blocks, inverses, format, saturates=False)
        return [_trimmed(values, x) for values in rounded]
    # Such a scale is no power of two: it has to be multiplied in, and its inverse out.
    results = []
    for block, scale in zip(blocks, scales, strict=True):
        scaled = _blocked(source, block) * scale
        rounded_once = round_to_fp8(scaled, scale.new_ones(()), format, saturates=False)
        results.append(_trimmed(rounded_once.mul_(1.0 / scale).view_as(source), x))
    return results


def _whole(x: Tensor) -> bool:
    """Whether `x` is treated as one expression, not chunk by chunk."""
    return torch.compiler.is_compiling() or x.device.type != "cpu"


def _round(scaled: Tensor, target: Format) -> Tensor:
    """`scaled`, float32, saturated and rounded to FP8, as one expression."""
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
    source: Tensor,
    block: tuple[int, int],
    format: str,
    scales_of: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """The matrix `source` rounded to FP8, as one expression; `scales_of` gives each block's scale
    and its inverse from the amax."""
    blocks = _blocked(source, block)
    largest = magnitude(blocks).amax(dim=(1, 3), keepdim=True)
    scale, inv_scale = map(_stored, scales_of(_stored(largest)))
    return (_round(blocks * scale, fp8_format(format)) * inv_scale).view_as(source)


def _stored(x: Tensor) -> Tensor:
    """`x` in memory: inductor would compute a block's scale anew for each of its elements."""
    return x.as_strided(x.shape, x.stride()) if x.device.type == "cpu" else x


def _round_blocks(
    source: Tensor,
    blocks: Sequence[tuple[int, int]],
    inv_scales: Sequence[Tensor],
    format: str,
    saturates: bool,
) -> list[Tensor]:
    """The matrix `source` rounded to FP8 times each of `inv_scales`, powers of two, one per block.

    A power of two commutes with rounding, so the values are rounded where they stand.
    """
    target = fp8_format(format)
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
            chunk = slice(start // block[0], (start + rows) // block[0])
            out = result[start : start + rows]
            torch.maximum(_blocked(spacing, block), least[chunk], out=_blocked(here, block))
            torch.add(part, here, out=out)
            out.sub_(here)
            if saturates:
                limit = inv_scale[chunk] * target.max
                _blocked(out, block).clamp_(-limit, limit)
    return results


def _spacing(values: Tensor, scratch: Tensor, target: Format) -> Tensor:
    """The magic number of each of the float32 `values`, in the memory of the int32 `scratch`."""
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=scratch)
    return scratch.view(torch.float32).mul_(_magic(target))


def _magic(target: Format) -> float:
    return float(1.5 * 2.0 ** (23 - target.mantissa_bits))


def _block_amaxes(source: Tensor, blocks: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The amax of each block of a matrix, a NaN included: float32 [n0, 1, n1, 1] for each size.

    By integers: the bits of magnitudes are ordered as the magnitudes are, NaN above all.
    """
    bits = source.view(torch.int32)
    results = [bits.new_zeros(len(bits) // b0, 1, bits.shape[1] // b1, 1) for b0, b1 in blocks]
    rows = _chunk_rows(source, blocks)
    scratch = torch.empty_like(bits[:rows])
    for start in range(0, source.shape[0], rows):
        part = bits[start : start + rows]
        masked = scratch[: part.shape[0]]
        torch.bitwise_and(part, _MAGNITUDE, out=masked)
        for block, result in zip(blocks, results, strict=True):
            chunk = slice(start // block[0], (start + rows) // block[0])
            torch.amax(_blocked(masked, block), dim=(1, 3), keepdim=True, out=result[chunk])
    return [result.view(torch.float32) for result in results]


def _blocked(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """A contiguous matrix as [n0, b0, n1, b1], a view."""
    (rows, columns), (b0, b1) = matrix.shape, block
    return matrix.view(rows // b0, b0, columns // b1, b1)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """The matrix `x` in float32, contiguous, with zeros up to a multiple in both dimensions."""
    rows, columns = x.shape
    padding = (0, -columns % multiple, 0, -rows % multiple)
    return F.pad(x.to(torch.float32), padding) if any(padding) else x.to(torch.float32).contiguous()


def _trimmed(values: Tensor, x: Tensor) -> Tensor:
    """`values` without the padding, contiguous."""
    return values[: x.shape[0], : x.shape[1]].contiguous()


def _chunk_rows(matrix: Tensor, blocks: Sequence[tuple[int, int]]) -> int:
    """How many rows to treat at a time: whole blocks, about as many elements as a chunk has."""
    tallest = max(block[0] for block in blocks)
    return max(1, CHUNK // max(1, matrix[:1].numel()) // tallest) * tallest


def _ordinary(largest: Tensor) -> bool:
    """Whether every block's amax is 0 or far from the ends of float32's range (and no NaN)."""
    tame = (largest == 0) | ((largest > _SMALL) & (largest < _LARGE))
    return bool(tame.all())
