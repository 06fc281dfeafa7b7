"""How long the command takes to start: `--help`, `doctor` and the import, beside torch's import."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from bench import report
from bench.report import Report
from fp8stack.benchmark.timing import interleaved

# In each, `main` is what the entry point of the installed command calls.
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
    """Each in a process of its own, in turns, after one start that is not counted."""
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
    """Run Python with this code, to its end.

    Raises:
        CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def modules(code: str) -> int:
    """How many modules are imported when this code has run; Python's own are counted too."""
    counted = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(len(sys.modules), file=sys.stderr))\n" + code
    )
    done = subprocess.run(
        [sys.executable, "-c", counted], check=True, capture_output=True, text=True
    )
    return int(done.stderr.splitlines()[-1])


def table(found: Report) -> str:
    extra = {"modules": report.number("modules", 0), f"/ {BASE}": report.number("ratio")}
    text = "Processes from their start to their end, Python's own start included."
    return report.page(found, "Start-up", text, extra)


figure = report.ratios("Start-up", "median_ms", "ms")
