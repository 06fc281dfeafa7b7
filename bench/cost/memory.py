"""The peak memory of a training step by recipe, and the memory of weights, gradients and moments.

On a GPU this is the allocator's peak. On a CPU every arm runs in a separate process: its peak
resident memory minus the memory before the model was built.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench import cells, report, runner
from bench.cost import emulation
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import (
    PRECISIONS,
    StepArm,
    StepWork,
    arms,
    baseline,
    build_step,
    chosen,
)
from fp8stack.precision import Hardware, probe
from fp8stack.training.memory_check import keep_freed_memory

STEPS = 2  # the first creates the moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, recipes=PRECISIONS, models=True)


def measure(arguments: argparse.Namespace) -> Report:
    hardware = probe(arguments.device)
    tiny = arguments.tiny
    works = [emulation.tiny_work()] if tiny else chosen(arguments.models, hardware.device)
    first = baseline(hardware)
    recipes = list(dict.fromkeys([first, *arguments.recipes]))
    rows: list[Row] = []
    for work in works:
        work_rows: list[Row] = []
        for arm in arms(hardware, recipes, ()):
            measure_arm = partial(_measured, arm, work, hardware)
            work_rows += arguments.cells.rows(work.model, [arm.name], measure_arm)
        (base,) = [row["peak_gib"] for row in work_rows if row["arm"] == first]
        for row in work_rows:
            rows.append(row | {"ratio": round(row["peak_gib"] / base, 4), "ratio_to": first})
        arguments.cells.left_out += cells.not_served(work.model, recipes, hardware)
    return report.report_of(hardware.device, {"steps": STEPS}, rows)


def _measured(arm: StepArm, work: StepWork, hardware: Hardware) -> list[Row]:
    try:
        gib = in_a_process(arm, work, hardware)
    except RuntimeError as error:
        if arm.name == baseline(hardware):
            raise
        return [cells.failure(work.model, arm.name, error)]
    floor = round(floor_gib(work), 4)
    return [{"case": work.model, "arm": arm.name, "peak_gib": round(gib, 4), "floor_gib": floor}]


def floor_gib(work: StepWork) -> float:
    """Weights, gradients and AdamW's two moments, float32 each: 16 bytes per parameter."""
    return 16 * work.config.parameters() / 2**30


def in_a_process(arm: StepArm, work: StepWork, hardware: Hardware) -> float:
    """The peak GiB of the arm, measured in a new process.

    Raises:
        RuntimeError: the process died.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_here, args=(arm, work, hardware, sender))
    process.start()
    sender.close()
    try:
        gib = float(receiver.recv())
    except EOFError:
        process.join()
        raise RuntimeError(
            f"{work.model}, {arm.name}: the process died, exit code {process.exitcode}"
        ) from None
    process.join()
    return gib


def _measure_here(arm: StepArm, work: StepWork, hardware: Hardware, sender: Connection) -> None:
    """Send the peak GiB of a few steps, minus the memory that the process had before."""
    if hardware.device == "cpu":
        keep_freed_memory()
        torch.ones(64, 64) @ torch.ones(64, 64)  # start threads and the GEMM library first
        before = peak_resident_gib()
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**30
    step = build_step(arm, work, hardware)
    for _ in range(STEPS):
        step()
    if hardware.device == "cpu":
        after = peak_resident_gib()
    else:
        torch.cuda.synchronize()
        after = torch.cuda.max_memory_allocated() / 2**30
    sender.send(after - before)


def peak_resident_gib() -> float:
    """The peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss includes the parent's memory at the fork
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def table(data: Report) -> str:
    text = "Beyond what the process had before the model. The floor is 16 bytes per parameter: "
    text += "weights, gradients and two moments in float32."
    rows = data["results"]
    cells = (
        [
            row["case"], row["arm"], f"{row['peak_gib']:.3f}", f"{row['floor_gib']:.3f}",
            f"{row['peak_gib'] - row['floor_gib']:.3f}", f"{row['ratio']:.3f}",
        ]
        for row in rows
    )  # fmt: skip
    header = ["model", "arm", "peak GiB", "floor GiB", "beyond it", f"/ {rows[0]['ratio_to']}"]
    title = "Peak memory of a training step"
    return report.heading(data, title, text) + report.markdown(header, cells)


figure = report.ratios("Peak memory of a step", "peak_gib", "GiB")
