"""Results that grow on disk: an interrupted measurement continues with the cells that are left."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import Row
from fp8stack.analysis.benchmark.step_timing import unserved
from fp8stack.analysis.benchmark.timing import Timing, interleaved
from fp8stack.common.errors import unknown
from fp8stack.precision import Hardware

Arm = Callable[[], object]


def words(text: str) -> list[str]:
    """Split the value of an option at its commas."""
    return [word for piece in text.split(",") if (word := piece.strip())]


def some_of(kind: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """`words` that refuses a word that is not among `names`, for an option's `type`."""

    def chosen(text: str) -> list[str]:
        for word in words(text):
            if word not in names:
                raise argparse.ArgumentTypeError(str(unknown(kind, word, names)))
        return words(text)

    return chosen


class Cells:
    """Rows by cell, such as the arms of one model. A cell is written to disk when measured.

    Args:
        path: a file of JSON lines, one per cell; None to keep the cells in memory only.
        conditions: the conditions that rows depend on besides the cell's name, such as the machine
            and the number of rounds. Cells in the file with other conditions are ignored.
    """

    def __init__(self, path: Path | None = None, conditions: object = None) -> None:
        self.path = path
        self._conditions = json.loads(json.dumps(conditions, default=str))
        self.left_out: list[Row] = []
        self._known: dict[str, list[Row]] = {}
        for line in json_lines(path) if path is not None else ():
            if line["conditions"] == self._conditions:
                self._known[line["cell"]] = line["rows"]
        if self._known:
            print(f"{path}: continues after {len(self._known)} cells that are there", flush=True)

    def rows(self, case: str, arms: Iterable[str], measure: Callable[[], list[Row]]) -> list[Row]:
        """The rows of these arms in this case: from the file, or else from `measure`. Rows of arms
        that were left out go to `left_out` instead."""
        cell = f"{case}: {', '.join(arms)}"
        rows = self._known.get(cell)
        if rows is None:
            before = clocks()
            rows = measure()
            share = _others_share(before, clocks())
            rows = self._known[cell] = [row | {"others_share": share} for row in rows]
            print(f"measured: {cell}", flush=True)
            if self.path is not None and not any(row.get("failed") for row in rows):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                line = {"conditions": self._conditions, "cell": cell, "rows": rows}
                append_line(self.path, line)
        self.left_out += [row for row in rows if "left_out" in row]
        return [row for row in rows if "left_out" not in row]

    def timed(
        self,
        case: str,
        builders: Mapping[str, Callable[[], Arm]],
        to_rows: Callable[[str, dict[str, Timing]], list[Row]],
        **options: Any,
    ) -> list[Row]:
        """The rows of arms that are built here and timed in turns. See `runnable`, and
        `interleaved` for the options."""

        def measure() -> list[Row]:
            seconds: dict[str, float] = {}
            arms, failed = runnable(case, builders, seconds)
            rows = to_rows(case, interleaved(arms, **options))
            return [row | {"first_s": round(seconds[row["arm"]], 1)} for row in rows] + failed

        return self.rows(case, builders, measure)

    def finish(self) -> int:
        """The number of arms that failed. If none failed, the file is removed. Otherwise the same
        command measures only the cells with failed arms again."""
        failed = len([row for row in self.left_out if row.get("failed")])
        if self.path is not None and not failed:
            self.path.unlink(missing_ok=True)
        return failed


def json_lines(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; none if there is no file. Blank lines, and lines that a
    killed process cut short, are skipped."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file of JSON lines; it starts on a new line, since the last one may be cut
    short."""
    with path.open("a") as file:
        file.write("\n" + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


class Clocks(NamedTuple):
    """Wall-clock seconds, CPU seconds of all processes (NaN if unknown), and CPU seconds of this
    process and its children."""

    wall: float
    busy: float
    this_process: float


def clocks() -> Clocks:
    busy = math.nan
    if Path("/proc/stat").exists():
        user, nice, system, _, _, irq, softirq = Path("/proc/stat").read_text().split()[1:8]
        ticks = sum(map(int, (user, nice, system, irq, softirq)))
        busy = ticks / os.sysconf("SC_CLK_TCK")
    return Clocks(time.monotonic(), busy, sum(os.times()[:4]))


def others_s(begin: Clocks, end: Clocks) -> float:
    """The CPU seconds of other processes."""
    return (end.busy - begin.busy) - (end.this_process - begin.this_process)


def _others_share(begin: Clocks, end: Clocks) -> float | None:
    """The fraction of the CPUs' time that other processes took; None if unknown."""
    share = others_s(begin, end) / ((end.wall - begin.wall) * (os.cpu_count() or 1))
    return round(max(0.0, share), 3) if math.isfinite(share) else None


# Arms that are left out


def left_out(case: str, arm: str, reason: str) -> Row:
    return {"case": case, "arm": arm, "left_out": reason}


def not_served(case: str, recipes: Iterable[str], hardware: Hardware) -> list[Row]:
    """A row for each of `recipes` that this machine cannot run as such."""
    reasons = unserved(recipes, hardware).items()
    return [left_out(case, recipe, reason) for recipe, reason in reasons]


def runnable(
    case: str,
    builders: Mapping[str, Callable[[], Arm]],
    seconds: dict[str, float] | None = None,
) -> tuple[dict[str, Arm], list[Row]]:
    """The arms, built and called once, which compiles them, and a row for each arm that fails or
    whose package is not installed. `seconds` gets the time of the build and the first call.

    Raises:
        Exception: the first arm failed, with which the others are compared.
    """
    arms: dict[str, Arm] = {}
    failed: list[Row] = []
    for name, build in builders.items():
        if reason := missing(name):
            failed.append(left_out(case, name, reason))
            continue
        before = time.perf_counter()
        try:
            arm = build()
            arm()
        except Exception as error:  # other libraries', compilers' and drivers' too
            if not arms:
                raise
            failed.append(failure(case, name, error))
        else:
            arms[name] = arm
            if seconds is not None:
                seconds[name] = time.perf_counter() - before
    return arms, failed


def failure(case: str, arm: str, error: Exception) -> Row:
    first_line = str(error).strip().partition("\n")[0][:200]
    reason = f"failed: {type(error).__name__}: {first_line}"
    print(f"{case}, {arm}: {reason}", file=sys.stderr, flush=True)
    return left_out(case, arm, reason) | {"failed": True}


def missing(arm: str) -> str:
    """The reason why a peer, the first word of the arm's name, cannot be measured; "" if it can."""
    package = arm.partition(" ")[0]
    if package not in ("torchao", "transformers"):
        return ""
    try:
        import_module(package)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            return f"skipped: {package} is not installed (pip install {package})"
        return f"skipped: {package} cannot be imported: {error}"
    return ""
