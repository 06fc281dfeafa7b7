"""Reads `metrics.jsonl` of a run: the rows that count, and the events.

One rule says which rows count: steps increase. Where a run went back, rows of the steps that it
left do not count, from the roll-back on, or, if it was resumed from an earlier checkpoint, from the
first step that it took again.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from fp8stack.common.formats import FORMATS
from fp8stack.common.io import json_lines
from fp8stack.training.run_folder import BRANCH

Row = dict[str, Any]

OVERFLOW = "the gradient overflowed in fp16, and the loss scale was lowered"


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of a run.

    Attributes:
        rows: the rows that count, one per logged step, by step.
        events: all events in the order written, the overflows of fp16 among them (with the key
            `fp16`). A branch has its own only.
        began: the step of the checkpoint that a branch began with, else 0. The rows up to it are
            those of its origin.
    """

    rows: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    began: int = 0

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """The steps and values of the rows whose `key` is a finite number."""
        pairs = [(row["step"], number(row.get(key))) for row in self.rows]
        pairs = [(step, value) for step, value in pairs if not math.isnan(value)]
        return [step for step, _ in pairs], [value for _, value in pairs]


def read_metrics(folder: Path, notes: list[str] | None = None) -> Metrics:
    """Read the metrics of the run in `folder`, which may be missing, or be written by another
    version or at this moment. For `notes` and errors see `json_lines`."""
    rows: list[Row] = []
    events: list[Row] = []
    began = 0
    for row in json_lines(folder / "metrics.jsonl", notes):
        step = step_of(row)
        if step is None:
            continue
        event = row.get("event")
        if event == BRANCH:  # the events before it are the origin's
            events, began = [], step
        if event is not None:
            events.append(row)
        elif row.get("skipped") is True:
            events.append({"step": step, "event": "skip", "why": OVERFLOW, "fp16": True})
        if event == "rollback" and type(row.get("to_step")) is int:
            go_back(rows, row["to_step"] + 1)
        elif event in (None, "non-finite"):  # the latter is the row of a step, too
            go_back(rows, step)
            rows.append(row)
    return Metrics(rows=rows, events=events, began=began)


def go_back(rows: list[Row], step: int) -> None:
    """Remove the rows of `step` and later ones, at the end of `rows` by step."""
    del rows[bisect_left(rows, step, key=itemgetter("step")) :]


def step_of(row: Row) -> int | None:
    """The step of a row; None if it has none."""
    step = row.get("step")
    return step if type(step) is int and 0 <= step < 2**53 else None


def number(value: Any) -> float:
    """A JSON value as a float; NaN if it is no number within the range of float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if abs(result) <= FORMATS["fp32"].max else math.nan
