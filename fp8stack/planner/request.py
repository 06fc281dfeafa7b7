"""The precision table of a run's configuration on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8stack.backends.compiler import require_compilable
from fp8stack.config import RunConfig, training_preset
from fp8stack.model.config import load_config
from fp8stack.planner.table import PrecisionTable, make_table
from fp8stack.precision import Hardware
from fp8stack.training.setup.build import context_of
from fp8stack.training.setup.variants import never_asked_for, phases_in, plan_recipe


def table_for(config: RunConfig, hardware: Hardware) -> PrecisionTable:
    """The table of a run on one device of `hardware`, in the run's own recipe.

    Raises:
        UserError: what planning the run would raise.
    """
    shape = load_config(config.model, config.model_overrides)
    unasked = never_asked_for(config, phases_in(config))
    recipe = config.recipe
    tokens = config.batch // config.accumulate * context_of(config, shape)
    plan = plan_recipe(recipe, config, shape, hardware, tokens)
    if config.compile:
        require_compilable(plan, config.activation_checkpointing)
    made = make_table(
        shape,
        plan,
        model=config.model,
        machine=str(hardware),
        accumulate=config.accumulate,
        optimizer=config.optimizer,
        grad_compression=config.grad_compression,
        activation_checkpointing=config.activation_checkpointing,
    )
    others = sorted({phase.recipe for phase in config.phases if phase.recipe} - {recipe})
    if unasked:
        return replace(made, notes=(*made.notes, unasked))
    if not others:
        return made
    note = f"this is the plan of recipe {recipe}; phases ask for {', '.join(others)} too"
    return replace(made, notes=(*made.notes, note))


def training_of(config: RunConfig) -> dict[str, Any]:
    """The training settings by key: the run's, else the model's training preset's, else the
    default."""
    keys = ("batch", "accumulate", "lr", "schedule", "warmup_steps", "steps", "weight_decay")
    told = {key: getattr(config, key) for key in keys}
    return told | {"source": training_preset(config.model).get("source", "")}


def training_line(config: RunConfig) -> str:
    """`training_of` in a line."""
    told = training_of(config)
    source = told.pop("source")
    values = ", ".join(f"{key} {value}" for key, value in told.items())
    return f"training: {values}" + (f"; preset: {source}" if source else "")
