"""FP8 in any model: its linears become a backend's, in place. It must not know a model by name.

Modules and parameters stay the same objects under the same names: ties, optimizers, checkpoints,
hooks and state dicts do not notice.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8stack.backends import Backend, build_backend
from fp8stack.backends.delayed import Group
from fp8stack.backends.linear import MasterLinear
from fp8stack.errors import UserError, quoted
from fp8stack.precision import LayerPlan, Plan

log = logging.getLogger("fp8stack")


def convert(
    module: nn.Module,
    plan: Plan,
    exclude: Iterable[str] = (),
    *,
    amax_group: Group = "world",
) -> nn.Module:
    """Let the linears of `module` run as `plan` has it: `nn.Linear`, and Conv1D of transformers.

    Nothing else is needed in a training loop: forward, `loss.backward()` and `optimizer.step()` on
    the module that was converted, delayed scaling included. Outputs keep the dtype that they had.
    What was converted, what was not and why is in `module.fp8_plan` (`.layers`, `.reasons`,
    `.summary()`) and in the log of "fp8stack". Convert before torch.compile.

    Delayed scaling begins with scale 1 and needs a few training passes; for a model that is only
    evaluated, use current scaling. `nn.TransformerEncoderLayer` reads its weights past its linears
    in eval mode without gradients: there it is not in FP8.

    Args:
        module: any model; its linears become ours in place: the same objects, with the same
            parameters, hooks and attributes.
        plan: what `resolve(recipe, hardware)` gave.
        exclude: a pattern of module paths to leave as they are, such as "*.mlp.*", or several.
        amax_group: delayed scaling: the torch.distributed group whose ranks train this model, each
            on its part of the data; all ranks if left out, None for this one alone. Their amaxes
            are reduced to the maximum, so that all cast with the same scales.

    Returns:
        `module`.

    Raises:
        UserError: nothing to convert, a pattern that matches no layer, or a module that is or was
            converted; under `strict`, a layer that the hardware cannot serve.
    """
    if not isinstance(plan, Plan):
        raise UserError("convert needs a plan, such as resolve('delayed', probe()).")
    linears = _linears(module)
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    left_out = _left_out(module, linears, patterns)
    if plan.is_fp8 and len(left_out) == len(linears):
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(f"Nothing to convert: no linear layer{f' ({why})' if why else ''}.")
    plan = _decided(module, plan, linears, left_out)
    if plan.is_fp8 and (elsewhere := _matrices_elsewhere(module, linears)):
        plan = replace(plan, reasons=(*plan.reasons, elsewhere))
    backend = build_backend(plan)
    if backend.delayed is not None:
        backend.delayed.group = amax_group
    for layer in plan.layers:
        if layer.precision != _UNCHANGED:
            _become(linears[layer.name].part, backend, layer)
    backend.attach(module)
    if plan.compute_dtype == "tf32":
        backend.set_matmul_precision(module)
    module.fp8_plan = plan  # type: ignore[assignment]
    for line in plan.summary():
        log.info(line)
    return module


_UNCHANGED = "unchanged"


class _Found(NamedTuple):
    """A linear, with all its module paths; the first is its name."""

    part: nn.Module
    paths: list[str]


def _linears(module: nn.Module) -> dict[str, _Found]:
    """Every layer that is a linear in some way, once, by its first module path."""
    found: dict[int, _Found] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, MasterLinear) or hasattr(part, "fp8_plan"):
            raise UserError("This model is converted already. Convert it once, from the original.")
        if isinstance(part, nn.Linear) or _is_conv1d(part):
            if not path:
                raise UserError("A bare linear cannot be converted in place: wrap it in a module.")
            found.setdefault(id(part), _Found(part, [])).paths.append(path)
    return {linear.paths[0]: linear for linear in found.values()}


def _is_conv1d(part: nn.Module) -> bool:
    """Whether `part` is transformers' Conv1D: a linear whose weight is [in, out]."""
    kind = type(part)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _left_out(
    module: nn.Module, linears: dict[str, _Found], patterns: tuple[str, ...]
) -> dict[str, str]:
    """The layers that stay as they are, with the reason."""
    paths = [path for linear in linears.values() for path in linear.paths]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise UserError(
                f"exclude: the pattern '{quoted(pattern)}' matches no layer. "
                f"Layers: {', '.join(linears)}."
            )
    reasons = {}
    for name, (part, paths) in linears.items():
        matched = [pattern for pattern in patterns if fnmatch.filter(paths, pattern)]
        owner = module.get_submodule(name.rpartition(".")[0])
        own = [key for key in ("weight", "bias") if key not in part._parameters]
        if matched:
            reasons[name] = f"excluded by the pattern '{matched[0]}'"
        elif isinstance(owner, nn.MultiheadAttention):
            reasons[name] = "nn.MultiheadAttention reads its weight and never calls it"
        elif type(part) is not nn.Linear and not _is_conv1d(part):
            reasons[name] = f"a {type(part).__name__} may do more than nn.Linear"
        elif "forward" in vars(part):
            reasons[name] = "it has a forward of its own"
        elif own:
            reasons[name] = f"its {own[0]} is computed and no parameter"
    return reasons


def _decided(
    module: nn.Module, plan: Plan, linears: dict[str, _Found], left_out: dict[str, str]
) -> Plan:
    """`plan` with a decision for each linear; one whose precision is "unchanged" stays as it is."""
    shapes = {name: _shape(linear.part) for name, linear in linears.items()}
    if plan.loss_scaling:
        unscaled = "fp16 needs a scaled loss, which convert cannot give"
        left_out = {name: left_out.get(name, unscaled) for name in linears}
    fresh = replace(plan, layers=())
    fresh = fresh.for_layers(shapes, _heads(module, linears), left_out, _UNCHANGED)
    if fresh.is_fp8 or fresh.compute_dtype == "bf16":
        return fresh
    unchanged = (replace(layer, precision=_UNCHANGED) for layer in fresh.layers)
    return replace(fresh, layers=tuple(unchanged))


def _shape(part: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    if _is_conv1d(part):
        rows, columns = part.get_parameter("weight").shape
        return rows, columns
    assert isinstance(part, nn.Linear)
    return part.in_features, part.out_features


def _heads(module: nn.Module, linears: dict[str, _Found]) -> set[str]:
    """The layers that give logits: by the answer of models that have one, else by their name."""
    asked = (getattr(part, "get_output_embeddings", None) for part in module.modules())
    heads = [head for ask in asked if callable(ask) and (head := ask()) is not None]
    return {
        name
        for name, linear in linears.items()
        if any(linear.part is head for head in heads)
        or (not heads and name.rpartition(".")[2] == "lm_head")
    }


def _matrices_elsewhere(module: nn.Module, linears: dict[str, _Found]) -> str:
    """A sentence on the weights that are in no linear, such as experts in one 3-D parameter; "" if
    they are few beside the linears'. Embeddings are tables, not weights of a GEMM."""
    inside = {id(p) for found in linears.values() for p in found.part.parameters()}
    tables = {
        id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    elsewhere = {
        name: p.numel()
        for name, p in module.named_parameters()
        if not is_lazy(p) and p.ndim > 1 and id(p) not in inside | tables
    }
    weights = sum(math.prod(_shape(found.part)) for found in linears.values())
    if 10 * sum(elsewhere.values()) < weights or not elsewhere:
        return ""
    largest = max(elsewhere, key=lambda name: elsewhere[name])
    return (
        f"weights in no linear layer stay as they are: {sum(elsewhere.values()):,} elements "
        f"beside {weights:,} in linears, the most of them in {largest}"
    )


def _become(part: nn.Module, backend: Backend, layer: LayerPlan) -> None:
    """Turn a linear into the backend's: the same object, that others may hold, of another class."""
    with torch.device("meta"):  # its own parameters are never used
        like = backend.linear(
            layer.name, layer.in_features, layer.out_features, part.bias is not None
        )
    assert isinstance(like, MasterLinear)
    like.transposed = _is_conv1d(part)
    like.keeps_dtype = True
    for key, value in vars(like).items():
        part.__dict__.setdefault(key, value)
    part.__class__ = type(like)
