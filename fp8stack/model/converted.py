"""Check a converted model against its plan: layers that were replaced or resized, or never ran."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8stack.common.errors import UserError
from fp8stack.layers.linear import LowPrecisionLinear, require_no_transform
from fp8stack.precision import LayerPlan, Plan

log = logging.getLogger("fp8stack")

UNCHANGED = "unchanged"  # the precision of a layer that stays as it is

# Packages whose FP8 layers accelerate puts into a model.
_OTHER_FP8 = {"torchao", "transformer_engine", "msamp"}


class _Place(NamedTuple):
    """A linear in the model: `linear` is the child `key` of `owner`."""

    linear: nn.Module
    owner: nn.Module
    key: str
    out_features: int | None

    def holds(self) -> bool:
        """Whether the linear is still there with the same size."""
        same = vars(self.linear).get("out_features") == self.out_features
        return same and self.owner._modules.get(self.key) is self.linear


class PlanFollower:
    """Updates `model.fp8_plan` when the model's linears change between passes.

    Models that are compiled as a whole are not checked.

    Args:
        model: the converted model.
        linears: all its linears, by their names in the plan.
    """

    def __init__(self, model: nn.Module, linears: Mapping[str, nn.Module]) -> None:
        self._linears = dict(linears)
        self._trained = False
        self._find(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def _find(self, model: nn.Module) -> None:
        """Record the places of the linears, and forget linears that left the model."""
        names = {id(linear): name for name, linear in self._linears.items()}
        self._places, self._linears = [], {}
        for owner in model.modules():
            for key, child in owner._modules.items():
                if child is not None and id(child) in names:
                    features = vars(child).get("out_features")
                    self._places.append(_Place(child, owner, key, features))
                    self._linears[names[id(child)]] = child

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        plan: Plan = model.fp8_plan  # type: ignore[assignment]
        if plan.runs_fp8:
            require_no_transform()  # before the hooks of delayed scaling, which write to its state
        if not all(place.holds() for place in self._places):
            self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Update the plan to the current linears. Raises a UserError if FP8 layers of another
        package replaced them, and under `strict` if the hardware does not support a new size."""
        self._find(model)
        plan: Plan = model.fp8_plan  # type: ignore[assignment]
        layers: list[LayerPlan] = []
        messages: list[str] = []
        foreign: list[type] = []
        for layer in plan.layers:
            linear = self._linears.get(layer.name) or _at(model, layer.name)
            package = type(linear).__module__.partition(".")[0]
            if layer.precision != UNCHANGED and package in _OTHER_FP8:
                foreign.append(type(linear))
            if linear is None:
                messages.append(f"{layer.name}: it is no longer a linear of this model")
                continue
            updated = self._updated(plan, layer, linear)
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
        self._tell(model, replace(plan, layers=tuple(layers), reasons=tuple(reasons)), messages)
        self._find(model)

    def _updated(self, plan: Plan, layer: LayerPlan, linear: nn.Module) -> LayerPlan:
        """The plan of `layer` for its current module, `linear`."""
        inputs, outputs = (vars(linear).get(key) for key in ("in_features", "out_features"))
        updated = layer
        if inputs is not None and outputs is not None:
            updated = replace(layer, in_features=inputs, out_features=outputs)
        if layer.name not in self._linears:
            self._linears[layer.name] = linear
            if layer.precision != UNCHANGED:
                reason = "replaced after convert: convert the model once its layers are final"
                updated = replace(updated, fp8=False, precision=UNCHANGED, reason=reason)
        elif layer.quantizers is not None:
            shape = (updated.in_features, updated.out_features)
            if reason := plan.unserved(layer.name, shape, layer.quantizers):
                assert isinstance(linear, LowPrecisionLinear)
                linear.in_fp8 = False
                dtype = plan.compute_dtype
                updated = replace(updated, fp8=False, precision=dtype, reason=reason)
        return updated

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._trained or torch.compiler.is_compiling():
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        self._trained = True
        idle = [
            name
            for name, linear in self._linears.items()
            if isinstance(linear, LowPrecisionLinear) and not linear.was_called
        ]
        # If torch compiled anything in this process, compiled code may call the idle layers.
        dynamo = sys.modules.get("torch._dynamo.utils")
        if idle and not (dynamo is not None and dynamo.counters["frames"]):
            names = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
            message = (
                f"{len(idle)} converted layer(s) were not called in the first training pass: "
                f"{names}. If the model reads their weights by itself, that is not in low precision"
            )
            self._tell(model, model.fp8_plan, [message])  # type: ignore[arg-type]

    def _tell(self, model: nn.Module, plan: Plan, messages: list[str]) -> None:
        reasons = (*plan.reasons, *messages)
        model.fp8_plan = replace(plan, reasons=reasons)  # type: ignore[assignment]
        for message in messages:
            log.warning(message)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """The linear at a module path; None without one."""
    module: nn.Module | None = model
    for key in path.split("."):
        module = None if module is None else module._modules.get(key)
    return module if hasattr(module, "weight") else None
