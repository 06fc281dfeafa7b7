"""The results of a run, read from its folder."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from fp8stack.common.io import read_json
from fp8stack.training.metrics.read import Metrics, read_metrics
from fp8stack.training.run_folder import RunFolder

Row = Mapping[str, Any]
Status = Literal["done", "diverged", "failed", "unfinished"]

WARM_UP = 5  # first steps, whose speed does not count: they compile, tune and allocate
HOPELESS = 1.1
"""A run diverged if its last validation loss exceeds this many times ln(V), a uniform guess's."""
NUMERIC_FAILURE = 5  # exit code of a run that stopped because its numbers were not finite


class RunFigures(BaseModel, frozen=True, extra="forbid"):
    """A run's figures."""

    recipe: str
    seed: int
    status: Status
    exit: int | None
    error: str = ""
    diverged_at: int | None = None
    val_loss: float | None = None  # the last one, in nats per token
    curve: tuple[tuple[int, float], ...] = ()  # validation loss by step
    seconds: float | None = None  # wall time with startup; None if trained in several starts
    tokens_per_s: float | None = None  # the median over steps
    peak_memory_gib: float | None = None  # of the last phase; on a CPU, of the run so far
    skips: int = 0
    events: dict[str, int] = {}
    fp8_gemms: int | None = None
    precisions: tuple[str, ...] = ()
    plan: dict[str, Any] = {}


def read_run(
    folder: RunFolder,
    *,
    recipe: str,
    seed: int,
    steps: int,
    vocabulary: int,
    exit: int | None,
    error: str = "",
    seconds: float | None = None,
) -> RunFigures:
    """The figures of the run in `folder`, which may be missing or hold an interrupted run.

    Args:
        steps: number of steps that the run is configured for.
        exit: exit code; None if the run has not ended.
        error: the last line that the run printed, if it failed.
        seconds: wall time of the run, if known.
    """
    metrics = read_metrics(folder.path)
    curve = list(zip(*metrics.column("val_loss"), strict=True))
    # The row of a skipped step may have a validation loss but no training loss.
    last: Row = next((row for row in reversed(metrics.rows) if "loss" in row), {})
    last_phase = [
        row
        for row in metrics.rows
        if row["step"] > metrics.began and row.get("phase") == last.get("phase")
    ]
    speeds = {row["step"]: row["tokens_per_s"] for row in last_phase if row.get("tokens_per_s")}
    warm_speeds = [speed for step, speed in speeds.items() if step > min(speeds) + WARM_UP - 1]
    memory = [row["memory_gib"] for row in last_phase if _number(row, "memory_gib")]
    kinds = Counter(str(event["event"]) for event in metrics.events if "fp16" not in event)
    status, diverged_at = _status(metrics, curve, steps, vocabulary, exit)
    return RunFigures(
        recipe=recipe,
        seed=seed,
        status=status,
        exit=exit,
        error=error,
        diverged_at=diverged_at,
        val_loss=curve[-1][1] if curve and status == "done" else None,
        curve=tuple(curve),
        seconds=seconds,
        tokens_per_s=statistics.median(warm_speeds or speeds.values()) if speeds else None,
        peak_memory_gib=max(memory, default=None),
        skips=len({event["step"] for event in metrics.events if event["event"] == "skip"}),
        events={kind: count for kind, count in kinds.items() if kind != "phase"},
        fp8_gemms=last.get("fp8_gemms"),
        precisions=tuple(dict.fromkeys(r["precision"] for r in last_phase if "precision" in r)),
        plan=_plan(folder.plan),
    )


def _status(
    metrics: Metrics,
    curve: Sequence[tuple[int, float]],
    steps: int,
    vocabulary: int,
    exit: int | None,
) -> tuple[Status, int | None]:
    """The status of a run, and the step at which it diverged, if it did."""
    if exit == NUMERIC_FAILURE:
        ends = (*metrics.rows[-1:], *metrics.events[-1:])
        return "diverged", max((row["step"] for row in ends), default=1)
    if exit:
        return "failed", None
    if exit is None or not curve or curve[-1][0] < steps:
        return "unfinished", None
    bound = HOPELESS * math.log(vocabulary)
    if curve[-1][1] <= bound:
        return "done", None
    losses = list(zip(*metrics.column("loss"), strict=True))
    good_steps = [step for step, loss in losses if loss <= bound]
    return "diverged", next((s for s, _ in losses if s > max(good_steps, default=0)), curve[-1][0])


def _number(row: Row, key: str) -> bool:
    return isinstance(row.get(key), int | float)


def _plan(path: Path) -> dict[str, Any]:
    """The plan that ran, from `plan.json`; empty if it cannot be read. The compute dtype is the
    last phase's."""
    try:
        plan = read_json(path)
        layers = plan["layers"]
        layer_reasons = {f"{la['name']}: {la['precision']}, {la['reason']}" for la in layers}
        last_phase = plan.get("phases", [{}])[-1]
        return {
            "asked": plan["asked"],
            "recipe": plan["recipe"]["name"],
            "backend": plan["backend"],
            "native": plan["native"],
            "device": plan["device"],
            "compute_dtype": last_phase.get("compute_dtype", plan["compute_dtype"]),
            "layers": len(layers),
            "fp8_layers": sum(la["fp8"] for la in layers),
            "not_fp8": {la["name"]: la["reason"] for la in layers if la["reason"]},
            "reasons": [reason for reason in plan["reasons"] if reason not in layer_reasons],
        }
    except (ValueError, KeyError, TypeError):
        return {}
