"""The report of `python -m bench gpu`: facts about the machine, rows as JSON, tables as
Markdown."""

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
from fp8stack.analysis.benchmark.timing import version
from fp8stack.analysis.conform.checks import Facts, brief, broken
from fp8stack.common.tables import markdown as table
from fp8stack.precision import Hardware

ROOT = Path(__file__).parents[2]
TIME_IS_UP = "the section's time was up"
# Facts of a case that have no column.
UNTOLD = ("check", "holds", "skipped", "failed", "traceback", "first", "losses")
Report = dict[str, Any]


def new_report(hardware: Hardware, quick: bool) -> Report:
    """A report without sections: the date, the command, the commit and the machine."""
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
    """The versions of the packages and libraries; None if missing or unknown."""
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
    """The output of a command; None if the command does not exist, fails, or prints nothing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def slug(name: str) -> str:
    """The folder name of a GPU: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def problems(report: Report) -> list[str]:
    """A line for each section that did not finish, and each case that failed or does not hold."""
    lines = []
    for name, section in report["sections"].items():
        if section["problem"]:
            lines.append(f"{name}: {section['problem']}")
        bad = filter(broken, section["cases"])
        lines += [f"{name}: {row['check']}: {brief(row)}" for row in bad]
    return lines


def write(report: Report, folder: Path) -> None:
    """Write `gpu.json` and `gpu.md` with the sections that the report has so far."""
    folder.mkdir(parents=True, exist_ok=True)
    report["problems"] = problems(report)
    (folder / "gpu.json").write_text(json.dumps(_finite(report), indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(report))


def _finite(data: Any) -> Any:
    """Replace numbers that are not finite by None, as JSON has none of them."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def markdown(report: Report) -> str:
    """The report as a page: the machine, the problems, and a table for each section."""
    known_versions = ", ".join(
        f"{name} {value}" for name, value in report["versions"].items() if value
    )
    lines = [
        f"# {report['gpu']}",
        "",
        f"Made by `{report['command']}` on {report['date']}: compute capability "
        f"{report['capability']}, driver {report['driver']}, {known_versions}, commit "
        f"{report['commit']}{' with changes' if report['changed_since_commit'] else ''}.",
        "",
    ]
    found_problems = problems(report)
    lines.append(
        f"{len(found_problems)} problems:"
        if found_problems
        else "Everything that has to hold holds."
    )
    lines += ["", *[f"- {line}" for line in found_problems], *([""] if found_problems else [])]
    for name, section in report["sections"].items():
        lines += [f"## {name}", "", summary(section), ""]
        lines += [*_rows(section["cases"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def summary(section: Mapping[str, Any]) -> str:
    """A line with the number of cases of a section by outcome."""
    rows = section["cases"]
    count = {
        "hold": sum(row.get("holds") is True for row in rows),
        "do not": sum(row.get("holds") is False for row in rows),
        "failed": sum("failed" in row for row in rows),
        "skipped": sum("skipped" in row for row in rows),
        "of these for want of time": sum(row.get("skipped") == TIME_IS_UP for row in rows),
    }
    counts = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
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
        return ", ".join(f"{name} {_told(inner)}" for name, inner in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _status(row: Facts) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "failed" in row:
        return "failed"
    return {True: "holds", False: "DOES NOT HOLD", None: ""}[row.get("holds")]
