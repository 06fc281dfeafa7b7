"""The reliability matrix: rows of faults that are put into runs, and how many runs survived.

The table is written after each row, so it can be measured row by row; rows that are not run now
stay as they are.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import torch

from bench import report as reports
from bench.cells import words
from bench.report import Report, Row
from bench.runner import RESULTS
from fp8stack.analysis.benchmark.timing import machine
from fp8stack.common.errors import UserError, unknown
from tests.faults.case import Case, Outcome

ROWS = ("kill_rows", "inputs.input_rows", "numeric.numeric_rows", "rank_rows")
SHOWN = 10  # lost faults to list per row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", type=words, default=[], metavar="R1,R2", help="these rows (default: all)")
    add(
        "--short",
        action="store_true",
        help="a few faults of each kind, in minutes; written only where --out says",
    )
    add("--keep", type=Path, metavar="DIR", help="keep the runs, in DIR/<row>")


def run(arguments: argparse.Namespace) -> None:
    """Run rows, and print and write the table after each. Exits with code 1 if a fault was not
    survived."""
    cases = all_cases()
    for name in arguments.only:
        if name not in cases:
            raise unknown("row", name, cases)
    facts = machine()
    chosen_folder: Path | None = None if arguments.out == RESULTS else arguments.out
    folder = (
        None
        if arguments.short and chosen_folder is None
        else chosen_folder or RESULTS / facts["slug"]
    )
    data = so_far(folder, facts)
    lost = False
    for name in arguments.only or cases:
        if cases[name].needs_cuda and not torch.cuda.is_available():
            print(f"{name}: not run, it needs a CUDA GPU", flush=True)
            continue
        row = measured(name, cases[name], arguments.short, arguments.keep)
        print(
            f"{name}: {row['survived']} of {row['injected']} survived, {row['seconds']:.0f} s",
            flush=True,
        )
        for line in row["lost"]:
            print(f"  LOST: {line}", flush=True)
        lost |= bool(row["lost"])
        data["results"] = sorted(
            [*(old for old in data["results"] if old["case"] != name), row],
            key=lambda row: _order(row["case"]),
        )
        if folder is not None:
            reports.write(data, table(data, cases), folder)
    print(table(data, cases))
    print(f"written: {folder}/reliability.json and .md" if folder else "nothing is written")
    if lost:
        raise SystemExit(1)


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for rows in ROWS:
        cases |= import_module(f"tests.faults.{rows}").CASES
    return dict(sorted(cases.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> int:
    return int(name.removeprefix("R"))


def so_far(folder: Path | None, facts: Row) -> Report:
    """The report with the rows that are already in `folder`."""
    path = folder / "reliability.json" if folder else None
    results = []
    if path and path.exists():
        before = json.loads(path.read_text())
        results = [{"machine": before["machine"]["machine"], **row} for row in before["results"]]
    return {"scenario": "reliability", "machine": facts, "results": results}


def measured(name: str, case: Case, short: bool, keep: Path | None) -> Row:
    """Run the faults of one row. Returns the row: the outcome, and the command that repeats it."""
    began = time.monotonic()
    with _folder(name, keep) as folder:
        try:
            outcome = case.run(folder, case.short if short else case.long)
        except Exception as error:  # the next rows are run all the same
            traceback.print_exc()
            reason = f"the row itself failed: {type(error).__name__}: {error}"
            outcome = Outcome(injected=0, survived=0, lost=(reason,))
    return {
        "case": name,
        "what": case.description,
        "passes": case.passes,
        "injected": outcome.injected,
        "survived": outcome.survived,
        "lost": list(outcome.lost),
        "seconds": round(time.monotonic() - began, 1),
        "command": f"python -m bench reliability --only {name}{' --short' if short else ''}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine()["machine"],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


@contextmanager
def _folder(name: str, keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"reliability-{name}-") as temporary:
            yield Path(temporary)
        return
    folder = (keep / name).resolve()
    if folder.exists():
        raise UserError(f"{folder} is there already. Remove it, or give another --keep.")
    folder.mkdir(parents=True)
    yield folder


def table(data: Report, cases: Mapping[str, Case]) -> str:
    rows = {row["case"]: row for row in data["results"]}
    text = "# Reliability\n\nFaults put into whole runs, and how many of them passed, each row by a"
    text += f" rule of its own. Measured on {_machines(data)}, torch "
    text += f"{data['machine']['torch']}, row by row, by `python -m bench reliability`.\n\n"
    cells = [
        _cells(rows[name]) if name in rows else _not_run(name, cases[name])
        for name in sorted(cases.keys() | rows.keys(), key=_order)
    ]
    header = ["row", "faults", "a fault passes when", "injected", "survived", "lost", "seconds"]
    return text + reports.markdown([*header, "run on"], cells) + "".join(_lost(rows.values()))


def _machines(data: Report) -> str:
    """The machine that the rows were run on; if there are several, each with its rows."""
    by_machine: dict[str, list[str]] = {}
    for row in data["results"]:
        by_machine.setdefault(row["machine"], []).append(row["case"])
    if len(by_machine) < 2:
        return str(next(iter(by_machine), data["machine"]["machine"]))
    return "; ".join(f"{name} ({', '.join(cases)})" for name, cases in by_machine.items())


def _cells(row: Row) -> list[str]:
    lost = f"**{len(row['lost'])} LOST**" if row["lost"] else "none"
    counts = [str(row["injected"]), str(row["survived"]), lost, f"{row['seconds']:,.0f}"]
    form = " (short)" if row["command"].endswith("--short") else ""
    return [row["case"], row["what"], row["passes"], *counts, row["date"] + form]


def _not_run(name: str, case: Case) -> list[str]:
    reason = "not run, needs a GPU" if case.needs_cuda else "not run"
    return [name, case.description, case.passes, "", "", "", "", reason]


def _lost(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row["lost"]:
            lines = [" ".join(line.split()) for line in row["lost"][:SHOWN]]
            more = len(row["lost"]) - len(lines)
            lines += [f"and {more} more"] if more else []
            yield f"\nLost in {row['case']}:\n\n" + "".join(f"- {line}\n" for line in lines)
