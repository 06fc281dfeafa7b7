"""The cost of a training step as batch, context and depth grow, one at a time, on one rank."""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from bench import report, runner
from bench.cost import emulation
from bench.cost.step import in_turns
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import SMALL, StepWork
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import Hardware, probe

SHORT = ["--rounds", "6", "--budget", "8"]
AXES: dict[str, dict[str, list[int]]] = {
    "cpu": {"batch": [32, 64, 128, 256], "context": [64, 128, 256], "layers": [2, 4, 6]},
    "cuda": {"batch": [32, 64, 128, 256], "context": [256, 512, 1024], "layers": [6, 12, 24]},
}
# Small enough that a batch of 256 fits into a laptop's memory and takes about a second.
NARROW = GPTConfig(vocabulary=256, context=32, layers=2, width=128, heads=2)
TINY = {"batch": [1, 2], "context": [16, 32], "layers": [1, 2]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=100, warm_up=10, recipes=["delayed"])


def measure(arguments: argparse.Namespace) -> Report:
    """Measure every axis, with the other sizes fixed as in `work_at`."""
    hardware = probe(arguments.device)
    rows: list[Row] = []
    for axis, values in (TINY if arguments.tiny else AXES[hardware.device]).items():
        for value in values:
            work = work_at(axis, value, hardware, arguments.tiny)
            facts = {"axis": axis, "value": value, "layers": work.config.layers}
            turns = in_turns(work, arguments.recipes, hardware, arguments)
            rows += [row | facts for row in turns]
    settings = runner.timing_settings(arguments) | {"ranks": 1}
    return report.report_of(hardware.device, settings, rows)


def work_at(axis: str, value: int, hardware: Hardware, tiny: bool) -> StepWork:
    """The work with one of its sizes changed."""
    if tiny:
        base = emulation.tiny_work()
        config, batch, context = base.config, 1, 16
    elif hardware.device == "cuda":
        config, batch, context = load_config("gpt2-124m"), 32, 256
    elif axis == "batch":
        config, batch, context = NARROW, 32, 32
    else:
        config, batch, context = SMALL, 4, 128
    batch = value if axis == "batch" else batch
    context = value if axis == "context" else context
    layers = value if axis == "layers" else config.layers
    sizes = config.model_dump() | {"layers": layers, "context": max(context, config.context)}
    return StepWork(
        model=f"{axis} {value}", config=GPTConfig(**sizes), batch=batch, context=context
    )


def table(data: Report) -> str:
    text = "One size changes at a time. tokens/s by the median step; relative time is to "
    text += f"{data['results'][0]['ratio_to']} at the same size."
    extra = {
        "tokens/s": report.number("tokens_per_s", 0),
        "TFLOP/s": report.number("tflops", 3),
        "relative time": report.number("ratio", 3),
    }
    return report.page(data, "Scaling of a training step on one rank", text, extra)


def figure(data: Report) -> Figure:
    rows = [row | {"case": row["axis"]} for row in data["results"]]
    return report.line_figure(rows, "Tokens per second", "value", "tokens_per_s")
