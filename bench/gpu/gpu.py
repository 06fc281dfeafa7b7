"""Checks of a GPU against the CPU's bytes, TE's bytes and float64; golden files; and first timings.

Every section runs in a separate process, which may die or be stopped without affecting the others.
The results so far are on disk at any moment.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.cells import append_line, json_lines
from bench.gpu import golden, gpu_report, losses, visit
from bench.gpu.gpu_report import TIME_IS_UP, Report
from fp8stack.analysis.conform.checks import Check, Context, Facts, run_check
from fp8stack.analysis.conform.suite import GROUPS
from fp8stack.common.errors import UserError
from fp8stack.precision import probe

# Seconds. The last section gets the rest of the time.
WHOLE = 455.0
BUDGETS = {"casts": 110.0, "histories": 75.0, "golden": 45.0, "layers": 90.0, "losses": WHOLE}
# The checks of `fp8stack conform`, by section.
CONFORM = {
    "casts": ("casts", "scales", "quantizers", "layouts", "golden"),
    "histories": ("histories",),
    "layers": ("gemms", "groups", "attention"),
}
GRACE = 15.0  # a section starts no case after its budget, and is stopped this much later


@dataclass(frozen=True)
class Section:
    """Cases that share a process and `budget` seconds. At most `count` cases run, all if None.
    Files that they write, such as golden files, go into `folder`."""

    name: str
    context: Context
    folder: Path
    budget: float
    count: int | None = None

    def cases(self, deadline: float) -> Iterator[Check]:
        if self.name == "losses":
            return losses.cases(self.context, deadline)
        if self.name == "golden":
            return iter([Check("capture", partial(golden.captured, self.context, self.folder))])
        groups = CONFORM[self.name]
        return itertools.chain.from_iterable(GROUPS[group](self.context) for group in groups)

    def work(self, path: Path) -> None:
        """Run the cases in this process, and append each row to the file at `path` at once."""
        deadline = time.monotonic() + self.budget
        for case in itertools.islice(self.cases(deadline), self.count):
            append_line(path, {"starting": case.name})
            late = time.monotonic() > deadline
            row = {"check": case.name, "skipped": TIME_IS_UP} if late else run_check(case)
            append_line(path, row)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sections",
        type=_sections,
        default=list(BUDGETS),
        metavar="A,B",
        help=f"some of {','.join(BUDGETS)} (default: all)",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="20 steps instead of 200, one shape of layers")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it runs")
    add("--cases", type=int, metavar="N", help="the first N cases of each section (default: all)")
    add("--seconds", type=float, default=WHOLE, help="of all sections (default: %(default)g)")
    add(
        "--part",
        type=int,
        choices=list(visit.PARTS),
        help="a part of the first visit to a new GPU instead, see docs/new_gpu.md",
    )
    add("--minutes", type=float, metavar="N", help="all parts, or --part, in so many minutes")
    add("--dry-run", action="store_true", help="such parts on a CPU, with tiny sizes")
    add("--archive", type=Path, metavar="FILE", help="what such parts have written, as one tar.gz; "
        "where --out is empty, they continue from it")  # fmt: skip


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in BUDGETS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; known: {','.join(BUDGETS)}")
    return [name for name in BUDGETS if name in chosen]


def run(arguments: argparse.Namespace) -> None:
    """Run the sections and write the report. Exits with code 1 if a check does not hold."""
    on_gpu = arguments.device == "cuda" and not arguments.dry_run
    if on_gpu and (not torch.cuda.is_available() or torch.version.hip is not None):
        print("python -m bench gpu needs a CUDA GPU, and torch finds none here.")
        raise SystemExit(2)
    if arguments.part or arguments.minutes is not None or arguments.dry_run:
        visit.run(
            arguments.part, arguments.out, arguments.minutes, arguments.dry_run, arguments.archive
        )
        return
    if arguments.archive is not None:
        raise UserError("--archive is of a visit: give --minutes or --part beside.")
    start = time.monotonic()
    hardware = probe(arguments.device)
    compiler = "inductor" if on_gpu else "eager"
    context = Context(hardware, arguments.quick, compiler)
    report = gpu_report.new_report(context.hardware, arguments.quick)
    folder: Path = arguments.out / gpu_report.slug(context.hardware.name)
    gpu_report.write(report, folder)
    print(f"{context.hardware}, {report['versions']}", flush=True)
    for name in arguments.sections:
        remaining = arguments.seconds - (time.monotonic() - start)
        budget = min(BUDGETS[name], remaining)
        add_section(report, Section(name, context, folder, budget, arguments.cases))
        gpu_report.write(report, folder)
    print(f"written: {folder}/gpu.json and gpu.md, after {time.monotonic() - start:.0f} s")
    if problems := gpu_report.problems(report):
        print(f"{len(problems)} problems:", *problems, sep="\n  ")
        raise SystemExit(1)
    rows = [row for section in report["sections"].values() for row in section["cases"]]
    if arguments.seconds < WHOLE and any(row.get("skipped") == TIME_IS_UP for row in rows):
        raise SystemExit(visit.CUT_SHORT)


def add_section(report: Report, section: Section) -> None:
    """Run one section in a separate process, and add its rows to the report."""
    start = time.monotonic()
    path = section.folder / f"rows-{section.name}.jsonl"
    if path.exists():  # of a section that was stopped
        path.replace(path.with_suffix(".before.jsonl"))
    problem = in_a_process(partial(section.work, path), section.budget + GRACE)
    rows, unfinished = read_rows(path)
    if problem and unfinished:
        problem = f"{problem} in the case '{unfinished}'"
    added = report["sections"][section.name] = {
        "seconds": round(time.monotonic() - start, 1),
        "budget_s": round(section.budget, 1),
        "problem": problem,
        "cases": rows,
    }
    print(f"{section.name}: {gpu_report.summary(added)}", flush=True)


def in_a_process(target: Callable[[], None], seconds: float) -> str:
    """Run `target` in a new process. Returns its problem, "" if there was none."""
    process = multiprocessing.get_context("spawn").Process(target=target)
    process.start()
    process.join(max(0.0, seconds))
    if process.is_alive():
        process.kill()
        process.join()
        return f"stopped after {seconds:.0f} s"
    return f"died with exit code {process.exitcode}" if process.exitcode else ""


def read_rows(path: Path) -> tuple[list[Facts], str]:
    """The finished rows, and the name of a case that was started but not finished, or ""."""
    lines = json_lines(path)
    unfinished = lines[-1].get("starting", "") if lines else ""
    return [row for row in lines if "starting" not in row], unfinished
