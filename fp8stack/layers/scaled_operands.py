"""The quantizers of a linear's operands on torch's scaled GEMMs.

`operand_of` gives a `ScaledOperand` where one cast makes both copies of an operand, else a
`MixedOperand`: where its copies have other quantizers, or where one of its GEMMs is not a scaled
one and multiplies values, as the emulator does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand
from fp8stack.layers.emulate import EmulatedOperand
from fp8stack.layers.kernels.scaled_gemm import MULTIPLES, ScaleLayout
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.layers.operands import LayerOperands, OperandQuantizers
from fp8stack.layers.weight_cache import CachedWeight
from fp8stack.precision.plan import LayerPlan

GEMMS_OF: dict[Operand, tuple[str, str]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}
"""The GEMMs that take the row copy and the column copy of each operand."""


class ScaledOperand(OperandQuantizers):
    """The quantizers of one operand of a layer for scaled GEMMs, see `OperandQuantizers`: both
    copies have the same quantizer, up to a Hadamard transform.

    Args:
        columns: whether to make both copies by the quantizer of the column copy.

    Attributes:
        quantizer: the quantizer of both copies.
        kind: the layout of the scales.
        target: the FP8 or FP4 format.
        cached: the cached copies of a weight, valid until it changes.
        in_batched_cast: whether the kernel that casts many weights supports this quantizer.
        shared: of a sharded weight, the same on all ranks: in current scaling its scale, in scales
            per row the amaxes of its columns.
        layer: the layer, if the operand is its weight.
    """

    def __init__(self, name: Operand, operands: LayerOperands, *, columns: bool = False) -> None:
        super().__init__(name, operands)
        if self.across == "forward":
            self.across, self.slot_across = self.along, self.slot
        if columns:
            assert isinstance(self.across, Quantizer)
            self.along, self.slot = replace(self.across, hadamard=0), self.slot_across
            self.stochastic = self.stochastic_across
        assert self.along is not None
        self.quantizer = self.along
        self.kind = _kind_of_scales(self.along)
        self.target = self.along.element
        self.cached: CachedWeight | None = None
        self.in_batched_cast = self.kind in (
            ScaleLayout.PER_TENSOR,
            ScaleLayout.SQUARES,
            ScaleLayout.MX,
        )
        self.shared = torch.ones(())
        self.layer: QuantizedLinear | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cached": None}  # a copied layer quantizes its own weight

    @property
    def layouts(self) -> list[ScaleLayout]:
        """The layouts of the scales of its copies for scaled GEMMs."""
        return [self.kind]


class MixedOperand:
    """The quantizers of one operand of a layer whose copies are cast one by one.

    Attributes:
        name: the operand.
        rows, columns: the quantizers of each copy; None for a GEMM that is not a scaled one.
        values: the quantizers of the copies for such GEMMs.
        cached, in_batched_cast, layer: see `ScaledOperand`.
    """

    in_batched_cast = False

    def __init__(
        self,
        name: Operand,
        rows: ScaledOperand | None,
        columns: ScaledOperand | None,
        values: EmulatedOperand,
    ) -> None:
        self.name = name
        self.rows = rows
        self.columns = columns
        self.values = values
        self.cached: CachedWeight | None = None
        self.layer: QuantizedLinear | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cached": None}  # a copied layer quantizes its own weight

    @property
    def layouts(self) -> list[ScaleLayout]:
        """See `ScaledOperand.layouts`."""
        return [copy.kind for copy in (self.rows, self.columns) if copy is not None]


TorchOperand = ScaledOperand | MixedOperand


def operand_of(
    name: Operand, operands: LayerOperands, layer: LayerPlan, *, in_bf16: bool
) -> TorchOperand:
    """The quantizers of an operand of a planned layer. `in_bf16` says whether GEMMs that are not
    scaled ones multiply bfloat16 values on a GPU, else float32."""
    quantizers, plain = operands.quantizers, layer.plain_gemms
    along, across = quantizers.along(name), quantizers.across(name)
    scaled = [gemm not in plain for gemm in GEMMS_OF[name]]
    if all(scaled) and _one_cast_makes_both(along, across):
        return ScaledOperand(name, operands)
    rows = ScaledOperand(name, operands) if scaled[0] else None
    columns = ScaledOperand(name, operands, columns=True) if scaled[1] else None
    values = LayerOperands(quantizers.only(plain), operands.slots, operands.draws)
    return MixedOperand(name, rows, columns, EmulatedOperand(name, values, in_bf16))


def rows_multiple(operands: Collection[TorchOperand]) -> int:
    """The number that must divide the rows of x and dy, whose quantizers are given."""
    return max((MULTIPLES[kind] for operand in operands for kind in operand.layouts), default=1)


def _one_cast_makes_both(along: Quantizer | None, across: object) -> bool:
    if along is None or not isinstance(across, Quantizer):
        return across == "forward"
    return replace(along, hadamard=across.hadamard) == across


def _kind_of_scales(quantizer: Quantizer) -> ScaleLayout:
    if quantizer.blocks is None:
        return ScaleLayout.PER_TENSOR if quantizer.per_tensor else ScaleLayout.PER_ROW
    if quantizer.scale_bytes == 1:
        return ScaleLayout.MX if quantizer.scale == "e8m0" else ScaleLayout.NV
    return ScaleLayout.SQUARES if quantizer.blocks[0] > 1 else ScaleLayout.ROWS
