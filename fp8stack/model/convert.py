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

from fp8stack.common.errors import UserError, described, quoted
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.linear import LowPrecisionLinear
from fp8stack.layers.reminder import StateReminder
from fp8stack.layers.shared_amaxes import Group
from fp8stack.model.converted import UNCHANGED, PlanFollower
from fp8stack.model.experts import ExpertModule, find_mixtures, find_routers, matrices_beside
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
    """Convert the linears of `module` in place: `nn.Linear`, and Conv1D of transformers.

    Subclasses are converted if they inherit `forward`. Name other classes whose forward pass is a
    plain x W^T + b in `also`.

    The training loop does not change: forward, `loss.backward()` and `optimizer.step()` on
    `module`, also in delayed scaling. Outputs keep their dtype. `module.fp8_plan` (`.layers`,
    `.reasons`, `.summary()`) and the log of "fp8stack" list the converted layers, and the others
    with the reason. A forward pass updates `module.fp8_plan` if layers were replaced or resized,
    and the first training pass warns about layers that it did not call. Convert before
    torch.compile.

    Delayed scaling begins with scale 1 and needs a few training passes; for a model that is only
    evaluated, use current scaling. A copy (`copy.deepcopy`, pickle) that is made between a training
    pass and the optimizer's step has the weight scales that the original has after the step.
    `nn.TransformerEncoderLayer` bypasses its linears in eval mode without gradients, so it does not
    run in FP8 there.

    Args:
        module: any model; its linears stay the same objects, with the same parameters, hooks and
            attributes.
        plan: a recipe, by name or path, for the device of the model's parameters; or a plan from
            `resolve(recipe, hardware)`.
        exclude: one or several patterns of module paths to leave unchanged, such as "*.mlp.*".
        also: classes, such as transformers' FalconLinear, that compute just x W^T + b, with a
            parameter `weight` [out, in] and an optional `bias` [out].
        scaled_loss: whether your loop scales the loss, with `LossScaler` or torch's GradScaler. A
            plan whose compute dtype is fp16 (`plan.loss_scaling`) needs it: without it, the layers
            stay unchanged. Other plans do not.
        amax_group: for delayed scaling, the torch.distributed group whose ranks train this model on
            different data: by default all ranks, None for only this rank. Amaxes are reduced to
            their maximum, so that all ranks cast with the same scales. In pipeline parallelism pass
            the ranks of one stage, such as `mesh.get_group("dp")`.

    Returns:
        `module`.

    Raises:
        UserError: an argument has the wrong type; there is nothing to convert, or no layer would be
            in FP8; the recipe has a dtype for attention or the residual stream; a pattern or class
            matches no layer; the module is converted already; under `strict`, the hardware cannot
            serve a layer.
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
    for key, setting in plan.recipe.beside_linears.items():
        if setting != usual[key]:
            raise UserError(
                f"convert changes linear layers alone, but recipe '{plan.recipe.name}' has {key} = "
                f"'{setting}'. Set it to '{usual[key]}' in the recipe."
            )
    linears = _linears(module, also)
    left_out = _left_out(module, linears, patterns, also)
    plan = _decided(module, plan, linears, left_out, scaled_loss)
    backend = build_backend(plan)
    if backend.delayed is not None:
        backend.delayed.sharing.group = amax_group
    modules = {name: linear.module for name, linear in linears.items()}
    changed = [layer for layer in plan.layers if layer.precision != UNCHANGED]
    # All templates first: an error must leave the model as it was.
    templates = [_template(modules[layer.name], backend, layer) for layer in changed]
    reminder = StateReminder()
    for layer, template in zip(changed, templates, strict=True):
        table = layer.quantizers
        if table is not None and (table.delayed or table.stochastic):
            template.reminder = reminder
        _become(modules[layer.name], template)
    if templates:
        # Before `backend.attach`, whose hooks need a plan that matches the model.
        PlanFollower(module, modules)
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


class _Linear(NamedTuple):
    """A linear with all its module paths; the first is its name."""

    module: nn.Module
    paths: list[str]


def _linears(module: nn.Module, also: tuple[type[nn.Module], ...]) -> dict[str, _Linear]:
    linears: dict[int, _Linear] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, LowPrecisionLinear) or hasattr(child, "fp8_plan"):
            raise UserError("This model is converted already. Convert it once, from the original.")
        if isinstance(child, (nn.Linear, *also)) or _conv1d(child):
            if not path:
                raise UserError("A bare linear cannot be converted in place: wrap it in a module.")
            linears.setdefault(id(child), _Linear(child, [])).paths.append(path)
    for kind in also:
        if not any(isinstance(linear.module, kind) for linear in linears.values()):
            raise UserError(f"also: no layer of this model is a {kind.__name__}.")
    return {linear.paths[0]: linear for linear in linears.values()}


def _conv1d(module: nn.Module) -> type[nn.Module] | None:
    """transformers' class Conv1D, a linear with weight [in, out], if `module` is one; else None."""
    name = ("transformers.pytorch_utils", "Conv1D")
    kinds = type(module).__mro__
    return next((kind for kind in kinds if (kind.__module__, kind.__name__) == name), None)


def _left_out(
    module: nn.Module,
    linears: dict[str, _Linear],
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
    for name, (linear, paths) in linears.items():
        matched = [pattern for pattern in patterns if fnmatch.filter(paths, pattern)]
        owner = module.get_submodule(name.rpartition(".")[0])
        kind = type(linear)
        plain = isinstance(linear, also) or kind.forward is (_conv1d(linear) or nn.Linear).forward
        missing = [key for key in ("weight", "bias") if key not in linear._parameters]
        computed = [
            key for key in missing if key != "bias" or getattr(linear, key, None) is not None
        ]
        if matched:
            reasons[name] = f"excluded by the pattern '{matched[0]}'"
        elif isinstance(owner, nn.MultiheadAttention):
            reasons[name] = "nn.MultiheadAttention reads its weight and never calls it"
        elif "forward" in vars(linear):
            reasons[name] = "it has a forward of its own"
        elif not plain:
            remedy = f"pass also=({kind.__name__},) if that is a plain x W^T + b"
            reasons[name] = f"a {kind.__name__} has a forward of its own: {remedy}"
        elif computed:
            reasons[name] = f"its {computed[0]} is computed and no parameter"
        elif is_lazy(linear.get_parameter("weight")):
            reasons[name] = "it has no size before its first pass"
        elif reason := _unusual_storage(linear.get_parameter("weight")):
            reasons[name] = reason
        elif not all(_shape(linear)):
            reasons[name] = "its weight has no elements"
    return reasons


def _unusual_storage(weight: nn.Parameter) -> str:
    """The reason that a weight is no plain tensor that a layer can quantize; "" if it is."""
    if not weight.is_floating_point() or weight.itemsize == 1:
        return f"its weight is quantized already ({str(weight.dtype).removeprefix('torch.')})"
    if is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__} of its own"
    return ""


def _decided(
    module: nn.Module,
    plan: Plan,
    linears: dict[str, _Linear],
    left_out: dict[str, str],
    scaled_loss: bool,
) -> Plan:
    """`plan` with a decision for each linear; linears with the precision "unchanged" are not
    converted. Raises a UserError if an FP8 recipe leaves no layer in FP8."""
    shapes = {name: _shape(linear.module) for name, linear in linears.items()}
    if plan.is_fp8 and not linears:
        raise UserError("Nothing to convert: no linear layer.")
    if plan.loss_scaling and not scaled_loss:
        unscaled = "fp16 needs a scaled loss: scale it (LossScaler) and pass scaled_loss=True"
        left_out = {name: left_out.get(name, unscaled) for name in linears}
    # If all layers are left out, "auto" must not fall back to a recipe without FP8.
    settled = plan.is_fp8 and len(left_out) == len(linears)
    fresh = replace(plan, layers=(), asked=plan.recipe.name if settled else plan.asked)
    heads = find_heads(module, {name: linear.module for name, linear in linears.items()}, shapes)
    mixtures = find_mixtures(module)
    routers = find_routers(module, shapes, mixtures)
    fresh = fresh.for_layers(shapes, heads, left_out, UNCHANGED, routers=routers)
    if fresh.is_fp8 and not fresh.runs_fp8:
        names: dict[str, list[str]] = {}  # by the reason that they are not in FP8
        for layer in fresh.layers:
            names.setdefault(layer.reason, []).append(layer.name)
        reasons = "; ".join(
            f"{first}{f' and {len(further)} more' if further else ''}: {reason}"
            for reason, (first, *further) in names.items()
        )
        raise UserError(f"Nothing to convert: no linear layer would be in FP8 ({reasons}).")
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
    mixtures: Collection[ExpertModule],
) -> Plan:
    """`plan` with the work of its layers and of the matrices outside them; experts
    count only for the share of tokens that they get."""
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
        work_outside_linears=beside.work,
        counted="GEMM weights" if unknown else "GEMM FLOPs",
        reasons=(*plan.reasons, beside.sentence) if beside.sentence else plan.reasons,
    )


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(in features, out features)."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    weight = linear._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"also: a {type(linear).__name__} has no parameter `weight` [out, in].")
    rows, columns = weight.shape
    return (rows, columns) if _conv1d(linear) else (columns, rows)


def _template(linear: nn.Module, backend: Backend, layer: LayerPlan) -> LowPrecisionLinear:
    """The backend's linear whose class and attributes `linear` gets; its parameters are not used.
    Raises a UserError if `linear` has an attribute of the same name."""
    bias = getattr(linear, "bias", None) is not None
    with torch.device("meta"):
        template = backend.linear(layer.name, layer.in_features, layer.out_features, bias)
        usual = vars(nn.Linear(1, 1)).keys()
    assert isinstance(template, LowPrecisionLinear)
    template.transposed = _conv1d(linear) is not None
    template.keeps_dtype = True
    clashing = [key for key in vars(template) if key not in usual and key in vars(linear)]
    if clashing:
        raise UserError(
            f"{layer.name} has an attribute '{clashing[0]}' of its own, which convert needs to "
            "set: exclude it (convert(..., exclude=...)) or rename the attribute."
        )
    return template


def _become(linear: nn.Module, template: LowPrecisionLinear) -> None:
    """Convert `linear` in place: it gets the class and the attributes of `template`."""
    for key, value in vars(template).items():
        linear.__dict__.setdefault(key, value)
    if not hasattr(linear, "bias"):
        linear.register_parameter("bias", None)
    exact = type(linear) in (nn.Linear, _conv1d(linear))
    linear.__class__ = type(template) if exact else _subclass(type(template), type(linear))


def _subclass(kind: type[LowPrecisionLinear], original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `original` with the forward pass of `kind`, so that isinstance checks still
    hold."""
    if (kind, original) in _SUBCLASSES:
        return _SUBCLASSES[kind, original]

    def reduce(self: nn.Module, protocol: object) -> tuple[object, ...]:
        return _blank, (kind, original), self.__getstate__()  # type: ignore[no-untyped-call]

    name = f"{kind.__name__}[{original.__name__}]"
    subclass = type(name, (kind, original), {"__reduce_ex__": reduce})
    return _SUBCLASSES.setdefault((kind, original), subclass)


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _blank(kind: type[LowPrecisionLinear], original: type[nn.Module]) -> nn.Module:
    """An instance without attributes, for pickle."""
    subclass = _subclass(kind, original)
    return subclass.__new__(subclass)
