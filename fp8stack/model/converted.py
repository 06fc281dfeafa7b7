"""Check a converted model against its plan: layers that were replaced or resized, or never ran."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8stack.backends.linear import LowPrecisionLinear, require_no_transform
from fp8stack.errors import UserError
from fp8stack.precision import LayerPlan, Plan

log = logging.getLogger("fp8stack")

UNCHANGED = "unchanged"  # the precision of a layer that stays as it is

# Packages that put FP8 layers of their own into a model: accelerate has them do it.
_OTHER_FP8 = {"torchao", "transformer_engine", "msamp"}


class _Place(NamedTuple):
    """Where a linear is: the child `key` of `owner`; and its `out_features`, if it has any."""

    part: nn.Module
    owner: nn.Module
    key: str
    out_features: int | None

    def holds(self) -> bool:
        """Whether the linear is still there with the same size."""
        same = vars(self.part).get("out_features") == self.out_features
        return same and self.owner._modules.get(self.key) is self.part


class PlanFollower:
    """Updates `model.fp8_plan` when the model's linears change between passes; `linears` are all of
    them, by their names in the plan. Models compiled as a whole are not checked."""

    def __init__(self, model: nn.Module, linears: Mapping[str, nn.Module]) -> None:
        self._linears = dict(linears)
        self._trained = False
        self._find(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def _find(self, model: nn.Module) -> None:
        """Find where the linears are now, and drop those that are no longer in the model."""
        names = {id(part): name for name, part in self._linears.items()}
        self._places, self._linears = [], {}
        for owner in model.modules():
            for key, part in owner._modules.items():
                if part is not None and id(part) in names:
                    features = vars(part).get("out_features")
                    self._places.append(_Place(part, owner, key, features))
                    self._linears[names[id(part)]] = part

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        plan: Plan = model.fp8_plan  # type: ignore[assignment]
        if plan.runs_fp8:
            require_no_transform()  # before the hooks of delayed scaling, which write to its state
        if not all(p.holds() for p in self._places):
            self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Update the plan to the model. Raises a UserError if another package's FP8 layers replaced
        the plan's, and under `strict` if the hardware does not support a layer's new size."""
        self._find(model)
        plan: Plan = model.fp8_plan  # type: ignore[assignment]
        layers: list[LayerPlan] = []
        said: list[str] = []
        foreign: list[type] = []
        for layer in plan.layers:
            found = self._linears.get(layer.name) or _at(model, layer.name)
            package = type(found).__module__.partition(".")[0]
            if layer.precision != UNCHANGED and package in _OTHER_FP8:
                foreign.append(type(found))
            if found is None:
                said.append(f"{layer.name}: it is no longer a linear of this model")
                continue
            now = self._now(plan, layer, found)
            layers.append(now)
            if now != layer and now.reason:
                said.append(now.sentence)
        if foreign:
            raise UserError(
                f"{len(foreign)} of {len(plan.layers)} linears were replaced after convert by the "
                f"{foreign[0].__name__} of {foreign[0].__module__.partition('.')[0]}, as "
                "Accelerator(mixed_precision='fp8') does: set mixed_precision to 'no' or 'bf16', "
                "because converted layers run in FP8 by themselves."
            )
        stale = {layer.sentence for layer in plan.layers} - {layer.sentence for layer in layers}
        reasons = [reason for reason in plan.reasons if reason not in stale]
        self._tell(model, replace(plan, layers=tuple(layers), reasons=tuple(reasons)), said)
        self._find(model)

    def _now(self, plan: Plan, layer: LayerPlan, found: nn.Module) -> LayerPlan:
        """The updated plan of `layer`, whose module is now `found`."""
        inputs, outputs = (vars(found).get(key) for key in ("in_features", "out_features"))
        now = layer
        if inputs is not None and outputs is not None:
            now = replace(layer, in_features=inputs, out_features=outputs)
        if layer.name not in self._linears:
            self._linears[layer.name] = found
            if layer.precision != UNCHANGED:
                why = "replaced after convert: convert the model once its layers are final"
                now = replace(now, fp8=False, precision=UNCHANGED, reason=why)
        elif layer.quantizers is not None and (
            why := plan.unserved(layer.name, (now.in_features, now.out_features), layer.quantizers)
        ):
            assert isinstance(found, LowPrecisionLinear)
            found.in_fp8 = False
            now = replace(now, fp8=False, precision=plan.compute_dtype, reason=why)
        return now

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._trained or torch.compiler.is_compiling():
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        self._trained = True
        ours = self._linears.items()
        idle = [name for name, one in ours if isinstance(one, LowPrecisionLinear) and not one.ran]
        # If torch compiled anything in this process, which layers that calls is not known.
        dynamo = sys.modules.get("torch._dynamo.utils")
        if idle and not (dynamo is not None and dynamo.counters["frames"]):
            shown = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
            why = (
                f"{len(idle)} converted layer(s) were not called in the first training pass: "
                f"{shown}. If the model reads their weights by itself, that is not in low precision"
            )
            self._tell(model, model.fp8_plan, [why])  # type: ignore[arg-type]

    def _tell(self, model: nn.Module, plan: Plan, said: list[str]) -> None:
        model.fp8_plan = replace(plan, reasons=(*plan.reasons, *said))  # type: ignore[assignment]
        for sentence in said:
            log.warning(sentence)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """The linear at a module path, if there is one."""
    part: nn.Module | None = model
    for key in path.split("."):
        part = None if part is None else part._modules.get(key)
    return part if hasattr(part, "weight") else None
