"""Check that a checkpoint holds what a run or a model needs.

Correct checksums prove that no byte has changed since the checkpoint was written, not that a run
can use it. The checks here find what does not fit before the run changes, so that an older
checkpoint can be used.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8stack.common import presets
from fp8stack.common.errors import MissingRequirement, NoUsableCheckpoint, UserError, quoted
from fp8stack.layers import RngState, build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Recipe, load_recipe, recipe_from_json
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.state import (
    random_state,
    restore,
    restore_random_state,
    restore_weights,
)
from fp8stack.training.optim.optimizer import build_optimizer

Check = Callable[[Checkpoint], object]


def newest_sound(folder: Path, check: Check) -> tuple[Checkpoint, Path, list[str]]:
    """The newest checkpoint in `folder` that passes `check`, its path, and the reasons why newer
    ones do not. Raises a NoUsableCheckpoint with the reasons if no checkpoint passes, and a
    MissingRequirement if a sound one needs what is missing here."""
    passed_over: list[str] = []
    for path in checkpoints.candidates(folder):
        try:
            return load_sound(path, check), path, passed_over
        except NoUsableCheckpoint as error:
            passed_over.append(str(error))
    if not passed_over:
        raise NoUsableCheckpoint(f"No checkpoint in {folder}. Train the run first.")
    raise NoUsableCheckpoint(
        f"No usable checkpoint in {folder}: {' '.join(passed_over)} Use another run, or train a "
        "new one in another --out."
    )


def load_sound(path: Path, check: Check) -> Checkpoint:
    """Load the checkpoint in the folder `path`, verified to the byte and by `check`. Raises a
    NoUsableCheckpoint that names its fault, or a MissingRequirement if it has none but needs what
    is missing here."""
    named = re.fullmatch(r"step-(\d{6,})", path.resolve().name)
    try:
        checkpoint = checkpoints.load(path)
        if named and int(named[1]) != checkpoint.step:
            raise UserError(f"it is of step {quoted(str(checkpoint.step))}")
        check(checkpoint)
    except MissingRequirement:
        raise
    except UserError as error:
        fault = str(error)
        if not fault.startswith(str(path)):
            fault = f"{path} cannot be used: {fault.rstrip('.')}."
        raise NoUsableCheckpoint(fault) from error
    return checkpoint


def can_go_on(checkpoint: Checkpoint) -> None:
    """Check that a run can resume from `checkpoint`: configuration, weights, moments and scales
    fit. Raises a UserError that names the first key or tensor that does not."""
    config, shape, info = _config(checkpoint), model_of(checkpoint), checkpoint.info
    recipes, draws = info["identity"]["recipes"], RngState()
    for place, plan in enumerate(info["plans"]):
        # The FP8 state has the counters of all variants.
        if (recipe := recipes.get(str(place))) is not None:
            _without_memory(shape, _recipe(recipe, f"recipes.{place}"), plan, draws)
    recipe = _recipe(info["identity"]["recipe"], "recipe")
    model = _without_memory(shape, recipe, info["plan"], draws)
    random = random_state()
    try:
        restore(model, build_optimizer(model, config, fused=False), checkpoint.tensors)
    finally:
        restore_random_state(random)


def has_weights(checkpoint: Checkpoint) -> None:
    """Check that `checkpoint` holds the weights of the model that it names. Raises a UserError that
    names the first key or tensor that does not fit."""
    _config(checkpoint)
    model = _without_memory(model_of(checkpoint), load_recipe("fp32"), {"layers": ()}, RngState())
    restore_weights(model, checkpoint.tensors.get("model", {}))


def model_of(checkpoint: Checkpoint) -> GPTConfig:
    """The shape of the model in `checkpoint`. Raises a UserError if it is no shape, or has more
    layers than the checkpoint has tensors."""
    where = "identity.model in checkpoint.json"
    config: GPTConfig = presets.parse(GPTConfig, checkpoint.info["identity"]["model"], where)
    if config.layers > len(checkpoint.tensors.get("model", {})):  # a damaged number may be huge
        raise UserError(f"{where} has {config.layers} layers, the weights fewer")
    return config


def _config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run. Raises a UserError if it, or a recipe of its plans, is invalid,
    or if the plan or the guard names layers that the model does not have."""
    info = checkpoint.info
    config: RunConfig = presets.parse(RunConfig, info["config"], "config in checkpoint.json")
    for plan in (info["plan"], *info["plans"]):
        recipe_from_json(plan["recipe"], "plan.recipe in checkpoint.json")
    linears = model_of(checkpoint).linear_shapes()
    model_layers = linears.keys() | {name.removesuffix(".qkv") for name in linears}  # attention
    names = [layer["name"] for layer in info["plan"]["layers"]]
    for key, layers in {"plan": names, "guard": (info["guard"] or {}).get("demoted", ())}.items():
        if unknown := [name for name in layers if name not in model_layers]:
            raise UserError(
                f"{key} in checkpoint.json: the model has no layer '{quoted(unknown[0])}'"
            )
    return config


def _recipe(recipe_keys: Mapping[str, Any], key: str) -> Recipe:
    where = f"identity.{key} in checkpoint.json"
    return recipe_from_json({"name": "its recipe", **recipe_keys}, where)


def _without_memory(
    config: GPTConfig, recipe: Recipe, saved_plan: Mapping[str, Any], draws: RngState
) -> GPT:
    """A model on the meta device, to check tensors against. The models of a run share `draws`."""
    chosen = recipe.model_copy(update={"attention": "compute"})  # FP8 attention needs a GPU to run
    plan = plan_for(config, chosen, Hardware("cpu"), left_out=layers_left_out(saved_plan))
    attends = plan.recipe.model_copy(update={"attention": recipe.attention})
    plan = replace(plan, recipe=attends)  # its state does not
    with torch.device("meta"):
        return GPT(config, build_backend(plan, draws=draws))


def layers_left_out(plan: Mapping[str, Any]) -> dict[str, str]:
    """The layers that a checkpoint's plan keeps out of FP8, with the reasons. A resumed run keeps
    the same layers out, since FP8 state and losses depend on them."""
    return {layer["name"]: layer["reason"] for layer in plan["layers"] if layer["reason"]}
