"""Every recipe on the same data, weights and order: final validation losses, beside fp32's.

Runs `fp8stack pretrain --model gpt-nano --recipe R --steps 300 --seed 0`, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import report as reports
from bench.report import Report
from fp8stack.benchmark import machine

SHORT = ["--steps", "3"]
RECIPES = ["fp32", "bf16", "delayed", "current", "block", "mxfp8"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")


def measure(arguments: argparse.Namespace) -> Report:
    """Train every recipe, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            rows.append(train(recipe, arguments.steps, arguments.seed, Path(folder) / recipe))
            print(f"{recipe}: {rows[-1]['val_loss']:.4f}", flush=True)
    for row in rows:
        row["gap_percent"] = round(100 * (row["val_loss"] / rows[0]["val_loss"] - 1), 3)
    return {
        "machine": machine("accelerate"),
        "command": command("R", arguments.steps, arguments.seed),
        "settings": {"steps": arguments.steps, "seed": arguments.seed},
        "results": rows,
        "bars": [],
    }


def command(recipe: str, steps: int, seed: int) -> str:
    return f"fp8stack pretrain --model gpt-nano --recipe {recipe} --steps {steps} --seed {seed}"


def train(recipe: str, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """One run's final losses, and what really ran."""
    words = command(recipe, steps, seed).split()[1:]
    subprocess.run(
        [sys.executable, "-m", "fp8stack", *words, "--out", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((out / "plan.json").read_text())
    return {
        "recipe": recipe,
        "ran": metrics[-1]["precision"],
        "fp8_layers": sum(layer["fp8"] for layer in plan["layers"]),
        "layers": len(plan["layers"]),
        "fp8_gemms_per_step": metrics[-1]["fp8_gemms"],
        "val_loss": metrics[-1]["val_loss"],
    }


def table(report: Report) -> str:
    """The report as a Markdown table with the command that makes it."""
    facts = report["machine"]
    lines = [
        "# Final validation loss by recipe",
        "",
        f"Made by `python -m bench recipes`, which runs `{report['command']}` for each recipe R: "
        "same data, same initial weights, same order, one seed. Losses are in nats per byte.",
        "",
        f"{facts['machine']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"accelerate {facts['accelerate']}, fp8stack {facts['fp8stack']}.",
        "",
        "| recipe | ran | FP8 layers | FP8 GEMMs per step | validation loss | gap to fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["results"]:
        lines.append(
            f"| {row['recipe']} | {row['ran']} | {row['fp8_layers']}/{row['layers']} "
            f"| {row['fp8_gemms_per_step']} | {row['val_loss']:.4f} | {row['gap_percent']:+.2f} % |"
        )
    return "\n".join(lines) + "\n"


def figure(report: Report) -> Figure:
    """The gaps to fp32's loss as bars."""
    rows = [{"case": "after training", "arm": row["recipe"], **row} for row in report["results"]]
    label = "validation loss, % above fp32"
    return reports.ratio_figure(rows, "Final validation loss", "gap_percent", label)
