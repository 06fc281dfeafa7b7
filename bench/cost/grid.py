"""A training step by precision and size, and as batch, context and depth grow; casts, scales, amax
histories and the judging of a step by themselves. On one rank, with confidence intervals.

Arms take turns, so that ratios are computed within a round; the interval shows the noise. On a CPU
the sizes are widths of a small GPT; on a GPU they are models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import cache, partial

from bench import cells, report, runner
from bench.cells import some_of
from bench.cost import emulation, operations
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import (
    PRECISIONS,
    SMALL,
    StepWork,
    arms,
    baseline,
    build_step,
    figures,
    free_memory,
    plan_of,
    works,
)
from fp8stack.analysis.benchmark.timing import interleaved
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import Hardware, probe
from fp8stack.training.metrics.throughput import peak_rate

PARTS = ("sizes", "growth", "operations")
SHORT = ["--parts", "sizes,operations", "--rounds", "20", "--budget", "15"]
WIDTHS = (128, 256, 384)
GPU_MODELS = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b")
GROWING = ["delayed"]  # recipes of the part "growth", relative to the baseline
AXES: dict[str, dict[str, list[int]]] = {
    "cpu": {"batch": [32, 64, 128, 256], "context": [64, 128, 256], "layers": [2, 4, 6]},
    "cuda": {"batch": [32, 64, 128, 256], "context": [256, 512, 1024], "layers": [6, 12, 24]},
}
# Small enough that a batch of 256 fits into a laptop's memory and takes about a second.
NARROW = GPTConfig(vocabulary=256, context=32, layers=2, width=128, heads=2)
TINY = {"batch": [1, 2], "context": [16, 32], "layers": [1, 2]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=100, budget_s=120.0, warm_up=10, recipes=PRECISIONS)
    parser.add_argument(
        "--parts",
        type=some_of("part", PARTS),
        default=[*PARTS],
        metavar="A,B",
        help=f"some of {','.join(PARTS)} (default: all)",
    )


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


def grown(axis: str, value: int, hardware: Hardware, tiny: bool) -> StepWork:
    """The work of a step with one of its sizes changed."""
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
    changed = config.model_dump() | {"layers": layers, "context": max(context, config.context)}
    return StepWork(
        model=f"{axis} {value}", config=GPTConfig(**changed), batch=batch, context=context
    )


def measure(arguments: argparse.Namespace) -> Report:
    hardware = probe(arguments.device)
    rows: list[Row] = []
    if "sizes" in arguments.parts:
        for work in sizes(hardware.device, arguments.tiny):
            turns = in_turns(work, arguments.recipes, hardware, arguments)
            rows += [row | {"part": "sizes"} for row in turns]
    if "growth" in arguments.parts:
        for axis, values in (TINY if arguments.tiny else AXES[hardware.device]).items():
            for value in values:
                work = grown(axis, value, hardware, arguments.tiny)
                rows += in_turns(work, GROWING, hardware, arguments)
    if "operations" in arguments.parts:
        rows += operations.rows(hardware.device, arguments)
    settings = runner.timing_settings(arguments) | {"ranks": 1}
    return report.report_of(hardware.device, settings, rows)


def in_turns(
    work: StepWork, recipes: Iterable[str], hardware: Hardware, arguments: argparse.Namespace
) -> list[Row]:
    """The rows of one model's arms, the baseline (bf16, or fp32 on a CPU without bf16 instructions)
    first. Rows in `arguments.cells` are not measured again, and recipes that do not run here are
    left out.

    On a CPU all arms take turns. On a GPU every arm takes turns with the baseline alone, so that no
    more than two models must fit.
    """
    first = baseline(hardware)
    recipes = list(dict.fromkeys([first, *recipes]))
    our_arms = {arm.name: arm for arm in arms(hardware, recipes, ())}
    builders: dict[str, Callable[[], Callable[[], None]]] = {
        name: partial(build_step, arm, work, hardware) for name, arm in our_arms.items()
    }
    builders[first] = cache(builders[first])  # it is in every group

    def timed(group: list[str]) -> list[Row]:
        steps, failed = cells.runnable(work.model, {name: builders[name] for name in group})
        timings = interleaved(steps, **runner.timing_options(arguments))
        rows = []
        for name, timing in timings.items():
            plan = plan_of(our_arms[name], work, hardware)
            facts = figures(work, timing, timings[first], peak_rate(hardware, plan))
            paired = report.paired(timing, timings[first])
            rows.append({"case": work.model, "arm": name, **facts, **paired, "ratio_to": first})
        return rows + failed

    rows: dict[str, Row] = {}
    for group in groups(list(builders), hardware):
        for row in arguments.cells.rows(work.model, group, partial(timed, group)):
            rows.setdefault(row["arm"], row)
        free_memory(hardware.device)  # for the next group
    arguments.cells.left_out += cells.not_served(work.model, recipes, hardware)
    return list(rows.values())


def groups(names: list[str], hardware: Hardware) -> list[list[str]]:
    """The groups of arms that take turns; the first arm is in every group."""
    if hardware.device != "cuda" or len(names) == 1:
        return [names]
    return [[names[0], name] for name in names[1:]]


def table(data: Report) -> str:
    rows = data["results"]
    cell = {
        (row["arm"], row["case"]): report.paired_cell(row)
        for row in rows
        if row.get("part") == "sizes"
    }
    for row in data["left_out"]:
        cell[row["arm"], row["case"]] = row["left_out"].partition(":")[0]
    order = list(dict.fromkeys([rows[0]["ratio_to"], *PRECISIONS, *(arm for arm, _ in cell)]))
    grid = {place: cell[place] for place in sorted(cell, key=lambda place: order.index(place[0]))}
    text = (
        "Time relative to another arm's in the same round: the median over the rounds, and its\n"
        f"95 % confidence interval. Steps are relative to {rows[0]['ratio_to']}, operations to\n"
        "the first arm of their case. fp16 scales its loss."
    )
    extra = {
        "tokens/s": report.number("tokens_per_s", 0),
        "GB/s": report.number("gb_per_s", 1),
        "relative time": report.paired_cell,
    }
    title = "Training steps by precision and size, and operations of FP8"
    crossed = report.crossed(grid, "precision") + "\n" if grid else ""
    return report.heading(data, title, text) + crossed + report.timing_table(rows, extra)
