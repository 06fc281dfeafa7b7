"""Convert the linears and experts of any model to a backend's, in place. Modules and parameters
stay the same objects under the same names, so ties, optimizers, checkpoints, hooks and state dicts
are unaffected."""

import logging
from collections.abc import Iterable
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
from fp8stack.model.conversion_plan import choose_layers, decide, probe_for
from fp8stack.model.converted import UNCHANGED, PlanFollower
from fp8stack.model.converted_experts import convert_experts, expert_linear, require_free_name
from fp8stack.model.convertible import Layers, Linear, conv1d
from fp8stack.model.expert_layouts import ExpertWeight
from fp8stack.model.subclasses import subclass
from fp8stack.precision import LayerPlan, Plan, Recipe, resolve

log = logging.getLogger("fp8stack")

Model = TypeVar("Model", bound=nn.Module)


def convert(
    module: Model,
    plan: Plan | Recipe | str | None = None,
    exclude: Iterable[str] = (),
    *,
    recipe: Recipe | str | None = None,
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
        recipe: a recipe, in place of `plan`.
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
            matches no layer; the module is converted already; the plan is strict and the hardware
            cannot serve a layer.
    """
    if plan is not None and recipe is not None:
        raise UserError("convert takes a plan or a recipe, not both: leave one out.")
    plan = recipe if plan is None else plan
    layers, left_out = choose_layers(module, exclude, also)
    if not (amax_group in ("world", None) or isinstance(amax_group, dist.ProcessGroup)):
        raise UserError(
            f"amax_group: {described(amax_group)} is no group of torch.distributed. Pass what "
            "new_group or mesh.get_group gave, or None for this rank alone."
        )
    if isinstance(plan, str | Recipe):
        plan = resolve(plan, probe_for(module))
    if not isinstance(plan, Plan):
        raise UserError(
            f"convert needs a recipe or a plan, such as convert(model, 'delayed'), not "
            f"{described(plan)}."
        )
    plan = decide(module, plan, layers, left_out, scaled_loss)
    require_one_device([layers[layer.name].module for layer in plan.layers if layer.fp8], plan)
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
        module.register_forward_pre_hook(backend.set_matmul_precision)
    module.fp8_plan = plan  # type: ignore[assignment]
    for line in plan.summary():
        log.info(line)
    return module


def require_one_device(modules: Iterable[nn.Module], plan: Plan) -> None:
    """Raise a UserError if modules that are on several devices need state that is on one."""
    has_state = plan.delayed or any(table.stochastic for table in plan.tables)
    devices = {str(p.device) for module in modules for p in module.parameters(recurse=False)}
    devices -= {"meta"}
    if has_state and len(devices) > 1:
        raise UserError(
            f"The layers are on several devices ({', '.join(sorted(devices))}), and recipe "
            f"'{plan.recipe.name}' keeps its scales or counters on one. Use a recipe without such "
            "state: current, block or mxfp8."
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
