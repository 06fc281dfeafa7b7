"""The command `fp8stack bench` and its subcommands."""

from pathlib import Path
from typing import Annotated

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.terminal import show, write_text

MODEL = option("Model preset or TOML file. [gpt2-124m]", autocompletion=completion.MODELS)
CONTEXT = option("Tokens per sequence. [the model's]", min=1)

bench = typer.Typer(
    name="bench",
    help="Measure on this machine, or predict for a GPU.",
    short_help="Measure speed here, or predict it for a GPU",
    invoke_without_command=True,
    add_help_option=False,  # typer imports pydantic for its own; ours is below
    rich_markup_mode=None,
)


@bench.callback()
def _no_command(context: typer.Context, help: Annotated[bool, options.HELP] = False) -> None:
    if context.invoked_subcommand is None:
        write_text(f"{context.get_help()}\n")


CAPABILITY = option(
    "Assume a GPU of this compute capability. [this machine's]",
    autocompletion=completion.CAPABILITIES,
)
GPU = option("Assume this GPU, such as H200.", autocompletion=completion.GPUS)
CEILING = option("Predict an upper bound: the head in FP8, casts for free.", "--ceiling")
RESULTS = option("Measured steps to show beside it: a step.json. [bench/results]")


@bench.command()
def roofline(
    model: Annotated[str, MODEL] = "gpt2-124m",
    capability: Annotated[str | None, CAPABILITY] = None,
    gpu: Annotated[str | None, GPU] = None,
    batch: Annotated[int, option("Sequences per step. [8]", min=1)] = 8,
    context: Annotated[int | None, CONTEXT] = None,
    ceiling: Annotated[bool, CEILING] = False,
    results: Annotated[Path | None, RESULTS] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Predict a training step's time in bf16 and each FP8 recipe, part by part."""
    from fp8stack.model.config import load_config
    from fp8stack.planning import roofline as predicted

    config = load_config(model)
    chosen, hardware = predicted.choose_gpu(capability, gpu)
    predictions = predicted.predict_all(
        model,
        config,
        chosen,
        hardware,
        batch=batch,
        context=context or config.context,
        ceiling=ceiling,
        results=results or predicted.find_results(chosen),
    )
    if json:
        options.print_json(predicted.as_json(predictions))
    else:
        show(*predicted.as_lines(predictions))


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
    from fp8stack.common.errors import unknown
    from fp8stack.precision import probe

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
