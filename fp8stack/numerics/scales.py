"""The scales of blocks, from their amaxes, as any `Quantizer` has them; and tensors in blocks.

Sources: OCP Microscaling 1.0 for E8M0 scales, Transformer Engine 2.20 for the choice of the scale
and its kernels for NVFP4, torchao's rowwise; docs/numerics.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8stack.common.errors import described
from fp8stack.common.formats import FORMATS, Format, Quantizer, ScaleRounding, quantized_format
from fp8stack.numerics.blocks import block_amax, in_memory, split_into_blocks
from fp8stack.numerics.cast import (
    FLT_MAX,
    amax,
    inverse,
    quotient,
    round_to_format,
    saturated,
    tensor_scale,
)

_MANTISSA = 0x7FFFFF
# The constants of NVFP4, in float32: 1 / 6, and 1 / (6 * 448).
_SIXTH, OUT_OF_TWO_LEVELS = torch.tensor([1 / 6, 1 / 2688], dtype=torch.float32).tolist()


class Scales(NamedTuple):
    """The scales of the blocks of a tensor.

    Attributes:
        into: float32, multiplies into the format.
        stored: as `Quantized` has them; e8m0 as int32 codes.
        out: float32, what a block's values carry into a GEMM; None if they carry nothing.
        factor: what the GEMM's output is then multiplied by, None for 1.
    """

    into: Tensor
    stored: Tensor
    out: Tensor | None
    factor: Tensor | None


class ScaledBlocks(NamedTuple):
    """A tensor in blocks that share a scale.

    Attributes:
        blocks: float32 [n0, b0, n1, b1, ...], padded with zeros.
        amaxes: float32 [n0, 1, n1, 1, ...], NaN ignored; 0-dim for one scale per tensor, None if
            that is given.
        scales: of the shape of `amaxes`.
        restore: returns a tensor of the shape of `blocks` in the shape of the original.
    """

    blocks: Tensor
    amaxes: Tensor | None
    scales: Scales
    restore: Callable[[Tensor], Tensor]


def scale_blocks(
    x: Tensor,
    quantizer: Quantizer,
    sizes: Sequence[int],
    dtype: torch.dtype,
    scale: Tensor | None = None,
) -> ScaledBlocks:
    """Split a tensor into blocks and compute their scales.

    Args:
        x: the tensor, after any Hadamard transform.
        quantizer: the quantizer.
        sizes: of a block, see `block_sizes`.
        dtype: the dtype of the tensor that is quantized, in which scales overflow.
        scale: the scale, if it is given and not computed.
    """
    blocks, restore = split_into_blocks(x.to(torch.float32).contiguous(), sizes)
    if scale is not None:
        return ScaledBlocks(blocks, None, given_scale(scale), restore)
    largest = amax(x) if quantizer.per_tensor else in_memory(block_amax(blocks))
    return ScaledBlocks(blocks, largest, scales_of(largest, quantizer, dtype), restore)


def round_blocks(
    blocks: Tensor, into: Tensor, out: Tensor | None, target: Format, bits: Tensor | None
) -> Tensor:
    """Scale blocks in float32, round them to `target`, and scale them back unless `out` is None.
    Rounds stochastically with `bits`, int64 of the blocks' shape, if given."""
    rounded = round_to_format(blocks * in_memory(into), target, bits)
    return rounded if out is None else rounded * in_memory(out)


def scales_of(largest: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Scales:
    """The scales of a tensor of `dtype` from the amaxes of its blocks, of the same shape."""
    if quantizer.scale == "e8m0":
        codes = e8m0_code(largest, quantizer.format, quantizer.scale_rounding)
        return Scales(e8m0_multiplier(codes), codes, e8m0_value(codes), None)
    if quantizer.scale == "e4m3":
        return _two_levels(largest)
    blocks = quantizer.blocks is not None
    scale = tensor_scale(
        largest,
        quantizer.format,
        power_of_two=quantizer.scale == "power_of_two",
        eps=quantizer.eps,
        overflow=min(torch.finfo(dtype).max, FLT_MAX) if blocks else FLT_MAX,
    )
    out = inverse(scale)
    if blocks:
        return Scales(scale, out, out, None)
    return Scales(scale, out, None, out.reshape(-1) if out.ndim else out)


def given_scale(scale: Tensor) -> Scales:
    """The one scale of a tensor that its caller knows."""
    out = inverse(scale)
    return Scales(scale, out, None, out)


def current_scale(largest: Tensor, quantizer: Quantizer) -> Tensor:
    """The scale that multiplies into the format, from the amax of a tensor: float32, 0-dim. Raises
    a ValueError if `quantizer` is none."""
    if not isinstance(quantizer, Quantizer):
        raise ValueError(f"{described(quantizer)} is no Quantizer. Give Quantizer(format='e4m3')")
    return scales_of(largest, quantizer, torch.float32).into


def max_of(largest: Tensor) -> Tensor:
    """The largest of some amaxes, 0 for none: 0-dim."""
    return largest.max() if largest.numel() else largest.new_zeros(())


def nvfp4_scale(amax: Tensor) -> Tensor:
    """The float32 scale by which NVFP4's E4M3 scales are multiplied, from the amax of the tensor;
    1 for an amax of 0 or inf."""
    unit = torch.ones_like(amax)
    scale = quotient(unit * (6.0 * 448.0), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), unit, scale)


def _two_levels(largest: Tensor) -> Scales:
    """NVFP4's scales: E4M3 for each block, and one float32 for the tensor."""
    tensor_amax = max_of(largest)
    into_e4m3 = nvfp4_scale(tensor_amax)
    exact = (largest * (into_e4m3 * _SIXTH)).clamp(max=448.0)
    stored = saturated(exact, FORMATS["e4m3"])
    out = stored.to(torch.float32)
    into = inverse(out * inverse(into_e4m3)).clamp(max=FLT_MAX)
    return Scales(into, stored, out, tensor_amax * OUT_OF_TWO_LEVELS)


def e8m0_code(amax: Tensor, format: str, rounding: ScaleRounding) -> Tensor:
    """The E8M0 code of each block's scale: int32 in 0..255, of the shape of `amax` (float32)."""
    target = quantized_format(format)
    if rounding == "rceil":
        return _round_up(amax * float(np.float32(1 / target.max)))
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
    """`2^(code - 127)`, which multiplies out: float32; NaN for code 255."""
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    return torch.where(codes == 255, torch.nan, bits.to(torch.int32).view(torch.float32))
