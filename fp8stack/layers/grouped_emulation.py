"""Grouped linears on any device: the exact FP8 values of each group, multiplied as `emulate` does.

On a GPU, groups whose product needs no factor are multiplied by torch's bfloat16 `grouped_mm`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand
from fp8stack.layers.backend import Backend
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.emulate import EmulateBackend, Emulated, EmulatedOperand, Form, in_bf16
from fp8stack.layers.grouped import GroupedSize, Groups, QuantizedGroupedLinear
from fp8stack.layers.kernels.grouped_gemm import (
    by_grouped_mm,
    each_group,
    output_shape,
    takes_grouped_mm,
)
from fp8stack.layers.linear import Call
from fp8stack.layers.operands import LayerOperands, castable
from fp8stack.numerics.cast import record_amax
from fp8stack.numerics.fused import needs_operator
from fp8stack.numerics.groups import GroupRounding
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.numerics.packed_groups import GroupPacking, PackedGroups
from fp8stack.numerics.rounding import Rounding, rounding
from fp8stack.precision.plan import LayerPlan


class GroupedForm(NamedTuple):
    """The form of the tensors of a copy.

    Attributes:
        transposed, in_bf16: see `emulate.Form`.
        multiple: see `GroupRounding`.
        by_row: whether each row of a row copy has a factor, and not each group.
        fp8: the dtype that holds the values, if it is FP8 and they carry no scales.
        packed, shape: see `emulate.Form`.
    """

    transposed: bool
    in_bf16: bool
    multiple: int = 1
    by_row: bool = False
    fp8: torch.dtype | None = None
    packed: GroupedOperand | None = None
    shape: tuple[int, ...] | None = None


class EmulatedGroups(NamedTuple):
    """A copy of the groups of an operand, see `Emulated`: `values` and `factor` are those that
    `GroupRounding.round` gives, `ends` the ends of the groups, None for weights. Where they are
    packed, the first two, `amax` and `has_nan` are those of `PackedGroups`."""

    values: Tensor
    factor: Tensor | None
    form: GroupedForm
    ends: Tensor | None
    amax: Tensor | None = None
    has_nan: Tensor | None = None
    sums: None = None


class GroupedOperand(EmulatedOperand):
    """The rounding of one operand of an emulated grouped linear, see `EmulatedOperand`.

    Attributes:
        packing: makes bytes of the column copy, where it is packed by itself.
        round_rows, round_columns, round_both: the rounding of the groups for each copy, and for
            both in one sweep.
        row_form, column_form: the form of each copy.
    """

    def __init__(self, name: Operand, operands: LayerOperands, bf16: bool, save_fp8: bool) -> None:
        super().__init__(name, operands, bf16, save_fp8)
        self.round_rows = _of_groups(self.rounding)
        self.round_columns = _of_groups(self.rounding_across)
        self.round_both = _of_groups(self.rounding_both)
        multiple = 1 if self.round_columns is None else self.round_columns.multiple
        by_row = self.along is not None and self.along.block == "row"
        fp8, fp8_across = _fp8_of(self.along), _fp8_of(self.across)
        self.row_form = GroupedForm(False, self.rows.in_bf16, 1, by_row, fp8)
        self.column_form = GroupedForm(
            True, self.columns.in_bf16, multiple, by_row=False, fp8=fp8_across
        )
        self.packing = None
        if self.packs and isinstance(self.across, Quantizer) and self.bytes_of_rows is None:
            self.packing = GroupPacking(rounding(self.across, [0]))

    def pack_groups(
        self, x: Tensor, ends: Tensor | None, rows: EmulatedGroups, call: Call
    ) -> EmulatedGroups:
        """`pack` of groups."""
        form = self.column_form._replace(packed=self, shape=tuple(x.shape))
        if self.across is None:
            return EmulatedGroups(x, None, form, ends)
        if not isinstance(self.across, Quantizer):
            return _with_row_scales(rows)._replace(form=form)
        if self.bytes_of_rows is not None:
            return rows._replace(values=rows.values.to(self.bytes_of_rows), form=form)
        assert self.packing is not None
        scale = recorded = counts = None
        if self.slot_across is not None:
            scale, recorded, counts = self.slot_across.cast_arguments(call.record)
        packed = self.packing.pack(castable(x), ends, self.bits(True, len(x)), scale)
        if recorded is not None:
            record_amax(recorded, packed.amax, counts)
        return EmulatedGroups(packed.data, packed.scales, form, ends, packed.amax, packed.has_nan)

    def unpack_groups(self, copy: EmulatedGroups) -> EmulatedGroups:
        """`unpack` of groups."""
        values, factor, (*_, shape) = copy.values, copy.factor, copy.form
        if copy.amax is None or copy.has_nan is None:
            values = values.to(torch.bfloat16 if self.bf16 else torch.float32)
        else:
            assert self.packing is not None
            assert factor is not None
            assert shape is not None
            packed = PackedGroups(values, factor, copy.amax, copy.has_nan)
            values, factor = self.packing.unpack(packed, copy.ends, shape, self.bf16)
        return EmulatedGroups(values, factor, self.column_form, copy.ends)


def _fp8_of(quantizer: object) -> torch.dtype | None:
    """`GroupedForm.fp8` of a copy."""
    if not isinstance(quantizer, Quantizer) or quantizer.blocks is not None:
        return None
    return quantizer.element.dtype


def _of_groups(rule: Rounding | None) -> GroupRounding | None:
    return None if rule is None else GroupRounding(rule)


class GroupedEmulation:
    """The casts and GEMMs of emulated grouped linears, a `GroupedBackend` and a `GemmBackend`."""

    Operand = GroupedOperand
    caches_weights = False  # see `Backend`

    def __init__(self, backend: Backend, *, save_fp8: bool = False) -> None:
        self._backend = backend
        self._save_fp8 = save_fp8
        self.gemm_count = 0
        self.compute_dtype = backend.compute_dtype

    @property
    def delayed(self) -> DelayedScaling | None:
        """The amax history of the model that is built."""
        return self._backend.delayed

    def linear(
        self, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> QuantizedGroupedLinear:
        """See `GroupedBackend.linear`."""
        bf16 = in_bf16(self._backend.plan, layer)
        quantizers = {name: self.Operand(name, operands, bf16, self._save_fp8) for name in OPERANDS}
        return QuantizedGroupedLinear(size, self, operands, quantizers)

    def cast(
        self, x: Groups | Tensor, quantizers: GroupedOperand, with_columns: bool, call: Call
    ) -> tuple[EmulatedGroups, EmulatedGroups | None]:
        """See `GemmBackend.cast`, of groups of rows or of a weight [groups, out, in]."""
        matrix, ends = x if isinstance(x, Groups) else (x, None)
        if quantizers.cached_weight is not None and not (with_columns or call.record):
            again = partial(self.cast, x, quantizers, with_columns, call)
            return quantizers.kept_copies(matrix, again)
        bf16 = quantizers.bf16
        if with_columns and quantizers.packs:
            rows = self._copy(matrix, ends, quantizers, False, call)
            return rows, quantizers.pack_groups(matrix, ends, rows, call)
        if with_columns and quantizers.round_both is not None:
            (first, second), _ = quantizers.round_both.round(matrix, ends, bf16=bf16)
            rows = EmulatedGroups(*first, quantizers.row_form, ends)
            return rows, EmulatedGroups(*second, quantizers.column_form, ends)
        rows = self._copy(matrix, ends, quantizers, False, call)
        if with_columns and quantizers.reuses_row_copy:
            columns = _with_row_scales(rows)
            return rows, columns._replace(form=quantizers.column_form)
        if with_columns:
            return rows, self._copy(matrix, ends, quantizers, True, call)
        if call.record and quantizers.always_records:
            self._copy(matrix, ends, quantizers, True, call)
        return rows, None

    def _copy(
        self, x: Tensor, ends: Tensor | None, quantizers: GroupedOperand, across: bool, call: Call
    ) -> EmulatedGroups:
        """Cast one copy of `x`."""
        rule = quantizers.round_columns if across else quantizers.round_rows
        form = quantizers.column_form if across else quantizers.row_form
        slot = quantizers.slot_across if across else quantizers.slot
        bf16 = quantizers.bf16
        if rule is None:
            return EmulatedGroups(x.to(torch.bfloat16 if bf16 else torch.float32), None, form, ends)
        scale = recorded = counts = None
        if slot is not None:
            scale, recorded, counts = slot.cast_arguments(call.record)
        bits = quantizers.bits(across, len(x))
        copies, amaxes = rule.round(x, ends, bits, scale, bf16=bf16, amaxes=recorded is not None)
        if recorded is not None and amaxes is not None:
            record_amax(recorded, amaxes, counts)
        return EmulatedGroups(*copies[0], form, ends)

    def matmul(
        self,
        a: EmulatedGroups,
        b: EmulatedGroups,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> Tensor:
        """See `GemmBackend.matmul`: [rows, N] where `b` is a weight; else [groups, M, N]."""
        if b.form.packed is not None:
            b = b.form.packed.unpack_groups(b)
        assert a.ends is not None
        turn = "a" if a.form.transposed else "neither" if b.form.transposed else "b"
        in_bf16 = a.form.in_bf16 and b.form.in_bf16
        run = _operator if needs_operator(a.values) else _emulated_gemm
        y: Tensor = run(
            a.values, b.values, a.ends, turn, a.form.multiple, a.factor, b.factor, a.form.by_row,
            bias, in_bf16, out_dtype,
        )  # fmt: skip
        return y


def _with_row_scales(rows: EmulatedGroups) -> EmulatedGroups:
    """See `emulate._with_row_scales`."""
    values, factor = rows.values, rows.factor
    if factor is None or not rows.form.by_row:
        return rows
    return rows._replace(values=(values * factor[..., None]).to(values.dtype), factor=None)


def _emulated_gemm(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    turn: str,
    multiple: int,
    a_factor: Tensor | None,
    b_factor: Tensor | None,
    by_row: bool,
    bias: Tensor | None,
    in_bf16: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """`EmulateBackend.matmul` of each group."""
    plain = a_factor is None and b_factor is None and bias is None
    if plain and out_dtype == torch.bfloat16 and takes_grouped_mm(a, b, ends):
        return by_grouped_mm(a, b, ends, turn)
    a_form, b_form = Form(turn == "a", in_bf16), Form(turn != "b", in_bf16)

    def multiply(group: int, a: Tensor, b: Tensor, place: slice, out: Tensor | None) -> Tensor:
        of_a = None if a_factor is None else a_factor[place if by_row else group]
        of_b = None if b_factor is None else b_factor[group]
        return EmulateBackend.matmul(
            Emulated(a, of_a, a_form),
            Emulated(b, of_b, b_form),
            out_dtype,
            bias=None if bias is None else bias[group],
            out=out if out_dtype == torch.float32 else None,
        )

    shape = output_shape(a, b, ends, turn)
    return each_group(a, b, ends, multiple, multiply, a.new_empty(shape, dtype=out_dtype))


def _fake_emulated_gemm(a: Tensor, b: Tensor, ends: Tensor, turn: str, *options: Any) -> Tensor:
    return a.new_empty(output_shape(a, b, ends, turn), dtype=options[-1])


_operator = operator_on_any_device("emulated_grouped_gemm", _fake_emulated_gemm)(_emulated_gemm)
