"""Training on a shared machine: steps and the first command next to busy loops.

A measurement that other processes disturbed is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from bench import report
from bench.cells import clocks, others_s
from bench.cost import emulation
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import arms, build, works
from fp8stack.common.errors import UserError
from fp8stack.precision import probe
from fp8stack.training.memory_check import keep_freed_memory
from fp8stack.training.threads import USER_SETTINGS, adapting

SHORT = ["--seconds", "1", "--steps", "4"]
LOOPS = (0, 1, 2, 4)
BEFORE, AFTER, ONE = "torch's own waiting", "fp8stack's", "fp8stack's, 1 thread"
ARMS: dict[str, dict[str, str]] = {
    BEFORE: {},
    AFTER: {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    ONE: {},
}
STEPS = {"gpt-nano, delayed": "gpt-nano", "6 x 384, fp32": "small"}
FIRST = "the first command"
WAYS = {"alone": (1, 0), "beside two busy loops": (1, 2), "three side by side": (3, 0)}
AT_MOST = {"beside two busy loops": 3.0, "three side by side": 5.0}
LEAST_STEPS = 1 / 3
DISTURBED = 0.2
_TRIES = 4
_LOOP = "while True: pass"
_COMMAND = """
import contextlib, sys
from fp8stack.cli import app as cli

if sys.argv[1] == "before":
    cli.adapting = contextlib.nullcontext
cli.main(sys.argv[2:])
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=float, default=4, help="of steps at a time (default: %(default)s)")
    add("--steps", type=int, default=60, help="of the first command (default: %(default)s)")
    add("--limit", type=int, default=150, help="seconds for a command (default: %(default)s)")
    add("--minutes", type=float, default=1e9, help="begin nothing after so many (default: none)")


def measure(arguments: argparse.Namespace) -> Report:
    """Measure every arm in a separate process, next to more and more busy loops; then the
    command."""
    jobs: dict[str, Callable[[], Any]] = {
        f"{case} | {arm}": partial(steps_of, case, arm, arguments.seconds)
        for case in STEPS
        for arm in ARMS
    }
    for arm in (BEFORE, AFTER):
        for way in WAYS:
            jobs[f"{FIRST} | {arm} | {way}"] = partial(
                first_command, arm, way, arguments.steps, arguments.limit
            )
    began = time.monotonic()
    results: dict[str, Any] = {}

    def measured(name: str) -> list[Row]:
        if time.monotonic() - began > 60 * arguments.minutes:
            remaining = len(jobs) - len(results)
            raise UserError(
                f"{remaining} of {len(jobs)} are left. The same command goes on with them."
            )
        return [{"found": undisturbed(jobs[name])}]

    for name in jobs:
        (row,) = arguments.cells.rows(name, [], partial(measured, name))
        results[name] = row["found"]
    rows = rows_of(results)
    settings = {
        "cores": os.cpu_count(),
        "seconds of steps": arguments.seconds,
        "steps of the first command": arguments.steps,
    }
    return report.report_of("cpu", settings, rows, bars=bars(rows))


def undisturbed(job: Callable[[], Any]) -> Any:
    """The result of `job`, which works in child processes, in a run that other processes did not
    disturb.

    Raises:
        UserError: every run was disturbed.
    """
    for _ in range(_TRIES):
        before = clocks()
        result = job()
        after = clocks()
        if others_s(before, after) / (after.wall - before.wall) < DISTURBED:
            return result
    raise UserError("Other processes take this machine's cores. Go on when it is quiet.")


@contextmanager
def loops(count: int) -> Iterator[None]:
    """A context in which `count` processes are busy."""
    running = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


# Steps


def steps_of(case: str, arm: str, seconds: float) -> dict[str, float]:
    code = f"from bench.cost.busy import child; child({case!r}, {arm!r}, {seconds!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environment(ARMS[arm]), check=True, capture_output=True
    )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def _environment(more: dict[str, str]) -> dict[str, str]:
    dropped = {*USER_SETTINGS, "OMP_NUM_THREADS"}
    return {key: value for key, value in os.environ.items() if key not in dropped} | more


def child(case: str, arm: str, seconds: float) -> None:
    """Print the steps per second of one arm as JSON, by the number of busy loops."""
    if arm == ONE:
        torch.set_num_threads(1)
    keep_freed_memory()
    hardware = probe("cpu")
    recipe = case.rpartition(" ")[2]
    work = emulation.nano() if STEPS[case] == "gpt-nano" else works("cpu")["small"]
    step = build(arms(hardware, [recipe], ())[0], work, hardware).step
    rates = {}
    with adapting() if arm in (AFTER, ONE) else nullcontext():
        for _ in range(3):
            step()
        for count in LOOPS:
            with loops(count):
                time.sleep(1.0 if count else 0.0)
                step()
                rates[count] = rate(step, seconds)
    print(json.dumps(rates))


def rate(step: Callable[[], None], seconds: float) -> float:
    """Steps per second, measured for `seconds` and at least two steps."""
    began, done = time.perf_counter(), 0
    while done < 2 or time.perf_counter() - began < seconds:
        step()
        done += 1
    return round(done / (time.perf_counter() - began), 4)


# The command


def first_command(arm: str, way: str, steps: int, limit: int) -> float | None:
    """The seconds that the README's command takes, shortened to `steps`; of several side by side,
    the slowest. None if it takes longer than `limit`."""
    side_by_side, count = WAYS[way]
    setting = "before" if arm == BEFORE else "after"
    with tempfile.TemporaryDirectory() as folder, loops(count):
        began = time.perf_counter()
        runs = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", _COMMAND, setting, "pretrain", "--recipe", "delayed"),
                    *("--steps", str(steps), "--out", f"{folder}/{number}"),
                ],
                env=_environment({}), stdout=subprocess.DEVNULL,
            )
            for number in range(side_by_side)
        ]  # fmt: skip
        try:
            for run in runs:
                remaining_s = limit - (time.perf_counter() - began)
                if run.wait(max(remaining_s, 0.1)):
                    raise UserError(f"The command ended with exit code {run.returncode}.")
        except subprocess.TimeoutExpired:
            return None
        finally:
            for run in runs:
                run.kill()
                run.wait()
        return round(time.perf_counter() - began, 2)


# The report


def rows_of(results: dict[str, Any]) -> list[Row]:
    """A row for each arm of the steps and of the command. `quiet_share` is the rate over the rate
    on the quiet machine, `times` the time over the time of the command alone."""
    rows = []
    for case in STEPS:
        for arm in ARMS:
            rates = results[f"{case} | {arm}"]
            shares = {count: round(rate / rates["0"], 3) for count, rate in rates.items()}
            rows.append({"case": case, "arm": arm, "steps_per_s": rates, "quiet_share": shares})
    for arm in (BEFORE, AFTER):
        seconds = {way: results[f"{FIRST} | {arm} | {way}"] for way in WAYS}
        times = {
            way: None if way_s is None else round(way_s / seconds["alone"], 2)
            for way, way_s in seconds.items()
        }
        rows.append({"case": FIRST, "arm": arm, "seconds": seconds, "times": times})
    return rows


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The limits that fp8stack's setting is held to."""
    judged = []
    for row in rows:
        if row["arm"] != AFTER:
            continue
        for way, most in AT_MOST.items() if row["case"] == FIRST else ():
            value = row["times"][way]
            bar = f"{row['case']}, {way}: at most {most:g} times its time alone"
            judged.append(
                {"bar": bar, "found": value, "holds": value is not None and value <= most}
            )
        if row["case"] != FIRST:
            value = row["quiet_share"]["2"]
            bar = f"{row['case']}, two busy loops: at least a third of the quiet machine's steps"
            judged.append({"bar": bar, "found": value, "holds": value >= LEAST_STEPS})
    return judged


def table(data: Report) -> str:
    text = (
        "Steps per second, forward, backward and AdamW, with so many endless loops beside; in "
        f"brackets the share of the quiet machine's. Then the README's first command, shortened, "
        "from its start to its end; of three side by side, the slowest. A measurement during "
        f"which other processes had more than {DISTURBED:g} cores was made again."
    )
    of_steps = [row for row in data["results"] if row["case"] != FIRST]
    lines = [
        [row["case"], row["arm"]]
        + [f"{row['steps_per_s'][n]:.2f} ({row['quiet_share'][n]:.2f})" for n in map(str, LOOPS)]
        for row in of_steps
    ]
    header = ["case", "threads wait by", *(f"{count} loops" for count in LOOPS)]
    limit = "too long"
    commands = [
        [row["arm"]]
        + [
            limit if row["seconds"][way] is None
            else f"{row['seconds'][way]:.1f} s ({row['times'][way]:.2f})"
            for way in WAYS
        ]
        for row in data["results"] if row["case"] == FIRST
    ]  # fmt: skip
    return (
        report.heading(data, "A busy machine", text)
        + report.markdown(header, lines) + "\n"
        + report.markdown(["threads wait by", *WAYS], commands)
    )  # fmt: skip


def figure(data: Report) -> Figure:
    rows = [
        {
            "case": row["case"],
            "arm": row["arm"],
            "busy loops": count,
            "steps/s": row["steps_per_s"][str(count)],
        }
        for row in data["results"] if row["case"] != FIRST
        for count in LOOPS
    ]  # fmt: skip
    plot = report.line_figure(rows, "A busy machine", "busy loops", "steps/s")
    for panel in plot.axes:
        panel.set_yscale("log")
        panel.set_xlabel("busy loops")
    return plot
