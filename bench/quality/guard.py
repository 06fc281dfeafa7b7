"""The guard's reaction to faults in whole runs, and to runs without faults.

Every run stays in `--runs`; `fp8stack report` shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from bench import report, runner
from bench.cells import some_of
from bench.report import Report, Row
from fp8stack.training.loop import train
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up

STEPS = 300
SPIKES = 20
NAN_STEPS = range(40, 46)
OUTLIER_FROM, OUTLIER_LAYER = 150, "blocks.2.mlp.down"
SMALL = ["model_overrides.layers=2", "model_overrides.width=64", "model_overrides.heads=2"]
TINY = ["model_overrides.layers=3", "model_overrides.width=32", "model_overrides.heads=2"]
Fault = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    """A run and its fault."""

    name: str
    description: str
    fault: Fault
    steps: int = STEPS
    recipe: str = "delayed"
    sizes: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)


def nothing(run: Run) -> None:
    """No fault."""


def nan_in_a_layer(run: Run) -> None:
    """A layer's output is NaN in some steps while the layer is in FP8."""

    def hook(layer: nn.Module, args: object, output: Tensor) -> Tensor | None:
        bad = layer.training and run.step + 1 in NAN_STEPS and layer.in_fp8
        return output * math.nan if bad else None

    run.model.get_submodule("blocks.1.mlp.up").register_forward_hook(hook)


def outlier_in_a_layer(run: Run) -> None:
    """The largest input channel of a layer becomes 500 times as large, permanently."""
    channels: list[int] = []

    def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if run.step + 1 < OUTLIER_FROM:
            return None
        x = args[0].clone()
        if not channels:
            channels.append(int(x.abs().flatten(0, -2).amax(dim=0).argmax()))
        x[..., channels[0]] *= 500
        return (x,)

    run.model.get_submodule(OUTLIER_LAYER).register_forward_pre_hook(hook)


def loss_spikes(run: Run) -> None:
    """The loss is multiplied by ten in some steps."""
    at = set(spiked_steps(run.config.steps))

    def hook(model: nn.Module, args: object, loss: Tensor) -> Tensor | None:
        return loss * 10 if model.training and run.step + 1 in at else None

    run.model.register_forward_hook(hook)


def spiked_steps(steps: int) -> list[int]:
    """The steps with a spike: after the guard's warm-up, no two in a row."""
    return sorted(2 * n for n in random.Random(0).sample(range(25, steps // 2), SPIKES))


CASES = [
    Case("clean", "nothing is put into it", nothing),
    Case(
        "nan",
        f"the output of blocks.1.mlp.up is NaN in steps {NAN_STEPS[0]} to {NAN_STEPS[-1]}",
        nan_in_a_layer,
        keys={"save_every": 30},
    ),
    Case(
        "outlier",
        f"the largest channel of {OUTLIER_LAYER}'s input times 500 from step {OUTLIER_FROM} on",
        outlier_in_a_layer,
        keys={"telemetry_every": 25},
    ),
    Case("spikes", f"the loss times 10 in {SPIKES} steps", loss_spikes),
    *(
        Case(
            f"long {recipe}",
            "nothing is put into it",
            nothing,
            steps=10_000,
            recipe=recipe,
            sizes=SMALL,
            keys={"batch": 8, "context": 64, "log_every": 10, "telemetry_every": 1000},
        )
        for recipe in ("fp32", "delayed")
    ),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = [case.name for case in CASES]
    help_text = f"some of {','.join(names)} (default: all)"
    add("--cases", type=some_of("case", names), default=[], metavar="A,B", help=help_text)
    add("--runs", type=Path, default=Path("runs/guard"), help="(default: %(default)s)")
    runner.add_options(parser, device=False)


def measure(arguments: argparse.Namespace) -> Report:
    chosen = [case for case in CASES if not arguments.cases or case.name in arguments.cases]
    rows = [measure_case(case, arguments.runs, arguments.tiny) for case in chosen]
    clean = next((row["val_loss"] for row in rows if row["case"] == "clean"), None)
    for row, case in zip(rows, chosen, strict=True):
        same = clean is not None and not case.sizes
        row["gap_percent"] = round(100 * (row["val_loss"] / clean - 1), 3) if same else None
    return report.report_of("cpu", {"model": "gpt-nano", "seed": 0}, rows)


def measure_case(case: Case, folder: Path, tiny: bool) -> Row:
    out = folder / case.name.replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    steps = min(case.steps, 100) if tiny else case.steps
    flags = {"recipe": case.recipe, "steps": steps, "device": "cpu", "out": str(out)}
    sizes = [*(TINY if tiny else case.sizes), "sample_tokens=0"]
    run = set_up({**flags, "eval_every": steps, **case.keys}, None, sizes, None)
    case.fault(run)
    with contextlib.redirect_stdout(io.StringIO()):
        train(run)
    rows = run.folder.read_metrics()
    events = Counter(row["event"] for row in rows if "event" in row)
    skipped = {row["step"] for row in rows if row.get("event") == "skip"}
    demoted = sorted({row["layer"] for row in rows if row.get("event") == "demote"})
    return {
        "case": case.name,
        "arm": case.recipe,
        "what": case.description,
        "steps": steps,
        "val_loss": round(next(r["val_loss"] for r in reversed(rows) if "val_loss" in r), 4),
        "events": dict(events),
        "skipped": len(skipped),
        "skipped_percent": round(100 * len(skipped) / steps, 4),
        "demoted": demoted,
        "run": str(out),
    }


def table(data: Report) -> str:
    text = "Whole runs of gpt-nano with faults put into them, judged by the guard's defaults. The\n"
    text += "long runs are of a smaller model (2 layers of 64)."
    cells = (
        [
            row["case"], row["what"], row["arm"], str(row["steps"]), f"{row['val_loss']:.4f}",
            "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f} %",
            f"{row['skipped']} ({row['skipped_percent']:g} %)",
            ", ".join(f"{count} {event}" for event, count in row["events"].items()),
            ", ".join(row["demoted"]),
        ]
        for row in data["results"]
    )  # fmt: skip
    header = ["case", "fault", "recipe", "steps", "validation loss", "gap to clean"]
    header += ["steps skipped", "events", "taken out of FP8"]
    return report.heading(data, "The guard", text) + report.markdown(header, cells)


def figure(data: Report) -> Figure:
    rows = [row for row in data["results"] if row["gap_percent"] is not None]
    names, losses = [row["case"] for row in rows], [row["val_loss"] for row in rows]
    label = "validation loss (nats per token)"
    return report.bar_figure(names, losses, "gpt-nano with faults", label)
