"""The GPT that the roofline traces: on tensors without memory, with the layers of its plan.

Transformer Engine casts and multiplies as torch's scaled GEMMs do, NVFP4 in half the bytes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.common.quantizer_table import OPERANDS, Quantizers
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.delayed import Slot
from fp8stack.layers.grouped import GroupedSize
from fp8stack.layers.kernels.scaled_gemm import Scaled
from fp8stack.layers.linear import QuantizedLinear, Size, _Multiply
from fp8stack.layers.operands import LayerOperands
from fp8stack.layers.torch import TorchBackend, TorchOperand
from fp8stack.precision import Plan
from fp8stack.precision.native_gemms import kernel_of
from fp8stack.precision.plan import LayerPlan


def backend_of(plan: Plan) -> Backend:
    """The plan's backend, with `torch` in place of Transformer Engine."""

    def by_torch(name: Any) -> Any:
        return "torch" if name == "te" else name

    layers = tuple(
        replace(la, backend=by_torch(la.backend), quantizers=_held_by_torch(la.quantizers))
        if plan.backend_of(la) == "te"
        else la
        for la in plan.layers
    )
    by_plan = replace(plan, backend=by_torch(plan.backend), layers=layers)
    backend = build_backend(by_plan)
    vars(backend)["set_matmul_precision"] = lambda *_: None  # nothing is multiplied
    for delegate in (backend, *backend._delegates.values()):
        if plan.backend == "te" and isinstance(delegate, TorchBackend):
            changed: Any = delegate
            changed.matmul = _any_gemm
            changed.fp8_grouped_linear = partial(_grouped_linear, delegate, plan)
            changed.register_hooks = partial(_register_hooks, delegate)
    if plan.backend == "te":
        native: Any = backend
        native.norm_linear = lambda x, norm, linear: linear(norm(x))
        native.norm_mlp = lambda x, norm, mlp: mlp(norm(x))
    backend.vocabulary_multiple = plan.layer("lm_head").out_features  # as padded
    if backend.delayed is not None:
        backend.delayed.sharing.group = None  # no exchange with other ranks
    return backend


def _grouped_linear(
    backend: TorchBackend,
    plan: Plan,
    layer: LayerPlan,
    size: GroupedSize,
    operands: LayerOperands,
) -> nn.Module:
    """See `Backend.fp8_grouped_linear`; `plan` names the backend that computes the layer."""
    if plan.backend_of(plan.layer(layer.name)) == "te":
        return GroupedByTE(backend, layer, size, operands)
    return TorchBackend.fp8_grouped_linear(backend, layer, size, operands)


class GroupedByTE(QuantizedLinear):
    """Takes the place of a grouped linear that Transformer Engine computes. Its weight has the
    matrices of all groups, one below the other, and each operand is cast with the first group's
    scale: the bytes are the same but for a few scales."""

    def __init__(
        self, backend: TorchBackend, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> None:
        groups, inputs, outputs, bias = size
        slots: Any = {place: _FirstOf(slot) for place, slot in operands.slots.items()}
        draws = None if operands.draws is None else backend.draws.layer(f"{layer.name}.0")
        of_all = LayerOperands(operands.quantizers, slots, draws)
        quantizers = {name: TorchOperand(name, of_all) for name in OPERANDS}
        gemms = _GroupedGemms(backend, groups)
        super().__init__(Size(inputs, groups * outputs, bias), gemms, of_all, quantizers)
        quantizers["weight"].layer = self
        self._groups = groups

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        """See `GroupedLinear.forward`; groups of any rows are as much work."""
        x, grad = input.to(self.compute_dtype), torch.is_grad_enabled()
        bias = None if self.bias is None else self.bias.view(self._groups, -1)[0]
        record = self.delayed is not None and self.delayed.records(grad)
        needs = (grad, grad)
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, self.weight, bias, None, self, needs, record, len(x), False
        )
        return y


class _FirstOf:
    """The first slot of a vector of them."""

    def __init__(self, slots: Slot) -> None:
        self._slots = slots

    def scale(self) -> Tensor:
        return self._slots.scale()[0]

    def cast_arguments(self, record: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scales, recorded, counts = self._slots.cast_arguments(record)
        counted = None if counts is None else counts[0]
        return scales[0], None if recorded is None else recorded[0], counted


class _GroupedGemms:
    """A torch backend whose GEMMs multiply each group by its matrix."""

    def __init__(self, backend: TorchBackend, groups: int) -> None:
        self._backend = backend
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def matmul(
        self,
        a: Scaled,
        b: Scaled,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> Tensor:
        """See `GemmBackend.matmul`."""
        groups, first, second, turn = self._groups, a.data, b.data, "neither"
        if fast_accumulation:  # y
            second, turn = second.view(groups, -1, second.shape[1]), "b"
        elif out_dtype == torch.float32:  # dw
            first, second, turn = first.t(), second.t(), "a"
        else:  # dx
            second = second.view(len(second), groups, -1).permute(1, 2, 0)
        ends = torch.empty(groups, dtype=torch.int32)
        gemm = torch.ops.fp8stack.emulated_gemm
        scales = a.inv_scale, b.inv_scale
        y: Tensor = gemm(first, second, ends, turn, 1, *scales, False, bias, False, out_dtype)
        return y.flatten(0, -2)


def _register_hooks(backend: TorchBackend, model: nn.Module) -> None:
    """See `Backend.register_hooks`; weights of groups are cached too."""
    TorchBackend.register_hooks(backend, model)
    backend._layers += [x for x in model.modules() if isinstance(x, GroupedByTE)]


def _any_gemm(a: Scaled, b: Scaled, out_dtype: torch.dtype, **options: Any) -> Tensor:
    """A scaled GEMM of any sizes; Transformer Engine supports some that torch does not."""
    gemm = torch.ops.fp8stack.mx_gemm
    y: Tensor = gemm(a.data, b.data, a.inv_scale, b.inv_scale, out_dtype)
    return y


def _held_by_torch(quantizers: Quantizers | None) -> Quantizers | None:
    """Quantizers that torch's backend can hold, of as many bytes: Transformer Engine stores NVFP4's
    scales of squares once for each row."""
    if quantizers is None or kernel_of(quantizers) != "nvfp4":
        return quantizers
    return Quantizers(**dict.fromkeys((f.name for f in fields(Quantizers)), quantizers.input))
