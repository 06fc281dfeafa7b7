"""The quantizers of a linear's operands, GEMM by GEMM, as data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from fp8stack.common.formats import Quantizer

Operand = Literal["input", "weight", "grad_output"]
OPERANDS: tuple[Operand, ...] = get_args(Operand)


@dataclass(frozen=True, kw_only=True)
class Quantizers:
    """The quantizers of a linear's three GEMMs: y = x w^T (fprop), dx = dy w (dgrad), dw = dy^T x
    (wgrad).

    `input` and `weight` quantize the operands of fprop, `grad_output` the gradient in dgrad.
    `input_wgrad`, `weight_dgrad` and `grad_output_wgrad` quantize the second copy of an operand,
    for the GEMM that reduces over its rows. None leaves an operand in the compute dtype; "forward"
    takes the values that fprop had.

    Raises:
        ValueError: two operands of a GEMM with different Hadamard transforms, or "forward" for
            values that were transformed.
    """

    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    input_wgrad: Quantizer | Literal["forward"] | None = None
    weight_dgrad: Quantizer | Literal["forward"] | None = None
    grad_output_wgrad: Quantizer | None = None

    def __post_init__(self) -> None:
        for gemm, (first, second) in self.gemms.items():
            transforms = [q.hadamard if isinstance(q, Quantizer) else 0 for q in (first, second)]
            if transforms[0] != transforms[1]:
                raise ValueError(
                    f"{gemm}: hadamard = {transforms[0]} and {transforms[1]}, which would not "
                    "cancel. Give both operands the same"
                )
        for name in OPERANDS:
            rowwise = self.rowwise(name)
            if self.columnwise(name) == "forward" and rowwise is not None and rowwise.hadamard:
                raise ValueError(
                    f"{name}: hadamard = {rowwise.hadamard} mixes the forward values that its "
                    "backward GEMM is to take. Use hadamard = 0 or backward = 'high_precision'"
                )

    def rowwise(self, operand: Operand) -> Quantizer | None:
        """The quantizer of the copy whose columns its GEMM reduces over: fprop's, and dgrad's
        grad_output."""
        quantizer: Quantizer | None = getattr(self, operand)
        return quantizer

    def columnwise(self, operand: Operand) -> Quantizer | Literal["forward"] | None:
        """The quantizer of the copy whose rows its GEMM reduces over: wgrad's, and dgrad's
        weight."""
        quantizer: Quantizer | Literal["forward"] | None = getattr(self, _COLUMNWISE[operand])
        return quantizer

    @property
    def gemms(self) -> dict[str, tuple[Quantizer | None, Quantizer | Literal["forward"] | None]]:
        """The quantizers of both operands of each GEMM: `fprop`, `dgrad`, `wgrad`."""
        return {
            gemm: (getattr(self, first), getattr(self, second))
            for gemm, (first, second) in _FIELDS.items()
        }

    def values(self, gemm: str) -> tuple[Quantizer | None, Quantizer | None]:
        """The quantizers that give the values of a GEMM's operands: fprop's for "forward"."""
        first, second = self.gemms[gemm]
        if second == "forward":
            second = self.weight if gemm == "dgrad" else self.input
        return first, second

    def only(self, gemms: Collection[str]) -> Quantizers:
        """The quantizers of the operands of some GEMMs, and those whose forward values they take;
        the operands of the other GEMMs have none."""
        fields = {name: getattr(self, name) for gemm in gemms for name in _FIELDS[gemm]}
        for operand, columnwise in _COLUMNWISE.items():
            if fields.get(columnwise) == "forward":
                fields[operand] = getattr(self, operand)
        return Quantizers(**fields)

    @property
    def each(self) -> dict[str, Quantizer]:
        """All quantizers by place: `input`, `input.wgrad`, `weight`, `weight.dgrad`, ..."""
        quantizers: dict[str, Quantizer] = {}
        for operand in OPERANDS:
            rowwise, columnwise = self.rowwise(operand), self.columnwise(operand)
            if rowwise is not None:
                quantizers[operand] = rowwise
            if isinstance(columnwise, Quantizer):
                quantizers[f"{operand}.{_COLUMNWISE[operand].rpartition('_')[2]}"] = columnwise
        return quantizers

    @property
    def casts(self) -> dict[str, Quantizer]:
        """The quantizers that need a cast: if both copies of an operand are quantized alike, one
        cast serves both."""
        by_place = self.each
        return {
            place: quantizer
            for place, quantizer in by_place.items()
            if "." not in place or quantizer != by_place.get(place.partition(".")[0])
        }

    def reuses_rowwise(self, operand: Operand) -> bool:
        """Whether the second copy of an operand holds the first one's values, transposed."""
        rowwise, columnwise = self.rowwise(operand), self.columnwise(operand)
        return columnwise == "forward" or (
            rowwise == columnwise and (rowwise is None or rowwise.turns)
        )

    @property
    def bits(self) -> int:
        """The fewest bits of an element in any operand."""
        return min(q.element.bits for q in self.each.values())

    @property
    def own_formats(self) -> tuple[str, ...]:
        """The formats of operands that no hardware has."""
        names = (q.format for q in self.each.values() if not q.element.is_shipped)
        return tuple(dict.fromkeys(names))

    @property
    def delayed(self) -> bool:
        """Whether any scale comes from earlier passes."""
        return any(q.delayed for q in self.each.values())

    @property
    def stochastic(self) -> bool:
        """Whether any operand is rounded at random."""
        return any(q.stochastic for q in self.each.values())

    @property
    def exact_in_bf16(self) -> bool:
        """Whether all values that the GEMMs multiply have at most 8 significant bits."""
        again = [self.rowwise(name) for name in OPERANDS if self.columnwise(name) == "forward"]
        exact = all(q.exact_in_bf16 for q in self.each.values())
        return exact and all(q is None or q.columnwise_exact_in_bf16 for q in again)

    @property
    def by_bf16_gemms(self) -> bool:
        """Whether GEMMs of bfloat16 operands to bfloat16 outputs, with at most a scale for all of
        the output, give the products of the quantized operands, rounded once."""
        return self.exact_in_bf16 and all(q.block != "row" for q in self.each.values())


_FIELDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight_dgrad"),
    "wgrad": ("grad_output_wgrad", "input_wgrad"),
}
"""The fields of `Quantizers` for the first and the second operand of each GEMM."""
_COLUMNWISE: dict[str, str] = {
    "input": "input_wgrad",
    "weight": "weight_dgrad",
    "grad_output": "grad_output_wgrad",
}
