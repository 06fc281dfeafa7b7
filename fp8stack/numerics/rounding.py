"""Round tensors to FP8, FP6 and FP4 values in float32 or bfloat16, for emulated GEMMs.

The values equal the dequantized bytes of `quantized` and `cast`, except for the sign of a zero.

On a CPU, `fused` rounds in one pass over the tensor. Compiled code, GPUs and machines without numba
use the torch expressions here, which a compiler can fuse and which never synchronize with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.numerics import fused
from fp8stack.numerics.blocks import Block, RoundingRule, block_sizes, split_into_blocks
from fp8stack.numerics.cast import amax, check_dtype, record_amax
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import check_arguments, checked_dim
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.scales import round_blocks, scale_blocks


class Rounded(NamedTuple):
    """A matrix as an emulated GEMM takes it.

    Attributes:
        values: of the shape of the matrix; with a Hadamard transform, the reduced dimension is
            padded to a multiple of the transform's size. NaN where the matrix has NaN. float32, or
            bfloat16 if requested.
        factor: the factor of this operand to multiply the GEMM's output by, float32: 0-dim, or for
            block = "row" [rows] of the operand as its GEMM reduces it; None if the values are
            already scaled.
    """

    values: Tensor
    factor: Tensor | None


class Rounding(RoundingRule):
    """A rounding rule with its two implementations, `fused` and torch."""

    @cached_property
    def number(self) -> int:
        """The rule's id in this process, see `fused.number`; compiled code cannot create one."""
        return fused.number(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _numbered, (self.quantizer, self.blocks, self.dim)

    def round(
        self,
        x: Tensor,
        generator: RandomBits | None = None,
        scale: Tensor | None = None,
        recorded: Tensor | None = None,
        is_counted: Tensor | None = None,
        bf16: bool = False,
        *,
        fuse: bool = True,
    ) -> list[Rounded]:
        """Round `x` once for each of the rule's block shapes.

        Args:
            x: a matrix, float32, bfloat16 or float16.
            generator: the bits for stochastic rounding, by the position in `x`.
            scale: the scale of the matrix, float32 and 0-dim, if it is given and not computed.
            recorded: float32 and 0-dim, replaced by the larger of it and the amax of `x`.
            is_counted: bool and 0-dim; if false, `recorded` stays as it is.
            bf16: return bfloat16, which represents the values of quantizers that are
                `exact_in_bf16`.
            fuse: use `fused` where possible, else torch's operators on every device.
        """
        run = fused.implementation(x) if fuse else None
        if run is not None:
            bits = _NO_BITS if generator is None else _bits(generator)
            tensors = run(x, self.number, scale, recorded, is_counted, *bits, bf16)
            copies = []
            step = 2 if self.has_factor else 1
            for i in range(0, len(tensors), step):
                copies.append(Rounded(tensors[i], tensors[i + 1] if step == 2 else None))
            return copies
        if recorded is not None:
            record_amax(recorded, amax(x), is_counted)
        dtype = x.dtype
        if self.quantizer.hadamard:
            x, dtype = hadamard(x, self.quantizer.hadamard, self.dim), torch.bfloat16
        copies = [self._one(x, block, dtype, generator, scale) for block in self.blocks]
        if not bf16:
            return copies
        return [copy._replace(values=copy.values.to(torch.bfloat16)) for copy in copies]

    def _one(
        self,
        x: Tensor,
        block: Block,
        dtype: torch.dtype,
        generator: RandomBits | None,
        scale: Tensor | None,
    ) -> Rounded:
        """Round `x`, after any Hadamard transform, for one block shape. `dtype` is the dtype of the
        original tensor."""
        blocks, _, scales, restore = scale_blocks(x, self.quantizer, block, dtype, scale)
        bits = None
        if self.quantizer.stochastic and generator is not None:
            bits, _ = split_into_blocks(generator.bits(*x.shape), block)
        values = round_blocks(blocks, scales.into, scales.out, self.quantizer.element, bits)
        return Rounded(restore(values), scales.factor)


def _numbered(*fields: Any) -> Rounding:
    """A copy of a rule, with its id in this process."""
    rule = Rounding(*fields)
    assert rule.number >= 0
    return rule


_NO_BITS: fused.Bits = (None, 0, 0, 0)


def _bits(generator: RandomBits) -> fused.Bits:
    return generator.counter, generator.seed, int(generator.stream), int(generator.first_row)


def rounding(quantizer: Quantizer, dims: Sequence[int]) -> Rounding:
    """The rounding rule of `quantizer` for GEMMs that reduce over each of `dims`: 1 (the columns)
    or 0 (the rows)."""
    blocks = [(rows, columns) for rows, columns in (block_sizes(quantizer, 2, d) for d in dims)]
    return Rounding(quantizer, tuple(blocks), dims[0])


def rounding_of_both(rowwise: Quantizer, columnwise: Quantizer) -> Rounding | None:
    """The rule that rounds an operand in one pass for two GEMMs, which reduce over the columns
    (`rowwise`) and over the rows (`columnwise`); None if the quantizers are not `alike`."""
    if not alike(rowwise, columnwise):
        return None
    return Rounding(rowwise, rounding(rowwise, [1]).blocks + rounding(columnwise, [0]).blocks)


def alike(rowwise: Quantizer, columnwise: Quantizer) -> bool:
    """Whether two quantizers differ only in their blocks, so that one pass rounds for both."""
    per_tensor = rowwise.per_tensor or columnwise.per_tensor
    return (
        not (per_tensor or rowwise.stochastic or rowwise.hadamard)
        and (rowwise.block == "row") == (columnwise.block == "row")
        and replace(rowwise, block=columnwise.block) == columnwise
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
        quantizer: the quantizer.
        dim: the dimension that the GEMM reduces over: 1 for the columns, 0 for the rows.
        generator: the bits for stochastic rounding, by the position in `x`.
        scale: float32, 0-dim, for one scale per tensor; required in delayed scaling.

    Raises:
        ValueError: `x` is not a matrix, or see `quantize`.
    """
    check_arguments(quantizer, generator, scale)
    return rounding(quantizer, [matrix_dim(x, dim)]).round(x.detach(), generator, scale)[0]


def matrix_dim(x: Tensor, dim: int) -> int:
    """`dim` as 0 or 1. Raises a `ValueError` if `x` is not a matrix, or see `checked_dim`."""
    check_dtype(x)
    if x.ndim != 2:
        raise ValueError(f"A tensor of shape {list(x.shape)} is no matrix. Use x.flatten(0, -2)")
    return checked_dim(x, dim)
