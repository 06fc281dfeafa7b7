"""The layers of any model that `convert` may take, and the reasons that it leaves some out."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8stack.common.errors import UserError, quoted
from fp8stack.layers.fsdp import is_dtensor
from fp8stack.layers.linear import LowPrecisionLayer
from fp8stack.model.expert_layouts import ExpertWeight, find_expert_weights


class Linear(NamedTuple):
    """A linear with all its module paths; the first is its name."""

    module: nn.Module
    paths: list[str]


Layers = dict[str, Linear | ExpertWeight]
"""Linears and the weights of experts by name, in the order of the model's modules."""


def find_layers(module: nn.Module, also: tuple[type[nn.Module], ...]) -> Layers:
    """Find the linears of a model, with the layers of the classes `also`, and its experts.

    Raises:
        UserError: the model is converted already or a bare linear, or has no layer of a class.
    """
    linears: dict[int, Linear] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, LowPrecisionLayer) or hasattr(child, "fp8_plan"):
            raise UserError("This model is converted already. Convert it once, from the original.")
        if isinstance(child, (nn.Linear, *also)) or conv1d(child):
            if not path:
                raise UserError("A bare linear cannot be converted in place: wrap it in a module.")
            linears.setdefault(id(child), Linear(child, [])).paths.append(path)
    for kind in also:
        if not any(isinstance(linear.module, kind) for linear in linears.values()):
            raise UserError(f"also: no layer of this model is a {kind.__name__}.")
    places = {id(child): place for place, child in enumerate(module.modules())}
    layers: list[Linear | ExpertWeight] = list(linears.values())
    layers += [w for w in find_expert_weights(module) if id(w.module) not in linears]
    layers.sort(key=lambda layer: places[id(layer.module)])
    return {layer.paths[0]: layer for layer in layers}


def conv1d(module: nn.Module) -> type[nn.Module] | None:
    """transformers' class Conv1D, a linear with weight [in, out], if `module` is one; else None."""
    name = ("transformers.pytorch_utils", "Conv1D")
    kinds = type(module).__mro__
    return next((kind for kind in kinds if (kind.__module__, kind.__name__) == name), None)


def shape_of(layer: Linear | ExpertWeight) -> tuple[int, int]:
    """(in features, out features), of one expert.

    Raises:
        UserError: a layer of a user's class has no weight [out, in].
    """
    if isinstance(layer, ExpertWeight):
        return layer.in_features, layer.out_features
    linear = layer.module
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    weight = linear._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"also: a {type(linear).__name__} has no parameter `weight` [out, in].")
    rows, columns = weight.shape
    return (rows, columns) if conv1d(linear) else (columns, rows)


def find_left_out(
    module: nn.Module,
    layers: Layers,
    patterns: tuple[str, ...],
    also: tuple[type[nn.Module], ...],
) -> dict[str, str]:
    """The layers that must stay as they are, with the reasons.

    Raises:
        UserError: a pattern matches no layer.
    """
    paths = [path for layer in layers.values() for path in layer.paths]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise UserError(
                f"exclude: the pattern '{quoted(pattern)}' matches no layer. "
                f"Layers: {', '.join(layers)}."
            )
    reasons = {}
    for name, layer in layers.items():
        matched = [pattern for pattern in patterns if fnmatch.filter(layer.paths, pattern)]
        if matched:
            reason = f"excluded by the pattern '{matched[0]}'"
        elif isinstance(layer, ExpertWeight):
            reason = _obstacle_of_experts(layer.module, layer.keys)
        else:
            owner = module.get_submodule(name.rpartition(".")[0])
            reason = _obstacle_of_linear(layer.module, owner, also)
        if reason:
            reasons[name] = reason
    return reasons


def _obstacle_of_linear(
    linear: nn.Module, owner: nn.Module, also: tuple[type[nn.Module], ...]
) -> str:
    """The reason that a linear cannot be converted; "" if it can be."""
    kind = type(linear)
    plain = isinstance(linear, also) or kind.forward is (conv1d(linear) or nn.Linear).forward
    missing = [key for key in ("weight", "bias") if key not in linear._parameters]
    computed = [key for key in missing if key != "bias" or getattr(linear, key, None) is not None]
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if "forward" in vars(linear):
        return "it has a forward of its own"
    if not plain:
        remedy = f"pass also=({kind.__name__},) if that is a plain x W^T + b"
        return f"a {kind.__name__} has a forward of its own: {remedy}"
    if computed:
        return f"its {computed[0]} is computed and no parameter"
    weight = linear.get_parameter("weight")
    if is_lazy(weight):
        return "it has no size before its first pass"
    if reason := _unusual_storage(weight):
        return reason
    return "" if all(shape_of(Linear(linear, []))) else "its weight has no elements"


def _obstacle_of_experts(module: nn.Module, keys: list[str]) -> str:
    """The reason that experts with parameters `keys` cannot be converted; "" if they can be."""
    computed = [key for key in keys if key not in module._parameters]
    if "forward" in vars(module):
        return "its module has a forward of its own"
    if getattr(module, "_is_expert_parallel", False):
        return "expert parallelism shares its experts out"
    if computed:
        return f"{computed[0]} is computed and no parameter"
    for key in keys:
        if reason := _unusual_storage(module.get_parameter(key)):
            return reason
        if not module.get_parameter(key).numel():
            return "its weight has no elements"
    return ""


def _unusual_storage(weight: nn.Parameter) -> str:
    """The reason that a weight is no plain tensor that a layer can quantize; "" if it is."""
    if not weight.is_floating_point() or weight.itemsize == 1:
        return f"its weight is quantized already ({str(weight.dtype).removeprefix('torch.')})"
    if is_traceable_wrapper_subclass(weight) and not is_dtensor(weight):
        return f"its weight is a {type(weight).__name__} of its own"
    return ""
