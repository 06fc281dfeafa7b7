"""Blocks of a tensor that share a scale: their sizes, rounding rules, splits and amaxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8stack.common.formats import Quantizer
from fp8stack.numerics.cast import magnitude

Block = tuple[int, int]
"""Rows and columns that share a scale; 0 is all of them."""


@dataclass(frozen=True)
class RoundingRule:
    """A rounding rule of a matrix, for one GEMM or for two.

    Attributes:
        quantizer: the quantizer.
        blocks: the rows and columns of a block, for each result.
        dim: the dimension that a Hadamard transform mixes.
    """

    quantizer: Quantizer
    blocks: tuple[Block, ...]
    dim: int = 1

    @property
    def carries(self) -> bool:
        """Whether values carry the scales of their blocks."""
        return self.blocks[0][0] * self.blocks[0][1] > 0

    @cached_property
    def has_factor(self) -> bool:
        """Whether the GEMM's output is multiplied by a factor."""
        return not self.carries or self.quantizer.scale == "e4m3"

    @cached_property
    def row_multiple(self) -> int:
        """The number that the rows of the result are padded to a multiple of: the size of a
        Hadamard transform that mixes rows, else 1."""
        return (self.quantizer.hadamard or 1) if self.dim == 0 else 1

    def shape(self, rows: int, columns: int) -> Block:
        """Rows and columns of the result, padded for a Hadamard transform."""
        size = self.quantizer.hadamard or 1
        if self.dim == 0:
            return -(-rows // size) * size, columns
        return rows, -(-columns // size) * size

    def factor_shape(self, block: Block, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the factor of one result."""
        return (rows,) if block == (1, 0) else (columns,) if block == (0, 1) else ()


def block_sizes(quantizer: Quantizer, ndim: int, dim: int) -> list[int]:
    """The size of a block in each dimension of a tensor that a GEMM reduces over `dim`, from 0; 0
    for all of a dimension."""
    if quantizer.per_tensor:
        return [0] * ndim
    sizes = [1] * ndim
    other_size, sizes[dim] = quantizer.blocks or (1, 0)
    if other_size > 1:
        if ndim < 2:
            raise ValueError(f"A block {quantizer.blocks} does not fit a tensor of one dimension.")
        sizes[-2 if dim == ndim - 1 else -1] = other_size
    return sizes


def split_into_blocks(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`x` padded with zeros and viewed as [n0, b0, n1, b1, ...], and the way back to its shape. A
    size of 0 is all of a dimension, and at least one element."""
    padding: list[int] = []
    for length, size in zip(reversed(x.shape), reversed(sizes), strict=True):
        padding += [0, -length % size if size else int(length == 0)]
    padded = F.pad(x, padding) if any(padding) else x
    shape: list[int] = []
    for length, size in zip(padded.shape, sizes, strict=True):
        shape += [length // size, size] if size else [1, length]

    def restore(blocks: Tensor) -> Tensor:
        unblocked = blocks.reshape(padded.shape)
        if padded is x:
            return unblocked.contiguous()
        # Stored first: inductor's code for a CPU (torch 2.13) writes wrong numbers if it trims
        # padded blocks while it computes them.
        trimmed = in_memory(unblocked)[tuple(slice(length) for length in x.shape)]
        return trimmed.clone(memory_format=torch.contiguous_format)  # no view of `padded`

    return padded.reshape(shape), restore


def block_amax(blocks: Tensor) -> Tensor:
    """The amax of each block of [n0, b0, n1, b1, ...], NaN ignored: [n0, 1, n1, 1, ...]."""
    dims = list(range(1, blocks.ndim, 2))
    is_eager = not torch.compiler.is_compiling() and type(blocks) is not FakeTensor
    if is_eager and blocks.device.type == "cpu":  # without a copy, see `cast.amax`
        low, high = blocks.amin(dims, keepdim=True), blocks.amax(dims, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs())
        if not bool(largest.isnan().any()):
            return largest
    return magnitude(blocks).amax(dims, keepdim=True)


def spread(scales: Tensor, sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The scale of each element of a tensor of `shape`, from the scales of its blocks."""
    for axis, size in enumerate(sizes):
        if size > 1:
            scales = in_memory(scales.repeat_interleave(size, axis)).narrow(axis, 0, shape[axis])
    return scales


def in_memory(x: Tensor) -> Tensor:
    """`x`, stored once by compiled code for a CPU, which would otherwise compute it for every
    use."""
    return x.as_strided(x.shape, x.stride()) if x.device.type == "cpu" else x
