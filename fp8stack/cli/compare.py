"""`fp8stack compare`: recipes side by side. It parses and calls."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fp8stack.cli.options import THREADS, option
from fp8stack.errors import Interrupted


def compare(
    recipes: Annotated[
        str, option("Precision recipes or TOML files, separated by commas. [six of them]")
    ] = "fp32,bf16,delayed,current,block,mxfp8",
    out: Annotated[
        str | None,
        option("Folder of the runs, and of compare.json, .md and .png. [runs/compare-MODEL]"),
    ] = None,
    seeds: Annotated[int, option("How many runs of each recipe, with seeds 0, 1, ... [3]")] = 3,
    baseline: Annotated[
        str | None, option("What the others are compared with. [fp32, else the first]")
    ] = None,
    from_: Annotated[
        str | None,
        option("Run or checkpoint whose weights all runs begin with.", "--from", metavar="PATH"),
    ] = None,
    model: Annotated[
        str | None, option("Model preset or TOML file. [gpt-nano, or that of --from]")
    ] = None,
    steps: Annotated[int | None, option("Optimizer steps of each run. [1200]")] = None,
    batch: Annotated[int | None, option("Sequences per step. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    data: Annotated[str | None, option("As of pretrain. [Python's library]")] = None,
    lr: Annotated[float | None, option("Peak learning rate. [0.003]")] = None,
    device: Annotated[str | None, option("auto, cpu or cuda. [auto]")] = None,
    threads: Annotated[int | None, THREADS] = None,
    backend: Annotated[
        str | None, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = None,
    compile: Annotated[bool, option("Compile the model with torch.compile.", "--compile")] = False,
    set: Annotated[
        list[str] | None, option("Any other key of a run: --set key=value, as often as needed.")
    ] = None,
) -> None:
    """Train every recipe with every seed: losses with their errors, speed and memory, in a table.

    Called again, it goes on where it was cut, and adds recipes and seeds.
    """
    flags: dict[str, Any] = {"model": model, "steps": steps, "batch": batch, "context": context}
    flags |= {"data": data, "lr": lr, "device": device, "backend": backend}
    flags |= {"compile": compile or None, "init_from": from_, "threads": threads}
    from fp8stack.compare import comparison, settings

    asked = settings.prepare(recipes, seeds, out, baseline, flags, set or [])
    try:
        raise typer.Exit(comparison.compare(asked))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. What is done is kept; the same command goes on with it."
        ) from None
