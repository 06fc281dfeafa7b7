"""Convert the linears of any model to a backend's, in place. Modules and parameters stay the same
objects under the same names, so ties, optimizers, checkpoints, hooks and state dicts are
unaffected."""

import fnmatch
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8stack.backends import Backend, build_backend
from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.backends.shared_amaxes import Group
from fp8stack.errors import UserError, quoted
from fp8stack.model.converted import UNCHANGED, PlanFollower
from fp8stack.precision import LayerPlan, Plan, Recipe, probe, resolve

log = logging.getLogger("fp8stack")

Model = TypeVar("Model", bound=nn.Module)


def convert(
    module: Model,
    plan: Plan | Recipe | str,
    exclude: Iterable[str] = (),
    *,
    also: type[nn.Module] | tuple[type[nn.Module], ...] = (),
    scaled_loss: bool = False,
    amax_group: Group = "world",
) -> Model:
    """Convert the linears of `module` as planned: `nn.Linear`, and Conv1D of transformers.

    Subclasses are converted if they inherit `forward`; of others, name those whose forward is a
    plain x W^T + b in `also`.

    Nothing else is needed in a training loop: forward, `loss.backward()` and `optimizer.step()` on
    the module that was converted, delayed scaling included. Outputs keep the dtype that they had.
    What was converted, what was not and why is in `module.fp8_plan` (`.layers`, `.reasons`,
    `.summary()`) and in the log of "fp8stack". A forward pass brings it up to date where layers
    were replaced or resized, and the first that trains warns of layers that it did not call.
    Convert before torch.compile.

    Delayed scaling begins with scale 1 and needs a few training passes; for a model that is only
    evaluated, use current scaling. A copy (`copy.deepcopy`, pickle) that is made between a training
    pass and the optimizer's step takes the scales of weights that the original takes after the
    step. `nn.TransformerEncoderLayer` reads its weights past its linears
    in eval mode without gradients: there it is not in FP8.

    Args:
        module: any model; its linears become ours in place: the same objects, with the same
            parameters, hooks and attributes.
        plan: a recipe, by name or path, for the device that the model's parameters are on; or what
            `resolve(recipe, hardware)` gave.
        exclude: a pattern of module paths to leave as they are, such as "*.mlp.*", or several.
        also: classes, such as transformers' FalconLinear, that compute x W^T + b and no more, with
            a parameter `weight` [out, in] and a `bias` [out] or none.
        scaled_loss: whether your loop scales the loss, by `LossScaler` or torch's GradScaler. A
            plan whose compute dtype is fp16 (`plan.loss_scaling`) needs it; without it, the layers
            stay as they are. Others do not.
        amax_group: delayed scaling: the torch.distributed group whose ranks train this model, each
            on its part of the data; all ranks if left out, None for this one alone. Their amaxes
            are reduced to the maximum, so that all cast with the same scales. In pipeline
            parallelism pass the ranks of one stage, such as `mesh.get_group("dp")`.

    Returns:
        `module`.

    Raises:
        UserError: nothing to convert, or no layer that would be in FP8; a recipe with a dtype for
            attention or the residual stream; a pattern or class that matches no layer; a module
            that is or was converted; under `strict`, a layer that the hardware cannot serve.
    """
    if isinstance(plan, str | Recipe):
        devices = {parameter.device.type for parameter in module.parameters()}
        plan = resolve(plan, probe("cuda" if "cuda" in devices else "cpu"))
    if not isinstance(plan, Plan):
        raise UserError("convert needs a recipe or a plan, such as convert(model, 'delayed').")
    usual = Recipe(name="").beside_linears
    for key, asked in plan.recipe.beside_linears.items():
        if asked != usual[key]:
            raise UserError(
                f"convert changes linear layers alone, but recipe '{plan.recipe.name}' has {key} = "
                f"'{asked}'. Set it to '{usual[key]}' in the recipe."
            )
    also = (also,) if isinstance(also, type) else tuple(also)
    linears = _linears(module, also)
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    left_out = _left_out(module, linears, patterns, also)
    plan = _decided(module, plan, linears, left_out, scaled_loss)
    if plan.is_fp8 and (elsewhere := _matrices_elsewhere(module, linears)):
        plan = replace(plan, reasons=(*plan.reasons, elsewhere))
    backend = build_backend(plan)
    if backend.delayed is not None:
        backend.delayed.sharing.group = amax_group
    parts = {name: linear.part for name, linear in linears.items()}
    changed = [layer for layer in plan.layers if layer.precision != UNCHANGED]
    likes = [(parts[layer.name], _like(parts[layer.name], backend, layer)) for layer in changed]
    for part, like in likes:
        _become(part, like)
    if likes:
        PlanFollower(module, parts)  # its hooks come first: a backend's need the layers of the plan
    backend.attach(module)
    if plan.compute_dtype == "tf32":
        backend.set_matmul_precision(module)
    module.fp8_plan = plan  # type: ignore[assignment]
    for line in plan.summary():
        log.info(line)
    return module


class _Found(NamedTuple):
    """A linear, with all its module paths; the first is its name."""

    part: nn.Module
    paths: list[str]


def _linears(module: nn.Module, also: tuple[type[nn.Module], ...]) -> dict[str, _Found]:
    found: dict[int, _Found] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, LowPrecisionLinear) or hasattr(part, "fp8_plan"):
            raise UserError("This model is converted already. Convert it once, from the original.")
        if isinstance(part, (nn.Linear, *also)) or _conv1d(part):
            if not path:
                raise UserError("A bare linear cannot be converted in place: wrap it in a module.")
            found.setdefault(id(part), _Found(part, [])).paths.append(path)
    for kind in also:
        if not any(isinstance(linear.part, kind) for linear in found.values()):
            raise UserError(f"also: no layer of this model is a {kind.__name__}.")
    return {linear.paths[0]: linear for linear in found.values()}


def _conv1d(part: nn.Module) -> type[nn.Module] | None:
    """The class Conv1D of transformers, a linear with weight [in, out], if `part` is one; else
    None."""
    home = ("transformers.pytorch_utils", "Conv1D")
    kinds = type(part).__mro__
    return next((kind for kind in kinds if (kind.__module__, kind.__name__) == home), None)


def _left_out(
    module: nn.Module,
    linears: dict[str, _Found],
    patterns: tuple[str, ...],
    also: tuple[type[nn.Module], ...],
) -> dict[str, str]:
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
        kind = type(part)
        plain = isinstance(part, also) or kind.forward is (_conv1d(part) or nn.Linear).forward
        missing = [key for key in ("weight", "bias") if key not in part._parameters]
        computed = [key for key in missing if key != "bias" or getattr(part, key, None) is not None]
        if matched:
            reasons[name] = f"excluded by the pattern '{matched[0]}'"
        elif isinstance(owner, nn.MultiheadAttention):
            reasons[name] = "nn.MultiheadAttention reads its weight and never calls it"
        elif "forward" in vars(part):
            reasons[name] = "it has a forward of its own"
        elif not plain:
            remedy = f"pass also=({kind.__name__},) if that is a plain x W^T + b"
            reasons[name] = f"a {kind.__name__} has a forward of its own: {remedy}"
        elif computed:
            reasons[name] = f"its {computed[0]} is computed and no parameter"
        elif is_lazy(part.get_parameter("weight")):
            reasons[name] = "it has no size before its first pass"
        elif not all(_shape(part)):
            reasons[name] = "its weight has no elements"
    return reasons


def _decided(
    module: nn.Module,
    plan: Plan,
    linears: dict[str, _Found],
    left_out: dict[str, str],
    scaled_loss: bool,
) -> Plan:
    """`plan` with a decision for each linear; one whose precision is "unchanged" stays as it is.
    Raises a UserError if the recipe is an FP8 recipe, and no layer would be in FP8."""
    shapes = {name: _shape(linear.part) for name, linear in linears.items()}
    if plan.is_fp8 and not linears:
        raise UserError("Nothing to convert: no linear layer.")
    if plan.loss_scaling and not scaled_loss:
        unscaled = "fp16 needs a scaled loss: scale it (LossScaler) and pass scaled_loss=True"
        left_out = {name: left_out.get(name, unscaled) for name in linears}
    # Where nothing is left, there is nothing for "auto" to choose for.
    settled = plan.is_fp8 and len(left_out) == len(linears)
    fresh = replace(plan, layers=(), asked=plan.recipe.name if settled else plan.asked)
    fresh = fresh.for_layers(shapes, _heads(module, linears), left_out, UNCHANGED)
    if fresh.is_fp8 and not fresh.runs_fp8:
        names: dict[str, list[str]] = {}  # by the reason why they are not in FP8
        for layer in fresh.layers:
            names.setdefault(layer.reason, []).append(layer.name)
        why = "; ".join(
            f"{first}{f' and {len(others)} more' if others else ''}: {reason}"
            for reason, (first, *others) in names.items()
        )
        raise UserError(f"Nothing to convert: no linear layer would be in FP8 ({why}).")
    if fresh.is_fp8 or fresh.compute_dtype in ("bf16", "fp16"):
        return fresh
    unchanged = (replace(layer, precision=UNCHANGED) for layer in fresh.layers)
    return replace(fresh, layers=tuple(unchanged))


def _shape(part: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    weight = part._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"also: a {type(part).__name__} has no parameter `weight` [out, in].")
    rows, columns = weight.shape
    return (rows, columns) if _conv1d(part) else (columns, rows)


def _heads(module: nn.Module, linears: dict[str, _Found]) -> set[str]:
    """The layers that compute logits: those of `get_output_embeddings`, by their name, tied to an
    embedding, or outside the blocks with as many outputs as the largest."""
    asked = (getattr(part, "get_output_embeddings", None) for part in module.modules())
    answers = [head for ask in asked if callable(ask) and (head := ask()) is not None]
    heads = {id(part) for answer in answers for part in answer.modules()}
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tied = {id(table.weight) for table in tables}
    vocabulary = max((table.num_embeddings for table in tables), default=None)
    found, named = set(), {}
    for name, (part, _) in linears.items():
        if id(part) in heads or id(part._parameters.get("weight")) in tied:
            found.add(name)
        path = name.split(".")
        if any(key.isdecimal() for key in path[:-1]):
            continue  # in a block
        if _shape(part)[1] == vocabulary:
            found.add(name)
        place = next((i for i, key in enumerate(path) if key in _HEADS), None)
        if place is not None:
            named[tuple(path[: place + 1])] = name  # the last of several gives the logits
    return found | set(named.values())


_HEADS = {"lm_head", "head", "classifier", "classification_head", "score", "qa_outputs"}


def _matrices_elsewhere(module: nn.Module, linears: dict[str, _Found]) -> str:
    """A sentence about weights outside linears, such as experts in one 3-D parameter; "" if they
    are few compared with the linears'. Embeddings do not count."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    known = [*tables, *(found.part for found in linears.values())]
    inside = {id(p) for part in known for p in part.parameters()}
    elsewhere = {
        name: p
        for name, p in module.named_parameters()
        if not is_lazy(p) and p.ndim > 1 and id(p) not in inside
    }
    weights = sum(math.prod(_shape(found.part)) for found in linears.values())
    count = sum(p.numel() for p in elsewhere.values())
    if 10 * count < weights or not elsewhere:
        return ""
    largest = max(elsewhere, key=lambda name: elsewhere[name].numel())
    shape = list(elsewhere[largest].shape)
    kind = ", matrices in one tensor, as experts are" if len(shape) == 3 else ""
    return (
        f"weights outside linear layers are not in FP8: {count:,} elements beside {weights:,} in "
        f"linears, the most of them in {largest} {shape}{kind}"
    )


def _like(part: nn.Module, backend: Backend, layer: LayerPlan) -> LowPrecisionLinear:
    """The backend's linear for a layer that is `part`; its own parameters are never used. Raises a
    UserError if `part` has an attribute that it would need."""
    bias = getattr(part, "bias", None) is not None
    with torch.device("meta"):
        like = backend.linear(layer.name, layer.in_features, layer.out_features, bias)
        usual = vars(nn.Linear(1, 1)).keys()
    assert isinstance(like, LowPrecisionLinear)
    like.transposed = _conv1d(part) is not None
    like.keeps_dtype = True
    taken = [key for key in vars(like) if key not in usual and key in vars(part)]
    if taken:
        raise UserError(
            f"{layer.name} has an attribute '{taken[0]}' of its own, which convert needs to set: "
            "exclude it (convert(..., exclude=...)) or rename the attribute."
        )
    return like


def _become(part: nn.Module, like: LowPrecisionLinear) -> None:
    """Turn a linear into the backend's by changing its class; the object stays the same."""
    for key, value in vars(like).items():
        part.__dict__.setdefault(key, value)
    if not hasattr(part, "bias"):
        part.register_parameter("bias", None)
    exact = type(part) in (nn.Linear, _conv1d(part))
    part.__class__ = type(like) if exact else _subclass(type(like), type(part))


def _subclass(ours: type[LowPrecisionLinear], theirs: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `theirs` with the forward pass of `ours`, so that isinstance checks still
    hold."""
    if (ours, theirs) in _SUBCLASSES:
        return _SUBCLASSES[ours, theirs]

    def reduce(self: nn.Module, protocol: object) -> tuple[object, ...]:
        return _blank, (ours, theirs), self.__getstate__()  # type: ignore[no-untyped-call]

    name = f"{ours.__name__}[{theirs.__name__}]"
    made = type(name, (ours, theirs), {"__reduce_ex__": reduce})
    return _SUBCLASSES.setdefault((ours, theirs), made)


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _blank(ours: type[LowPrecisionLinear], theirs: type[nn.Module]) -> nn.Module:
    """An empty instance for pickle."""
    kind = _subclass(ours, theirs)
    return kind.__new__(kind)
