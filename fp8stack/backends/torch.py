"""FP8 linears on torch's own scaled GEMMs: no Transformer Engine needed, and they compile.

The bytes, scales and amaxes are those of the emulator, to the bit. x and w are quantized in the
forward pass, once for both their GEMMs, and saved as FP8 for the backward pass; the copies that
reduce over rows are stored transposed, as Hopper wants them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8stack import numerics
from fp8stack.backends.base import Backend
from fp8stack.backends.fsdp import FullWeight, ShardedWeight
from fp8stack.backends.linear import LowPrecisionLinear, Size, no_autocast
from fp8stack.backends.operands import Draws, LayerOperands
from fp8stack.backends.weights import Version, own_weight, version_of
from fp8stack.formats import Operand, Quantizer
from fp8stack.ops.kernels import cast_transpose
from fp8stack.ops.scaled_gemm import MULTIPLES, Scaled, Scales, pack_scales, scaled_gemm
from fp8stack.precision.plan import LayerPlan, Plan


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
        # A gathered weight is gathered again for the backward pass: keeping it would undo that.
        ctx.gathers = needs_dx and isinstance(weight, FullWeight)
        w_along, w_across = layer.quantized_weight(weight, record, needs_dx and not ctx.gathers)
        layer.backend.count_gemms(1)
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
            if ctx.gathers:
                _, w_across = layer.quantized_weight(layer.weight, False, True)
            elif w_data is not None:
                w_across = Scaled(w_data, w_scale, layer.kind("weight"))
            else:
                w_across = None
            if w_across is not None:
                dx = scaled_gemm(along, w_across, dy.dtype)
            if across is not None:
                x_across = Scaled(x_data, x_scale, layer.kind("input"))
                dw = scaled_gemm(across, x_across, torch.float32).to(ctx.weight_dtype)
            if ctx.has_bias:
                db = dy.sum(0, dtype=torch.float32).to(ctx.weight_dtype)
        layer.backend.count_gemms((dx is not None) + (dw is not None))
        if ctx.record and layer.delayed is not None:
            layer.delayed.backward_ran()
        return dx, dw, db, None, None, None


class ScaledLinear(LowPrecisionLinear):
    """A linear on `scaled_mm`."""

    def __init__(self, size: Size, backend: TorchBackend, operands: LayerOperands) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.backend = backend
        self.operands = operands
        self._kept: tuple[tuple[Scaled, Scaled], Version] | None = None
        self.shared_scale = torch.ones(())  # current scaling of a weight that ranks share out

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}  # a copy quantizes for itself

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`; pads rows to what the weight gradient's GEMM takes."""
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

    def keep_weight(self, record: bool) -> None:
        """Quantize the weight, to be used until it changes."""
        along, across = self.quantize(self.matrix, "weight", record, True)
        assert across is not None
        self._kept = (along, across), version_of(own_weight(self))

    def forget_weight(self) -> None:
        """Quantize the weight at each call from now on."""
        self._kept = None

    def quantized_weight(
        self, weight: Tensor, record: bool, across: bool
    ) -> tuple[Scaled, Scaled | None]:
        """See `quantize`, for the weight."""
        if isinstance(weight, FullWeight):
            inverse = numerics.inverse(weight.scale)
            along = Scaled(weight.data8, inverse, Scales.PER_TENSOR)
            return along, along._replace(data=along.data.t().contiguous()) if across else None
        kept, version = self._kept or (None, None)
        # A part that is called by itself may have changed since the model's last pass.
        if (
            kept is not None
            and self.backend.weights.copied
            and (torch.compiler.is_compiling() or version == version_of(own_weight(self)))
        ):
            return kept[0], kept[1] if across else None
        return self.quantize(weight, "weight", record, across)

    def cast_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `fsdp.Caster`: delayed scaling knows the scale; current scaling was told."""
        slot = self.operands.slots.get(("weight", False))
        scale = self.shared_scale if slot is None else slot.scale()
        record = self.delayed is not None and self.delayed.is_recording
        format = self.quantizer("weight").format
        data, _, largest = cast_transpose(rows, scale, format, across=False, record=record)
        if slot is not None and largest is not None:
            slot.record(largest)  # of these rows: the history takes the maximum over ranks
        return data, scale

    def quantizer(self, name: Operand) -> Quantizer:
        """That of an operand: one for both its copies, or the plan had not chosen this backend."""
        found = self.operands.quantizers.along(name)
        assert found is not None
        return found

    def kind(self, name: Operand) -> Scales:
        """How the scales of an operand are laid out."""
        quantizer = self.quantizer(name)
        if quantizer.blocks is None:
            return Scales.PER_TENSOR
        if quantizer.scale == "e8m0":
            return Scales.MX
        return Scales.SQUARES if quantizer.blocks[0] > 1 else Scales.ROWS

    def quantize(
        self, x: Tensor, name: Operand, record: bool, across: bool
    ) -> tuple[Scaled, Scaled | None]:
        """`x` [rows, columns] for a GEMM that reduces over its columns and, if `across`, for one
        that reduces over its rows: that one is [columns, rows]."""
        kind = self.kind(name)
        if kind is Scales.PER_TENSOR:
            data, transposed, scale = self._cast(x, name, record, across)
            along = Scaled(data, numerics.inverse(scale), kind)
            return along, None if transposed is None else along._replace(data=transposed)
        quantizer = self.quantizer(name)
        data, inv_scale = numerics.quantize(x.contiguous(), quantizer)[:2]
        along = Scaled(data, pack_scales(inv_scale, kind), kind)
        if not across:
            return along, None
        if kind is Scales.SQUARES:
            data, inv_scale = data.t().contiguous(), inv_scale.t()
        else:  # one copy is not the transpose of the other
            data, inv_scale = numerics.quantize(x.t().contiguous(), quantizer)[:2]
        return along, Scaled(data, pack_scales(inv_scale, kind), kind)

    def _cast(
        self, x: Tensor, name: Operand, record: bool, across: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The FP8 bytes of `x` by one scale, those of its transpose if `across`, and the scale."""
        format = self.quantizer(name).format
        if torch.compiler.is_compiling():  # the compiler fuses the cast with what made x
            scale, _ = self.operands.scale(x, name, record)
            assert scale is not None
            data = numerics.cast_to_fp8(x, scale, format).contiguous()
            return data, data.t().contiguous() if across else None, scale
        slot = self.operands.slots.get((name, False))
        if slot is None:  # current scaling: the amax comes first
            scale, _ = self.operands.scale(x, name, False)
            assert scale is not None
            return *cast_transpose(x, scale, format, across=across, record=False)[:2], scale
        scale = slot.scale()
        data, transposed, largest = cast_transpose(x, scale, format, across=across, record=record)
        if largest is not None:
            slot.record(largest)
        return data, transposed, scale


class TorchBackend(Backend):
    """FP8 on the hardware, with torch alone."""

    keeps_weights = True

    def __init__(self, plan: Plan, *, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._layers: list[ScaledLinear] = []
        self._shared: list[ScaledLinear] = []

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> ScaledLinear:
        """See `Backend.fp8_linear`."""
        return ScaledLinear(size, self, operands)

    def follow(self, model: nn.Module) -> None:
        """See `Backend.follow`; weights are quantized once for all micro-batches of a step."""
        parts = model.modules()
        self._layers = [p for p in parts if isinstance(p, ScaledLinear) and p.backend is self]
        model.register_forward_pre_hook(self._keep_weights)

    def share_out(self, part: nn.Module | None) -> None:
        """See `Backend.share_out`; a weight with one scale whose rows can be shared equally is
        gathered as FP8 bytes."""
        super().share_out(part)
        within = set() if part is None else set(part.modules())
        for layer in self._layers:
            quantizer = layer.quantizer("weight")
            equal = layer.weight.shape[0] % dist.get_world_size() == 0
            if layer in within and equal and quantizer.per_tensor:
                rows = ShardedWeight(layer.weight.data, layer, quantizer.format)
                layer.weight = nn.Parameter(rows)
                self._shared.append(layer)

    def before_gathering(self) -> None:
        """See `Backend.before_gathering`: the scales of current scaling, in one collective."""
        shared = [layer for layer in self._shared if not layer.quantizer("weight").delayed]
        if not shared:
            return
        # DTensors, whose local tensors are `ShardedWeight`s.
        rows = [layer.weight.to_local().plain() for layer in shared]  # type: ignore[attr-defined]
        with torch.no_grad():
            largest = torch.stack([numerics.amax(part) for part in rows])
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        for layer, amax in zip(shared, largest.unbind(), strict=True):
            layer.shared_scale = numerics.current_scale(amax, layer.quantizer("weight"))

    def _keep_weights(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self.weights.copied:
            return
        # Else they could not be saved for a backward pass (and this switches gradients on).
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers:
                weight = own_weight(layer)
                if layer.in_fp8 and weight is not None and not isinstance(weight, DTensor):
                    layer.keep_weight(self.weights.first)
                else:  # it is not whole here
                    layer.forget_weight()
        self.weights.copied = True
