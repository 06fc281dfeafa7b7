"""The peak memory of a training step by recipe, beside what weights, gradients and moments need.

On a GPU it is the allocator's peak. On a CPU every arm is a process of its own: its peak of
resident memory less what it had before the model was built. With them, the bytes that a forward
pass keeps (`activations`).
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
from bench.cost import activations, emulation
from bench.report import Report, Row
from fp8stack.benchmark.step import PRECISIONS, StepArm, Work, arms, baseline, build_step, chosen
from fp8stack.precision import Hardware, probe
from fp8stack.training.memory import keep_freed_memory

STEPS = 2  # in the first, moments are made


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
        found: list[Row] = []
        for arm in arms(hardware, recipes, ()):
            one = partial(_measured, arm, work, hardware)
            found += arguments.cells.rows(work.model, [arm.name], one)
        (base,) = [row["peak_gib"] for row in found if row["arm"] == first]
        for row in found:
            rows.append(row | {"ratio": round(row["peak_gib"] / base, 4), "ratio_to": first})
        arguments.cells.left_out += cells.not_served(work.model, recipes, hardware)
    made = report.report_of(hardware.device, {"steps": STEPS}, rows)
    return made | {"activations": activations.rows(tiny)}


def _measured(arm: StepArm, work: Work, hardware: Hardware) -> list[Row]:
    try:
        gib = in_a_process(arm, work, hardware)
    except RuntimeError as error:
        if arm.name == baseline(hardware):
            raise
        return [cells.failure(work.model, arm.name, error)]
    floor = round(floor_gib(work), 4)
    return [{"case": work.model, "arm": arm.name, "peak_gib": round(gib, 4), "floor_gib": floor}]


def floor_gib(work: Work) -> float:
    """Weights, gradients and AdamW's two moments, float32 each: 16 bytes per parameter."""
    return 16 * work.config.parameters() / 2**30


def in_a_process(arm: StepArm, work: Work, hardware: Hardware) -> float:
    """The GiB that the arm takes, measured in a fresh process.

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


def _measure_here(arm: StepArm, work: Work, hardware: Hardware, sender: Connection) -> None:
    """Send the GiB of a few steps beyond what the process had before."""
    if hardware.device == "cpu":
        keep_freed_memory()
        torch.ones(64, 64) @ torch.ones(64, 64)  # threads and the library of GEMMs count before
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
    """The most memory that this process had in RAM."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss counts what the parent had when it started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def table(found: Report) -> str:
    text = "Beyond what the process had before the model. The floor is 16 bytes per parameter: "
    text += "weights, gradients and two moments in float32."
    rows = found["results"]
    cells = (
        [
            row["case"], row["arm"], f"{row['peak_gib']:.3f}", f"{row['floor_gib']:.3f}",
            f"{row['peak_gib'] - row['floor_gib']:.3f}", f"{row['ratio']:.3f}",
        ]
        for row in rows
    )  # fmt: skip
    header = ["model", "arm", "peak GiB", "floor GiB", "beyond it", f"/ {rows[0]['ratio_to']}"]
    title = "Peak memory of a training step"
    peaks = report.heading(found, title, text) + report.markdown(header, cells)
    return peaks + activations.table(found)


figure = report.ratios("Peak memory of a step", "peak_gib", "GiB")
