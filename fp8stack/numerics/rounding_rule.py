"""A rounding rule of a matrix, and the shapes of its results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fp8stack.common.formats import Quantizer

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
