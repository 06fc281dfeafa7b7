"""FP8 linears on any device: the operands' exact FP8 values, multiplied in float32 or bfloat16.

Every FP8 value is exact in the GEMM's dtype, so products are exact and sums are float32, as on
the hardware. It must not know how a scale was found (numerics) or when (delayed).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8stack.backends.contract import Backend, GemmCounter, matmul_precision
from fp8stack.backends.delayed import DelayedScaling
from fp8stack.backends.linear import MasterLinear, no_autocast
from fp8stack.backends.scaling import Name, Operand, Scaling, build_scaling
from fp8stack.precision.plan import Plan
from fp8stack.precision.recipe import BlockRecipe


class Gemm(GemmCounter):
    """Multiplies operands in one dtype, and counts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __call__(
        self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """`a` [M, K] times `b` [K, N], scaled in float32, plus `bias` [N]: [M, N]."""
        self.count += 1
        with matmul_precision("highest"):  # TF32 would round the operands
            return self._multiply(a, b, out_dtype, bias)

    def _multiply(
        self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        scale = None
        if a.inv_scale is not None and b.inv_scale is not None:
            scale = a.inv_scale * b.inv_scale
        if a.values.device.type == "cpu":
            # The scale goes into the GEMM's alpha: no pass of its own over the output.
            alpha = 1.0 if scale is None else float(scale)
            if bias is not None:
                return torch.addmm(bias.float(), a.values, b.values, alpha=alpha).to(out_dtype)
            y = a.values.new_empty(a.values.shape[0], b.values.shape[1])
            return torch.addmm(y, a.values, b.values, beta=0, alpha=alpha, out=y).to(out_dtype)
        left, right = a.values.to(self.dtype), b.values.to(self.dtype)
        if self.dtype == torch.float32:
            y = left @ right
        else:
            y = torch.mm(left, right, out_dtype=torch.float32)
        if scale is not None:
            y *= scale
        if bias is not None:
            y += bias
        return y.to(out_dtype)


class _Multiply(torch.autograd.Function):
    """y = x w^T + b with quantized operands; x and w are quantized once and reused in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: EmulatedLinear,
        differentiated: bool,
        record: bool,
    ) -> Tensor:
        scaling = layer.scaling
        both = differentiated and not layer.save_fp8
        x_operand, x_saved = scaling.operands(x, "input", record, both)
        w_operand, w_saved = scaling.operands(weight, "weight", record, both)
        y = layer.gemm(x_operand, _transposed(w_operand), x.dtype, bias)
        if differentiated:
            if x_saved is None or w_saved is None:
                ctx.save_for_backward(
                    *scaling.pack(x, "input", x_operand), *scaling.pack(weight, "weight", w_operand)
                )
            else:
                ctx.save_for_backward(*x_saved, *w_saved)
            ctx.layer, ctx.record = layer, record
            ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: EmulatedLinear = ctx.layer
        scaling, record = layer.scaling, ctx.record
        x_values, x_scales, w_values, w_scales = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = db = None
        with no_autocast(dy.device.type):
            dy_operand, dy_over_rows = scaling.operands(dy, "grad_output", record, both=needs_dw)
            if needs_dx:
                dx = layer.gemm(dy_operand, _load(layer, "weight", w_values, w_scales), dy.dtype)
            if dy_over_rows is not None:
                x_operand = _load(layer, "input", x_values, x_scales)
                dw = layer.gemm(_transposed(dy_over_rows), x_operand, layer.weight.dtype)
            if ctx.has_bias:
                db = dy.sum(0, dtype=layer.weight.dtype)
        if record and layer.delayed is not None:
            layer.delayed.backward_ran()
        return dx, dw, db, None, None, None


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.values.t(), operand.inv_scale)


def _load(layer: EmulatedLinear, name: Name, values: Tensor, scales: Tensor | None) -> Operand:
    if layer.save_fp8:
        assert scales is not None
        return layer.scaling.unpack(values, scales, name)
    return Operand(values, scales)


class EmulatedLinear(MasterLinear):
    """A linear on the exact values of its FP8 operands."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        scaling: Scaling,
        gemm: Gemm,
        compute_dtype: torch.dtype,
        delayed: DelayedScaling | None,
        save_fp8: bool,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, compute_dtype=compute_dtype, delayed=delayed
        )
        self.scaling = scaling
        self.gemm = gemm
        self.save_fp8 = save_fp8

    def multiply(self, x: Tensor) -> Tensor:
        """See `MasterLinear.multiply`."""
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, self.matrix, self.bias, self, torch.is_grad_enabled(), self.records()
        )
        return y


class EmulateBackend(Backend):
    """Layers that multiply FP8 values without FP8 hardware."""

    def __init__(self, plan: Plan, *, save_fp8: bool = False) -> None:
        super().__init__(plan)
        self._save_fp8 = save_fp8
        recipe = plan.recipe
        # Scales that are no powers of two make values that bfloat16 cannot hold.
        exact = not (isinstance(recipe, BlockRecipe) and not recipe.power_of_two)
        self._gemm = Gemm(self.compute_dtype if exact else torch.float32)

    def fp8_linear(
        self, name: str, in_features: int, out_features: int, bias: bool
    ) -> MasterLinear:
        """See `Backend.fp8_linear`."""
        return EmulatedLinear(
            in_features,
            out_features,
            bias,
            scaling=build_scaling(self.plan.recipe, name, self.delayed),
            gemm=self._gemm,
            compute_dtype=self.compute_dtype,
            delayed=self.delayed,
            save_fp8=self._save_fp8,
        )

    def fp8_gemms(self) -> int:
        """See `Backend.fp8_gemms`."""
        return self._gemm.take()
