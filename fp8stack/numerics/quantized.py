"""What any `Quantizer` makes of a tensor: the bytes and scales, to the bit, and back.

What an emulated GEMM multiplies, the same values without the bytes, is in `rounding`. Sources: OCP
Microscaling 1.0 for e8m0 scales, Transformer Engine 2.20's kernels for NVFP4, torchao's rowwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.formats import FORMATS, Format, Quantizer
from fp8stack.numerics.blocks import (
    block_amax,
    block_scale,
    drop_block_dims,
    e8m0_code,
    e8m0_multiplier,
    e8m0_value,
    in_memory,
    split_into_blocks,
)
from fp8stack.numerics.cast import FLT_MAX, amax, inverse, quotient, saturated
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.random import RandomBits


class Quantized(NamedTuple):
    """A tensor in few bits.

    Attributes:
        data: float8 of the shape of `x` for E4M3 and E5M2; for FP6 uint8, a code to a byte; for FP4
            uint8, two codes to a byte along `dim`, the even element in the low half, an odd length
            filled up with code 0. A code is sign, exponent and mantissa from its top bit down.
        scales: what multiplies out: 0-dim float32 for block = "tensor", the shape of `x` with `dim`
            of size 1 for "row", otherwise the shape of `x` divided by the block, rounded up:
            float32, `float8_e8m0fnu`, or `float8_e4m3fn`, above which stands `amax / 2688`.
        amax: the amax of `x`, NaN ignored: float32, 0-dim.
        quantizer: how it was made.
        dim: the dimension that its GEMM reduces over, from 0.
        shape: of `x`.
        has_nan: bool, 0-dim: whether there was a NaN. FP4 and FP6 have no code for it and hold
            their largest value there.

    With a Hadamard transform, all of it is that of the transformed tensor, whose `dim` is padded
    to a multiple of the transform's size; `shape` is that of `x` before.
    """

    data: Tensor
    scales: Tensor
    amax: Tensor
    quantizer: Quantizer
    dim: int
    shape: torch.Size
    has_nan: Tensor


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    dim: int = -1,
    generator: RandomBits | None = None,
    *,
    scale: Tensor | None = None,
) -> Quantized:
    """`x` as `quantizer` says, for a GEMM that reduces over `dim`.

    Args:
        x: at least one dimension, float32, bfloat16 or float16.
        quantizer: how.
        dim: the dimension that the GEMM reduces over.
        generator: the bits for stochastic rounding, by the place in `x` as a matrix of its last
            dimension's rows.
        scale: float32, 0-dim; multiplies into the format. For one scale per tensor: needed for
            delayed scaling, known to the caller or not for current scaling.

    Raises:
        ValueError: no generator or no scale where one is needed, or a scale for blocks.
    """
    check_arguments(quantizer, generator, scale)
    dim, shape, dtype = dim % x.ndim, x.shape, x.dtype
    if quantizer.hadamard:
        x, dtype = hadamard(x, quantizer.hadamard, dim), torch.bfloat16
    if quantizer.per_tensor:
        largest = amax(x)
        scales = given_scale(scale) if scale is not None else scales_of(largest, quantizer, dtype)
        scaled, stored = x.to(torch.float32) * scales.into, scales.stored
    else:
        blocks, restore = split_into_blocks(x, _block_sizes(quantizer, x, dim))
        largest = block_amax(blocks)
        scales = scales_of(largest, quantizer, dtype)
        scaled = restore(blocks * scales.into)  # in float32, which scales of blocks are in
        stored = drop_block_dims(scales.stored)
    target = FORMATS[quantizer.format]
    if target.dtype is not None and not quantizer.stochastic:
        data = saturated(scaled, target)
    else:
        bits = None
        if quantizer.stochastic and generator is not None:
            columns = x.shape[-1]
            bits = generator.bits(x.numel() // max(1, columns), columns).view(x.shape)
        data = encode(scaled, target, bits)
        data = _packed(data, dim) if target.bits == 4 else data
        data = data if target.dtype is None else data.view(target.dtype)
    return Quantized(data, stored, _max(largest), quantizer, dim, shape, x.isnan().any())


def dequantize(quantized: Quantized) -> Tensor:
    """The values of `quantized`: float32, of the shape of `x`; of the transformed tensor, padded,
    where there is a Hadamard transform."""
    scales = _out(quantized)
    if quantized.quantizer.scale == "e4m3":
        scales = scales * quantized.amax * OUT_OF_TWO_LEVELS
    values = _elements(quantized)
    return values * _spread(scales, quantized, values)


def unpack(quantized: Quantized) -> tuple[Tensor, Tensor | None]:
    """The values of `quantized` and their factor as an emulated GEMM takes them, see
    `rounding.Rounded`; where the format has no code for a NaN that there was, the factor is NaN."""
    quantizer, scales = quantized.quantizer, _out(quantized)
    values, factor = _elements(quantized), None
    if quantizer.blocks is None:
        factor = scales.reshape(-1) if scales.ndim else scales
    else:
        values = values * _spread(scales, quantized, values)
        if quantizer.scale == "e4m3":
            return values, upper_scale(quantized)
    if FORMATS[quantizer.format].dtype is None:
        one = torch.ones_like(quantized.amax) if factor is None else factor
        factor = torch.where(quantized.has_nan, torch.nan, one)
    return values, factor


def upper_scale(quantized: Quantized) -> Tensor:
    """Of two levels of scales the upper one, which multiplies out: float32, 0-dim; NaN if there was
    a NaN, which FP4 has no code for."""
    return torch.where(quantized.has_nan, torch.nan, quantized.amax * OUT_OF_TWO_LEVELS)


def _elements(quantized: Quantized) -> Tensor:
    """What the codes stand for, float32, without scales."""
    data, quantizer = quantized.data, quantized.quantizer
    dim, shape = quantized.dim, quantized.shape
    target = FORMATS[quantizer.format]
    if target.dtype is not None:
        return data.to(torch.float32)
    if target.bits == 4:
        padding = -shape[dim] % quantizer.hadamard if quantizer.hadamard else 0
        data = _unpacked(data, dim, shape[dim] + padding)
    table = [target.decode(code) for code in range(1 << target.bits)]
    return torch.tensor(table, dtype=torch.float32, device=data.device)[data.int()]


def _out(quantized: Quantized) -> Tensor:
    """The scales in float32, as they multiply out; of two levels the lower one."""
    if quantized.quantizer.scale == "e8m0":
        return e8m0_value(quantized.scales.view(torch.uint8).to(torch.int32))
    return quantized.scales.to(torch.float32)


def _spread(scales: Tensor, quantized: Quantized, values: Tensor) -> Tensor:
    """The scale of each element."""
    quantizer = quantized.quantizer
    if quantizer.blocks is not None:
        for axis, size in enumerate(_block_sizes(quantizer, values, quantized.dim)):
            if size > 1:
                spread = in_memory(scales.repeat_interleave(size, axis))
                scales = spread.narrow(axis, 0, values.shape[axis])
    return scales


def current_scale(largest: Tensor, quantizer: Quantizer) -> Tensor:
    """The scale that multiplies into the format, from the amax of a tensor: float32, 0-dim."""
    return scales_of(largest, quantizer, torch.float32).into


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


def scales_of(largest: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Scales:
    """The scales of a tensor of `dtype` from the amaxes of its blocks, of the same shape."""
    if quantizer.scale == "e8m0":
        codes = e8m0_code(largest, quantizer.format, quantizer.scale_rounding)
        return Scales(e8m0_multiplier(codes), codes, e8m0_value(codes), None)
    if quantizer.scale == "e4m3":
        return _two_levels(largest)
    blocks, power_of_two = quantizer.blocks is not None, quantizer.scale == "power_of_two"
    dtype = dtype if blocks else torch.float32
    scale = block_scale(largest, dtype, quantizer.format, power_of_two, quantizer.eps)
    out = inverse(scale)
    if blocks:
        return Scales(scale, out, out, None)
    return Scales(scale, out, None, out.reshape(-1) if out.ndim else out)


def given_scale(scale: Tensor) -> Scales:
    """The one scale of a tensor that its caller knows."""
    out = inverse(scale)
    return Scales(scale, out, None, out)


# The constants of NVFP4, in float32: 1 / 6, and 1 / (6 * 448).
SIXTH, OUT_OF_TWO_LEVELS = torch.tensor([1 / 6, 1 / 2688], dtype=torch.float32).tolist()


def _two_levels(largest: Tensor) -> Scales:
    """NVFP4's scales: E4M3 of each block, below one float32 of the tensor."""
    whole = _max(largest)
    one = torch.ones_like(whole)
    into_e4m3 = quotient(one * (6.0 * 448.0), whole).clamp(max=FLT_MAX)
    into_e4m3 = torch.where((whole == 0) | (into_e4m3 == 0), one, into_e4m3)
    exact = (largest * (into_e4m3 * SIXTH)).clamp(max=448.0)
    stored = saturated(exact, FORMATS["e4m3"])
    out = stored.to(torch.float32)
    into = inverse(out * inverse(into_e4m3)).clamp(max=FLT_MAX)
    return Scales(into, stored, out, whole * OUT_OF_TWO_LEVELS)


def check_arguments(
    quantizer: Quantizer, generator: RandomBits | None, scale: Tensor | None
) -> None:
    """Raise a `ValueError` if what `quantizer` needs is missing."""
    if quantizer.stochastic and generator is None:
        raise ValueError("rounding = 'stochastic' needs a generator. Give it RandomBits")
    if quantizer.delayed and scale is None:
        raise ValueError("amax = 'delayed' needs a scale. Give it that of its history")
    if scale is not None and not quantizer.per_tensor:
        raise ValueError(f"block = {quantizer.block} takes no scale from outside")


def encode(scaled: Tensor, target: Format, bits: Tensor | None) -> Tensor:
    """The codes of float32 values, saturated: uint8. NaN is 0x7F in FP8, the largest value else.

    Args:
        scaled: float32.
        target: of eight bits or fewer.
        bits: int64 of the shape of `scaled`, for stochastic rounding; None rounds to the nearest,
            ties to even.
    """
    held = scaled.abs().clamp(max=target.max)
    exponent = ((held.view(torch.int32) >> 23) - 127 + target.bias).clamp(min=1)
    step = ((exponent - target.bias - target.mantissa_bits + 127) << 23).view(torch.float32)
    steps = quotient(held, step)  # exact
    if bits is None:
        whole = steps.round()
    else:
        below = steps.floor()
        whole = below + (bits < ((steps - below) * 2.0**32).ceil().to(torch.int64))
    codes = ((exponent - 1) << target.mantissa_bits) + whole.to(torch.int32)
    codes = codes + (scaled.signbit().to(torch.int32) << (target.bits - 1))
    nan_code = 0x7F if target.dtype is not None else target.max_code
    return torch.where(scaled != scaled, nan_code, codes).to(torch.uint8)


def _packed(codes: Tensor, dim: int) -> Tensor:
    """Two codes of four bits to a byte along `dim`, the even one in the low half."""
    codes = F.pad(codes, [0, 0] * (codes.ndim - 1 - dim) + [0, codes.shape[dim] % 2])
    even, odd = torch.unflatten(codes, dim, (codes.shape[dim] // 2, 2)).unbind(dim + 1)
    return even | (odd << 4)


def _unpacked(data: Tensor, dim: int, length: int) -> Tensor:
    """The codes of four bits in `data`, `length` of them along `dim`."""
    return torch.stack((data & 15, data >> 4), dim + 1).flatten(dim, dim + 1).narrow(dim, 0, length)


def _block_sizes(quantizer: Quantizer, x: Tensor, dim: int) -> list[int]:
    """The size of a block in each dimension of `x`, or of a row along `dim`."""
    sizes = [1] * x.ndim
    if quantizer.blocks is None:
        sizes[dim] = max(1, x.shape[dim])
        return sizes
    across, sizes[dim] = quantizer.blocks
    if across > 1:
        if x.ndim < 2:
            raise ValueError(f"A block {quantizer.blocks} does not fit a tensor of one dimension.")
        sizes[-2 if dim == x.ndim - 1 else -1] = across
    return sizes


def _max(largest: Tensor) -> Tensor:
    """The largest of some amaxes, 0 for none: 0-dim."""
    return largest.max() if largest.numel() else largest.new_zeros(())
