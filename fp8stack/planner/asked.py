"""From a run's configuration and a machine to its precision table. It builds no model."""

from __future__ import annotations

from fp8stack.errors import UserError
from fp8stack.model import load_config, plan_for
from fp8stack.planner.table import PrecisionTable, make_table
from fp8stack.precision import assumed, load_recipe, probe
from fp8stack.training.building import context_of
from fp8stack.training.config import RunConfig


def table_for(config: RunConfig, capability: str | None = None, te: bool = True) -> PrecisionTable:
    """The table of a run on one device.

    Args:
        config: of the run.
        capability: of a GPU that is not here, or "none" for a CPU; None is this machine.
        te: whether Transformer Engine is installed on the GPU that is not here.

    Raises:
        UserError: what planning the run would raise.
    """
    hardware = probe(config.device) if capability is None else assumed(capability, has_te=te)
    shape = load_config(config.model, config.model_overrides)
    if config.recipe_overrides and config.recipe == "auto":
        raise UserError("recipe_overrides needs a recipe by name: auto chooses one by itself.")
    recipe = config.recipe
    plan = plan_for(
        shape,
        recipe if recipe == "auto" else load_recipe(recipe, config.recipe_overrides),
        hardware,
        config.backend,
        config.strict,
        tokens=config.batch // config.accumulate * context_of(config, shape),
    )
    return make_table(
        shape,
        plan,
        model=config.model,
        machine=str(hardware),
        accumulate=config.accumulate,
        optimizer=config.optimizer,
        grad_compression=config.grad_compression,
        activation_checkpointing=config.activation_checkpointing,
    )
