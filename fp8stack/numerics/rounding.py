"""FP8, FP6 and FP4 values in float32: what a cast would give, without its bytes.

An emulated GEMM multiplies these. They equal the bytes of `quantized`, `cast` and `blocks` to the
bit (only the sign of a zero may differ).

How a value is rounded: adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times the value's own
power of two leaves just `mantissa_bits` of mantissa, to nearest even, by float32's own addition.
That power is not let below the format's smallest normal, which keeps the subnormals' fixed step.

On a CPU `fused` computes all of it in one sweep. In compiled code, on a GPU, and where numba is
missing, it is the expressions here: a compiler fuses them with what comes before and after, and a
GPU is asked for no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.formats import FORMATS, Format, Quantizer
from fp8stack.numerics import fused
from fp8stack.numerics.blocks import block_amax, in_memory, split_into_blocks
from fp8stack.numerics.cast import amax, record_amax
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import check_arguments, checked_dim
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.scales import Scales, given_scale, scales_of

_EXPONENT = 0x7F800000

Block = tuple[int, int]
"""Rows and columns that share a scale; 0 is all of them."""


class Rounded(NamedTuple):
    """A matrix as an emulated GEMM takes it.

    Attributes:
        values: of the shape of the matrix; with a Hadamard transform, the reduced dimension is
            padded to a multiple of the transform's size. NaN where the matrix has NaN. float32, or
            bfloat16 where that was asked for.
        factor: float32, what the GEMM's output is multiplied by for this operand: 0-dim, or for
            block = "row" one for each row of the operand as its GEMM reduces it; None if the values
            carry their scales.
    """

    values: Tensor
    factor: Tensor | None


@dataclass(frozen=True)
class Rounding:
    """How a matrix is rounded, for one GEMM or for two.

    Attributes:
        quantizer: by what.
        blocks: for one result, or for two.
        dim: what a Hadamard transform mixes.
    """

    quantizer: Quantizer
    blocks: tuple[Block, ...]
    dim: int = 1

    def round(
        self,
        x: Tensor,
        generator: RandomBits | None = None,
        scale: Tensor | None = None,
        recorded: Tensor | None = None,
        counts: Tensor | None = None,
        bf16: bool = False,
        *,
        fuse: bool = True,
    ) -> list[Rounded]:
        """`x`, a matrix in float32, bfloat16 or float16, for each of the blocks.

        `generator` gives the bits for stochastic rounding, by the place in `x`; `scale`, float32
        and 0-dim, is that of the whole matrix, if it is known. `recorded`, float32 and 0-dim,
        becomes at least the amax of `x`, if that `counts`, bool and 0-dim. `bf16` gives bfloat16,
        which holds the values of `Quantizer.exact_in_bf16`. Without `fuse`, torch's operators
        compute it wherever `x` is.
        """
        run = fused.implementation(x) if fuse else None
        if run is not None:
            drawn = _NO_BITS if generator is None else _bits(generator)
            tensors = run(x, self._number, scale, recorded, counts, *drawn)
            made = []
            step = 2 if self.has_factor else 1
            for i in range(0, len(tensors), step):
                made.append(Rounded(tensors[i], tensors[i + 1] if step == 2 else None))
        else:
            if recorded is not None:
                record_amax(recorded, amax(x), counts)
            dtype = x.dtype
            if self.quantizer.hadamard:
                x, dtype = hadamard(x, self.quantizer.hadamard, self.dim), torch.bfloat16
            made = [self._one(x, block, dtype, generator, scale) for block in self.blocks]
        if not bf16:
            return made
        return [each._replace(values=each.values.to(torch.bfloat16)) for each in made]

    def _one(
        self,
        x: Tensor,
        block: Block,
        dtype: torch.dtype,
        generator: RandomBits | None,
        scale: Tensor | None,
    ) -> Rounded:
        """`x`, transformed if it is to be, of a tensor of `dtype`, for one of the blocks."""
        quantizer, x = self.quantizer, x.to(torch.float32).contiguous()
        sizes = [size or max(1, length) for size, length in zip(block, x.shape, strict=True)]
        blocks, restore = split_into_blocks(x, sizes)
        if scale is not None:
            scales = given_scale(scale)
        elif block == (0, 0):
            scales = scales_of(amax(x), quantizer, dtype)
        else:
            scales = scales_of(in_memory(block_amax(blocks)), quantizer, dtype)
            if not x.numel() and not self.carries:  # no column has no amax, and yet an output
                scales = scales._replace(factor=x.new_ones(self.factor_shape(block, *x.shape)))
        bits = None
        if quantizer.stochastic and generator is not None:
            bits, _ = split_into_blocks(generator.bits(*x.shape), sizes)
        values = round_scaled(blocks, scales, FORMATS[quantizer.format], bits)
        return Rounded(restore(values), scales.factor)

    @cached_property
    def _number(self) -> int:
        return fused.number(self)

    @property
    def carries(self) -> bool:
        """Whether values carry the scales of their blocks."""
        return self.blocks[0][0] * self.blocks[0][1] > 0

    @cached_property
    def has_factor(self) -> bool:
        """Whether what multiplies the GEMM's output is not 1."""
        return not self.carries or self.quantizer.scale == "e4m3"

    def shape(self, rows: int, columns: int) -> Block:
        """Rows and columns of the result, padded for a Hadamard transform."""
        size = self.quantizer.hadamard or 1
        if self.dim == 0:
            return -(-rows // size) * size, columns
        return rows, -(-columns // size) * size

    def factor_shape(self, block: Block, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of what multiplies out for one result."""
        return (rows,) if block == (1, 0) else (columns,) if block == (0, 1) else ()


_NO_BITS: fused.Bits = (None, 0, 0, 0)


def _bits(generator: RandomBits) -> fused.Bits:
    return generator.counter, generator.seed, int(generator.stream), int(generator.first_row)


def rounding(quantizer: Quantizer, dims: Sequence[int]) -> Rounding:
    """How `quantizer` rounds for GEMMs that reduce over each of `dims`: 1 the columns, 0 the
    rows."""
    across, along = (0, 0) if quantizer.per_tensor else quantizer.blocks or (1, 0)
    blocks = [(across, along) if dim == 1 else (along, across) for dim in dims]
    return Rounding(quantizer, tuple(blocks), dims[0])


def rounding_of_both(along: Quantizer, across: Quantizer) -> Rounding | None:
    """How two quantizers round in one sweep, for GEMMs that reduce over the columns and over the
    rows; None if they differ in more than their blocks."""
    if not alike(along, across):
        return None
    return Rounding(along, rounding(along, [1]).blocks + rounding(across, [0]).blocks)


def alike(one: Quantizer, other: Quantizer) -> bool:
    """Whether two quantizers differ in their blocks alone, so that one sweep makes both copies."""
    return (
        not (one.per_tensor or other.per_tensor or one.stochastic or one.hadamard)
        and (one.block == "row") == (other.block == "row")
        and replace(one, block=other.block) == other
    )


def round_to(
    x: Tensor,
    quantizer: Quantizer,
    dim: int,
    generator: RandomBits | None = None,
    *,
    scale: Tensor | None = None,
) -> Rounded:
    """The values of `quantize(x, quantizer, dim)` in float32.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        quantizer: how it is quantized.
        dim: what the GEMM reduces over: 1 the columns, 0 the rows.
        generator: the bits for stochastic rounding, by the place in `x`.
        scale: float32, 0-dim, for one scale per tensor: needed for delayed scaling.

    Raises:
        ValueError: no matrix, or as `quantize`.
    """
    check_arguments(quantizer, generator, scale)
    return rounding(quantizer, [matrix_dim(x, dim)]).round(x, generator, scale)[0]


def matrix_dim(x: Tensor, dim: int) -> int:
    """`dim` from 0. Raises a `ValueError` if `x` is no matrix, has no such dimension, or has
    another dtype."""
    if x.ndim != 2:
        raise ValueError(f"A tensor of shape {list(x.shape)} is no matrix. Use x.flatten(0, -2)")
    return checked_dim(x, dim)


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


def round_scaled(blocks: Tensor, scales: Scales, target: Format, bits: Tensor | None) -> Tensor:
    """Blocks in float32 rounded to `target`, multiplied by their scales before and after; at random
    by `bits`, int64 of their shape, if there are any."""
    scaled = blocks * in_memory(scales.into)
    if bits is None:
        rounded = _round(scaled, target)
    else:
        rounded = _round_at_random(scaled.clamp(-target.max, target.max), bits, target)
    return rounded if scales.out is None else rounded * in_memory(scales.out)


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


def _magic(target: Format) -> float:
    return float(1.5 * 2.0 ** (23 - target.mantissa_bits))
