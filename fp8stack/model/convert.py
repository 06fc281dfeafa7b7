"""Convert the linears and experts of any model to a backend's, in place. Modules and parameters
stay the same objects under the same names, so ties, optimizers, checkpoints, hooks and state dicts
are unaffected."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fp8stack.common.errors import UserError, described
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.layers.linear import LowPrecisionLayer, LowPrecisionLinear
from fp8stack.layers.reminder import StateReminder
from fp8stack.layers.shared_amaxes import Group
from fp8stack.model.converted import UNCHANGED, PlanFollower
from fp8stack.model.converted_experts import convert_experts, expert_linear, require_free_name
from fp8stack.model.convertible import Layers, Linear, conv1d, find_layers, find_left_out, shape_of
from fp8stack.model.expert_layouts import ExpertWeight
from fp8stack.model.experts import (
    ExpertModule,
    find_mixtures,
    find_routers,
    matrices_beside,
    unknown_layouts,
)
from fp8stack.model.heads import find_heads
from fp8stack.model.hf import scheme_loaded_from
from fp8stack.model.subclasses import subclass
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
    """Convert the linears and experts of `module` in place: `nn.Linear`, and Conv1D and experts of
    transformers.

    Subclasses are converted if they inherit `forward`. Name other classes whose forward pass is a
    plain x W^T + b in `also`. Experts in one 3-D parameter run as grouped linears if the layout of
    the parameter is known.

    The training loop does not change: forward, `loss.backward()` and `optimizer.step()` on
    `module`, also in delayed scaling. Outputs keep their dtype. `plan_of(module)` (`.layers`,
    `.reasons`, `.summary()`) and the log of "fp8stack" list the converted layers, and the others
    with the reason. A forward pass updates `plan_of(module)` if layers were replaced or resized,
    and the first training pass warns about layers that it did not call. Convert before
    torch.compile.

    Delayed scaling begins with scale 1 and needs a few training passes; for a model that is only
    evaluated, use current scaling. A copy (`copy.deepcopy`, pickle) that is made between a training
    pass and the optimizer's step has the weight scales that the original has after the step.
    `nn.TransformerEncoderLayer` bypasses its linears in eval mode without gradients, so it does not
    run in FP8 there.

    Args:
        module: any model; its linears and experts stay the same objects, with the same parameters,
            hooks and attributes. A module of experts gets a child without parameters for each
            weight.
        plan: a recipe, by name or path, for the device of the model's parameters; or a plan from
            `resolve(recipe, hardware)`.
        exclude: one or several patterns of module paths to leave unchanged, such as "*.mlp.*", or
            of the paths of experts' parameters.
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
    layers = find_layers(module, also)
    left_out = find_left_out(module, layers, patterns, also)
    plan = _decided(module, plan, layers, left_out, scaled_loss)
    backend = build_backend(plan)
    if backend.delayed is not None:
        backend.delayed.sharing.group = amax_group
    changed = _with_all_experts(layers, plan)
    # All templates first: an error must leave the model as it was.
    templates = [_template(layers[layer.name], backend, layer) for layer in changed]
    reminder = StateReminder()
    for layer, template in zip(changed, templates, strict=True):
        table = layer.quantizers
        if table is not None and (table.delayed or table.stochastic):
            template.reminder = reminder
        target = layers[layer.name]
        if isinstance(template, GroupedLinear):
            assert isinstance(target, ExpertWeight)
            convert_experts(target, template)
        else:
            assert isinstance(template, LowPrecisionLinear)
            _become(target.module, template)
    if templates:
        # Before `backend.attach`, whose hooks need a plan that matches the model.
        PlanFollower(module, {name: layer.module for name, layer in layers.items()})
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


def _decided(
    module: nn.Module,
    plan: Plan,
    layers: Layers,
    left_out: dict[str, str],
    scaled_loss: bool,
) -> Plan:
    """`plan` with a decision for each layer; layers with the precision "unchanged" are not
    converted. Raises a UserError if an FP8 recipe leaves no layer in FP8."""
    shapes = {name: shape_of(layer) for name, layer in layers.items()}
    grouped = {n: layer.groups for n, layer in layers.items() if isinstance(layer, ExpertWeight)}
    linears = {name: layer.module for name, layer in layers.items() if name not in grouped}
    if plan.is_fp8 and not layers:
        raise UserError("Nothing to convert: no linear layer.")
    if plan.loss_scaling and not scaled_loss:
        unscaled = "fp16 needs a scaled loss: scale it (LossScaler) and pass scaled_loss=True"
        left_out = {name: left_out.get(name, unscaled) for name in layers}
    # If all layers are left out, "auto" must not fall back to a recipe without FP8.
    settled = plan.is_fp8 and len(left_out) == len(layers)
    fresh = replace(plan, layers=(), asked=plan.recipe.name if settled else plan.asked)
    heads = find_heads(module, linears, shapes)
    mixtures = find_mixtures(module)
    routers = find_routers(module, {name: shapes[name] for name in linears}, mixtures)
    fresh = fresh.for_layers(shapes, heads, left_out, UNCHANGED, routers=routers, grouped=grouped)
    if fresh.is_fp8 and not fresh.runs_fp8:
        names: dict[str, list[str]] = {}  # by the reason that they are not in FP8
        for layer in fresh.layers:
            names.setdefault(layer.reason, []).append(layer.name)
        listed = "; ".join(
            f"{first}{f' and {len(further)} more' if further else ''}: {reason}"
            for reason, (first, *further) in names.items()
        )
        raise UserError(f"Nothing to convert: no linear layer would be in FP8 ({listed}).")
    if not fresh.is_fp8 and fresh.compute_dtype not in ("bf16", "fp16"):
        unchanged = (replace(layer, precision=UNCHANGED) for layer in fresh.layers)
        return replace(fresh, layers=tuple(unchanged))
    notes = unknown_layouts(module, shapes, mixtures)
    if (origin := scheme_loaded_from(module)) is not None:
        notes = [*notes, origin]
    fresh = replace(fresh, reasons=(*fresh.reasons, *notes))
    return _with_work(module, fresh, mixtures) if fresh.is_fp8 else fresh


def _with_work(module: nn.Module, plan: Plan, mixtures: Collection[ExpertModule]) -> Plan:
    """`plan` with the work of its layers and of the matrices outside them; experts
    count only for the share of tokens that they get."""
    sizes = {
        layer.name: layer.in_features * layer.out_features * (layer.groups or 1)
        for layer in plan.layers
    }
    beside = matrices_beside(module, sizes, mixtures)
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


def _with_all_experts(layers: Layers, plan: Plan) -> list[LayerPlan]:
    """The layers that are converted: of experts all weights, if any of them is."""
    changed = {id(layers[la.name].module) for la in plan.layers if la.precision != UNCHANGED}
    return [layer for layer in plan.layers if id(layers[layer.name].module) in changed]


def _template(
    target: Linear | ExpertWeight, backend: Backend, layer: LayerPlan
) -> LowPrecisionLayer:
    """The backend's layer whose class and attributes a linear gets, or that experts multiply by;
    its parameters are not used. Raises a UserError if the module has an attribute of the same
    name."""
    if isinstance(target, ExpertWeight):
        require_free_name(target)
        return expert_linear(target, None if layer.precision == UNCHANGED else backend, layer.name)
    linear = target.module
    bias = getattr(linear, "bias", None) is not None
    with torch.device("meta"):
        template = backend.linear(layer.name, layer.in_features, layer.out_features, bias)
        usual = vars(nn.Linear(1, 1)).keys()
    assert isinstance(template, LowPrecisionLinear)
    template.transposed = conv1d(linear) is not None
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
    exact = type(linear) in (nn.Linear, conv1d(linear))
    linear.__class__ = type(template) if exact else subclass(type(template), type(linear))
