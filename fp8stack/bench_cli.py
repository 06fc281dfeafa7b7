"""`fp8stack bench`: its commands. They parse, call and print; they compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(
    name="bench",
    help="Measure on this machine, or predict for a GPU.",
    invoke_without_command=True,
    add_help_option=False,  # typer imports pydantic for its own; ours is below
    rich_markup_mode=None,
)


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **more)


def _show_help(context: typer.Context, asked: bool) -> None:
    if asked:
        print(context.get_help())
        raise typer.Exit


@bench.callback()
def _no_command(
    context: typer.Context,
    help: Annotated[
        bool,
        _option("Show this message and exit.", "--help", is_eager=True, callback=_show_help),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command()
def shapes(
    model: Annotated[str, _option("Model preset or TOML file. [gpt2-124m]")] = "gpt2-124m",
    batch: Annotated[int, _option("Sequences per micro-batch. [8]", min=1)] = 8,
    context: Annotated[int | None, _option("Tokens per sequence. [the model's]", min=1)] = None,
    recipe: Annotated[str, _option("FP8 recipe or TOML file. [auto]")] = "auto",
    backend: Annotated[str, _option("Who computes: auto, te, torch. [auto]")] = "auto",
    rounds: Annotated[int, _option("Timed rounds of each layer. [50]", min=6)] = 50,
) -> None:
    """Measure each linear of a model in FP8 and in bf16, for plans on this GPU to know."""
    from fp8stack import shapes_bench
    from fp8stack.model import load_config
    from fp8stack.precision import probe

    hardware = probe()
    config = load_config(model)
    plan = shapes_bench.native_plan(recipe, hardware, backend)
    print(f"machine: {hardware}")
    print(plan.summary()[0])
    tokens = batch * (context or config.context)
    results = shapes_bench.measure_shapes(config, plan, hardware, tokens=tokens, rounds=rounds)
    print(*shapes_bench.as_lines(results, plan), sep="\n")
    print(f"written: {shapes_bench.save(results, plan, hardware)}")


@bench.command()
def roofline(
    model: Annotated[str, _option("Model preset or TOML file. [gpt2-124m]")] = "gpt2-124m",
    capability: Annotated[
        str | None, _option("Predict for a GPU of this compute capability. [this machine's]")
    ] = None,
    gpu: Annotated[str | None, _option("Predict for this GPU, such as H200.")] = None,
    batch: Annotated[int, _option("Sequences per step. [8]", min=1)] = 8,
    context: Annotated[int | None, _option("Tokens per sequence. [the model's]", min=1)] = None,
    ceiling: Annotated[
        bool, _option("Predict a bound: the head in FP8, casts that take no time.", "--ceiling")
    ] = False,
    results: Annotated[
        Path | None, _option("Measured steps to show beside: a step.json. [bench/results]")
    ] = None,
    json: Annotated[bool, _option("Print JSON.", "--json")] = False,
) -> None:
    """Predict a training step's time in bf16 and each FP8 recipe, part by part."""
    from fp8stack import roofline_table
    from fp8stack.model import load_config

    config = load_config(model)
    chosen, hardware = roofline_table.choose_gpu(capability, gpu)
    path = results or roofline_table.find_results(chosen)
    made = roofline_table.predict_all(
        model,
        config,
        chosen,
        hardware,
        batch=batch,
        context=context or config.context,
        ceiling=ceiling,
        measured=({}, "") if path is None else (roofline_table.read_results(path), str(path)),
    )
    if json:
        import json as encoder

        print(encoder.dumps(roofline_table.as_json(made), indent=2))
    else:
        print(*roofline_table.as_lines(made), sep="\n")
