"""The cost of a checkpoint: the time that a step waits for a save in the foreground and in the
background, and the slowdown of steps during a background save.

Checkpoints are written to the disk of `--folder` and flushed, as in a run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import report, runner
from bench.cost import emulation
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import StepWork, training_step
from fp8stack.analysis.benchmark.timing import summarize, wait_for
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, probe
from fp8stack.training.checkpoint.saver import Groups, Saver
from fp8stack.training.checkpoint.state import capture
from fp8stack.training.memory_check import keep_freed_memory
from fp8stack.training.optim.optimizer import build_optimizer

SHORT = ["--rounds", "3"]
WAITING, BEHIND = "in the foreground", "in the background"
QUIET, BUSY = "nothing is written", "a checkpoint is written"
INFO: dict[str, object] = {
    "identity": {}, "config": {}, "plan": {}, "scaler": None, "versions": {}, "guard": None,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=8, help="checkpoints of each kind (default: %(default)s)")
    add("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    runner.add_options(parser)


def measure(arguments: argparse.Namespace) -> Report:
    """Save checkpoints of a model of 84 million parameters, which trains in fp32 in between."""
    hardware = probe(arguments.device)
    shape = GPTConfig(vocabulary=16384, context=256, layers=10, width=768, heads=12)
    work = StepWork(model="84M parameters", config=shape, batch=1, context=128)
    work = emulation.tiny_work() if arguments.tiny else work
    if hardware.device == "cpu":
        keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows, size = _measured(work, hardware, Path(folder), arguments.rounds)
    settings = {"rounds": arguments.rounds, "checkpoint_gib": round(size / 2**30, 3)}
    return report.report_of(hardware.device, settings, rows)


def _measured(
    work: StepWork, hardware: Hardware, folder: Path, rounds: int
) -> tuple[list[Row], int]:
    step, state = _training(work, hardware)
    savers = {
        WAITING: Saver(folder / "waiting", keep=2),
        BEHIND: Saver(folder / "behind", keep=2, in_background=True),
    }
    samples_ms: dict[str, list[float]] = defaultdict(list)
    on_disk_s: list[float] = []
    step()  # creates the moments
    for number in range(1, rounds + 2):  # the first does not count: it allocates memory
        samples_ms[QUIET].append(_timed(step, hardware))
        for kind, saver in savers.items():
            begun = time.perf_counter()
            save = partial(saver.save, number, INFO, state)
            samples_ms[kind].append(_timed(save, hardware))
        while savers[BEHIND].is_writing:
            samples_ms[BUSY].append(_timed(step, hardware))
        savers[BEHIND].wait()
        on_disk_s.append(time.perf_counter() - begun)
    size = sum(file.stat().st_size for file in (folder / "behind").rglob(f"step-{number:06d}/*"))
    facts = {BEHIND: {"first_ms": samples_ms[BEHIND][0], "on_disk_ms": 1000 * max(on_disk_s[1:])}}
    rows: list[Row] = []
    for case, arms in ((f"{work.model}, save", savers), (f"{work.model}, step", (QUIET, BUSY))):
        first, second = arms
        timings = {
            arm: summarize(samples_ms[arm][1:] or samples_ms[arm]) for arm in (first, second)
        }
        for row in report.rows_of(case, timings, first):
            more = facts.get(row["arm"], {})
            rows.append(row | {key: round(value, 2) for key, value in more.items()})
    return rows, size


def _training(
    work: StepWork, hardware: Hardware
) -> tuple[Callable[[], None], Callable[[], Groups]]:
    """A training step in fp32, and a function that returns the state that a run saves."""
    plan = plan_for(work.config, "fp32", hardware, "reference")
    model = GPT(work.config, build_backend(plan)).to(hardware.device)
    optimizer = build_optimizer(model, RunConfig(lr=1e-4))
    step = training_step(model, optimizer, work.batches_of(hardware.device))
    return step, partial(capture, model, optimizer)


def _timed(work: Callable[[], object], hardware: Hardware) -> float:
    """The milliseconds that `work` takes, including its work on a GPU."""
    wait_for(hardware.device)
    begun = time.perf_counter()
    work()
    wait_for(hardware.device)
    return 1000 * (time.perf_counter() - begun)


def table(data: Report) -> str:
    text = (
        f"A checkpoint has {data['settings']['checkpoint_gib']} GiB: weights and two moments in "
        "float32. `save` is how long a step waits for one; the first in the background allocates "
        "host memory and stands by itself. `step` is a step of training, alone and while one is "
        "written."
    )
    cells = {
        "ratio": report.number("ratio", 3),
        "first ms": report.number("first_ms"),
        "on the disk after, ms": report.number("on_disk_ms"),
    }
    return report.page(data, "The cost of a checkpoint", text, cells)


figure = report.ratios("The cost of a checkpoint", "median_ms", "ms, median")
