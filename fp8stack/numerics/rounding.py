"""FP8 values in float32: what a cast would give, with no float8 tensor. No nn.Module here.

An emulated GEMM multiplies these. They equal the casts of `cast` and `blocks` to the bit (only
the sign of a zero may differ), and cost a few passes over chunks that stay in the cache, where a
cast to float8 and back costs ten times as much on a CPU.

How a value is rounded: adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times the value's own
power of two leaves just `mantissa_bits` of mantissa, to nearest even, by float32's own addition.
That power is not let below the format's smallest normal, which keeps the subnormals' fixed step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8stack.numerics.blocks import (
    MX_BLOCK,
    ScaleRounding,
    block_scale,
    dequantize_blocks,
    dequantize_mxfp8,
    e8m0_code,
    e8m0_value,
    quantize_blocks,
    quantize_mxfp8,
    split_into_blocks,
)
from fp8stack.numerics.formats import Format, fp8_format

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
    source = x.contiguous().to(torch.float32).view(-1)
    result = torch.empty_like(source)
    step = _chunk(source)
    scratch = torch.empty(min(step, source.numel()), dtype=torch.int32, device=x.device)
    for start in range(0, source.numel(), step):
        part = result[start : start + step]
        torch.mul(source[start : start + step], scale, out=part)
        if saturates:
            part.clamp_(-target.max, target.max)
        spacing = _spacing(part, scratch[: part.numel()], target).clamp_min_(
            target.min_normal * _magic(target)
        )
        part.add_(spacing).sub_(spacing)
    return result.view(x.shape)


def round_to_mxfp8(
    x: Tensor, dim: int, format: str = "e4m3", scale_rounding: ScaleRounding = "rceil"
) -> Tensor:
    """The values of `quantize_mxfp8(x, dim)`: float32, of the shape of the matrix `x`."""
    block = (MX_BLOCK, 1) if dim in (0, -2) else (1, MX_BLOCK)
    blocks, restore = split_into_blocks(x.contiguous().to(torch.float32), block)
    largest = _block_amax(blocks)
    if not _ordinary(largest):
        return dequantize_mxfp8(*quantize_mxfp8(x, dim, format, scale_rounding), dim)
    inv_scale = e8m0_value(e8m0_code(largest, format, scale_rounding))
    # Rounded up, a scale leaves room for its whole block; the other rules saturate.
    return restore(_round_blocks(blocks, inv_scale, format, saturates=scale_rounding != "rceil"))


def round_to_blocks(
    x: Tensor, block: Sequence[int], format: str = "e4m3", power_of_two: bool = True
) -> Tensor:
    """The values of `quantize_blocks(x, block)`: float32, of the shape of the matrix `x`."""
    blocks, restore = split_into_blocks(x.contiguous().to(torch.float32), block)
    largest = _block_amax(blocks)
    if not _ordinary(largest):
        data, inv_scale = quantize_blocks(x, block, format, power_of_two)
        return dequantize_blocks(data, inv_scale, block)
    scale = block_scale(largest, x.dtype, format, power_of_two)
    if power_of_two:
        return restore(_round_blocks(blocks, 1.0 / scale, format, saturates=False))
    # Such a scale is no power of two: it has to be multiplied in, and its inverse out.
    scaled = round_to_fp8(blocks * scale, scale.new_ones(()), format, saturates=False)
    return restore(scaled.mul_(1.0 / scale))


def _round_blocks(blocks: Tensor, inv_scale: Tensor, format: str, saturates: bool) -> Tensor:
    """`blocks` [n0, b0, n1, b1] rounded to FP8 times `inv_scale` [n0, 1, n1, 1], powers of two.

    A power of two commutes with rounding, so the values are rounded where they stand.
    """
    target = fp8_format(format)
    smallest = inv_scale * (target.min_normal * _magic(target))
    limit = inv_scale * target.max
    result = torch.empty_like(blocks)
    rows = max(1, _chunk(blocks) // max(1, blocks[:1].numel()))
    scratch = torch.empty_like(blocks[:rows], dtype=torch.int32)
    for start in range(0, blocks.shape[0], rows):
        chunk = slice(start, start + rows)
        part, out = blocks[chunk], result[chunk]
        spacing = _spacing(part, scratch[: part.shape[0]], target)
        torch.maximum(spacing, smallest[chunk], out=spacing)
        torch.add(part, spacing, out=out)
        out.sub_(spacing)
        if saturates:
            out.clamp_(-limit[chunk], limit[chunk])
    return result


def _spacing(values: Tensor, scratch: Tensor, target: Format) -> Tensor:
    """The magic number of each of the float32 `values`, in the memory of the int32 `scratch`."""
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=scratch)
    return scratch.view(torch.float32).mul_(_magic(target))


def _magic(target: Format) -> float:
    return float(1.5 * 2.0 ** (23 - target.mantissa_bits))


def _block_amax(blocks: Tensor) -> Tensor:
    """The amax of each block of [n0, b0, n1, b1], a NaN included: float32 [n0, 1, n1, 1].

    By integers: the bits of magnitudes are ordered as the magnitudes are, NaN above all.
    """
    n0, _, n1, _ = blocks.shape
    bits = blocks.view(torch.int32)
    result = torch.zeros(n0, 1, n1, 1, dtype=torch.int32, device=blocks.device)
    rows = max(1, 2 * _chunk(blocks) // max(1, blocks[:1].numel()))
    scratch = torch.empty_like(bits[:rows])
    for start in range(0, n0, rows):
        part = bits[start : start + rows]
        masked = scratch[: part.shape[0]]
        torch.bitwise_and(part, _MAGNITUDE, out=masked)
        torch.amax(masked, dim=(1, 3), keepdim=True, out=result[start : start + rows])
    return result.view(torch.float32)


def _ordinary(largest: Tensor) -> bool:
    """Whether every block's amax is 0 or far from the ends of float32's range (and no NaN)."""
    tame = (largest == 0) | ((largest > _SMALL) & (largest < _LARGE))
    return bool(tame.all())


def _chunk(x: Tensor) -> int:
    """How many elements to treat at a time: all of them on a GPU, where a launch costs more."""
    return CHUNK if x.device.type == "cpu" else max(1, x.numel())
