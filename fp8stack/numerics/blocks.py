"""Block scaling: MXFP8 (1x32, E8M0 scales) and 1x128 / 128x128 blocks.

Here are the exact bytes and scales. What an emulated GEMM multiplies, the same values without a
float8 tensor in between, is in `rounding`. Source: OCP Microscaling specification 1.0, and
Transformer Engine 2.20 for the choice of the scale; docs/numerics.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.formats import ScaleRounding, fp8_format, quantized_format
from fp8stack.numerics.cast import FLT_MAX, cast_to_fp8, inverse, magnitude, tensor_scale

MX_BLOCK = 32
_MANTISSA = 0x7FFFFF


def quantize_mxfp8(
    x: Tensor, dim: int = -1, format: str = "e4m3", scale_rounding: ScaleRounding = "rceil"
) -> tuple[Tensor, Tensor]:
    """`x` in MXFP8: blocks of 32 along `dim`, each with a power-of-two scale.

    A length that 32 does not divide is padded with zeros and trimmed again.

    Args:
        x: at least one dimension, float32, bfloat16 or float16.
        dim: the dimension that is blocked; the reduction dimension of the GEMM it is for.
        format: "e4m3" or "e5m2".
        scale_rounding: "rceil" rounds up, so that no element saturates; "floor" is the OCP rule;
            "even" rounds amax half up to the mantissa's bits first.

    Returns:
        data: float8, of the shape of `x`.
        scales: `float8_e8m0fnu`, the shape of `x` with `dim` divided by 32, rounded up. A value
            is `data * 2^(code - 127)`.

    Raises:
        ValueError: an unknown format or rounding.
    """
    fp8_format(format)
    block = [1] * x.ndim
    block[dim] = MX_BLOCK
    blocks, restore = split_into_blocks(x, block)
    codes = e8m0_code(block_amax(blocks), format, scale_rounding)
    data = cast_to_fp8(blocks, e8m0_multiplier(codes), format)
    return restore(data), drop_block_dims(codes)


def dequantize_mxfp8(data: Tensor, scales: Tensor, dim: int = -1) -> Tensor:
    """The float32 values of an MXFP8 tensor: the inverse of `quantize_mxfp8`, exact."""
    codes = scales.view(torch.uint8).to(torch.int32)
    value = torch.where(codes == 255, torch.nan, e8m0_value(codes))
    spread = value.repeat_interleave(MX_BLOCK, dim).narrow(dim, 0, data.shape[dim])
    return data.to(torch.float32) * spread


def quantize_blocks(
    x: Tensor, block: Sequence[int] = (1, 128), format: str = "e4m3", power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """`x` in FP8 with one float32 scale for each block: 1x128 for activations and gradients,
    128x128 for weights (DeepSeek-V3's layout).

    A scale that overflows float32 becomes the maximum of `x`'s own dtype.

    Args:
        x: float32, bfloat16 or float16.
        block: the block's size in the last dimensions of `x`; (128, 1) blocks the columns.
        format: "e4m3" or "e5m2".
        power_of_two: truncate the scales to powers of two.

    Returns:
        data: float8, of the shape of `x`.
        inv_scale: float32, the shape of `x` divided by the block, rounded up. A value is
            `data * inv_scale`.

    Raises:
        ValueError: an unknown format, or a block of more dimensions than `x`.
    """
    fp8_format(format)
    blocks, restore = split_into_blocks(x, _full_block(x, block))
    scale = block_scale(block_amax(blocks), x.dtype, format, power_of_two)
    data = cast_to_fp8(blocks, scale, format)
    return restore(data), drop_block_dims(inverse(scale))


def dequantize_blocks(data: Tensor, inv_scale: Tensor, block: Sequence[int] = (1, 128)) -> Tensor:
    """The float32 values of a blocked tensor: `data * inv_scale`, rounded once to float32."""
    spread = inv_scale
    for dim, size in enumerate(_full_block(data, block)):
        spread = spread.repeat_interleave(size, dim).narrow(dim, 0, data.shape[dim])
    return data.to(torch.float32) * spread


def block_scale(
    amax: Tensor, dtype: torch.dtype, format: str, power_of_two: bool, eps: float = 0.0
) -> Tensor:
    """The scale of each block of a tensor of `dtype`, from its amax: float32, same shape."""
    overflow = min(torch.finfo(dtype).max, FLT_MAX)
    return tensor_scale(amax, format, power_of_two=power_of_two, eps=eps, overflow=overflow)


def e8m0_code(amax: Tensor, format: str, rounding: ScaleRounding) -> Tensor:
    """The E8M0 code of each block's scale: int32 in 0..255, of the shape of `amax` (float32).

    Raises:
        ValueError: an unknown format or rounding.
    """
    target = quantized_format(format)
    if rounding == "rceil":
        return _round_up(amax * float(np.float32(1 / target.max)))
    if rounding not in ("floor", "even"):
        raise ValueError(f"No scale rounding '{rounding}'. Known: rceil, floor, even.")
    bits = amax.view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << (22 - target.mantissa_bits))
    largest_exponent = target.max_code >> target.mantissa_bits
    codes = ((bits >> 23) & 0xFF) - (largest_exponent - target.bias)
    return torch.where(amax != amax, 255, codes.clamp(0, 254))  # NaN alone; compiled, isnan is slow


def _round_up(scale: Tensor) -> Tensor:
    """The code of the smallest power of two that is not below `scale`, clamped to 254."""
    bits = scale.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    # 2^-127, the power of code 0, is the subnormal 0x400000: up to there nothing is rounded up.
    up = (mantissa != 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    codes = (exponent + up.to(torch.int32)).clamp(max=254)
    return torch.where(scale != scale, 255, codes)


def e8m0_multiplier(codes: Tensor) -> Tensor:
    """`2^(127 - code)`, which multiplies into FP8: float32; NaN for code 255."""
    bits = (254 - codes) << 23
    bits = torch.where(codes == 254, 0x400000, bits)  # 2^-127 is subnormal in float32
    return torch.where(codes == 255, torch.nan, bits.to(torch.int32).view(torch.float32))


def e8m0_value(codes: Tensor) -> Tensor:
    """`2^(code - 127)` for codes 0..254, which multiplies out: float32."""
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    return bits.to(torch.int32).view(torch.float32)


def split_into_blocks(x: Tensor, block: Sequence[int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`x` padded with zeros and viewed as [n0, b0, n1, b1, ...], and the way back to its shape."""
    padding: list[int] = []
    for length, size in zip(reversed(x.shape), reversed(block), strict=True):
        padding += [0, -length % size]
    padded = F.pad(x, padding) if any(padding) else x
    shape: list[int] = []
    for length, size in zip(padded.shape, block, strict=True):
        shape += [length // size, size]

    def restore(blocks: Tensor) -> Tensor:
        whole = blocks.reshape(padded.shape)
        return whole.contiguous() if padded is x else trimmed(whole, x.shape)

    return padded.reshape(shape), restore


def trimmed(padded: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of `padded` in each dimension, contiguous."""
    # Stored first: of blocks that were padded, inductor's code for a CPU (torch 2.13) writes other
    # numbers where it trims them as it computes them.
    here = in_memory(padded)[tuple(slice(length) for length in shape)]
    return here.clone(memory_format=torch.contiguous_format)  # not a view of what was padded


def in_memory(x: Tensor) -> Tensor:
    """`x`, which compiled code for a CPU stores instead of computing it anew for each use."""
    return x.as_strided(x.shape, x.stride()) if x.device.type == "cpu" else x


def block_amax(blocks: Tensor) -> Tensor:
    """The amax of each block of [n0, b0, n1, b1, ...], NaN ignored: [n0, 1, n1, 1, ...]."""
    return magnitude(blocks).amax(dim=list(range(1, blocks.ndim, 2)), keepdim=True)


def drop_block_dims(scales: Tensor) -> Tensor:
    """[n0, 1, n1, 1, ...] as [n0, n1, ...]; codes become `float8_e8m0fnu`."""
    small = scales.reshape(scales.shape[::2])
    if small.dtype != torch.int32:
        return small
    return small.to(torch.uint8).view(torch.float8_e8m0fnu)


def _full_block(x: Tensor, block: Sequence[int]) -> list[int]:
    """`block` with as many dimensions as `x`, filled or trimmed with ones on the left."""
    sizes = list(block)
    while len(sizes) > x.ndim and sizes[0] == 1:
        sizes.pop(0)
    if len(sizes) > x.ndim or any(size < 1 for size in sizes):
        raise ValueError(f"A block {tuple(block)} does not fit a tensor of shape {tuple(x.shape)}.")
    return [1] * (x.ndim - len(sizes)) + sizes
