"""FP8 linears on torch's own scaled GEMMs: no Transformer Engine needed, and they compile.

The bytes, scales and amaxes are those of the emulator, to the bit. x and w are quantized in the
forward pass, once for both their GEMMs, and saved as FP8 for the backward pass; the copies that
reduce over rows are stored transposed, as Hopper wants them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8stack import numerics
from fp8stack.backends.contract import Backend, GemmCounter
from fp8stack.backends.delayed import DelayedScaling
from fp8stack.backends.linear import MasterLinear, no_autocast
from fp8stack.backends.scaled_gemm import MULTIPLES, Scaled, Scales, pack_scales, scaled_gemm
from fp8stack.backends.scaling import Name
from fp8stack.precision.plan import Plan
from fp8stack.precision.recipe import (
    BlockRecipe,
    CurrentRecipe,
    DelayedRecipe,
    Fp8Recipe,
    Mxfp8Recipe,
    PlainRecipe,
)


class _Multiply(torch.autograd.Function):
    """y = x w^T + b with FP8 operands; x and w are quantized once and reused in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: ScaledLinear,
        needs: tuple[bool, bool],
        record: bool,
    ) -> Tensor:
        needs_dx, needs_dw = needs
        x_along, x_across = layer.quantize(x, "input", record, needs_dw)
        w_along, w_across = layer.quantize(weight, "weight", record, needs_dx)
        layer.ran(1)
        y = scaled_gemm(x_along, w_along, x.dtype, bias=bias, fast_accumulation=True)
        x_saved = (None, None) if x_across is None else (x_across.data, x_across.inv_scale)
        w_saved = (None, None) if w_across is None else (w_across.data, w_across.inv_scale)
        ctx.save_for_backward(*x_saved, *w_saved)
        ctx.layer, ctx.record = layer, record
        ctx.weight_dtype, ctx.has_bias = weight.dtype, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: ScaledLinear = ctx.layer
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        dx = dw = db = None
        with no_autocast(dy.device.type):
            along, across = layer.quantize(dy, "grad_output", ctx.record, x_data is not None)
            if w_data is not None:
                w_across = Scaled(w_data, w_scale, layer.kind("weight"))
                dx = scaled_gemm(along, w_across, dy.dtype)
            if across is not None:
                x_across = Scaled(x_data, x_scale, layer.kind("input"))
                dw = scaled_gemm(across, x_across, torch.float32).to(ctx.weight_dtype)
            if ctx.has_bias:
                db = dy.sum(0, dtype=torch.float32).to(ctx.weight_dtype)
        layer.ran((dx is not None) + (dw is not None), ctx.record)
        return dx, dw, db, None, None, None


class ScaledLinear(MasterLinear):
    """A linear on `scaled_mm`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        path: str,
        recipe: Fp8Recipe,
        compute_dtype: torch.dtype,
        delayed: DelayedScaling | None,
        counter: GemmCounter,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, compute_dtype=compute_dtype, delayed=delayed
        )
        self.path = path
        self.recipe = recipe
        self.counter = counter

    def multiply(self, x: Tensor) -> Tensor:
        """See `MasterLinear.multiply`; rows are padded to what the weight gradient's GEMM takes."""
        weight = self.matrix
        grad = torch.is_grad_enabled()
        needs = (grad and x.requires_grad, grad and weight.requires_grad)
        rows = len(x)
        missing = -rows % MULTIPLES[self.kind("input")]
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, weight, self.bias, self, needs, self.records()
        )
        return y[:rows] if missing else y

    def ran(self, gemms: int, backward: bool = False) -> None:
        """Note that GEMMs ran and, at the end of a backward pass that records, that it did.

        Compiled code does neither: it is not counted, and scales are updated before the next pass.
        """
        if torch.compiler.is_compiling():
            return
        self.counter.count += gemms
        if backward and self.delayed is not None:
            self.delayed.backward_ran()

    def kind(self, name: Name) -> Scales:
        """How the scales of an operand are laid out."""
        if isinstance(self.recipe, Mxfp8Recipe):
            return Scales.MX
        if isinstance(self.recipe, BlockRecipe):
            return Scales.SQUARES if name == "weight" else Scales.ROWS
        return Scales.PER_TENSOR

    def quantize(
        self, x: Tensor, name: Name, record: bool, across: bool
    ) -> tuple[Scaled, Scaled | None]:
        """`x` [rows, columns] for a GEMM that reduces over its columns and, if `across`, for one
        that reduces over its rows: that one is [columns, rows]."""
        recipe, kind = self.recipe, self.kind(name)
        if kind is Scales.PER_TENSOR:
            assert isinstance(recipe, DelayedRecipe | CurrentRecipe)
            format = recipe.backward_format if name == "grad_output" else recipe.forward_format
            scale = self._scale(x, name, format, record)
            data, inv_scale = numerics.cast_to_fp8(x, scale, format), numerics.inverse(scale)
            along = Scaled(data.contiguous(), inv_scale, kind)
            return along, along._replace(data=data.t().contiguous()) if across else None
        x = x.contiguous()
        if kind is Scales.SQUARES:
            data, inv_scale = self._quantize_blocks(x, (128, 128))
            along = Scaled(data, pack_scales(inv_scale, kind), kind)
            if not across:
                return along, None
            return along, Scaled(data.t().contiguous(), pack_scales(inv_scale.t(), kind), kind)
        # One copy is not the transpose of the other.
        copies = []
        for part in (x, x.t().contiguous()) if across else (x,):
            if isinstance(recipe, Mxfp8Recipe):
                data, inv_scale = numerics.quantize_mxfp8(part, -1, "e4m3", recipe.scale_rounding)
            else:
                data, inv_scale = self._quantize_blocks(part, (1, 128))
            copies.append(Scaled(data, pack_scales(inv_scale, kind), kind))
        return copies[0], copies[1] if across else None

    def _scale(self, x: Tensor, name: Name, format: str, record: bool) -> Tensor:
        """The scale of the whole tensor `x`; delayed scaling records its amax if `record`."""
        if isinstance(self.recipe, CurrentRecipe):
            return numerics.tensor_scale(
                numerics.amax(x),
                format,
                power_of_two=self.recipe.power_of_two,
                eps=self.recipe.eps,
            )
        assert self.delayed is not None
        slot = f"{self.path}.{name}"
        scale = self.delayed.scale(slot)
        if record:
            self.delayed.record(slot, numerics.amax(x))
        return scale

    def _quantize_blocks(self, x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        assert isinstance(self.recipe, BlockRecipe)
        return numerics.quantize_blocks(x, block, "e4m3", self.recipe.power_of_two)


class TorchBackend(Backend):
    """FP8 on the hardware, with torch alone."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._counter = GemmCounter()

    def fp8_linear(
        self, name: str, in_features: int, out_features: int, bias: bool
    ) -> MasterLinear:
        """See `Backend.fp8_linear`."""
        assert not isinstance(self.plan.recipe, PlainRecipe)
        return ScaledLinear(
            in_features,
            out_features,
            bias,
            path=name,
            recipe=self.plan.recipe,
            compute_dtype=self.compute_dtype,
            delayed=self.delayed,
            counter=self._counter,
        )

    def fp8_gemms(self) -> int:
        """See `Backend.fp8_gemms`; compiled code does not count."""
        return self._counter.take()
