"""A training step in every precision and several sizes, with confidence intervals.

Arms take turns, so that ratios are computed within a round; the interval shows the noise. On a CPU
the sizes are widths of a small GPT; on a GPU they are models.
"""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from bench import report, runner
from bench.cost.step import in_turns
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import PRECISIONS, StepWork, works
from fp8stack.model.config import GPTConfig
from fp8stack.precision import probe

SHORT = ["--rounds", "20", "--budget", "15"]
WIDTHS = (128, 256, 384)
GPU_MODELS = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=100, budget_s=600.0, warm_up=10, recipes=PRECISIONS)


def sizes(device: str, tiny: bool) -> list[StepWork]:
    """The work of a step in at least three sizes, the smallest first."""
    if device == "cuda" and not tiny:
        gpu_works = works(device)
        return [gpu_works[name] for name in GPU_MODELS]
    widths, layers, batch, context = (16, 32, 48), 1, 1, 16
    if not tiny:
        widths, layers, batch, context = WIDTHS, 2, 8, 64
    return [
        StepWork(
            model=f"width {width}",
            config=GPTConfig(vocabulary=256, context=context, layers=layers, width=width, heads=2),
            batch=batch,
            context=context,
        )
        for width in widths
    ]


def measure(arguments: argparse.Namespace) -> Report:
    hardware = probe(arguments.device)
    rows: list[Row] = []
    for work in sizes(hardware.device, arguments.tiny):
        rows += in_turns(work, arguments.recipes, hardware, arguments)
    return report.report_of(hardware.device, runner.timing_settings(arguments), rows)


def table(data: Report) -> str:
    rows = data["results"]
    cell = {(row["arm"], row["case"]): report.paired_cell(row) for row in rows}
    for row in data["left_out"]:
        cell[row["arm"], row["case"]] = row["left_out"].partition(":")[0]
    order = list(dict.fromkeys([rows[0]["ratio_to"], *PRECISIONS, *(arm for arm, _ in cell)]))
    grid = {place: cell[place] for place in sorted(cell, key=lambda place: order.index(place[0]))}
    text = f"A training step, its time relative to {rows[0]['ratio_to']} in the same round: the "
    text += "median over the\n"
    text += "rounds, and its 95 % confidence interval. fp16 scales its loss."
    extra = {"tokens/s": report.number("tokens_per_s", 0), "relative time": report.paired_cell}
    return (
        report.heading(data, "Training steps by precision and size", text)
        + report.crossed(grid, "precision")
        + "\n"
        + report.timing_table(rows, extra)
    )


def figure(data: Report) -> Figure:
    plot = report.ratio_figure(data["results"], "Training steps", "paired")
    for panel in plot.axes:
        rows = [row for row in data["results"] if row["case"] == panel.get_title()]
        values = [row["paired"] for row in rows]
        ends = [
            [row["paired"] - row["paired_low"] for row in rows],
            [row["paired_high"] - row["paired"] for row in rows],
        ]
        panel.errorbar(values, range(len(rows)), xerr=ends, fmt="none", color="black", capsize=2)
    return plot
