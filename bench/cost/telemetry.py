"""The cost of telemetry: a training step that is sampled, compared with one that is not.

With a sample every `EVERY` steps, telemetry takes the fraction (ratio - 1) / `EVERY` of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from bench import cells, report, runner
from bench.cost import emulation
from bench.report import Bar, Report, Row
from fp8stack.analysis.benchmark.step_timing import FP8, Built, StepArm, StepWork, build, served
from fp8stack.analysis.benchmark.timing import interleaved
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, probe
from fp8stack.training.telemetry.operand_errors import Telemetry

SHORT = ["--rounds", "12", "--budget", "30"]
EVERY = RunConfig().telemetry_every
AT_MOST = 0.02  # of the time
PLAIN, SAMPLED, TRIED = "not sampled", "sampled", "sampled, mxfp8 tried"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=40, recipes=FP8)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure every recipe, on the device's default backend."""
    hardware = probe(arguments.device)
    nano = emulation.nano()
    work = emulation.tiny_work() if arguments.tiny else nano
    rows: list[Row] = []

    def timed(case: str, recipe: str) -> list[Row]:
        timings = interleaved(steps(recipe, work, hardware), **runner.timing_options(arguments))
        arm_rows = report.rows_of(case, timings, PLAIN)
        return [row | {"share": round((row["ratio"] - 1) / EVERY, 5)} for row in arm_rows]

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


def steps(recipe: str, work: StepWork, hardware: Hardware) -> dict[str, Callable[[], None]]:
    """The arms: steps of the same model without and with samples."""
    backend = served(recipe, hardware)[0]
    arm = StepArm(name=recipe, recipe=recipe, backend=backend, compiled=False)
    built = build(arm, work, hardware)
    plain, tried = (Telemetry(built.plan, 1, what_if) for what_if in ((), ("mxfp8",)))
    return {
        PLAIN: built.step,
        SAMPLED: partial(sampled_step, built, plain),
        TRIED: partial(sampled_step, built, tried),
    }


def sampled_step(built: Built, telemetry: Telemetry) -> None:
    """Run a step whose only micro-batch is sampled, and compute its rows."""
    with telemetry.sampling(built.model):
        built.step()
    telemetry.finish(1, None)


def table(data: Report) -> str:
    every = data["settings"]["every"]
    text = f"The share is that of all steps' time, with a sample every {every} steps."
    cells = {"share": lambda row: f"{100 * row['share']:.2f} %"}
    return report.page(data, "The cost of telemetry", text, cells)


figure = report.ratios("A step that is sampled")
