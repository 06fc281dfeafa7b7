"""Convert the linears of any model to a backend's, in place. Modules and parameters stay the same
objects under the same names, so ties, optimizers, checkpoints, hooks and state dicts are
unaffected."""

import fnmatch
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8stack.backends import Backend, build_backend
from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.backends.reminder import StateReminder
from fp8stack.backends.shared_amaxes import Group
from fp8stack.errors import UserError, described, quoted
from fp8stack.model.converted import UNCHANGED, PlanFollower
from fp8stack.model.experts import Mixture, find_mixtures, find_routers, matrices_beside
from fp8stack.model.heads import find_heads
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
        UserError: an argument of another type; nothing to convert, or no layer that would be in
            FP8; a recipe with a dtype for attention or the residual stream; a pattern or class that
            matches no layer; a module that is or was converted; under `strict`, a layer that the
            hardware cannot serve.
    """
    also = (also,) if isinstance(also, type) else also
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    _require_arguments(module, exclude, also, amax_group)
    patterns, also = tuple(exclude), tuple(also)
    if isinstance(plan, str | Recipe):
        devices = {parameter.device.type for parameter in module.parameters()}
        plan = resolve(plan, probe("cuda" if "cuda" in devices else "cpu"))
    if not isinstance(plan, Plan):
        raise UserError(
            f"convert needs a recipe or a plan, such as convert(model, 'delayed'), not "
            f"{described(plan)}."
        )
    usual = Recipe(name="").beside_linears
    for key, asked in plan.recipe.beside_linears.items():
        if asked != usual[key]:
            raise UserError(
                f"convert changes linear layers alone, but recipe '{plan.recipe.name}' has {key} = "
                f"'{asked}'. Set it to '{usual[key]}' in the recipe."
            )
    linears = _linears(module, also)
    left_out = _left_out(module, linears, patterns, also)
    plan = _decided(module, plan, linears, left_out, scaled_loss)
    backend = build_backend(plan)
    if backend.delayed is not None:
        backend.delayed.sharing.group = amax_group
    parts = {name: linear.part for name, linear in linears.items()}
    changed = [layer for layer in plan.layers if layer.precision != UNCHANGED]
    likes = [(parts[layer.name], _like(parts[layer.name], backend, layer)) for layer in changed]
    reminder = StateReminder()
    for layer, (part, like) in zip(changed, likes, strict=True):
        table = layer.quantizers
        if table is not None and (table.delayed or table.stochastic):
            like.reminder = reminder
        _become(part, like)
    if likes:
        PlanFollower(module, parts)  # its hooks come first: a backend's need the layers of the plan
        reminder.attach(module)
    backend.attach(module)
    if plan.compute_dtype == "tf32":
        backend.set_matmul_precision(module)
    module.fp8_plan = plan  # type: ignore[assignment]
    for line in plan.summary():
        log.info(line)
    return module


def _require_arguments(module: object, exclude: object, also: object, amax_group: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise UserError(
            f"convert takes a model, not {described(module)}: make one first, such as "
            f"convert({module.__name__}(...), 'delayed')."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            "convert cannot change a TorchScript module: convert the model that it was made from, "
            "and compile that with torch.compile."
        )
    if not isinstance(module, nn.Module):
        raise UserError(f"convert takes a model (torch.nn.Module), not {described(module)}.")
    for pattern in exclude if isinstance(exclude, Iterable) else (exclude,):
        if not isinstance(pattern, str):
            raise UserError(
                f"exclude: {described(pattern)} is no pattern. Give module paths such as "
                "'*.mlp.*', one or several."
            )
    for kind in also if isinstance(also, Iterable) else (also,):
        if not isinstance(kind, type):
            raise UserError(
                f"also: {described(kind)} is no class. Give classes of layers, such as "
                "also=(FalconLinear,)."
            )
    if not (amax_group in ("world", None) or isinstance(amax_group, dist.ProcessGroup)):
        raise UserError(
            f"amax_group: {described(amax_group)} is no group of torch.distributed. Pass what "
            "new_group or mesh.get_group gave, or None for this rank alone."
        )


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
        elif why := _held_otherwise(part.get_parameter("weight")):
            reasons[name] = why
        elif not all(_shape(part)):
            reasons[name] = "its weight has no elements"
    return reasons


def _held_otherwise(weight: nn.Parameter) -> str:
    """Why a weight is not the numbers that a layer could quantize; "" if it is."""
    if not weight.is_floating_point() or weight.itemsize == 1:
        return f"its weight is quantized already ({str(weight.dtype).removeprefix('torch.')})"
    if is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__} of its own"
    return ""


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
    heads = find_heads(module, {name: linear.part for name, linear in linears.items()}, shapes)
    mixtures = find_mixtures(module)
    routers = find_routers(module, shapes, mixtures)
    fresh = fresh.for_layers(shapes, heads, left_out, UNCHANGED, routers=routers)
    if fresh.is_fp8 and not fresh.runs_fp8:
        names: dict[str, list[str]] = {}  # by the reason why they are not in FP8
        for layer in fresh.layers:
            names.setdefault(layer.reason, []).append(layer.name)
        why = "; ".join(
            f"{first}{f' and {len(others)} more' if others else ''}: {reason}"
            for reason, (first, *others) in names.items()
        )
        raise UserError(f"Nothing to convert: no linear layer would be in FP8 ({why}).")
    if fresh.is_fp8:
        return _with_work(module, fresh, shapes, mixtures)
    if fresh.compute_dtype in ("bf16", "fp16"):
        return fresh
    unchanged = (replace(layer, precision=UNCHANGED) for layer in fresh.layers)
    return replace(fresh, layers=tuple(unchanged))


def _with_work(
    module: nn.Module,
    plan: Plan,
    shapes: Mapping[str, tuple[int, int]],
    mixtures: Collection[Mixture],
) -> Plan:
    """`plan` with the work of its layers and of the matrices outside them: a token goes to a few
    experts alone."""
    beside = matrices_beside(module, shapes, mixtures)
    layers = []
    for layer in plan.layers:
        mixture = next((mixture for mixture in mixtures if mixture.holds(layer.name)), None)
        active = 1.0 if mixture is None else mixture.active or 1.0
        layers.append(replace(layer, active=active))
    unknown = any(mixture.active is None for mixture in mixtures)
    return replace(
        plan,
        layers=tuple(layers),
        beside_work=beside.work,
        counted="GEMM weights" if unknown else "GEMM FLOPs",
        reasons=(*plan.reasons, beside.sentence) if beside.sentence else plan.reasons,
    )


def _shape(part: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    weight = part._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"also: a {type(part).__name__} has no parameter `weight` [out, in].")
    rows, columns = weight.shape
    return (rows, columns) if _conv1d(part) else (columns, rows)


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
