"""Check that a checkpoint holds what a run or a model needs.

Correct checksums prove that no byte has changed since the checkpoint was written, not that a run
can use it. The checks here find what does not fit before the run changes, so that an older
checkpoint can be used.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

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


class _CheckedKeys(BaseModel, frozen=True, strict=True, extra="allow"):
    """A JSON object with more keys than the ones checked here."""


class _Identity(_CheckedKeys):
    model: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, str]
    recipes: dict[str, dict[str, Any]] = {}  # by index in `plans`


class _Layer(_CheckedKeys):
    name: str
    reason: str
    fp8: bool = False


class _Named(_CheckedKeys):
    name: str


class _Plan(_CheckedKeys):
    layers: list[_Layer]
    recipe: dict[str, Any] = {}


class _PlanOfPhase(_Plan):
    recipe: _Named  # type: ignore[assignment]


class _Phases(_CheckedKeys):
    ended_at: int | None
    judged_at: int
    entered: str | None
    reason: str | None = None  # older checkpoints have none
    places: dict[str, NonNegativeInt]


class _Scaler(_CheckedKeys):
    scale: PositiveFloat
    growth_factor: PositiveFloat
    backoff_factor: PositiveFloat
    growth_interval: int
    growth_tracker: Annotated[int, Field(alias="_growth_tracker")]
    steps: NonNegativeInt = 0  # older checkpoints have none
    overflows: NonNegativeInt = 0


class _Watch(_CheckedKeys):
    window: list[Any]
    streak: int
    overflows: int
    norms: list[float] = []


class _Guard(_CheckedKeys):
    watch: _Watch
    left_out: list[int]
    demoted: dict[str, int | None]
    incidents: int
    last_bad: int
    tried: list[str]
    bad: list[dict[str, Any]]
    left_fp16: bool


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
    try:
        checkpoint = checkpoints.load(path)
    except MissingRequirement:
        raise
    except UserError as error:
        raise NoUsableCheckpoint(str(error)) from error
    named = re.fullmatch(r"step-(\d{6,})", path.resolve().name)
    try:
        if named and int(named[1]) != checkpoint.step:
            raise UserError(f"it is of step {quoted(str(checkpoint.step))}")
        check(checkpoint)
    except MissingRequirement:
        raise
    except UserError as error:
        fault = str(error).rstrip(".")
        raise NoUsableCheckpoint(f"{path} cannot be used: {fault}.") from error
    return checkpoint


def can_go_on(checkpoint: Checkpoint) -> None:
    """Check that a run can resume from `checkpoint`: configuration, weights, moments and scales
    fit. Raises a UserError that names the first key or tensor that does not."""
    config = presets.parse(RunConfig, checkpoint.info["config"], "config in checkpoint.json")
    if checkpoint.info["scaler"] is not None:
        _parsed(_Scaler, checkpoint, "scaler")
    plan = _plan(checkpoint)
    plans = _parsed(list[_PlanOfPhase], checkpoint, "plans")
    _check_decisions(checkpoint, plan)
    identity, shape = _parsed(_Identity, checkpoint, "identity"), model_of(checkpoint)
    draws = RngState()
    for place, planned in enumerate(plans):
        # The FP8 state has the counters of all recipes.
        if recipe_keys := identity.recipes.get(str(place)):
            _without_memory(shape, _recipe(recipe_keys, f"recipes.{place}"), planned, draws)
    model = _without_memory(shape, _recipe(identity.recipe, "recipe"), plan, draws)
    random = random_state()
    try:
        restore(model, build_optimizer(model, config, fused=False), checkpoint.tensors)
    finally:
        restore_random_state(random)


def has_weights(checkpoint: Checkpoint) -> None:
    """Check that `checkpoint` holds the weights of the model that it names. Raises a UserError that
    names the first key or tensor that does not fit."""
    presets.parse(RunConfig, checkpoint.info["config"], "config in checkpoint.json")
    _parsed(list[_PlanOfPhase], checkpoint, "plans")
    _check_decisions(checkpoint, _plan(checkpoint))
    model = _without_memory(model_of(checkpoint), load_recipe("fp32"), _Plan(layers=[]), RngState())
    restore_weights(model, checkpoint.tensors.get("model", {}))


def model_of(checkpoint: Checkpoint) -> GPTConfig:
    """The shape of the model in `checkpoint`. Raises a UserError if the checkpoint does not state a
    shape, or states more layers than it has tensors."""
    identity = _parsed(_Identity, checkpoint, "identity")
    config: GPTConfig = presets.parse(
        GPTConfig, identity.model, "identity.model in checkpoint.json"
    )
    if config.layers > len(checkpoint.tensors.get("model", {})):  # a damaged number may be huge
        raise UserError(
            f"identity.model in checkpoint.json has {config.layers} layers, the weights fewer"
        )
    return config


def _parsed(schema: Any, checkpoint: Checkpoint, key: str) -> Any:
    return presets.parse(schema, checkpoint.info[key], f"{key} in checkpoint.json")


def _plan(checkpoint: Checkpoint) -> _Plan:
    """The plan of the run. Raises a UserError if it or its recipe is invalid."""
    plan: _Plan = _parsed(_Plan, checkpoint, "plan")
    if "name" not in plan.recipe:
        raise UserError("plan in checkpoint.json: key 'recipe.name' is missing.")
    recipe_from_json(plan.recipe, "plan.recipe in checkpoint.json")
    linears = model_of(checkpoint).linear_shapes()
    if odd := [layer.name for layer in plan.layers if layer.name not in linears]:
        raise UserError(f"plan in checkpoint.json: the model has no layer '{quoted(odd[0])}'.")
    return plan


def _check_decisions(checkpoint: Checkpoint, plan: _Plan) -> None:
    """Raise a UserError if the state of the phases or of the guard is invalid. The guard may name
    only layers of `plan`."""
    if checkpoint.info["phases"] is not None:
        _parsed(_Phases, checkpoint, "phases")
    if checkpoint.info["guard"] is not None:
        guard = _parsed(_Guard, checkpoint, "guard")
        layer_names = {layer.name for layer in plan.layers}
        layer_names |= {name.removesuffix(".qkv") for name in layer_names}  # attention
        for name in guard.demoted.keys() - layer_names:
            raise UserError(f"guard in checkpoint.json: the model has no layer '{quoted(name)}'")


def _recipe(recipe_keys: dict[str, Any], key: str) -> Recipe:
    return recipe_from_json(
        {"name": "its recipe"} | recipe_keys, f"identity.{key} in checkpoint.json"
    )


def _without_memory(config: GPTConfig, recipe: Recipe, planned: _Plan, draws: RngState) -> GPT:
    """A model on the meta device, to check tensors against. The models of a run share `draws`."""
    chosen = recipe.model_copy(update={"attention": "compute"})  # FP8 attention needs a GPU to run
    left_out = {layer.name: layer.reason for layer in planned.layers if layer.reason}
    plan = plan_for(config, chosen, Hardware("cpu"), left_out=left_out)
    attends = plan.recipe.model_copy(update={"attention": recipe.attention})
    plan = replace(plan, recipe=attends)  # its state does not
    with torch.device("meta"):
        return GPT(config, build_backend(plan, draws=draws))
