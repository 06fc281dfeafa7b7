"""Decide how `convert` converts a model: the layers, and the plan for them on any machine."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import nn

from fp8stack.common.errors import UserError, described
from fp8stack.model.converted import UNCHANGED
from fp8stack.model.convertible import Layers, find_layers, find_left_out, shape_of
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
from fp8stack.precision import Hardware, Plan, Recipe, probe, resolve
from fp8stack.precision.hardware import machine_for


def plan(
    module: nn.Module,
    recipe: Recipe | str = "auto",
    *,
    capability: str | None = None,
    gpu: str | None = None,
    te: bool | None = None,
    exclude: Iterable[str] = (),
    also: type[nn.Module] | tuple[type[nn.Module], ...] = (),
    scaled_loss: bool = False,
) -> Plan:
    """The plan by which `convert` would convert a model, on this machine or on a GPU that is not
    here. The model does not change. `print(plan(model, "delayed", capability="9.0"))` shows it.

    Args:
        module, exclude, also, scaled_loss: see `convert`. The model may be on the meta device.
        recipe: a recipe, its name or path, or "auto".
        capability: a compute capability such as "9.0", or "none" for a CPU; None, without `gpu`:
            this machine, by the device of the model's parameters.
        gpu: the name of a GPU, such as "H100", in place of its capability.
        te: with one of both, whether Transformer Engine is installed there; by default it is.

    Raises:
        UserError: bad input, see `convert`; no such capability or GPU.
    """
    layers, left_out = choose_layers(module, exclude, also)
    this_machine = capability is None and gpu is None and te is None
    hardware = probe_for(module) if this_machine else machine_for(capability, te, gpu=gpu)
    return decide(module, resolve(recipe, hardware), layers, left_out, scaled_loss)


def probe_for(module: nn.Module) -> Hardware:
    """The machine that the model's parameters are on: a GPU, or else the CPU."""
    devices = {parameter.device.type for parameter in module.parameters()}
    return probe(next((gpu for gpu in ("cuda", "xpu", "mps") if gpu in devices), "cpu"))


def choose_layers(
    module: nn.Module,
    exclude: Iterable[str],
    also: type[nn.Module] | tuple[type[nn.Module], ...],
) -> tuple[Layers, dict[str, str]]:
    """The layers of a model that `convert` may take, and the reason for each that it leaves out.
    For arguments and errors see `convert`."""
    also = (also,) if isinstance(also, type) else also
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    _require_arguments(module, exclude, also)
    patterns, also = tuple(exclude), tuple(also)
    layers = find_layers(module, also)
    return layers, find_left_out(module, layers, patterns, also)


def _require_arguments(module: object, exclude: object, also: object) -> None:
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


def decide(
    module: nn.Module,
    plan: Plan,
    layers: Layers,
    left_out: dict[str, str],
    scaled_loss: bool,
) -> Plan:
    """`plan` with a decision for each of the `layers` that `find_layers` returned; layers with the
    precision "unchanged" are not converted. Raises a UserError if an FP8 recipe leaves no layer in
    FP8, or sets more than linears."""
    usual = Recipe(name="").beside_linears
    for key, setting in plan.recipe.beside_linears.items():
        if setting != usual[key]:
            raise UserError(
                f"convert changes linear layers alone, but recipe '{plan.recipe.name}' has {key} = "
                f"'{setting}'. Set it to '{usual[key]}' in the recipe."
            )
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
