"""FP8 linears on any device: the operands' exact FP8 values, multiplied in float32 or bfloat16.

Every FP8 value is exact in the GEMM's dtype, so products are exact and sums are float32, as on
the hardware.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8stack.backends.base import Backend
from fp8stack.backends.delayed import Slots
from fp8stack.backends.linear import LowPrecisionLinear, Size, no_autocast
from fp8stack.backends.scaling import Name, Operand, Scaling, build_scaling
from fp8stack.ops.matmul_precision import exact_matmul
from fp8stack.precision.plan import Plan
from fp8stack.precision.recipe import BlockRecipe


class Gemm:
    """Multiplies operands in one dtype."""

    def __init__(self, dtype: torch.dtype, backend: EmulateBackend) -> None:
        self.dtype = dtype
        self.backend = backend

    def __call__(
        self,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        *,
        turn: Literal["neither", "a", "b"] = "neither",
        bias: Tensor | None = None,
    ) -> Tensor:
        """`a` [M, K] times `b` [K, N], scaled in float32, plus `bias` [N]: [M, N]; the operand to
        `turn` is given as its transpose."""
        self.backend.count_gemms(1)
        left, right = a.values, b.values
        scale = None
        if a.inv_scale is not None and b.inv_scale is not None:
            scale = a.inv_scale * b.inv_scale
        with exact_matmul():  # TF32 would round the operands
            if left.device.type == "cpu":
                bias = None if bias is None else bias.float()
                y: Tensor = _cpu_gemm(left, right, turn, scale, bias)
                return y.to(out_dtype)
            left, right = _turned(left, right, turn)
            if self.dtype == torch.float32:
                y = left @ right
            else:
                y = torch.mm(left, right, out_dtype=torch.float32)
        if scale is not None:
            y = y * scale
        if bias is not None:
            y = y + bias
        return y.to(out_dtype)

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The dtype of its operands: on a CPU float32, which is the fastest there."""
        return torch.float32 if device.type == "cpu" else self.dtype


def _turned(a: Tensor, b: Tensor, turn: str) -> tuple[Tensor, Tensor]:
    return a.t() if turn == "a" else a, b.t() if turn == "b" else b


# An operator of its own: the scale goes into the GEMM's alpha, which costs no pass over the output,
# and compiled code could not read it. It turns operands itself: inductor 2.13 would copy them.
@torch.library.custom_op("fp8stack::cpu_gemm", mutates_args=())
def _cpu_gemm(a: Tensor, b: Tensor, turn: str, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    a, b = _turned(a, b, turn)
    alpha = 1.0 if scale is None else float(scale)
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=alpha)
    y = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(y, a, b, beta=0, alpha=alpha, out=y)


@_cpu_gemm.register_fake
def _(a: Tensor, b: Tensor, turn: str, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    a, b = _turned(a, b, turn)
    return a.new_empty(a.shape[0], b.shape[1])


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
        x_operand, x_saved = layer.operands(x, "input", record, both)
        w_operand, w_saved = layer.operands(weight, "weight", record, both)
        y = layer.gemm(x_operand, w_operand, x.dtype, turn="b", bias=bias)
        if differentiated:
            if x_saved is None or w_saved is None:
                ctx.save_for_backward(
                    *scaling.pack(x, "input", x_operand), *scaling.pack(weight, "weight", w_operand)
                )
            else:
                ctx.save_for_backward(*x_saved, *w_saved)
            ctx.layer, ctx.record = layer, record
            ctx.weight_dtype, ctx.has_bias = weight.dtype, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: EmulatedLinear = ctx.layer
        record = ctx.record
        x_values, x_scales, w_values, w_scales = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = db = None
        with no_autocast(dy.device.type):
            dy_operand, dy_over_rows = layer.operands(dy, "grad_output", record, needs_dw)
            if needs_dx:
                dx = layer.gemm(dy_operand, layer.saved(w_values, w_scales, "weight"), dy.dtype)
            if dy_over_rows is not None:
                x_operand = layer.saved(x_values, x_scales, "input")
                dw = layer.gemm(dy_over_rows, x_operand, ctx.weight_dtype, turn="a")
            if ctx.has_bias:
                db = dy.sum(0, dtype=ctx.weight_dtype)
        if record and layer.delayed is not None:
            layer.delayed.backward_ran()
        return dx, dw, db, None, None, None


class EmulatedLinear(LowPrecisionLinear):
    """A linear on the exact values of its FP8 operands."""

    def __init__(
        self, size: Size, backend: EmulateBackend, gemm: Gemm, scaling: Scaling, save_fp8: bool
    ) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.gemm = gemm
        self.scaling = scaling
        self.save_fp8 = save_fp8

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`."""
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, self.matrix, self.bias, self, torch.is_grad_enabled(), self.records()
        )
        return y

    def operands(
        self, x: Tensor, name: Name, record: bool, both: bool
    ) -> tuple[Operand, Operand | None]:
        """See `Scaling.operands`; the values have the dtype of the GEMM."""
        dtype = self.gemm.dtype_on(x.device)
        one, other = self.scaling.operands(x, name, record, both)
        first = one._replace(values=one.values.to(dtype))
        if other is None or other is one:
            return first, other and first
        return first, other._replace(values=other.values.to(dtype))

    def saved(self, values: Tensor, scales: Tensor | None, name: Name) -> Operand:
        """An operand that was saved for the backward pass."""
        if not self.save_fp8:
            return Operand(values, scales)
        assert scales is not None
        operand = self.scaling.unpack(values, scales, name)
        return operand._replace(values=operand.values.to(self.gemm.dtype_on(values.device)))


class EmulateBackend(Backend):
    """Layers that multiply FP8 values without FP8 hardware."""

    def __init__(self, plan: Plan, *, save_fp8: bool = False) -> None:
        super().__init__(plan)
        self._save_fp8 = save_fp8
        recipe = plan.recipe
        # Scales that are no powers of two make values that bfloat16 cannot hold.
        exact = not (isinstance(recipe, BlockRecipe) and not recipe.power_of_two)
        self._gemm = Gemm(self.compute_dtype if exact else torch.float32, self)

    def fp8_linear(self, name: str, size: Size, slots: Slots | None) -> LowPrecisionLinear:
        """See `Backend.fp8_linear`."""
        scaling = build_scaling(self.plan.recipe, slots)
        return EmulatedLinear(size, self, self._gemm, scaling, self._save_fp8)
