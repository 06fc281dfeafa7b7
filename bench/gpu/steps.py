"""Training steps of one model in some recipes, one after the other, optionally with the head in
FP8.

The row of a recipe is written as soon as it is measured; a recipe that fails does not stop the
others.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.cells import append_line, json_lines, words
from fp8stack.analysis.benchmark.step_timing import (
    StepWork,
    chosen,
    figures,
    free_memory,
    training_step,
)
from fp8stack.analysis.benchmark.timing import interleaved
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, load_recipe, probe
from fp8stack.training.metrics import profiler
from fp8stack.training.metrics.throughput import peak_rate
from fp8stack.training.optim.optimizer import build_optimizer

TINY = GPTConfig(vocabulary=256, context=64, layers=1, width=64, heads=2)


def measured(
    work: StepWork, recipe: str, hardware: Hardware, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The row of a recipe: its plan and time; `arguments` are the command's."""
    to_run = load_recipe(recipe)
    if arguments.head and to_run.is_fp8:
        to_run = to_run.model_copy(update={"head": True})
    plan = plan_for(work.config, to_run, hardware, arguments.backend, tokens=work.tokens)
    backend = build_backend(plan)
    backend.weights.only_tracked_changes = True  # as in a run
    model = GPT(work.config, backend).to(hardware.device)
    compiled = hardware.device == "cuda" and plan.backend != "te"
    if compiled:
        model.compile_blocks()
    optimizer = build_optimizer(model, RunConfig(lr=1e-4))
    step = training_step(model, optimizer, work.batches_of(hardware.device))
    options = {"rounds": arguments.rounds, "warm_up": 2, "budget_s": arguments.budget}
    timing = interleaved({recipe: step}, device=hardware.device, **options)[recipe]
    row = {"recipe": recipe, "compiled": compiled, "plan": plan.summary()}
    row |= figures(work, timing, timing, peak_rate(hardware, plan))
    for key in ("ratio", "speedup"):  # they compare the recipe with itself
        del row[key]
    if arguments.profile:
        name = f"{work.model}-{recipe}{'-head' if arguments.head else ''}"
        folder = arguments.out.parent / name
        folder.mkdir(parents=True, exist_ok=True)
        with profiler.recording(torch.device(hardware.device)) as recorded:
            step()
        print(profiler.write(recorded, folder, 1))
    return row


def main() -> int:
    """Measure, print, and append to a file. Returns 1 if a recipe failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.steps", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a file, one JSON object per line")
    add("--model", default="gpt2-124m", help="of those that steps are measured of")
    add("--recipes", type=words, default=["bf16", "delayed"], metavar="A,B")
    add("--backend", default="auto", help="compute backend (default: %(default)s)")
    add("--head", action="store_true", help="the head in FP8 as well")
    add("--profile", action="store_true", help="a table and a trace of one step, beside the file")
    add("--rounds", type=int, default=30, help="timed steps at most (default: %(default)s)")
    add("--budget", type=float, default=40.0, help="seconds for a recipe, after compiling")
    add("--tiny", action="store_true", help="a tiny model on a CPU, to see that it runs")
    arguments = parser.parse_args()
    hardware = probe("cpu" if arguments.tiny else "cuda")
    if arguments.tiny:
        work = StepWork(model=arguments.model, config=TINY, batch=2, context=64)
    else:
        (work,) = chosen([arguments.model], hardware.device)
    failed = False
    settings = {key: getattr(arguments, key) for key in ("head", "backend", "tiny")}
    rows = json_lines(arguments.out) if arguments.out.exists() else []
    timed = [row for row in rows if "median_ms" in row and row | settings == row]
    for recipe in arguments.recipes:
        if any((row["model"], row["recipe"]) == (work.model, recipe) for row in timed):
            print(f"{work.model} in {recipe}: measured before")
            continue
        try:
            row = measured(work, recipe, hardware, arguments)
            result = f"{row['median_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s"
        except Exception as error:  # of any kind: the next recipe is measured all the same
            failed, result = True, f"failed: {type(error).__name__}: {error}"
            row = {"model": work.model, "recipe": recipe, "traceback": traceback.format_exc()}
        append_line(arguments.out, row | settings)
        print(f"{work.model} in {recipe}{', head in FP8' if arguments.head else ''}: {result}")
        free_memory(hardware.device)
        torch._dynamo.reset()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
