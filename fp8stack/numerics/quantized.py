"""Quantize a tensor by any `Quantizer`: the bytes and scales, to the bit, and back.

The values that an emulated GEMM multiplies, which equal the bytes, are in `rounding`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.common.errors import described
from fp8stack.common.formats import Quantizer
from fp8stack.numerics.blocks import block_sizes, spread
from fp8stack.numerics.cast import amax, check_dtype, encode, saturated
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.scales import (
    OUT_OF_TWO_LEVELS,
    e8m0_value,
    max_of,
    scale_blocks,
)


class Quantized(NamedTuple):
    """A tensor in few bits.

    Attributes:
        data: float8 of the shape of `x` for E4M3 and E5M2; for other formats of more than 4 bits
            uint8, a code to a byte; for FP4 uint8, two codes to a byte along `dim`, the even
            element in the low half, an odd length filled up with code 0. A code is sign, exponent
            and mantissa from its top bit down.
        scales: what multiplies out: 0-dim float32 for block = "tensor", the shape of `x` with `dim`
            of size 1 for "row", otherwise the shape of `x` divided by the block, rounded up:
            float32, `float8_e8m0fnu`, or `float8_e4m3fn`, above which stands `amax / 2688`.
        amax: the amax of `x`, NaN ignored: float32, 0-dim.
        quantizer: how it was made.
        dim: the dimension that its GEMM reduces over, from 0.
        shape: of `x`.
        has_nan: bool, 0-dim: whether there was a NaN. Formats below 8 bits have no code for it and
            hold their largest value there.

    With a Hadamard transform, the attributes describe the transformed tensor, whose `dim` is padded
    to a multiple of the transform's size, but for `shape`, the shape of `x` before.
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
        ValueError: another dtype, a dimension that `x` has not, no generator or no scale where one
            is needed, or a scale for blocks.
    """
    check_arguments(quantizer, generator, scale)
    dim = checked_dim(x, dim)
    # Bytes have no gradient: what follows from the scales alone would be a wrong one.
    x, shape, dtype = x.detach(), x.shape, x.dtype
    if quantizer.hadamard:
        x, dtype = hadamard(x, quantizer.hadamard, dim), torch.bfloat16
    sizes = block_sizes(quantizer, x.ndim, dim)
    blocks, amaxes, scales, restore = scale_blocks(x, quantizer, sizes, dtype, scale)
    scaled, target, bits = restore(blocks * scales.into), quantizer.element, None
    if quantizer.stochastic and generator is not None:
        columns = x.shape[-1]
        bits = generator.bits(x.numel() // max(1, columns), columns).view(x.shape)
    if target.dtype is None or bits is not None:
        data = encode(scaled, target, bits).view(target.dtype or torch.uint8)
    else:
        data = saturated(scaled, target)
    stored = scales.stored.reshape(scales.stored.shape[::2])
    if quantizer.scale == "e8m0":
        stored = stored.to(torch.uint8).view(torch.float8_e8m0fnu)
    data = _packed(data, dim) if quantizer.element_bits == 4 else data
    largest = amax(x) if amaxes is None else max_of(amaxes)
    return Quantized(data, stored, largest, quantizer, dim, shape, x.isnan().any())


def dequantize(quantized: Quantized) -> Tensor:
    """The values of `quantized`: float32, of the shape of `x`; of the transformed tensor, padded,
    where there is a Hadamard transform.

    Raises:
        ValueError: scales of another dtype, or of another shape than the quantizer's blocks have;
            `quantized` is no `Quantized`.
    """
    _check_quantized(quantized)
    _check_scales(quantized)
    scales = _out(quantized)
    if quantized.quantizer.scale == "e4m3":
        scales = scales * quantized.amax * OUT_OF_TWO_LEVELS
    values = _elements(quantized)
    return values * _per_element(scales, quantized, values)


def _check_quantized(quantized: Quantized) -> None:
    if not isinstance(quantized, Quantized):
        raise ValueError(f"{described(quantized)} is no Quantized. Give what quantize returned")


def _check_scales(quantized: Quantized) -> None:
    quantizer, scales = quantized.quantizer, quantized.scales
    if quantizer.scale == "e8m0" and scales.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise ValueError(f"Scales in e8m0 are float8_e8m0fnu, not {scales.dtype}")
    if quantizer.blocks is None:
        return
    shape = list(quantized.shape)
    if quantizer.hadamard:
        shape[quantized.dim] += -shape[quantized.dim] % quantizer.hadamard
    sizes = block_sizes(quantizer, len(shape), quantized.dim)
    expected = [-(-length // size) for length, size in zip(shape, sizes, strict=True)]
    if list(scales.shape) != expected:
        raise ValueError(
            f"Scales of shape {list(scales.shape)} do not belong to a tensor of shape {shape} in "
            f"blocks of {sizes}, which has {expected}. Give the quantizer and the dimension that "
            "they were made with"
        )


def unpack(quantized: Quantized) -> tuple[Tensor, Tensor | None]:
    """The values of `quantized` and their factor as an emulated GEMM takes them, see
    `rounding.Rounded`; where the format has no code for a NaN that there was, the factor is NaN."""
    _check_quantized(quantized)
    quantizer, scales = quantized.quantizer, _out(quantized)
    values, factor = _elements(quantized), None
    if quantizer.blocks is None:
        factor = scales.reshape(-1) if scales.ndim else scales
    else:
        values = values * _per_element(scales, quantized, values)
        if quantizer.scale == "e4m3":
            factor = quantized.amax * OUT_OF_TWO_LEVELS  # the upper of two levels
    if not quantizer.element.has_nan:
        factor_or_one = torch.ones_like(quantized.amax) if factor is None else factor
        factor = torch.where(quantized.has_nan, torch.nan, factor_or_one)
    return values, factor


def _elements(quantized: Quantized) -> Tensor:
    """The values of the codes in float32, without scales."""
    data, quantizer = quantized.data, quantized.quantizer
    dim, shape = quantized.dim, quantized.shape
    target = quantizer.element
    if target.dtype is not None:
        return data.to(torch.float32)
    if quantizer.element_bits == 4:
        padding = -shape[dim] % quantizer.hadamard if quantizer.hadamard else 0
        data = _unpacked(data, dim, shape[dim] + padding)
    table = [target.decode(code) for code in range(1 << target.bits)]
    return torch.tensor(table, dtype=torch.float32, device=data.device)[data.int()]


def _out(quantized: Quantized) -> Tensor:
    """The scales in float32, as they multiply out; of two levels the lower one."""
    if quantized.quantizer.scale == "e8m0":
        return e8m0_value(quantized.scales.view(torch.uint8).to(torch.int32))
    return quantized.scales.to(torch.float32)


def _per_element(scales: Tensor, quantized: Quantized, values: Tensor) -> Tensor:
    quantizer, shape = quantized.quantizer, values.shape
    if quantizer.blocks is None:
        return scales
    return spread(scales, block_sizes(quantizer, len(shape), quantized.dim), shape)


def check_arguments(
    quantizer: Quantizer, generator: RandomBits | None, scale: Tensor | None
) -> None:
    """Raise a `ValueError` if `quantizer` is none, or if what it needs is missing."""
    if not isinstance(quantizer, Quantizer):
        raise ValueError(f"{described(quantizer)} is no Quantizer. Give Quantizer(format='e4m3')")
    if quantizer.stochastic and not (
        isinstance(generator, RandomBits)
        and isinstance(generator.counter, Tensor)
        and generator.counter.dtype == torch.int64
    ):
        raise ValueError(
            "rounding = 'stochastic' needs a generator with an int64 counter. Give it "
            "RandomBits(seed=0, stream=0, counter=torch.tensor(0))"
        )
    if quantizer.delayed and scale is None:
        raise ValueError("amax = 'delayed' needs a scale. Give it that of its history")
    if scale is not None and not quantizer.per_tensor:
        raise ValueError(f"block = {quantizer.block} takes no scale from outside")
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.ndim or scale.dtype != torch.float32:
        description = (
            f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        )
        raise ValueError(
            f"scale is a 0-dim float32 tensor, not {description}. Give it torch.tensor(2.0)"
        )


def checked_dim(x: Tensor, dim: int) -> int:
    """`dim` from 0. Raises a `ValueError` if `x` has no such dimension, or another dtype."""
    check_dtype(x)
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"A tensor of shape {list(x.shape)} has no dimension {dim}")
    return dim % x.ndim


def _packed(codes: Tensor, dim: int) -> Tensor:
    """Two codes of four bits to a byte along `dim`, the even one in the low half."""
    codes = F.pad(codes, [0, 0] * (codes.ndim - 1 - dim) + [0, codes.shape[dim] % 2])
    even, odd = torch.unflatten(codes, dim, (codes.shape[dim] // 2, 2)).unbind(dim + 1)
    return even | (odd << 4)


def _unpacked(data: Tensor, dim: int, length: int) -> Tensor:
    """The codes of four bits in `data`, `length` of them along `dim`."""
    return torch.stack((data & 15, data >> 4), dim + 1).flatten(dim, dim + 1).narrow(dim, 0, length)
