"""An MLP as one operation on torch's scaled GEMMs: a kernel fuses the activation with the casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8stack.layers.kernels.fused_casts import FusedInput
from fp8stack.layers.kernels.scaled_gemm import BLOCK_KERNELS, ScaleLayout
from fp8stack.layers.kernels.variants import has_kernel
from fp8stack.layers.linear import (
    Call,
    Gradients,
    QuantizedLinear,
    multiply_backward,
    multiply_forward,
    no_autocast,
    require_supported_input,
)


def fuses_mlp(x: Tensor, mlp: Any) -> bool:
    """Whether `fused_mlp` can replace the layers of an MLP, with the same results."""
    if not has_kernel(x.device) or _has_hooks(mlp):
        return False
    layers = (mlp.up, mlp.down)
    if not all(_takes_fused_inputs(layer) for layer in layers):
        return False
    # Each layer pads its input separately: the activation of a padded row may not be zero.
    rows = x.numel() // x.shape[-1]
    return rows > 0 and rows % max(layer.row_multiple for layer in layers) == 0


def fused_mlp(backend: Any, x: Tensor, mlp: Any) -> Tensor:
    """`mlp(x)` as one operation, see `fuses_mlp`."""
    up, down = mlp.up, mlp.down
    compiling = torch.compiler.is_compiling()
    if compiling:
        backend.weights.note_compiled_call()
    for layer in (up, down):
        require_supported_input(x, layer._parameters.get("weight"))
        if not compiling:
            layer.was_called = True
    grad = torch.is_grad_enabled()
    up_needs = grad and x.requires_grad, grad and up.weight.requires_grad
    bias_trains = grad and up.bias is not None and up.bias.requires_grad
    down_needs = any(up_needs) or bias_trains, grad and down.weight.requires_grad
    records = [
        layer.delayed is not None and layer.delayed.records(layer.training and grad)
        for layer in (up, down)
    ]
    with no_autocast(x.device.type):
        rows = x.to(backend.compute_dtype).reshape(-1, up.in_features)
        parameters = (up.matrix, up.bias, down.matrix, down.bias)
        y: Tensor = _MultiplyTwice.apply(  # type: ignore[no-untyped-call]
            rows, *parameters, up, down, mlp.activation, (up_needs, down_needs), tuple(records)
        )
        return y.view(*x.shape[:-1], down.out_features)


class _MultiplyTwice(torch.autograd.Function):
    """Two linears with an activation in between. The output of the activation and the gradient of
    its input are written to memory in FP8 only, see `fused_casts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        up: QuantizedLinear,
        down: QuantizedLinear,
        activation: str,
        needs: tuple[tuple[bool, bool], tuple[bool, bool]],
        records: tuple[bool, bool],
    ) -> Tensor:
        # Neither gradient comes from the backward pass of a norm.
        up_call = Call(records[0], len(x), up_bias is not None, after_norm=True)
        down_call = Call(records[1], len(x), down_bias is not None, after_norm=True)
        hidden, up_saved, ctx.up = multiply_forward(up, x, up_weight, up_bias, needs[0], up_call)
        fused_input = FusedInput(activation, hidden)
        y, down_saved, ctx.down = multiply_forward(
            down, fused_input, down_weight, down_bias, needs[1], down_call
        )
        ctx.activation, ctx.split = activation, len(up_saved)
        ctx.save_for_backward(hidden, *up_saved, *down_saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *saved = ctx.saved_tensors
        up_gradients: Gradients = (None, None, None)
        with no_autocast(dy.device.type):
            down_gradients = multiply_backward(ctx.down, dy, tuple(saved[ctx.split :]))
            if down_gradients[0] is not None:
                fused_input = FusedInput(ctx.activation, hidden, down_gradients[0])
                up_gradients = multiply_backward(ctx.up, fused_input, tuple(saved[: ctx.split]))
        return *up_gradients, *down_gradients[1:], None, None, None, None, None


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module, in the forward or the backward pass."""
    has_forward_hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(has_forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def _takes_fused_inputs(layer: nn.Module) -> bool:
    """Whether the layer's input and output gradient can be `FusedInput`s, which never exist in high
    precision: no hook reads them, and a kernel casts them."""
    if type(layer) is not QuantizedLinear or not layer.in_fp8 or layer.keeps_dtype:
        return False
    if _has_hooks(layer):
        return False
    casts = [
        getattr(layer.quantizers[name], "joint_cast", None)  # the emulator has none
        for name in ("input", "grad_output")
    ]
    layouts = {ScaleLayout.PER_TENSOR, *BLOCK_KERNELS}
    return all(cast is not None and cast.kind in layouts for cast in casts)
