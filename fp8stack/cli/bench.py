"""The command `fp8stack bench` and its subcommands."""

from typing import Annotated

import typer

from fp8stack.cli import options
from fp8stack.cli.options import option
from fp8stack.common.terminal import write_text

bench = typer.Typer(
    name="bench",
    help="Measure on this machine.",
    short_help="Measure speed on this machine",
    invoke_without_command=True,
    add_help_option=False,  # typer imports pydantic for its own; ours is below
    rich_markup_mode=None,
)


@bench.callback()
def _no_command(context: typer.Context, help: Annotated[bool, options.HELP] = False) -> None:
    if context.invoked_subcommand is None:
        write_text(f"{context.get_help()}\n")


@bench.command()
def step(
    model: Annotated[str | None, option("Model to measure. [the first for this device]")] = None,
    recipe: Annotated[
        list[str] | None, option("FP8 recipe, repeatable. [those of hardware]")
    ] = None,
    device: Annotated[str, options.DEVICE] = "auto",
    rounds: Annotated[int, option("Timed steps per arm. [20]", min=6)] = 20,
    seconds: Annotated[float, option("Time limit per arm, in seconds. [60]", min=1)] = 60.0,
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Measure training steps in FP8 here, relative to a step without FP8."""
    from fp8stack.analysis.benchmark.step_timing import FP8, QUANTIZED, chosen, measure, table
    from fp8stack.common.errors import require, unknown
    from fp8stack.precision import probe

    require("scipy", "fp8stack bench step")
    hardware = probe(device)
    recipes = recipe or list(FP8)
    for name in recipes:
        if name not in QUANTIZED:
            raise unknown("FP8 recipe", name, list(QUANTIZED))
    work = chosen([model] if model else [], hardware.device)[0]
    rows = list(measure(work, hardware, recipes=recipes, rounds=rounds, budget_s=seconds))
    if json:
        options.print_json(rows)
    else:
        from fp8stack.common.screen import Screen

        Screen().print(table(rows))
