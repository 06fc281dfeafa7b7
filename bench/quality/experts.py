"""Losses of a mixture of experts in every recipe: `fp8stack compare` of gpt-nano-moe, with
the gap of each to fp32 and its limit."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import report, runner
from bench.report import Report, Row
from tests.faults.processes import run_ranks

RECIPES = ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"]
LIMITS = {"nvfp4": 5.0}  # percent
LIMIT = 2.0
SHORT = ["--steps", "100", "--seeds", "1"]
TINY = ["--context", "16", "--set", "model_overrides.layers=1", "--batch", "2"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    add("--seeds", type=int, default=3, help="of each recipe (default: %(default)s)")
    add("--shared", default="25%", help="steps in fp32 at the start (default: %(default)s)")
    add("--runs", type=Path, default=Path("runs/experts"), help="(default: %(default)s)")
    runner.add_options(parser, device=False, recipes=RECIPES)


def measure(arguments: argparse.Namespace) -> Report:
    """A row for each recipe: the mean validation loss of its seeds and the gap to fp32."""
    folder = arguments.runs / ("tiny" if arguments.tiny else "all")
    folder.mkdir(parents=True, exist_ok=True)
    compared = comparison(folder, arguments)
    shutil.rmtree(folder / "comparison")
    rows: list[Row] = [
        {
            "case": "gpt-nano-moe",
            "arm": row["recipe"],
            "val_loss": row["val_loss"] and round(row["val_loss"], 6),
            "gap_percent": row["gap_percent"] and round(row["gap_percent"]["mean"], 4),
            "limit_percent": LIMITS.get(row["recipe"], LIMIT),
        }
        for row in compared["recipes"]
    ]
    names = ("steps", "seeds", "shared")
    return report.report_of("cpu", {name: getattr(arguments, name) for name in names}, rows)


def comparison(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The contents of `compare.json`.

    Raises:
        RuntimeError: the command failed. Its finished runs are kept in `folder`.
    """
    words = ["compare", "--model", "gpt-nano-moe", "--out", "comparison"]
    words += ["--recipes", ",".join(["fp32", *arguments.recipes])]
    for name in ("steps", "seeds", "shared"):
        words += [f"--{name}", str(getattr(arguments, name))]
    words += TINY if arguments.tiny else []
    (ended,) = run_ranks(words, folder, 1, timeout_s=24 * 3600)
    if ended.code:
        raise RuntimeError(f"fp8stack {' '.join(words)}: {ended.code}, {ended.stderr[-500:]}")
    data: dict[str, Any] = json.loads((folder / "comparison" / "compare.json").read_text())
    return data


def table(data: Report) -> str:
    settings = data["settings"]
    text = f"gpt-nano-moe after {settings['steps']} steps, mean of {settings['seeds']} seeds. The\n"
    text += f"first {settings['shared']} of the steps are in fp32 in all runs of a seed."
    cells = [
        [
            row["arm"],
            "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
            "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f} %",
            f"{row['limit_percent']:.0f} %",
        ]
        for row in data["results"]
    ]
    header = ["recipe", "validation loss", "gap to fp32", "expected at most"]
    return report.heading(data, "A mixture of experts", text) + report.markdown(header, cells)


def figure(data: Report) -> Figure:
    rows = [row for row in data["results"] if row["gap_percent"] is not None]
    names, gaps = [row["arm"] for row in rows], [row["gap_percent"] for row in rows]
    return report.bar_figure(names, gaps, "gpt-nano-moe, against fp32", "gap, %")
