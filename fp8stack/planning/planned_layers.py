"""The layers of a plan without their arithmetic, to trace the model on tensors without memory.

They cast what the layers of the plan's backend cast outside of their GEMMs, save as many bytes for
the backward pass, and return outputs of the same shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.common.formats import Quantizer
from fp8stack.layers import Backend
from fp8stack.layers.backend import DTYPES
from fp8stack.layers.emulate import in_bf16
from fp8stack.layers.kernels.activations import TRANSFORMER_ENGINES
from fp8stack.precision import LayerPlan, Plan
from fp8stack.precision.native_gemms import feature_multiple


def operand_bytes(plan: Plan, layer: LayerPlan, gemm: str, rows: int, columns: int) -> int:
    """The bytes of the second operand of one of a quantized layer's GEMMs, which is a copy [rows,
    columns] of the weight (fprop, dgrad) or of the input (wgrad), with its scales. The GEMM reduces
    over the columns."""
    assert layer.quantizers is not None
    quantizer, backend = layer.quantizers.values(gemm)[1], plan.backend_of(layer)
    # Torch saves groups without blocks in FP8 even if its GEMM multiplies in high precision.
    is_held = gemm in layer.plain_gemms and not (
        layer.groups and gemm != "fprop" and quantizer is not None and quantizer.blocks is None
    )
    if quantizer is None or backend == "emulate" or is_held:
        return rows * columns * held_dtype(plan, layer).itemsize
    return rows * columns * quantizer.element_bits // 8 + _scale_bytes(quantizer, rows, columns)


def _scale_bytes(quantizer: Quantizer, rows: int, columns: int) -> int:
    """The bytes of a copy's scales; GEMMs read scales of a byte for each row, also of squares."""
    if quantizer.blocks is None:
        return 0 if quantizer.per_tensor else 4 * rows
    height, width = quantizer.blocks
    block = width if quantizer.scale_bytes == 1 else height * width
    return quantizer.scale_bytes * rows * columns // block


def held_dtype(plan: Plan, layer: LayerPlan) -> torch.dtype:
    """The dtype of the operands of a quantized layer's emulated GEMMs."""
    return torch.bfloat16 if in_bf16(plan, layer) else torch.float32


def weight_bytes(plan: Plan, layer: LayerPlan) -> tuple[int, int]:
    """The bytes of the copies of a layer's weight: copies that are kept until the weight changes,
    and copies that each micro-batch makes and saves for its backward pass."""
    matrices, shape = layer.groups or 1, (layer.out_features, layer.in_features)
    elements = matrices * shape[0] * shape[1]
    if layer.quantizers is None:
        dtype = DTYPES[plan.compute_dtype]
        in_float32 = layer.precision in ("fp32", "tf32") or dtype == torch.float32
        size = 0 if in_float32 else elements * dtype.itemsize
        return (size, 0) if plan.backend in ("reference", "torch") else (0, size)
    sizes = {
        "fprop": operand_bytes(plan, layer, "fprop", *shape),
        "dgrad": operand_bytes(plan, layer, "dgrad", *shape[::-1]),
    }
    for gemm in sizes:
        is_parameter = layer.quantizers.values(gemm)[1] is None
        if is_parameter and held_dtype(plan, layer) == torch.float32:
            sizes[gemm] = 0  # the parameter itself
    if plan.backend_of(layer) == "emulate":
        return 0, matrices * sizes["dgrad"]
    return matrices * sum(sizes.values()), 0


class _Saves(torch.autograd.Function):
    """Runs a function and saves a tensor for a backward pass that never comes."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], saved: Tensor, *inputs: Tensor) -> Tensor:
        """`run(*inputs)`."""
        ctx.save_for_backward(saved)
        return run(*inputs)


class PlannedLinear(nn.Module):
    """A linear or grouped linear of a plan, with the parameters of the real one."""

    def __init__(self, plan: Plan, layer: LayerPlan, bias: bool) -> None:
        super().__init__()
        self.plan, self.layer = plan, layer
        self.compute_dtype = DTYPES[plan.compute_dtype]
        self.by_te = layer.fp8 and plan.backend_of(layer) == "te"
        groups = (layer.groups,) if layer.groups else ()
        shape = (*groups, layer.out_features, layer.in_features)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1])) if bias else None

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        """[..., in] in any floating dtype -> [..., out] in the compute dtype."""
        x = input if self.by_te else input.to(self.compute_dtype)
        if not self.layer.fp8:  # casts that autograd reverses
            for parameter in reversed(list(self.parameters())):
                parameter.to(self.compute_dtype)
        y: Tensor = _Saves.apply(self._multiply, self._saved(x), x)  # type: ignore[no-untyped-call]
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        if self.layer.fp8 and self.bias is not None and self.plan.backend_of(self.layer) == "torch":
            self.bias.to(self.compute_dtype)
        layer, dtype = self.layer, self.compute_dtype
        is_emulated = layer.fp8 and self.plan.backend_of(layer) == "emulate"
        if is_emulated and not layer.groups and self.plan.device != "cpu":
            dtype = torch.float32  # of the product before it is scaled
        rows = x.to(dtype).flatten(0, -2)
        y = rows @ rows.new_empty(layer.in_features, layer.out_features)
        return y.to(self.compute_dtype).view(*x.shape[:-1], layer.out_features)

    def _saved(self, x: Tensor) -> Tensor:
        """A tensor of as many bytes as the input that is saved for the weight's gradient."""
        layer = self.layer
        if layer.quantizers is None:
            return x
        if layer.quantizers.values("wgrad")[1] is None and x.dtype == held_dtype(self.plan, layer):
            return x
        shape = x[..., 0].numel(), layer.in_features
        size = operand_bytes(self.plan, layer, "wgrad", *shape[::-1])
        return x.new_empty(size, dtype=torch.uint8)


class PlannedBackend(Backend):
    """Builds the layers of a plan without their arithmetic."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.delayed = None
        self.vocabulary_multiple = plan.layer("lm_head").out_features  # as padded

    def linear(self, name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        """See `Backend.linear`."""
        layer = self.plan.layer(name)
        if layer.quantizers is None and self.compute_dtype == torch.float32:
            return nn.Linear(in_features, out_features, bias)
        return PlannedLinear(self.plan, layer, bias)

    def grouped_linear(
        self, name: str, groups: int, in_features: int, out_features: int, bias: bool
    ) -> Any:
        """See `Backend.grouped_linear`."""
        return PlannedLinear(self.plan, self.plan.layer(name), bias)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """See `Backend.norm_linear`."""
        y: Tensor = linear(self._norm(x, norm, linear))
        return y

    def norm_mlp(self, x: Tensor, norm: nn.Module, mlp: Any) -> Tensor:
        """See `Backend.norm_mlp`."""
        has_activation = mlp.activation in TRANSFORMER_ENGINES
        linears = (mlp.up, mlp.down) if has_activation else ()
        y: Tensor = mlp(self._norm(x, norm, *linears))
        return y

    def _norm(self, x: Tensor, norm: nn.Module, *linears: nn.Module) -> Tensor:
        """Run a norm, which Transformer Engine fuses with linears after it, if there are any, and
        then saves its input in the compute dtype. It cannot where rows are padded, which would not
        stay zero."""
        has_module = isinstance(norm, nn.RMSNorm) or norm.bias is not None
        by_te = bool(linears) and all(getattr(linear, "by_te", False) for linear in linears)
        y: Tensor
        if by_te and has_module:
            assert self.plan.recipe.quantizers is not None
            multiple = feature_multiple(self.plan.recipe.quantizers, "te")
            if x[..., 0].numel() % multiple == 0:
                vars(norm)["is_fused"] = True
                saved = x.new_empty(x.shape, dtype=self.compute_dtype)
                y = _Saves.apply(norm, saved, x)  # type: ignore[no-untyped-call]
                return y
        y = norm(x)
        return y

    def attach(self, model: nn.Module) -> None:
        """No hooks: there is no FP8 state."""

    def set_matmul_precision(self, *_: object) -> None:
        """Leave torch's setting alone: nothing is multiplied."""
