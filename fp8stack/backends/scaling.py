"""How the operands of a linear get their scales, one class per recipe.

What comes out are FP8 values in float32, or FP8 bytes with scales to be kept for later.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.backends.delayed import Slots
from fp8stack.formats import FORMATS, Fp8Name
from fp8stack.precision import Recipe
from fp8stack.precision.recipe import BlockRecipe, CurrentRecipe, DelayedRecipe, Mxfp8Recipe

# The operands of the three GEMMs: y = x w^T, dx = dy w, dw = dy^T x.
Name = Literal["input", "weight", "grad_output"]

# A scaled value this little above fp8_max still rounds down to it, so it needs no clamp.
_ROUNDS_DOWN = 1.01


class Operand(NamedTuple):
    """What a GEMM multiplies: FP8 values, and the float32 factor its output gets for them."""

    values: Tensor
    inv_scale: Tensor | None


class PerTensor:
    """One scale per tensor, from its own amax or, in delayed scaling, from earlier ones."""

    def __init__(self, recipe: DelayedRecipe | CurrentRecipe, slots: Slots | None) -> None:
        self.recipe = recipe
        self.slots = slots

    def format(self, name: Name) -> Fp8Name:
        """The format that an operand is cast to."""
        recipe = self.recipe
        return recipe.backward_format if name == "grad_output" else recipe.forward_format

    def scale(self, x: Tensor, name: Name, record: bool) -> tuple[Tensor, Tensor | None]:
        """The scale to cast `x` with, and the amax of `x` if that was needed; recorded if so."""
        if self.slots is None:
            assert isinstance(self.recipe, CurrentRecipe)
            largest = numerics.amax(x)
            scale = numerics.tensor_scale(
                largest,
                self.format(name),
                power_of_two=self.recipe.power_of_two,
                eps=self.recipe.eps,
            )
            return scale, largest
        slot = self.slots[name]
        scale = slot.scale()
        if not record:
            return scale, None
        largest = numerics.amax(x)
        slot.record(largest)
        return scale, largest

    def operands(
        self, x: Tensor, name: Name, record: bool, both: bool
    ) -> tuple[Operand, Operand | None]:
        """`x` [rows, columns] quantized for a GEMM that reduces over its columns and, if `both`,
        for one that reduces over its rows; `record` its amax, if amaxes are recorded at all."""
        scale, largest = self.scale(x, name, record)
        format = self.format(name)
        saturates = True
        # Elsewhere a clamp costs less than asking for a number.
        if largest is not None and x.device.type == "cpu" and not torch.compiler.is_compiling():
            saturates = not float(largest * scale) < FORMATS[format].max * _ROUNDS_DOWN
        operand = Operand(
            numerics.round_to_fp8(x, scale, format, saturates), numerics.inverse(scale)
        )
        return operand, operand if both else None

    def pack(self, x: Tensor, name: Name, operand: Operand) -> tuple[Tensor, Tensor]:
        """FP8 bytes and scales for the GEMM over rows; `operand` is that for columns."""
        assert operand.inv_scale is not None
        dtype = FORMATS[self.format(name)].dtype
        assert dtype is not None
        return operand.values.to(dtype), operand.inv_scale

    def unpack(self, data: Tensor, scales: Tensor, name: Name) -> Operand:
        """What `pack` packed."""
        return Operand(data.to(torch.float32), scales)


class _Mxfp8:
    """A power of two per 32 elements along the GEMM's reduction: two copies of each tensor."""

    def __init__(self, recipe: Mxfp8Recipe) -> None:
        self.rounding = recipe.scale_rounding

    def operands(
        self, x: Tensor, name: Name, record: bool, both: bool
    ) -> tuple[Operand, Operand | None]:
        dims = (1, 0) if both else (1,)
        return _pair(numerics.round_to_mxfp8(x, dims, "e4m3", self.rounding))

    def pack(self, x: Tensor, name: Name, operand: Operand) -> tuple[Tensor, Tensor]:
        return numerics.quantize_mxfp8(x, 0, "e4m3", self.rounding)

    def unpack(self, data: Tensor, scales: Tensor, name: Name) -> Operand:
        return Operand(numerics.dequantize_mxfp8(data, scales, 0), None)


class _Blocks:
    """A scale per 1x128 elements of x and dy along the reduction, and per 128x128 of w."""

    def __init__(self, recipe: BlockRecipe) -> None:
        self.power_of_two = recipe.power_of_two

    def operands(
        self, x: Tensor, name: Name, record: bool, both: bool
    ) -> tuple[Operand, Operand | None]:
        if name == "weight":  # a square serves both
            values = numerics.round_to_blocks(x, [(128, 128)], "e4m3", self.power_of_two)
            return _pair([*values, *values] if both else values)
        blocks = [(1, 128), (128, 1)] if both else [(1, 128)]
        return _pair(numerics.round_to_blocks(x, blocks, "e4m3", self.power_of_two))

    @staticmethod
    def _block(name: Name) -> tuple[int, int]:
        return (128, 128) if name == "weight" else (128, 1)

    def pack(self, x: Tensor, name: Name, operand: Operand) -> tuple[Tensor, Tensor]:
        return numerics.quantize_blocks(x, self._block(name), "e4m3", self.power_of_two)

    def unpack(self, data: Tensor, scales: Tensor, name: Name) -> Operand:
        return Operand(numerics.dequantize_blocks(data, scales, self._block(name)), None)


def _pair(copies: list[Tensor]) -> tuple[Operand, Operand | None]:
    """Values that carry their scales, for the GEMM over columns and that over rows, if any."""
    first, *second = [Operand(values, None) for values in copies]
    return first, second[0] if second else None


Scaling = PerTensor | _Mxfp8 | _Blocks


def build_scaling(recipe: Recipe, slots: Slots | None) -> Scaling:
    """The scaling of `recipe` for one layer, whose slots of delayed scaling are `slots`."""
    if isinstance(recipe, Mxfp8Recipe):
        return _Mxfp8(recipe)
    if isinstance(recipe, BlockRecipe):
        return _Blocks(recipe)
    assert isinstance(recipe, DelayedRecipe | CurrentRecipe)
    return PerTensor(recipe, slots)
