"""Grouped linears on torch's own grouped FP8 GEMM, `torch._scaled_grouped_mm`.

It multiplies rows by a weight for each group, E4M3 by E4M3 with a scale for each row, to bfloat16:
fprop and dgrad of `rowwise`, and fprop of recipes with a scale per tensor, in which a row has the
scale of its group. Their dgrad has an E5M2 operand, and weight gradients are float32: these GEMMs
are emulated on the exact values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8stack.layers.grouped import GroupedSize, Groups, QuantizedGroupedLinear
from fp8stack.layers.grouped_emulation import EmulatedGroups, GroupedEmulation, GroupedOperand
from fp8stack.layers.linear import Call
from fp8stack.layers.operands import LayerOperands
from fp8stack.layers.scaled_operands import GEMMS_OF
from fp8stack.layers.weight_cache import CachedWeight
from fp8stack.layers.weight_changes import WeightChanges, version_of, weight_matrix
from fp8stack.precision.plan import LayerPlan

_E4M3 = torch.float8_e4m3fn


class CachedGroups(GroupedOperand):
    """The rounding of an operand, see `GroupedOperand`.

    Attributes:
        cached: the copies of a weight, used until it changes.
        layer: the layer, if this is its weight.
    """

    cached: CachedWeight | None = None
    layer: QuantizedGroupedLinear | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cached": None}  # a copy quantizes for itself


class GroupedTorch(GroupedEmulation):
    """The casts of `GroupedEmulation`, and FP8 GEMMs where torch has them. Columns are saved as
    bytes, and weights cast once until they change. `backend` is the `TorchBackend`."""

    Operand = CachedGroups
    caches_weights = True

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, save_fp8=True)
        self._torch = backend

    @property
    def weights(self) -> WeightChanges:
        """See `Backend`."""
        weights: WeightChanges = self._torch.weights
        return weights

    def linear(
        self, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> QuantizedGroupedLinear:
        """See `GroupedBackend.linear`."""
        linear = super().linear(layer, size, operands)
        linear.quantizers["weight"].layer = linear
        for name, of_operand in linear.quantizers.items():
            rows_gemm, columns_gemm = GEMMS_OF[name]
            if rows_gemm in layer.plain_gemms:
                of_operand.row_form = of_operand.row_form._replace(fp8=None)
            if columns_gemm in layer.plain_gemms:
                of_operand.column_form = of_operand.column_form._replace(fp8=None)
        return linear

    def cast(
        self, x: Groups | Tensor, quantizers: Any, with_columns: bool, call: Call
    ) -> tuple[EmulatedGroups, EmulatedGroups | None]:
        """See `GemmBackend.cast`."""
        if quantizers.cached is not None and self._torch.is_current(quantizers, quantizers.cached):
            rows, columns = quantizers.cached.copies
            return rows, columns if with_columns else None
        return super().cast(x, quantizers, with_columns, call)

    def cache_weight(self, layer: QuantizedGroupedLinear, record: bool) -> None:
        """Cast the weight of a layer, to be used until it changes, if it is whole here."""
        quantizers: CachedGroups = layer.quantizers["weight"]
        quantizers.cached = None
        stored = weight_matrix(layer)
        if not layer.in_fp8 or stored is None or isinstance(stored, DTensor):
            return
        call = Call(record, 0, has_bias=False)
        rows, columns = super().cast(layer.weight, quantizers, True, call)
        if rows.form.fp8 == _E4M3:
            rows = rows._replace(values=rows.values.to(_E4M3))
        quantizers.cached = CachedWeight((rows, columns), version_of(stored))

    def matmul(
        self,
        a: EmulatedGroups,
        b: EmulatedGroups,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> Tensor:
        """See `GemmBackend.matmul`. The bias is added after the rounding to bfloat16."""
        if not a.form.fp8 == b.form.fp8 == _E4M3:
            return super().matmul(a, b, out_dtype, bias=bias, fast_accumulation=fast_accumulation)
        if b.form.packed is not None:
            b = b.form.packed.unpack_groups(b)
        assert a.ends is not None
        assert a.factor is not None
        assert b.factor is not None
        rows, weight = a.values.to(_E4M3), b.values.to(_E4M3)
        if b.form.transposed:  # [groups, out, in] for a GEMM over out, which has to be contiguous
            weight = weight.transpose(-2, -1).contiguous()
        if not len(rows):
            return a.values.new_zeros((0, weight.shape[1]), dtype=out_dtype)
        places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        group_of_row = torch.searchsorted(a.ends, places, right=True)
        row_scales = a.factor if a.form.by_row else a.factor[group_of_row]
        scales = b.factor if b.factor.ndim > 1 else b.factor[:, None].expand(-1, weight.shape[1])
        y = torch._scaled_grouped_mm(
            rows,
            weight.transpose(-2, -1),
            row_scales.contiguous(),
            scales.contiguous(),
            offs=a.ends,
            out_dtype=out_dtype,
            use_fast_accum=fast_accumulation,
        )
        return y if bias is None else y + bias.to(out_dtype)[group_of_row]
