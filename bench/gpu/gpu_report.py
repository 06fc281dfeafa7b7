"""What `python -m bench gpu` writes: facts about the machine, rows as JSON, tables as Markdown."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack.benchmark.timing import version
from fp8stack.conform.checks import Facts, brief, broken
from fp8stack.precision import Hardware
from fp8stack.tables import markdown as table

ROOT = Path(__file__).parents[2]
TIME_IS_UP = "the section's time was up"
# The facts of a case that are not in a column of their own.
UNTOLD = ("check", "holds", "skipped", "failed", "traceback", "first", "losses")
Report = dict[str, Any]


def new_report(hardware: Hardware, quick: bool) -> Report:
    """A report with no section yet: when, by which command, on what."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m bench {shlex.join(sys.argv[1:])}",
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed_since_commit": bool(_output("git", "status", "--porcelain")),
        "gpu": hardware.name,
        "capability": None if hardware.capability is None else "{}.{}".format(*hardware.capability),
        "memory_gib": hardware.memory_gib,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions(hardware),
        "quick": quick,
        "sections": {},
    }


def versions(hardware: Hardware) -> dict[str, str | None]:
    """What computed; None where it is not there or not known."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "fp8stack": fp8stack.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublas": version("nvidia-cublas") or version("nvidia-cublas-cu12"),
        "cudnn": None if cudnn is None else str(cudnn),
        "triton": version("triton"),
        "transformer-engine": hardware.te_version,
        "transformer-engine problem": hardware.te_problem or None,
        "python": platform.python_version(),
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None if there is no such command here, or nothing to print."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def slug(name: str) -> str:
    """A folder's name for a GPU: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def problems(report: Report) -> list[str]:
    """Each section that did not run to its end, and each case that failed or does not hold."""
    found = []
    for name, section in report["sections"].items():
        if section["problem"]:
            found.append(f"{name}: {section['problem']}")
        bad = filter(broken, section["cases"])
        found += [f"{name}: {row['check']}: {brief(row)}" for row in bad]
    return found


def write(report: Report, folder: Path) -> None:
    """`gpu.json` and `gpu.md`, as far as the report has got."""
    folder.mkdir(parents=True, exist_ok=True)
    report["problems"] = problems(report)
    (folder / "gpu.json").write_text(json.dumps(_finite(report), indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(report))


def _finite(data: Any) -> Any:
    """The data with None for numbers that JSON does not have."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def markdown(report: Report) -> str:
    """The report as a page: what it ran on, what is wrong, and a table for each section."""
    known = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    lines = [
        f"# {report['gpu']}",
        "",
        f"Made by `{report['command']}` on {report['date']}: compute capability "
        f"{report['capability']}, driver {report['driver']}, {known}, commit {report['commit']}"
        f"{' with changes' if report['changed_since_commit'] else ''}.",
        "",
    ]
    found = problems(report)
    lines.append(f"{len(found)} problems:" if found else "Everything that has to hold holds.")
    lines += ["", *[f"- {line}" for line in found], *([""] if found else [])]
    for name, section in report["sections"].items():
        lines += [f"## {name}", "", summary(section), ""]
        lines += [*_rows(section["cases"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def summary(section: Mapping[str, Any]) -> str:
    """How many cases of a section came out how, in a line."""
    rows = section["cases"]
    count = {
        "hold": sum(row.get("holds") is True for row in rows),
        "do not": sum(row.get("holds") is False for row in rows),
        "failed": sum("failed" in row for row in rows),
        "skipped": sum("skipped" in row for row in rows),
        "of these for want of time": sum(row.get("skipped") == TIME_IS_UP for row in rows),
    }
    counts = ", ".join(f"{number} {what}" for what, number in count.items())
    problem = f" {section['problem']}." if section["problem"] else ""
    return f"{len(rows)} cases in {section['seconds']:.0f} s: {counts}.{problem}"


def _rows(rows: list[Facts]) -> list[str]:
    """A table with a column for each fact that a case has."""
    names = dict.fromkeys(name for row in rows for name in row if name not in UNTOLD)
    cells = [
        [row["check"], *(_told(row.get(name)) for name in names), _status(row)] for row in rows
    ]
    return table(["case", *(name.replace("_", " ") for name in names), ""], cells)


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _status(row: Facts) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "failed" in row:
        return "failed"
    return {True: "holds", False: "DOES NOT HOLD", None: ""}[row.get("holds")]
