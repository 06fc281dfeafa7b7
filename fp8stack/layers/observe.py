"""Observe the operands of FP8 linears during a pass, without changing any result.

Hooks are registered within a context only, so there is no cost outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand
from fp8stack.layers.compiler import without_compiled_code
from fp8stack.layers.fsdp import FullWeight
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.linear import LowPrecisionLayer, LowPrecisionLinear, no_autocast
from fp8stack.numerics.groups import split_groups

Place = Operand | Literal["output", "grad_input"]


See = Callable[[str, nn.Module, Place, Tensor], None]
"""A callback for each operand. Arguments: the path of the linear, the linear, the operand's name,
and the operand, [rows, columns], detached, which must not be changed."""


@contextmanager
def observing(
    model: nn.Module,
    see: See,
    *,
    outputs: bool = False,
    layers: Mapping[str, nn.Module] | None = None,
) -> Iterator[None]:
    """Within the context, call `see` for each operand that linears of `model` cast, in order.

    A grouped linear shows each group by itself, as a linear at `<path>.<group>`, also a group
    without rows. Compiled code, which runs no hooks, runs eagerly within the context.

    A linear gives its input and weight in the forward pass and its grad_output in the backward
    pass; with `outputs` also its output and its grad_input, in that place in the order. Tensors
    have the dtype that is cast: the compute dtype, for weights the master's. A block that is
    recomputed for the backward pass is observed the first time. Observing changes no bit of the
    losses, the gradients or the FP8 state.

    In Transformer Engine's fused modules, a LayerNormLinear's input is the norm's output,
    recomputed. Between the linears of a LayerNormMLP, the input of the second and the grad_output
    of the first are recomputed by GEMMs in the compute dtype, so they lack FP8's rounding errors.
    grad_input is not observed in a linear after a fused norm and in the linears of a LayerNormMLP.

    `see` is called without gradients and without autocast. `layers` are the linears to observe by
    path, by default `fp8_linears`.
    """
    chosen = fp8_linears(model) if layers is None else layers
    observer = Observer(see, chosen, outputs)
    # Backends that fuse a linear with other modules report its operands to the observer.
    backends: set[Any] = {getattr(layer, "backend", None) for layer in chosen.values()}
    backends = {backend for backend in backends if hasattr(backend, "observer")}
    before = [(backend, backend.observer) for backend in backends]
    handles = [handle for layer in chosen.values() for handle in observer.register_hooks(layer)]
    for backend in backends:
        backend.observer = observer
    try:
        with without_compiled_code():
            yield
    finally:
        observer.active = False  # hooks on tensors outlive the context
        for backend, earlier in before:
            backend.observer = earlier
        for handle in handles:
            handle.remove()


def all_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears and grouped linears of `model`, in any precision, by their name in the plan: the
    module path, of converted experts the path of their weight."""
    return {
        module.name_at(path) if isinstance(module, LowPrecisionLayer) else path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | GroupedLinear)
    }


def fp8_linears(model: nn.Module) -> dict[str, LowPrecisionLayer]:
    """The layers of `all_linears` that are in FP8 now."""
    return {
        name: layer
        for name, layer in all_linears(model).items()
        if isinstance(layer, LowPrecisionLayer) and layer.in_fp8
    }


def fp8_parts(model: nn.Module) -> list[str]:
    """The module paths of linears and attention that are currently in FP8."""
    return [path for path, module in model.named_modules() if getattr(module, "in_fp8", False)]


def scale_of(
    path: str, layer: nn.Module, place: str, x: Tensor, quantizer: Quantizer
) -> Tensor | None:
    """The scale of an operand in the running pass, if it has one scale per tensor: float32, 0-dim.
    In delayed scaling a view, which an update changes in place.

    `path` is the layer's path in the model that was built or converted, that of a group with its
    number, `place` the operand's place in `Quantizers.each`.
    """
    if quantizer.delayed:
        delayed: Any = getattr(layer, "delayed", None)
        scale: Tensor = delayed.scale(f"{path}.{place}")
        return scale
    return numerics.current_scale(numerics.amax(x), quantizer) if quantizer.per_tensor else None


class Observer:
    """Passes the operands of some linears to a callback, see `observing`. Its hooks call it, and
    backends with fused modules call `report_fused` and `report_fused_mlp`."""

    def __init__(self, see: See, layers: Mapping[str, nn.Module], outputs: bool) -> None:
        self.active = True
        self._see = see
        self._outputs = outputs
        self._paths = {layer: path for path, layer in layers.items()}

    def register_hooks(self, layer: nn.Module) -> list[Any]:
        """Register hooks on a linear. Returns their handles."""
        return [
            layer.register_forward_pre_hook(self._before, with_kwargs=True),
            layer.register_forward_hook(self._after, with_kwargs=True),
        ]

    def report_fused(self, linear: nn.Linear, x: Tensor, y: Tensor) -> None:
        """Report a linear that ran fused with the norm before it: its input `x` [..., in], in the
        dtype in which it is cast, and its output `y` [..., out]."""
        self._report_operands(linear, x)
        self._report_output(linear, y)

    def report_fused_mlp(
        self,
        up: nn.Linear,
        down: nn.Linear,
        activation: str,
        x: Tensor,
        y: Tensor,
        inner_dtype: torch.dtype,
    ) -> None:
        """Report an MLP that ran fused with the norm before it; tensors within it are recomputed.
        `x` [..., in] is the input of `up` in the dtype in which it is cast, `y` the output of
        `down`; the output of the activation is cast in `inner_dtype`."""
        dtype = y.dtype
        with torch.no_grad(), no_autocast(x.device.type):
            bias = None if up.bias is None else up.bias.to(dtype)
            hidden = F.linear(x.to(dtype), _matrix(up).to(dtype), bias).float()
            inner = ACTIVATIONS[activation](hidden).to(inner_dtype)
        self._report_operands(up, x)
        self._report_operands(down, inner)
        self._report_output(down, y)
        if y.requires_grad:
            y.register_hook(  # type: ignore[no-untyped-call]
                partial(self._backward_of_mlp, up, down, activation, hidden)
            )

    def _backward_of_mlp(
        self, up: nn.Linear, down: nn.Linear, activation: str, hidden: Tensor, dy: Tensor
    ) -> None:
        if not self.active:
            return
        with no_autocast(dy.device.type):
            with torch.no_grad():
                inner = dy @ _matrix(down).to(dy.dtype)
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                outer = torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, inner.float())[0]
        self._report(up, "grad_output", outer.to(dy.dtype))

    def _before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        x: Tensor = args[0] if args else kwargs["input"]
        ends = _ends(layer, args, kwargs)
        self._report_operands(layer, _as_cast(layer, x), ends)
        if not (self._outputs and x.requires_grad):
            return None
        # A view, because other modules may read `x` too and add to its gradient.
        view = x.view_as(x)
        view.register_hook(  # type: ignore[no-untyped-call]
            partial(self._report_as_cast, layer, "grad_input", ends=ends)
        )
        return ((view, *args[1:]), kwargs) if args else ((), {**kwargs, "input": view})

    def _after(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        self._report_output(layer, output, _ends(layer, args, kwargs))

    def _report_output(self, layer: nn.Module, output: Tensor, ends: Tensor | None = None) -> None:
        if self._outputs and not _is_recomputing():
            self._report_as_cast(layer, "output", output, ends)
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                partial(self._report_as_cast, layer, "grad_output", ends=ends)
            )

    def _report_as_cast(
        self, layer: nn.Module, operand: Place, x: Tensor, ends: Tensor | None = None
    ) -> None:
        self._report(layer, operand, _as_cast(layer, x), ends)

    def _report_operands(self, layer: nn.Module, x: Tensor, ends: Tensor | None = None) -> None:
        """Report input and weight, except in a recomputed pass."""
        if not _is_recomputing():
            self._report(layer, "input", x, ends)
            self._report(layer, "weight", _matrix(layer))

    def _report(
        self, layer: nn.Module, operand: Place, x: Tensor, ends: Tensor | None = None
    ) -> None:
        if isinstance(x, FullWeight):  # no rank has the full float32 weight
            return
        if not self.active or layer not in self._paths:
            return
        path = self._paths[layer]
        with torch.no_grad(), no_autocast(x.device.type):
            if isinstance(layer, GroupedLinear):
                for group, rows in enumerate(split_groups(x.detach(), ends)):
                    self._see(f"{path}.{group}", layer, operand, rows)
            else:
                self._see(path, layer, operand, x.detach().reshape(-1, x.shape[-1]))


def _ends(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The ends of the groups, if this is the call of a grouped linear."""
    if not isinstance(layer, GroupedLinear):
        return None
    ends: Tensor = args[1] if len(args) > 1 else kwargs["offsets"]
    return ends


def _is_recomputing() -> bool:
    """Whether a backward pass is running, in which blocks are recomputed."""
    return torch._C._current_graph_task_id() != -1


def _as_cast(layer: nn.Module, x: Tensor) -> Tensor:
    """`x` in the dtype in which the layer computes."""
    return x.detach().to(getattr(layer, "compute_dtype", x.dtype))


def _matrix(layer: nn.Module) -> Tensor:
    """The weight as [out, in]; of a grouped linear [groups, out, in]."""
    weight: Any = layer.matrix if isinstance(layer, LowPrecisionLinear) else layer.weight
    matrix: Tensor = weight.detach()
    return matrix
