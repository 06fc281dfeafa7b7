"""Grouped linears on torch's own grouped FP8 GEMM, `torch._scaled_grouped_mm`.

It multiplies rows by a weight for each group, E4M3 by E4M3 with a scale for each row, to bfloat16:
fprop and dgrad of `rowwise`, and fprop of recipes with a scale per tensor, in which a row has the
scale of its group. Their dgrad has an E5M2 operand, and weight gradients are float32: these GEMMs
are emulated on the exact values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.layers.grouped_emulation import EmulatedGroups, GroupedEmulation

_E4M3 = torch.float8_e4m3fn


class GroupedTorch(GroupedEmulation):
    """The casts of `GroupedEmulation`, and FP8 GEMMs where torch has them."""

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
        is_e4m3 = a.form.fp8 == b.form.fp8 == _E4M3
        if a.form.turned or not is_e4m3 or out_dtype != torch.bfloat16 or not len(a.values):
            return super().matmul(a, b, out_dtype, bias=bias, fast_accumulation=fast_accumulation)
        if b.form.packed is not None:
            b = b.form.packed.unpack_groups(b)
        assert a.ends is not None
        assert a.factor is not None
        assert b.factor is not None
        rows, weight = a.values.to(_E4M3), b.values.to(_E4M3)
        if b.form.turned:  # [groups, out, in] for a GEMM over out, which has to be contiguous
            weight = weight.transpose(-2, -1).contiguous()
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
