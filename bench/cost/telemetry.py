"""What a look at every operand costs: a training step that is sampled, beside one that is not.

With a sample every `EVERY` steps, telemetry takes the share (ratio - 1) / `EVERY` of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from bench import cells, report, runner
from bench.cost import emulation
from bench.report import Bar, Report, Row
from fp8stack.benchmark.step import FP8, Built, StepArm, Work, build, served
from fp8stack.benchmark.timing import interleaved
from fp8stack.config import RunConfig
from fp8stack.precision import Hardware, probe
from fp8stack.telemetry.operands import Telemetry

SHORT = ["--rounds", "12", "--budget", "30"]
EVERY = RunConfig().telemetry_every
AT_MOST = 0.02  # of the time
PLAIN, SAMPLED, TRIED = "not sampled", "sampled", "sampled, mxfp8 tried"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=40, recipes=FP8)


def measure(arguments: argparse.Namespace) -> Report:
    """Every recipe, by the backend that is the device's own."""
    hardware = probe(arguments.device)
    nano = emulation.nano()
    work = emulation.tiny_work() if arguments.tiny else nano
    rows: list[Row] = []

    def timed(case: str, recipe: str) -> list[Row]:
        timings = interleaved(steps(recipe, work, hardware), **runner.timing_options(arguments))
        found = report.rows_of(case, timings, PLAIN)
        return [row | {"share": round((row["ratio"] - 1) / EVERY, 5)} for row in found]

    arguments.cells.left_out += cells.not_served(work.model, arguments.recipes, hardware)
    for recipe in (name for name in arguments.recipes if served(name, hardware)):
        case = f"{work.model}, {recipe}"
        rows += arguments.cells.rows(case, (PLAIN, SAMPLED, TRIED), partial(timed, case, recipe))
    bars = [
        Bar(case=f"{nano.model}, {recipe}", arm=SAMPLED, of=PLAIN, at_most=1 + EVERY * AT_MOST)
        for recipe in arguments.recipes
    ]
    settings = runner.timing_settings(arguments) | {"every": EVERY}
    return report.report_of(hardware.device, settings, rows, bars=report.judged(bars, rows))


def steps(recipe: str, work: Work, hardware: Hardware) -> dict[str, Callable[[], None]]:
    """The arms: one model that trains, looked at or not."""
    backend = served(recipe, hardware)[0]
    arm = StepArm(name=recipe, recipe=recipe, backend=backend, compiled=False)
    built = build(arm, work, hardware)
    own, tried = (Telemetry(built.plan, 1, what_if) for what_if in ((), ("mxfp8",)))
    return {
        PLAIN: built.step,
        SAMPLED: partial(sampled_step, built, own),
        TRIED: partial(sampled_step, built, tried),
    }


def sampled_step(built: Built, telemetry: Telemetry) -> None:
    """A step whose only micro-batch is looked at, and its rows."""
    with telemetry.sampling(built.model):
        built.step()
    telemetry.finish(1, None)


def table(found: Report) -> str:
    every = found["settings"]["every"]
    text = f"The share is that of all steps' time, with a sample every {every} steps."
    cells = {"share": lambda row: f"{100 * row['share']:.2f} %"}
    return report.page(found, "The cost of telemetry", text, cells)


figure = report.ratios("A step that is sampled")
