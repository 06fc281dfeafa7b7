"""The results of a run, read from its folder."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from fp8stack.io import read_json
from fp8stack.training.run_folder import RunFolder, read_rows

Row = Mapping[str, Any]
Status = Literal["done", "diverged", "failed", "unfinished"]

OWN = (None, "phase")  # of events, those that are as expected
WARM_UP = 5  # steps whose speed does not count: they compile, tune and fault memory in
HOPELESS = 1.1
"""A run diverged whose validation loss ends above this many times a uniform guess's, ln(V)."""
NUMERIC_FAILURE = 5  # the exit code of a run that stopped since its numbers were not finite


class WorstSqnr(BaseModel, frozen=True, extra="forbid"):
    """The least signal-to-noise ratio of an FP8 operand, and where and when it was seen."""

    db: float
    layer: str
    operand: str
    step: int


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
    seconds: float | None = None  # that it took, with its start; None if it was not seen whole
    tokens_per_s: float | None = None  # the median over steps
    peak_memory_gib: float | None = None  # the most of any step
    skips: int = 0
    events: dict[str, int] = {}
    fp8_gemms: int | None = None
    precisions: tuple[str, ...] = ()
    worst_sqnr: WorstSqnr | None = None
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
    """The figures of the run in `folder`, which may be missing, or hold a run that was cut. It was
    to take so many `steps`; `exit` is the exit code, None if it has not ended, `error` the line
    that it ended with, if it failed, and `seconds` the time that it took, if that is known."""
    rows = folder.read_metrics()
    taken = valid_steps(rows)
    curve = [(step, row["val_loss"]) for step, row in taken.items() if _number(row, "val_loss")]
    # The row of a step whose batch was left out has a validation loss alone.
    last: Row = next((row for row in reversed(taken.values()) if "loss" in row), {})
    of_recipe = {n: row for n, row in taken.items() if row.get("phase") == last.get("phase")}
    speeds = {n: row["tokens_per_s"] for n, row in of_recipe.items() if row.get("tokens_per_s")}
    counted = [speed for step, speed in speeds.items() if step > min(speeds) + WARM_UP - 1]
    memory = [row["memory_gib"] for row in rows if _number(row, "memory_gib")]
    ran = [row for row in of_recipe.values() if "precision" in row]
    skipped = [row for row in rows if row.get("event") == "skip" or row.get("skipped") is True]
    status, diverged_at = _status(taken, rows, curve, steps, vocabulary, exit)
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
        tokens_per_s=statistics.median(counted or speeds.values()) if speeds else None,
        peak_memory_gib=max(memory, default=None),
        skips=len({row["step"] for row in skipped}),
        events=dict(Counter(str(row["event"]) for row in rows if row.get("event") not in OWN)),
        fp8_gemms=last.get("fp8_gemms"),
        precisions=tuple(dict.fromkeys(r["precision"] for r in ran)),
        worst_sqnr=worst_sqnr(folder.telemetry),
        plan=_plan(folder.plan),
    )


def valid_steps(rows: Sequence[Row]) -> dict[int, Row]:
    """The rows that stand, by step: of several the last, and none of what was rolled back."""
    found: dict[int, Row] = {}
    for row in rows:
        if row.get("event") == "rollback":
            back = int(row.get("to_step", row["step"]))
            found = {step: kept for step, kept in found.items() if step <= back}
        elif row.get("loss") is not None or row.get("val_loss") is not None:
            found[row["step"]] = row
    return dict(sorted(found.items()))


def _status(
    taken: Mapping[int, Row],
    rows: Sequence[Row],
    curve: Sequence[tuple[int, float]],
    steps: int,
    vocabulary: int,
    exit: int | None,
) -> tuple[Status, int | None]:
    """How the run ended, and where it diverged if it did."""
    if exit == NUMERIC_FAILURE:
        return "diverged", rows[-1]["step"] if rows else 1
    if exit:
        return "failed", None
    if exit is None or not curve or curve[-1][0] < steps:
        return "unfinished", None
    bound = HOPELESS * math.log(vocabulary)
    if curve[-1][1] <= bound:
        return "done", None
    losses = [(step, row["loss"]) for step, row in taken.items() if row.get("loss") is not None]
    held = [step for step, loss in losses if loss <= bound]
    return "diverged", next((s for s, _ in losses if s > max(held, default=0)), curve[-1][0])


def _number(row: Row, key: str) -> bool:
    return isinstance(row.get(key), int | float)


def _plan(path: Path) -> dict[str, Any]:
    """What ran, from `plan.json`, which layers are not in FP8, and why it is not what was asked."""
    try:
        plan = read_json(path)
        layers = plan["layers"]
        of_layers = {f"{la['name']}: {la['precision']}, {la['reason']}" for la in layers}
        return {
            "asked": plan["asked"],
            "recipe": plan["recipe"]["name"],
            "backend": plan["backend"],
            "native": plan["native"],
            "device": plan["device"],
            "compute_dtype": plan["compute_dtype"],
            "layers": len(layers),
            "fp8_layers": sum(la["fp8"] for la in layers),
            "not_fp8": {la["name"]: la["reason"] for la in layers if la["reason"]},
            "reasons": [reason for reason in plan["reasons"] if reason not in of_layers],
        }
    except (ValueError, KeyError, TypeError):
        return {}


def worst_sqnr(path: Path) -> WorstSqnr | None:
    """The operand with the lowest SQNR, of the run's own recipe. The first sampled step does not
    count: delayed scaling has every scale at 1 then, and recipes are to be compared alike."""
    rows = [row for row in read_rows(path, {"step": 0}) if "operand" in row]
    rows = [row for row in rows if not row.get("what_if")]
    first = min((row["step"] for row in rows), default=0)
    counted = [row for row in rows if row["step"] > first and _number(row, "sqnr_db")]
    if not counted:
        return None
    worst = min(counted, key=lambda row: row["sqnr_db"])
    where = {key: worst[key] for key in ("layer", "operand", "step")}
    return WorstSqnr(db=worst["sqnr_db"], **where)
