"""Whether every recipe trains as well as float32 over some hundred steps: `fp8stack compare`, held
to bars.

Losses alone are kept: nothing here is timed, so it may run beside other work.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import report, runner
from bench.report import Report, Row
from fp8stack.compare import comparison, settings
from tests.faults.processes import rows

SHORT = ["--steps", "300", "--recipes", "fp32,bf16,delayed,mxfp8"]
RECIPES = ["fp32", "bf16", "delayed", "current", "block", "mxfp8", "fp16"]
AT_MOST = {"bf16": 1.0}  # percent of float32's loss
AT_MOST_OTHERS = 5.0
OWN_BAR = 0.25  # percent, of the FP8 recipes: shown only if the whole interval lies below
SETS = ["telemetry_every=0", "sample_tokens=0"]
TINY = [
    "model_overrides.layers=1", "model_overrides.width=32", "model_overrides.heads=2",
    "eval_windows=8", "warmup_steps=2", "context=32", "batch=4",
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=500, help="of each run (default: %(default)s)")
    add("--seeds", type=int, default=1, help="runs of each recipe (default: %(default)s)")
    add("--runs", type=Path, help="where runs are kept, and gone on with (default: nowhere)")
    runner.add_options(parser, device=False, recipes=RECIPES)


def measure(arguments: argparse.Namespace) -> Report:
    """The validation loss of each recipe at the end, and what was not finite on the way."""
    with tempfile.TemporaryDirectory() as temporary:
        return _measured(arguments, arguments.runs or Path(temporary) / "runs")


def _measured(arguments: argparse.Namespace, folder: Path) -> Report:
    flags = {"steps": arguments.steps, "device": "cpu"}
    sets = [*SETS, *(TINY if arguments.tiny else [])]
    asked = settings.prepare(
        ",".join(arguments.recipes), arguments.seeds, str(folder), "fp32", flags, sets
    )
    comparison.compare(asked)
    known = settings.read_report(asked.report)
    found = [
        {
            "case": f"{arguments.steps} steps",
            "arm": one["recipe"],
            "ran": one["ran"],
            "val_loss": one["val_loss"],
            "gap_percent": (one["gap_percent"] or {}).get("mean"),
            "half_width": (one["gap_percent"] or {}).get("half_width"),
            "nonfinite": _nonfinite(folder, one["recipe"]),
            "skipped": one["skips"],
        }
        for one in known["recipes"]
    ]
    facts = {"steps": arguments.steps, "seeds": arguments.seeds, "model": "gpt-nano"}
    return report.report_of("cpu", facts, found, bars=bars(found))


def _nonfinite(folder: Path, recipe: str) -> int:
    """How many losses of the recipe's runs were not finite."""
    runs = (folder / "runs").glob(f"{recipe}-seed*")
    return sum("loss" in row and row["loss"] is None for run in runs for row in rows(run))


def bars(found: list[Row]) -> list[dict[str, Any]]:
    """What must hold of each recipe beside float32: its gap, and that all losses were finite."""
    judged = []
    for row in found:
        at_most = AT_MOST.get(row["arm"], AT_MOST_OTHERS)
        gap = 0.0 if row["arm"] == "fp32" else row["gap_percent"]
        holds = gap is not None and gap <= at_most and not row["nonfinite"]
        judged.append({"case": row["case"], "arm": row["arm"], "at_most": at_most, "holds": holds})
    return judged


def table(report_: Report) -> str:
    """The losses beside their bars."""
    text = (
        "gpt-nano on Python's standard library; the same first weights, data and order for one "
        f"seed. The gap to fp32 must be at most {AT_MOST['bf16']:g} % in bf16 and "
        f"{AT_MOST_OTHERS:g} % in the others, and every loss finite. That FP8 costs less than "
        f"{OWN_BAR:g} % is shown only where the whole 95 % interval lies below; one seed has none."
    )
    holds = {(bar["case"], bar["arm"]): bar["holds"] for bar in report_["bars"]}
    header = ["recipe", "ran", "validation loss", "gap to fp32", "losses not finite", "skipped"]
    lines = [
        [
            row["arm"],
            row["ran"],
            "none" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
            _gap(row),
            str(row["nonfinite"]),
            str(row["skipped"]),
            "yes" if holds[row["case"], row["arm"]] else "no",
        ]
        for row in report_["results"]
    ]
    return report.heading(report_, "Convergence", text) + report.markdown([*header, "holds"], lines)


def _gap(row: Row) -> str:
    if row["gap_percent"] is None:
        return ""
    width = "" if row["half_width"] is None else f" ± {row['half_width']:.2f}"
    return f"{row['gap_percent']:+.2f}{width} %"


def figure(report_: Report) -> Figure:
    """The gaps, recipe by recipe."""
    found = [row for row in report_["results"] if row["gap_percent"] is not None]
    names, gaps = [row["arm"] for row in found], [row["gap_percent"] for row in found]
    title = ", ".join(sorted({row["case"] for row in report_["results"]}))
    errors = [row["half_width"] or 0 for row in found]
    return report.bar_figure(names, gaps, title, "validation loss beside fp32's, %", errors)
