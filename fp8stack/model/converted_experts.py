"""Experts of transformers, whose matrices are grouped linears.

Parameters stay in the module of the experts. Each weight gets a grouped linear, a child of the
module that has no parameters and multiplies with the weight. Experts that use transformers'
interface keep their class: `config._experts_implementation` dispatches their forward pass to
`_run_or_pass_on` here. Llama 4's get the forward pass of a subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.common.errors import UserError
from fp8stack.layers import Backend
from fp8stack.layers.grouped import GroupedLinear, GroupedSize, gather, sort_by_group
from fp8stack.model.expert_layouts import INTERFACE, ExpertWeight, uses_interface
from fp8stack.model.subclasses import subclass

_PREFIX = "fp8stack-"  # of experts implementations; what follows runs the experts left out


class StoredInExperts(GroupedLinear):
    """A grouped linear that multiplies with parameters of its parent, the module of the experts.

    Attributes:
        stored: the parameters.
    """

    stored: ExpertWeight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as [groups, out, in]."""
        weight: Tensor = getattr(self.stored.module, self.stored.key)
        return weight.transpose(1, 2) if self.stored.transposed else weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias as [groups, out]."""
        return getattr(self.stored.module, self.stored.bias) if self.stored.bias else None

    @property
    def stored_weight(self) -> Tensor | None:
        """See `LowPrecisionLayer.stored_weight`."""
        return self.stored.module._parameters.get(self.stored.key)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredInExperts:
        """See `LowPrecisionLayer._apply`. The parameters are the parent's and move later."""
        nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        weight = self.stored_weight
        if self.delayed is not None and weight is not None:
            device = fn(torch.empty(1, dtype=weight.dtype, device=weight.device)).device
            if device.type != "meta":
                self.delayed.move(device)
        return self

    def name_at(self, path: str) -> str:
        """See `LowPrecisionLayer.name_at`: the parameter's path."""
        return path.removesuffix(_child(self.stored)) + self.stored.key

    @property
    def fits(self) -> bool:
        """Whether the weight has the shape that it had in `convert`, as far as it can be seen: FSDP
        stores a part of it between its calls."""
        weight = self.stored_weight
        return weight is None or weight.ndim != 3 or tuple(weight.shape) == self.stored.shape

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()  # a pickle may be loaded where nothing was converted


def _child(weight: ExpertWeight) -> str:
    """The name of the grouped linear of a weight in the module of the experts."""
    return f"{weight.key}_linear"


def expert_linear(weight: ExpertWeight, backend: Backend | None, name: str) -> GroupedLinear:
    """The grouped linear of a `backend` that multiplies with a weight; without, a plain one in the
    precision of the weight. Its own parameters are on the meta device."""
    inputs, outputs = weight.in_features, weight.out_features
    size = GroupedSize(weight.groups, inputs, outputs, weight.bias != "")
    with torch.device("meta"):
        if backend is not None:
            return backend.grouped_linear(name, *size)
        return GroupedLinear(size, weight.module.get_parameter(weight.key).dtype)


def require_free_name(weight: ExpertWeight) -> None:
    """See that the module of the experts has no attribute with the name of the grouped linear.

    Raises:
        UserError: it has.
    """
    if hasattr(weight.module, _child(weight)):
        raise UserError(
            f"{weight.paths[-1]} has an attribute '{_child(weight)}' of its own, which convert "
            "needs to set: exclude it (convert(..., exclude=...)) or rename the attribute."
        )


def convert_experts(weight: ExpertWeight, linear: GroupedLinear) -> None:
    """Make the experts multiply with their `weight` by `linear`, whose own parameters are not
    used. All weights of a module are converted, some maybe to a plain `linear`."""
    experts = weight.module
    linear._parameters.clear()
    linear.__class__ = subclass(StoredInExperts, type(linear))  # type: ignore[assignment]
    assert isinstance(linear, StoredInExperts)
    linear.stored = weight
    linear.keeps_dtype = True
    experts.add_module(_child(weight), linear.train(experts.training))
    if len(linears_of(experts)) == 1:
        experts.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _before_loading
        )
    if uses_interface(experts):
        config: Any = experts.config
        if not _runs_here(experts):
            implementation = f"{_PREFIX}{config._experts_implementation or 'eager'}"
            _register()
            # The attribute itself: the property sets that of configurations below it as well.
            config._experts_implementation_internal = implementation
    elif not isinstance(experts, Llama4Experts):
        experts.__class__ = subclass(Llama4Experts, type(experts))


def _before_loading(
    experts: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any
) -> None:
    """See `LowPrecisionLayer._load_from_state_dict`."""
    for linear in linears_of(experts):
        if linear.reminder is not None and prefix + linear.stored.key in state_dict:
            linear.was_called = False
            linear.reminder.weights_loaded()


def linears_of(experts: nn.Module) -> list[StoredInExperts]:
    """The grouped linears of a module of experts; none of one that is not converted."""
    return [child for child in experts.children() if isinstance(child, StoredInExperts)]


def not_converted(experts: nn.Module) -> str:
    """The reason that experts that were converted do not run so; "" if they do."""
    if not all(linear.fits for linear in linears_of(experts)):
        return "resized after convert: convert the model once its layers are final"
    if not uses_interface(experts) or _runs_here(experts):
        return ""
    config: Any = experts.config
    return f"config._experts_implementation was set to '{config._experts_implementation}'"


def _runs_here(experts: nn.Module) -> bool:
    """Whether the interface dispatches the forward pass of experts to this file."""
    config: Any = experts.config
    return str(config._experts_implementation).startswith(_PREFIX)


def _register() -> None:
    """Register an implementation over each of those that transformers has."""
    interface: Any = sys.modules.get(INTERFACE)
    if interface is None:
        return
    functions = interface.ALL_EXPERTS_FUNCTIONS
    for name in ["eager", *functions]:
        if not name.startswith(_PREFIX):
            functions.register(f"{_PREFIX}{name}", partial(_run_or_pass_on, functions, name))


def _run_or_pass_on(
    functions: Any, implementation: str, experts: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward pass of experts; those that were not converted run by `implementation`."""
    if _is_converted(experts):
        return run_experts(experts, *args, **kwargs)
    forward: Any = type(experts).forward
    run = functions.get_interface(implementation, forward.__wrapped__)
    y: Tensor = run(experts, *args, **kwargs)
    return y


def _is_converted(experts: nn.Module) -> bool:
    linears = linears_of(experts)
    return bool(linears) and all(linear.fits for linear in linears)


def run_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        experts: the module.
        hidden_states: [tokens, width].
        top_k_index: the experts of each token, int64 [tokens, k].
        top_k_weights: their routing weights, [tokens, k].

    Returns:
        [tokens, width] in the dtype of `hidden_states`.

    Raises:
        UserError: ranks share out the experts.
    """
    if getattr(experts, "_is_expert_parallel", False):
        raise UserError(
            "Converted experts do not run under expert parallelism: leave them out "
            "(convert(..., exclude=...)), or use FSDP2 or DDP."
        )
    has_gate = getattr(experts, "has_gate", True)
    up = experts.gate_up_proj_linear if has_gate else experts.up_proj_linear
    order, ends = sort_by_group(top_k_index, up.groups)
    copies = torch.argsort(order).view(top_k_index.shape)  # the indices of each token's rows
    inner = up(gather(hidden_states, order // copies.shape[1], copies), ends)
    inner = experts._apply_gate(inner) if has_gate else experts.act_fn(inner)
    outputs = experts.down_proj_linear(inner, ends)
    if getattr(experts, "has_post_expert_norm", False):
        outputs = experts.post_expert_norm(outputs)
    y = gather(outputs, copies.flatten(), order[:, None])
    weighted = y.view(*copies.shape, y.shape[-1]) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


class Llama4Experts(nn.Module):
    """Llama 4's experts. Each takes all tokens; tokens of other experts are zeros."""

    gate_up_proj_linear: GroupedLinear
    down_proj_linear: GroupedLinear
    act_fn: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[experts * tokens, width], sorted by expert -> the same shape."""
        if not _is_converted(self):
            y: Tensor = super().forward(hidden_states)
            return y
        groups = self.gate_up_proj_linear.groups
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        numbers = torch.arange(1, groups + 1, device=rows.device, dtype=torch.int32)
        ends = numbers * (len(rows) // groups)
        gate, up = self.gate_up_proj_linear(rows, ends).chunk(2, dim=-1)
        y = self.down_proj_linear(up * self.act_fn(gate), ends)
        return y
