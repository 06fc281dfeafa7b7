"""FP8 in any model: its linears replaced in place by a backend's. It must not know a model by name.

Parameters stay the same objects under the same names: ties, optimizers made later, checkpoints and
state dicts do not notice.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from fp8stack.backends import Backend, build_backend
from fp8stack.backends.linear import MasterLinear
from fp8stack.errors import UserError, quoted
from fp8stack.precision import Plan
from fp8stack.precision.recipe import PlainRecipe

log = logging.getLogger("fp8stack")


def convert(module: nn.Module, plan: Plan, exclude: Iterable[str] = ()) -> nn.Module:
    """Let the linears of `module` run as `plan` has it: `nn.Linear`, and Conv1D of transformers.

    Nothing else is needed in a training loop: forward, `loss.backward()` and `optimizer.step()` on
    the module that was converted, delayed scaling included. Outputs keep the dtype that they had.
    What was converted, what was not and why is in `module.fp8_plan` (`.layers`, `.reasons`,
    `.summary()`) and in the log of "fp8stack". Convert before the optimizer is built, before a
    wrapper such as DDP, and before torch.compile.

    Args:
        module: any model; it is changed in place. Weights and biases stay the same parameters.
        plan: what `resolve(recipe, hardware)` gave.
        exclude: patterns of module paths to leave as they are, such as "*.mlp.*".

    Returns:
        `module`.

    Raises:
        UserError: nothing to convert, a pattern that matches no layer, or a module that is or was
            converted; under `strict`, a layer that the hardware cannot serve.
    """
    linears = dict(_linears(module))
    left_out = _left_out(module, linears, tuple(exclude))
    shapes = {name: _shape(part) for name, part in linears.items() if name not in left_out}
    plan = replace(plan, layers=())
    if plan.is_fp8 and not shapes:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(f"Nothing to convert: no linear layer{f' ({why})' if why else ''}.")
    plan = plan.for_layers(shapes, heads=_heads(module, linears))
    if plan.loss_scaling:
        unscaled = "fp16 needs a scaled loss, which convert cannot give: unchanged"
        left_out |= dict.fromkeys(shapes, unscaled)
    plan = replace(
        plan, reasons=(*plan.reasons, *(f"{name}: {why}" for name, why in left_out.items()))
    )
    backend = build_backend(plan)
    chosen = [layer.name for layer in plan.layers if layer.fp8 or _casts(plan)]
    for name in chosen:
        if name not in left_out:
            _replace_everywhere(module, linears[name], _built(backend, name, linears[name]))
    backend.attach(module)
    module.fp8_plan = plan  # type: ignore[assignment]
    for line in plan.summary():
        log.info(line)
    return module


def _casts(plan: Plan) -> bool:
    """Whether a plan without FP8 changes how a linear multiplies."""
    return isinstance(plan.recipe, PlainRecipe) and plan.compute_dtype in ("bf16", "fp16")


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that is a linear in some way, once, by its first module path."""
    for name, part in module.named_modules():
        if isinstance(part, MasterLinear) or hasattr(part, "fp8_plan"):
            raise UserError("This model is converted already. Convert it once, from the original.")
        if isinstance(part, nn.Linear) or _is_conv1d(part):
            if not name:
                raise UserError("A bare linear cannot be replaced in place: wrap it in a module.")
            yield name, part


def _is_conv1d(part: nn.Module) -> bool:
    """Whether `part` is transformers' Conv1D: a linear whose weight is [in, out]."""
    kind = type(part)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _left_out(
    module: nn.Module, linears: dict[str, nn.Module], exclude: tuple[str, ...]
) -> dict[str, str]:
    """The layers that stay as they are, with the reason."""
    reasons = {}
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in linears):
            raise UserError(
                f"exclude: the pattern '{quoted(pattern)}' matches no layer. "
                f"Layers: {', '.join(linears)}."
            )
    for name, part in linears.items():
        matched = [pattern for pattern in exclude if fnmatch.fnmatchcase(name, pattern)]
        owner = module.get_submodule(name.rpartition(".")[0])
        if matched:
            reasons[name] = f"unchanged, excluded by the pattern '{matched[0]}'"
        elif isinstance(owner, nn.MultiheadAttention):
            reasons[name] = "unchanged, nn.MultiheadAttention reads its weight and never calls it"
        elif type(part) is not nn.Linear and not _is_conv1d(part):
            reasons[name] = f"unchanged, a {type(part).__name__} may do more than nn.Linear"
        elif part._parameters.get("weight") is None:
            reasons[name] = "unchanged, its weight is computed and no parameter"
    return reasons


def _shape(part: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    rows, columns = part.get_parameter("weight").shape
    return (rows, columns) if _is_conv1d(part) else (columns, rows)


def _heads(module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
    """The layers that give logits: the model's own answer if it has one, else those so named."""
    ask = getattr(module, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return {
        name
        for name, part in linears.items()
        if part is head or (head is None and name.rpartition(".")[2] == "lm_head")
    }


def _built(backend: Backend, name: str, part: nn.Module) -> nn.Module:
    """The backend's layer in place of `part`, with its parameters, mode and hooks."""
    inputs, outputs = _shape(part)
    with torch.device("meta"):  # its own parameters are thrown away at once
        layer = backend.linear(name, inputs, outputs, part.bias is not None)
    assert isinstance(layer, MasterLinear)
    for key in ("weight", "bias"):
        layer.register_parameter(key, part._parameters[key])
    layer.transposed = _is_conv1d(part)
    layer.keeps_dtype = True
    for key, value in vars(part).items():
        if "_hooks" in key:
            layer.__dict__[key] = value
    return layer.train(part.training)


def _replace_everywhere(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is: a layer may be shared."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is old:
                setattr(parent, name, new)
