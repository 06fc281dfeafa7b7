"""What a training step costs as batch, context and depth grow, one at a time; on one rank."""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from bench import emulation, report
from bench.report import Report, Row
from bench.runner import add_timing_arguments, timing_options
from fp8stack.benchmark import interleaved, machine
from fp8stack.benchmark_step import SMALL, Work, arms, baseline, build, figures
from fp8stack.cli_options import words
from fp8stack.model import GPTConfig, load_config, plan_for
from fp8stack.precision import Hardware, probe
from fp8stack.training.throughput import peak_rate

SHORT = ["--rounds", "6", "--budget", "8"]
AXES: dict[str, dict[str, list[int]]] = {
    "cpu": {"batch": [32, 64, 128, 256], "context": [64, 128, 256], "layers": [2, 4, 6]},
    "cuda": {
        "batch": [32, 64, 128, 256],
        "context": [256, 512, 1024],
        "layers": [6, 12, 24],
    },
}
# So small that a batch of 256 fits into a laptop, and takes a second or so.
NARROW = GPTConfig(vocabulary=256, context=32, layers=2, width=128, heads=2)
TINY = {"batch": [1, 2], "context": [16, 32], "layers": [1, 2]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_timing_arguments(parser, rounds=100, budget_s=60.0, warm_up=10)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add("--recipes", type=words, default="delayed", metavar="A,B", help="(default: %(default)s)")


def measure(arguments: argparse.Namespace) -> Report:
    """Every axis, the others held at where they are in `works_along`."""
    hardware = probe(arguments.device)
    first = baseline(hardware)
    own = arms(hardware, dict.fromkeys([first, *arguments.recipes]), ())
    options = timing_options(arguments) | {"device": hardware.device}
    rate = peak_rate(hardware, plan_for(SMALL, first, hardware))
    rows: list[Row] = []
    for axis, values in (TINY if arguments.tiny else AXES[hardware.device]).items():
        for value in values:
            work = work_at(axis, value, hardware, arguments.tiny)
            steps = {arm.name: build(arm, work, hardware).step for arm in own}
            timings = interleaved(steps, **options)
            for name, timing in timings.items():
                facts = figures(work, timing, timings[first], rate)
                rows.append(
                    {"case": f"{axis} {value}", "axis": axis, "value": value, "arm": name}
                    | facts
                    | {"ratio_to": first, "layers": work.config.layers}
                )
            del steps
    return {
        "machine": machine(device=hardware.device),
        "settings": {"rounds": arguments.rounds, "budget_s": arguments.budget, "ranks": 1},
        "results": rows,
        "bars": [],
    }


def work_at(axis: str, value: int, hardware: Hardware, tiny: bool) -> Work:
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
    return Work(model=f"{axis} {value}", config=GPTConfig(**sizes), batch=batch, context=context)


def table(found: Report) -> str:
    """Speed at every point."""
    text = "One size changes at a time. tokens/s by the median step; relative time is to "
    text += f"{found['results'][0]['ratio_to']} at the same size."
    extra = {
        "tokens/s": report.number("tokens_per_s", 0),
        "TFLOP/s": report.number("tflops", 3),
        "relative time": report.number("ratio", 3),
    }
    head = report.heading(found, "Scaling of a training step on one rank", text)
    return head + report.timing_table(found["results"], extra)


def figure(found: Report) -> Figure:
    """Tokens per second along each axis."""
    rows = [row | {"case": row["axis"]} for row in found["results"]]
    return report.line_figure(rows, "Tokens per second", "value", "tokens_per_s")
