"""The command `fp8stack plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fp8stack.cli import options
from fp8stack.cli.options import option
from fp8stack.common.terminal import show

if TYPE_CHECKING:
    from fp8stack.planning.plan_table import PrecisionTable
    from fp8stack.planning.run_config import RunConfig
    from fp8stack.precision import Hardware


@options.takes_keys("model", "recipe", "backend", "strict", "batch", "context", "accumulate")
def plan(
    flags: dict[str, Any],
    capability: Annotated[str | None, options.CAPABILITY] = None,
    gpu: Annotated[str | None, options.GPU] = None,
    te: Annotated[bool | None, options.TE] = None,
    config: Annotated[str | None, options.CONFIG] = None,
    set: Annotated[list[str] | None, options.SET] = None,
    json: Annotated[bool, option("Print JSON, layer by layer.", "--json")] = False,
) -> None:
    """Show the precision of every operation of a training step, and where tensors are cast."""
    from fp8stack.planning import plan_table as tables
    from fp8stack.planning.run_config import parse_config
    from fp8stack.precision.hardware import machine_for

    parsed = parse_config(config, flags, set or [])
    table = table_for(parsed, machine_for(capability, te, parsed.device, gpu))
    training = training_of(parsed)
    if json:
        options.print_json(tables.as_json(table) | {"training": training})
        return
    from fp8stack.common.screen import Screen
    from fp8stack.common.tables import aligned, rich_table

    console, rows = Screen(), tables.rows_of(table.operations)
    show(f"machine: {table.machine}", *table.plan.summary())
    source = training.pop("source")
    values = ", ".join(f"{key} {value}" for key, value in training.items())
    show(f"training: {values}" + (f"; preset: {source}" if source else ""), "")
    if console.is_terminal:
        console.print(rich_table(None, tables.HEADINGS, rows))
    else:
        show(*aligned([tables.HEADINGS, *rows]))
    show(*tables.as_lines(table))


def table_for(config: RunConfig, hardware: Hardware) -> PrecisionTable:
    """The table of a run on one device of `hardware`, in the run's own recipe. Raises what planning
    the run would raise."""
    from dataclasses import replace

    from fp8stack.layers.compiler import require_compilable
    from fp8stack.model.config import load_config
    from fp8stack.planning.plan_table import make_table
    from fp8stack.training.run_plans import context_of, never_asked_for, phases_in, plan_recipe

    shape = load_config(config.model, config.model_overrides)
    note = never_asked_for(config, phases_in(config))
    tokens = config.batch // config.accumulate * context_of(config, shape)
    plan = plan_recipe(config.recipe, config, shape, hardware, tokens)
    if config.compile:
        require_compilable(plan, config.activation_checkpointing)
    table = make_table(shape, plan, config, str(hardware))
    recipes = sorted({phase.recipe for phase in config.phases if phase.recipe} - {config.recipe})
    if recipes and not note:
        names = ", ".join(recipes)
        note = f"this is the plan of recipe {config.recipe}; phases ask for {names} too"
    return replace(table, notes=(*table.notes, note)) if note else table


def training_of(config: RunConfig) -> dict[str, Any]:
    """The training settings by key: the run's, else the model's training preset's, else the
    default."""
    from fp8stack.planning.run_config import training_preset

    keys = ("batch", "accumulate", "lr", "schedule", "warmup_steps", "steps", "weight_decay")
    settings = {key: getattr(config, key) for key in keys}
    return settings | {"source": training_preset(config.model).get("source", "")}
