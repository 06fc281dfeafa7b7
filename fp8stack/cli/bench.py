"""`fp8stack bench`: its commands. They parse, call and print; they compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8stack.cli.options import HELP, THREADS, option

bench = typer.Typer(
    name="bench",
    help="Measure on this machine, or predict for a GPU.",
    invoke_without_command=True,
    add_help_option=False,  # typer imports pydantic for its own; ours is below
    rich_markup_mode=None,
)


@bench.callback()
def _no_command(
    context: typer.Context,
    help: Annotated[bool, HELP] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command()
def shapes(
    model: Annotated[str, option("Model preset or TOML file. [gpt2-124m]")] = "gpt2-124m",
    batch: Annotated[int, option("Sequences per micro-batch. [8]", min=1)] = 8,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]", min=1)] = None,
    recipe: Annotated[str, option("FP8 recipe or TOML file. [auto]")] = "auto",
    backend: Annotated[str, option("Who computes: auto, te, torch. [auto]")] = "auto",
    rounds: Annotated[int, option("Timed rounds of each layer. [50]", min=6)] = 50,
) -> None:
    """Measure each linear of a model in FP8 and in bf16, for plans on this GPU to know."""
    from fp8stack.benchmark import shapes
    from fp8stack.model.config import load_config
    from fp8stack.precision import probe

    hardware = probe()
    config = load_config(model)
    plan = shapes.native_plan(recipe, hardware, backend)
    print(f"machine: {hardware}")
    print(plan.summary()[0])
    tokens = batch * (context or config.context)
    results = shapes.measure_shapes(config, plan, hardware, tokens=tokens, rounds=rounds)
    print(*shapes.as_lines(results, plan), sep="\n")
    print(f"written: {shapes.save(results, plan, hardware)}")


@bench.command()
def roofline(
    model: Annotated[str, option("Model preset or TOML file. [gpt2-124m]")] = "gpt2-124m",
    capability: Annotated[
        str | None, option("Predict for a GPU of this compute capability. [this machine's]")
    ] = None,
    gpu: Annotated[str | None, option("Predict for this GPU, such as H200.")] = None,
    batch: Annotated[int, option("Sequences per step. [8]", min=1)] = 8,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]", min=1)] = None,
    ceiling: Annotated[
        bool, option("Predict a bound: the head in FP8, casts that take no time.", "--ceiling")
    ] = False,
    results: Annotated[
        Path | None, option("Measured steps to show beside: a step.json. [bench/results]")
    ] = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
) -> None:
    """Predict a training step's time in bf16 and each FP8 recipe, part by part."""
    from fp8stack.benchmark import roofline as predicted
    from fp8stack.model.config import load_config

    config = load_config(model)
    chosen, hardware = predicted.choose_gpu(capability, gpu)
    path = results or predicted.find_results(chosen)
    made = predicted.predict_all(
        model,
        config,
        chosen,
        hardware,
        batch=batch,
        context=context or config.context,
        ceiling=ceiling,
        measured=({}, "") if path is None else (predicted.read_results(path), str(path)),
    )
    if json:
        import json as encoder

        print(encoder.dumps(predicted.as_json(made), indent=2))
    else:
        print(*predicted.as_lines(made), sep="\n")


@bench.command()
def step(
    model: Annotated[
        str | None, option("One of the models that steps are measured of. [the first]")
    ] = None,
    recipe: Annotated[list[str] | None, option("FP8 recipe, as often as needed. [all]")] = None,
    device: Annotated[str, option("auto, cpu or cuda. [auto]")] = "auto",
    rounds: Annotated[int, option("Timed steps of each arm. [20]", min=6)] = 20,
    seconds: Annotated[float, option("Most time for each arm. [60]", min=1)] = 60.0,
    threads: Annotated[int | None, THREADS] = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
) -> None:
    """Measure training steps in FP8 here, relative to a step without FP8."""
    from fp8stack.benchmark.step import FP8, chosen, measure, table
    from fp8stack.errors import unknown
    from fp8stack.precision import probe
    from fp8stack.threads import use_threads

    use_threads(threads)
    hardware = probe(device)
    wanted = recipe or list(FP8)
    for name in wanted:
        if name not in FP8:
            raise unknown("FP8 recipe", name, list(FP8))
    work = chosen([model] if model else [], hardware.device)[0]
    rows = list(measure(work, hardware, recipes=wanted, rounds=rounds, budget_s=seconds))
    if json:
        import json as encoder

        print(encoder.dumps(rows, indent=2))
    else:
        from rich.console import Console

        Console().print(table(rows))
