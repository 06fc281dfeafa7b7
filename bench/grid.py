"""A training step in every precision and several sizes, with confidence intervals.

Arms take turns, so that a ratio is taken within a round; its interval says what noise can do. On a
CPU the sizes are widths of a small GPT, on a GPU models.
"""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from bench import report
from bench.report import Report, Row
from bench.runner import add_timing_arguments, timing_options
from fp8stack.benchmark import interleaved, machine
from fp8stack.benchmark_step import (
    FP8,
    Work,
    arms,
    baseline,
    build,
    figures,
    free_memory,
    works,
)
from fp8stack.cli_options import words
from fp8stack.model import GPTConfig, plan_for
from fp8stack.precision import Hardware, probe
from fp8stack.training.throughput import peak_rate

SHORT = ["--rounds", "20", "--budget", "15"]
WIDTHS = (128, 256, 384)
GPU_MODELS = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_timing_arguments(parser, rounds=100, budget_s=600.0, warm_up=10)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    recipes = ["bf16", *FP8]
    add("--recipes", type=words, default=recipes, metavar="A,B", help="(default: bf16 and FP8)")


def sizes(device: str, tiny: bool) -> list[Work]:
    """What a step computes, the smallest first; three sizes at least."""
    if device == "cuda" and not tiny:
        known = works(device)
        return [known[name] for name in GPU_MODELS]
    widths, layers, batch, context = (16, 32, 48), 1, 1, 16
    if not tiny:
        widths, layers, batch, context = WIDTHS, 2, 8, 64
    return [
        Work(
            model=f"width {width}",
            config=GPTConfig(vocabulary=256, context=context, layers=layers, width=width, heads=2),
            batch=batch,
            context=context,
        )
        for width in widths
    ]


def measure(arguments: argparse.Namespace) -> Report:
    """Every size: its arms in turn."""
    hardware = probe(arguments.device)
    first = baseline(hardware)
    rows: list[Row] = []
    for work in sizes(hardware.device, arguments.tiny):
        rows += _measured(work, hardware, arguments)
        free_memory(hardware.device)
    return {
        "machine": machine(device=hardware.device),
        "settings": {
            "rounds": arguments.rounds, "warm_up": arguments.warm_up, "budget_s": arguments.budget,
        },
        "results": rows,
        "bars": [],
        "ratio_to": first,
    }  # fmt: skip


def _measured(work: Work, hardware: Hardware, arguments: argparse.Namespace) -> list[Row]:
    first = baseline(hardware)
    found = arms(hardware, dict.fromkeys([first, *arguments.recipes]), ())
    steps = {arm.name: build(arm, work, hardware).step for arm in found}
    options = timing_options(arguments) | {"device": hardware.device}
    timings = interleaved(steps, **options)
    rate = peak_rate(hardware, plan_for(work.config, first, hardware))
    return [
        {
            "case": work.model,
            "arm": name,
            **figures(work, timing, timings[first], rate),
            **report.paired(timing, timings[first]),
            "ratio_to": first,
        }
        for name, timing in timings.items()
    ]


def table(found: Report) -> str:
    """The ratios as a grid of precisions and sizes, then every timing."""
    rows, first = found["results"], found["ratio_to"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    cell = {(row["arm"], row["case"]): report.paired_cell(row) for row in rows}
    grid = (
        [arm, *(cell.get((arm, case), "") for case in cases)]
        for arm in dict.fromkeys(row["arm"] for row in rows)
    )
    text = f"A training step, its time relative to {first} in the same round: the median over the\n"
    text += "rounds, and its 95 % confidence interval."
    extra = {"tokens/s": report.number("tokens_per_s", 0), "relative time": report.paired_cell}
    return (
        report.heading(found, "Training steps by precision and size", text)
        + report.markdown(["precision", *cases], grid)
        + "\n"
        + report.timing_table(rows, extra)
    )


def figure(found: Report) -> Figure:
    """Relative times with their intervals, a panel for each size."""
    made = report.ratio_figure(found["results"], "Training steps", "paired")
    for panel in made.axes:
        rows = [row for row in found["results"] if row["case"] == panel.get_title()]
        values = [row["paired"] for row in rows]
        ends = [
            [row["paired"] - row["paired_low"] for row in rows],
            [row["paired_high"] - row["paired"] for row in rows],
        ]
        panel.errorbar(values, range(len(rows)), xerr=ends, fmt="none", color="black", capsize=2)
    return made
