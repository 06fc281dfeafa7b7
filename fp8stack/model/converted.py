"""Keep the plan of a converted model current: layers that were replaced, resized or never ran."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8stack.common.errors import UserError
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.linear import LowPrecisionLinear, require_no_transform
from fp8stack.model.converted_experts import linears_of, not_converted
from fp8stack.precision import LayerPlan, Plan
from fp8stack.precision.plan import unserved

log = logging.getLogger("fp8stack")

UNCHANGED = "unchanged"  # the precision of a layer that runs as the model defines it

# Packages whose FP8 layers accelerate puts into a model.
_OTHER_FP8 = {"torchao", "transformer_engine", "msamp"}


class _Place(NamedTuple):
    """The place of a module in the model: `module` is the child `key` of `owner`."""

    module: nn.Module
    owner: nn.Module
    key: str
    state: object

    def holds(self) -> bool:
        """Whether the module is still in its place with the same state, see `_state`."""
        is_same_size = _state(self.module) == self.state
        return is_same_size and self.owner._modules.get(self.key) is self.module


def _state(module: nn.Module) -> object:
    """The state that `_Place.holds` compares: the size of a linear, or the reason that experts do
    not run as they were converted."""
    return not_converted(module) if linears_of(module) else vars(module).get("out_features")


def plan_of(model: nn.Module) -> Plan:
    """The current plan of a converted model or a `GPT`: the precision of each layer, with reasons.

    Raises:
        UserError: the model is neither; a submodule of a converted model has no plan.
    """
    plan = getattr(model, "fp8_plan", None)
    if plan is None:
        plan = getattr(getattr(model, "backend", None), "plan", None)
    if not isinstance(plan, Plan):
        raise UserError(
            f"{type(model).__name__} has no plan: convert it first, or give the module that was "
            "converted."
        )
    return plan


def delayed_scaling_of(model: nn.Module) -> DelayedScaling | None:
    """The delayed scaling of a converted model or a `GPT`, with its amax history; None if no layer
    uses it. For errors see `plan_of`."""
    plan_of(model)
    scaling: DelayedScaling | None = getattr(model, "delayed_scaling", None)
    return scaling


class PlanFollower:
    """Updates `model.fp8_plan` when the model's linears or experts change between passes.

    Models that are compiled as a whole are not checked.

    Args:
        model: the converted model.
        modules: the modules of its linears and experts, by their names in the plan.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._converted_layers: dict[str, LayerPlan] = {}  # the plans of experts at conversion
        self._trained = False
        self._locate_modules(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def _locate_modules(self, model: nn.Module) -> None:
        """Record the places of the modules, and forget modules that left the model."""
        names: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            names.setdefault(id(module), []).append(name)
        self._places, self._modules = [], {}
        for owner in model.modules():
            for key, child in owner._modules.items():
                if child is not None and id(child) in names:
                    self._places.append(_Place(child, owner, key, _state(child)))
                    self._modules |= dict.fromkeys(names[id(child)], child)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        plan = plan_of(model)
        if plan.runs_fp8:
            require_no_transform()  # before the hooks of delayed scaling, which write to its state
        if not all(place.holds() for place in self._places):
            self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Update the plan to the current layers. Raises a UserError if FP8 layers of another
        package replaced them, and under `strict` if the hardware does not support a new size."""
        self._locate_modules(model)
        plan = plan_of(model)
        layers: list[LayerPlan] = []
        messages: list[str] = []
        foreign: list[type] = []
        for layer in plan.layers:
            module = self._modules.get(layer.name) or _module_at(model, layer.name)
            package = type(module).__module__.partition(".")[0]
            if layer.precision != UNCHANGED and package in _OTHER_FP8:
                foreign.append(type(module))
            if module is None:
                kind = "weight of experts" if layer.groups else "linear"
                messages.append(f"{layer.name}: it is no longer a {kind} of this model")
                continue
            updated = self._updated(plan, layer, module)
            layers.append(updated)
            if updated != layer and updated.reason:
                messages.append(updated.sentence)
        if foreign:
            raise UserError(
                f"{len(foreign)} of {len(plan.layers)} linears were replaced after convert by the "
                f"{foreign[0].__name__} of {foreign[0].__module__.partition('.')[0]}, as "
                "Accelerator(mixed_precision='fp8') does: set mixed_precision to 'no' or 'bf16', "
                "because converted layers run in FP8 by themselves."
            )
        stale = {layer.sentence for layer in plan.layers} - {layer.sentence for layer in layers}
        reasons = [reason for reason in plan.reasons if reason not in stale]
        self._report(model, replace(plan, layers=tuple(layers), reasons=tuple(reasons)), messages)
        self._locate_modules(model)

    def _updated(self, plan: Plan, layer: LayerPlan, module: nn.Module) -> LayerPlan:
        """The plan of `layer` for its current module."""
        inputs, outputs = (vars(module).get(key) for key in ("in_features", "out_features"))
        updated = layer
        if inputs is not None and outputs is not None and not layer.groups:
            updated = replace(layer, in_features=inputs, out_features=outputs)
        if layer.name not in self._modules:
            self._modules[layer.name] = module
            if layer.precision != UNCHANGED:
                reason = "replaced after convert: convert the model once its layers are final"
                updated = replace(updated, fp8=False, precision=UNCHANGED, reason=reason)
        elif layer.groups:
            updated = self._converted_layers.setdefault(layer.name, layer)
            reason = not_converted(module)
            if updated.precision != UNCHANGED and reason:
                updated = replace(updated, fp8=False, precision=UNCHANGED, reason=reason)
        elif layer.quantizers is not None and (reason := unserved(plan, updated)):
            assert isinstance(module, LowPrecisionLinear)
            module.in_fp8 = False
            updated = replace(updated, fp8=False, precision=plan.compute_dtype, reason=reason)
        return updated

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._trained or torch.compiler.is_compiling():
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        self._trained = True
        idle = [name for name, module in self._modules.items() if not _was_called(module)]
        # If torch compiled anything in this process, compiled code may call the idle layers.
        dynamo = sys.modules.get("torch._dynamo.utils")
        if idle and not (dynamo is not None and dynamo.counters["frames"]):
            names = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
            message = (
                f"{len(idle)} converted layer(s) were not called in the first training pass: "
                f"{names}. If the model reads their weights by itself, that is not in low precision"
            )
            self._report(model, plan_of(model), [message])

    def _report(self, model: nn.Module, plan: Plan, messages: list[str]) -> None:
        reasons = (*plan.reasons, *messages)
        model.fp8_plan = replace(plan, reasons=reasons)  # type: ignore[assignment]
        for message in messages:
            log.warning(message)


def _was_called(module: nn.Module) -> bool:
    """Whether a linear or experts were called, if they are converted."""
    if isinstance(module, LowPrecisionLinear):
        return module.was_called
    return not_converted(module) != "" or all(linear.was_called for linear in linears_of(module))


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The linear at a module path, or the module of the parameter at a path; None without one."""
    owner: nn.Module | None = model
    *keys, last = path.split(".")
    for key in keys:
        owner = None if owner is None else owner._modules.get(key)
    if owner is None:
        return None
    module = owner if last in owner._parameters else owner._modules.get(last)
    return module if module is owner or hasattr(module, "weight") else None
