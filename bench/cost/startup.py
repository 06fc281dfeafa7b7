"""The start-up time of the command: `--help`, `doctor` and the import, compared with torch's
import."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from bench import report
from bench.report import Report
from fp8stack.analysis.benchmark.timing import interleaved

# `main` is the function that the entry point of the installed command calls.
_COMMAND = "import sys; from fp8stack.cli import main; sys.argv = {words}; main()"
CASES = {
    "import fp8stack": "import fp8stack",
    "fp8stack --help": _COMMAND.format(words=["fp8stack", "--help"]),
    "fp8stack doctor": _COMMAND.format(words=["fp8stack", "doctor"]),
    "import torch": "import torch",
}
SHORT = ["--rounds", "6"]
BASE = "import torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=10, help="starts of each (default: %(default)s)"
    )


def measure(arguments: argparse.Namespace) -> Report:
    """Time whole processes in turns, after one start of each that is not counted."""
    starts: dict[str, Callable[[], object]] = {
        name: partial(start, code) for name, code in CASES.items()
    }
    timings = interleaved(starts, rounds=arguments.rounds, warm_up=1)
    rows = report.rows_of("start", timings, BASE)
    for row in rows:
        row["modules"] = modules(CASES[row["arm"]])
    settings = {"rounds": arguments.rounds, "warm_up": 1, "python": sys.version.split()[0]}
    return report.report_of("cpu", settings, rows, packages=("typer", "rich", "accelerate"))


def start(code: str) -> None:
    """Run Python with this code.

    Raises:
        CalledProcessError: the code failed.
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def modules(code: str) -> int:
    """The number of modules that are imported after this code, including Python's own."""
    counted = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(len(sys.modules), file=sys.stderr))\n" + code
    )
    done = subprocess.run(
        [sys.executable, "-c", counted], check=True, capture_output=True, text=True
    )
    return int(done.stderr.splitlines()[-1])


def table(data: Report) -> str:
    extra = {"modules": report.number("modules", 0), f"/ {BASE}": report.number("ratio")}
    text = "Processes from their start to their end, Python's own start included."
    return report.page(data, "Start-up", text, extra)


figure = report.ratios("Start-up", "median_ms", "ms")
