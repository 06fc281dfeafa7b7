"""FP8 linears on any device: the operands' exact FP8 values, multiplied in float32 or bfloat16.

Every FP8 value is exact in the GEMM's dtype, so products are exact and sums are float32, as on
the hardware. A GEMM in float32, on a CPU, may be multiplied by bf16 instructions.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8stack.backends.base import Backend
from fp8stack.backends.linear import LowPrecisionLinear, Size, no_autocast
from fp8stack.backends.operands import Draws, LayerOperands, Saved
from fp8stack.formats import Operand
from fp8stack.numerics import Rounded
from fp8stack.numerics.operators import operator, seen
from fp8stack.ops.matmul_precision import bf16_matmul, exact_matmul
from fp8stack.precision.plan import LayerPlan, Plan


def _factors(
    a: Tensor | None, b: Tensor | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """What a GEMM's output is multiplied by for its operands: in all, by row, by column."""
    whole = [factor for factor in (a, b) if factor is not None and factor.ndim == 0]
    rows = a[:, None] if a is not None and a.ndim else None
    return whole, rows, b if b is not None and b.ndim else None


def _finished(
    y: Tensor, whole: list[Tensor], rows: Tensor | None, columns: Tensor | None, bias: Tensor | None
) -> Tensor:
    """`y` times the factors, plus the bias. `y` itself stays: it is what a GEMM gave, which
    selective activation checkpointing keeps."""
    kept = y
    scale = [whole[0] * whole[1]] if len(whole) == 2 else whole
    for factor in (*scale, rows, columns):
        if factor is not None:
            y = y * factor if y is kept else y.mul_(factor)
    if bias is None:
        return y
    return y + bias if y is kept else y.add_(bias)


_FLOAT32 = torch.finfo(torch.float32)


def _turned(a: Tensor, b: Tensor, turn: str) -> tuple[Tensor, Tensor]:
    return a.t() if turn == "a" else a, b.t() if turn == "b" else b


# An operator of its own: scales go into the GEMM's alpha, which costs no pass over the output, and
# compiled code could not read them, nor choose how it multiplies. It turns operands itself:
# inductor 2.13 would copy them.
def _gemm(
    a: Tensor, b: Tensor, turn: str, scales: list[Tensor], bias: Tensor | None, in_bf16: bool
) -> Tensor:
    with bf16_matmul() if in_bf16 else exact_matmul():
        return _product(*_turned(a, b, turn), scales, bias)


def _product(a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None) -> Tensor:
    if not scales:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    factors = [scale.item() for scale in scales]
    # In float64, which holds a product of two float32, and rounded once by the GEMM.
    alpha = math.prod(factors)
    if not _FLOAT32.tiny <= alpha <= _FLOAT32.max:
        # These are multiplied by afterwards. BLAS reads no operand where alpha is 0, or is taken
        # for it as a subnormal may be: a NaN would be lost. MKL's GEMM for AVX2 takes a NaN for 1,
        # and makes NaN of infinity, which stands for products that float32 cannot hold.
        if not alpha <= _FLOAT32.max:
            factors = [math.nan if math.isnan(alpha) else math.inf]
        y = torch.mm(a, b)
        for factor in sorted(factors, reverse=True):  # the smallest last: it may leave 0
            y.mul_(factor)
        return y if bias is None else y.add_(bias)
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=alpha)
    y = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    return torch.addmm(y, a, b, beta=0, alpha=alpha, out=y)


def _fake_gemm(a: Tensor, b: Tensor, turn: str, *others: Any) -> Tensor:
    a, b = _turned(a, b, turn)
    return a.new_empty(a.shape[0], b.shape[1])


_cpu_gemm = operator(
    "cpu_gemm(Tensor a, Tensor b, str turn, Tensor[] scales, Tensor? bias, bool in_bf16) -> Tensor",
    _gemm,
    _fake_gemm,
)


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
        operands = layer.operands
        both = differentiated and not layer.save_fp8
        x_along, x_across = layer.round(x, "input", record, both)
        w_along, w_across = layer.round(weight, "weight", record, both)
        y = layer.gemm(x_along, w_along, x.dtype, turn="b", bias=bias)
        if differentiated:
            if x_across is None or w_across is None:
                x_saved = operands.pack(x, "input", x_along)
                w_saved = operands.pack(weight, "weight", w_along)
            else:
                x_saved, w_saved = Saved(*x_across), Saved(*w_across)
            ctx.save_for_backward(*x_saved, *w_saved)
            ctx.shapes = x.shape, weight.shape
            ctx.layer, ctx.record = layer, record
            ctx.weight_dtype, ctx.has_bias = weight.dtype, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: EmulatedLinear = ctx.layer
        record = ctx.record
        kept = ctx.saved_tensors
        x_saved, w_saved = Saved(*kept[:4]), Saved(*kept[4:])
        x_shape, w_shape = ctx.shapes
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = db = None
        with no_autocast(dy.device.type):
            dy_along, dy_across = layer.round(dy, "grad_output", record, needs_dw)
            if needs_dx:
                w_across = layer.saved(w_saved, "weight", w_shape)
                dx = layer.gemm(dy_along, w_across, dy.dtype)
            if dy_across is not None:
                x_across = layer.saved(x_saved, "input", x_shape)
                dw = layer.gemm(dy_across, x_across, ctx.weight_dtype, turn="a")
            if ctx.has_bias:
                db = dy.sum(0, dtype=ctx.weight_dtype)
        layer.operands.backward_ran()
        if record and layer.delayed is not None:
            layer.delayed.backward_ran()
        return dx, dw, db, None, None, None


_GEMMS = {"b": "fprop", "neither": "dgrad", "a": "wgrad"}  # by the operand that is turned


class EmulatedLinear(LowPrecisionLinear):
    """A linear on the exact values of its quantized operands."""

    def __init__(
        self, size: Size, backend: EmulateBackend, operands: LayerOperands, save_fp8: bool
    ) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.backend = backend
        self.operands = operands
        self.save_fp8 = save_fp8
        quantizers = operands.quantizers
        self._bf16 = quantizers.exact_in_bf16 and backend.compute_dtype == torch.bfloat16
        self._in_bf16 = {turn: quantizers.bf16_holds(name) for turn, name in _GEMMS.items()}

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`."""
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, self.matrix, self.bias, self, torch.is_grad_enabled(), self.records()
        )
        return y

    def gemm(
        self,
        a: Rounded,
        b: Rounded,
        out_dtype: torch.dtype,
        *,
        turn: Literal["neither", "a", "b"] = "neither",
        bias: Tensor | None = None,
    ) -> Tensor:
        """`a` [M, K] times `b` [K, N], scaled in float32, plus `bias` [N]: [M, N]; the operand to
        `turn` is given as its transpose."""
        self.backend.count_gemms(1)
        left, right = a.values, b.values
        whole, rows, columns = _factors(a.factor, b.factor)
        if left.is_cpu:
            bias = None if bias is None else bias.float()
            multiply = _cpu_gemm if seen(left) else _gemm
            in_bf16 = self._in_bf16[turn]
            if rows is None and columns is None:
                return multiply(left, right, turn, whole, bias, in_bf16).to(out_dtype)
            y = multiply(left, right, turn, whole, None, in_bf16)
            return _finished(y, [], rows, columns, bias).to(out_dtype)
        left, right = _turned(left, right, turn)
        with exact_matmul():  # TF32 would round the operands
            y = torch.mm(left, right, out_dtype=torch.float32) if self._bf16 else left @ right
        return _finished(y, whole, rows, columns, bias).to(out_dtype)

    def round(
        self, x: Tensor, name: Operand, record: bool, both: bool
    ) -> tuple[Rounded, Rounded | None]:
        """See `LayerOperands.round`; the values have the dtype of the GEMM: on a CPU float32, which
        is the fastest there."""
        return self.operands.round(x, name, record, both, self._bf16 and not x.is_cpu)

    def saved(self, saved: Saved, name: Operand, shape: torch.Size) -> Rounded:
        """An operand of this shape that was saved for the backward pass."""
        if not self.save_fp8:
            return Rounded(*saved[:2])
        values, factor = self.operands.unpack(saved, name, shape)
        bf16 = self._bf16 and not values.is_cpu
        return Rounded(values.to(torch.bfloat16 if bf16 else torch.float32), factor)


class EmulateBackend(Backend):
    """Layers that multiply quantized values without hardware for them."""

    def __init__(self, plan: Plan, *, save_fp8: bool = False, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._save_fp8 = save_fp8

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> EmulatedLinear:
        """See `Backend.fp8_linear`."""
        return EmulatedLinear(size, self, operands, self._save_fp8)
