"""Table of the study's larger models: measured gaps beside the gaps that the law of `fp8stack
forecast` predicted before the models were trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.quality.study_tables import BASELINE, SCRATCH, pairs_of
from fp8stack.analysis.compare.intervals import mean_interval

PREDICTIONS = Path(__file__).parents[1] / "results" / "cpu" / "ladder_predictions.json"

SIZES = {1_000_000: "1M", 3_000_000: "3M", 10_000_000: "10M"}
HALF, LAST_QUARTER = "first half in fp32", "first three quarters in fp32"
SHARES = {HALF: 0.5, SCRATCH: 1.0}  # of the steps in the recipe
DESIGNS: dict[str, tuple[str, ...]] = {
    "nvfp4": (HALF, SCRATCH),
    "mxfp6_e2m3": (HALF,),
    "mxfp8": (HALF,),
    "delayed": (HALF,),
}
"""The recipes that larger models are trained in. Once in a training, after 3 to 8 million tokens,
their loss falls steeply. When it does differs by hundreds of steps between runs, even between two
of a seed that round differently. So the runs of a seed share the first half of their steps."""
SHORT_CELL = ("3M", 4)
SHORT_DESIGNS: dict[str, tuple[str, ...]] = {"mxfp8": (LAST_QUARTER,), "nvfp4": (LAST_QUARTER,)}
"""A cell of a fifth of the tokens, which fits into an afternoon. Its runs share three quarters of
their steps, so that they share the fall too."""

Rows = Sequence[Mapping[str, Any]]
Designs = Mapping[str, Sequence[str]]  # of a recipe
Place = tuple[str, int, str, str]  # size, tokens per parameter, recipe, design


def predictions(path: Path = PREDICTIONS) -> dict[Place, tuple[float, float]]:
    """The 90 % interval of the gap of each cell, in percent, from a committed file. Its gaps are in
    proportion to the share of the steps in the recipe, but for those of the short cell, which were
    predicted after the 1M models had shown that they are not."""
    predicted = json.loads(path.read_text())
    ratio = round(predicted["tokens_per_parameter"])
    short = {
        (*SHORT_CELL, cell["recipe"], LAST_QUARTER): (cell["low"], cell["high"])
        for cell in predicted["short_cell"]["predictions"]
    }
    return short | {
        (SIZES[cell["parameters"]], ratio, cell["recipe"], design): (
            cell["low"] * SHARES[design] / cell["share_of_steps"],
            cell["high"] * SHARES[design] / cell["share_of_steps"],
        )
        for cell in predicted["predictions"]
        for design in DESIGNS[cell["recipe"]]
    }


def section(rows: Rows, predicted: Mapping[Place, tuple[float, float]]) -> list[str]:
    """A table of the cells that have a prediction."""
    gaps: dict[Place, list[float]] = defaultdict(list)
    for design in sorted({design for *_, design in predicted}):
        for row, base in pairs_of(rows, design):
            place = (row["size"], row["ratio"], row["recipe"], design)
            gaps[place].append(100 * (row["val_loss"] / base["val_loss"] - 1))
    lines = []
    for place, (low, high) in predicted.items():
        size, ratio, recipe, design = place
        words = [f"{size}, {ratio} tokens", recipe, design, f"{low:.2f} to {high:.2f}"]
        lines.append(words + judged(gaps[place], low, high))
    header = ["model", "recipe", "design", "predicted, %", "measured, %", "pairs", "verdict"]
    text = ["## Larger models", "", f"{_INTRODUCTION} {len(rows)} runs are done.", ""]
    text.append(report.markdown(header, lines))
    for cell in dict.fromkeys((size, ratio) for size, ratio, *_ in predicted):
        text += curves([row for row in rows if (row["size"], row["ratio"]) == cell])
    return text


def curves(rows: Rows) -> list[str]:
    """A table of the losses of one cell's runs over their steps."""
    if not rows:
        return []
    lines = []
    for row in sorted(rows, key=lambda row: [row[key] for key in ("seed", "recipe", "design")]):
        losses = [f"{loss:.3f}" for _, loss in row["curve"]]
        design = "" if row["recipe"] == BASELINE else f", {row['design']}"
        lines.append([f"seed {row['seed']}, {row['recipe']}{design}", *losses])
    longest = max((row["curve"] for row in rows), key=len)
    header = ["run", *(f"{step / longest[-1][0]:.0%}" for step, _ in longest)]
    lines = [line + [""] * (len(header) - len(line)) for line in lines]
    words = (
        f"Validation losses of {rows[0]['size']}, {rows[0]['ratio']} tokens, in nats per byte, by "
        "the share of the steps that were done:"
    )
    return [words, "", report.markdown(header, lines)]


_INTRODUCTION = (
    "Trained on Linux's source, with predictions (90 % intervals of `fp8stack forecast`) that were "
    "committed before. Measured are means with 95 % intervals by Student's t; a gap agrees "
    "if the two intervals overlap. The loss of these models falls steeply once, after 3 to 8 "
    "million tokens. From scratch, when it does differs by hundreds of steps between the runs of a "
    "pair, in either direction, and moves the gap by several percent. Runs that share their first "
    "half, or more of it, are past it."
)


def judged(gaps: Sequence[float], low: float, high: float) -> list[str]:
    """The measured gap in percent, the number of pairs, and whether the gap agrees: the measured
    and the predicted interval overlap. A measured one that is wider cannot tell."""
    if not gaps:
        return ["", "0", "not trained yet"]
    gap = mean_interval(gaps)
    width = gap.half_width
    measured = f"{gap.mean:+.2f}" + ("" if width is None else f" ± {width:.2f}")
    if width is None or 2 * width > high - low:
        verdict = "cannot tell"
    elif gap.mean - width <= high and gap.mean + width >= low:
        verdict = "agrees"
    else:
        verdict = "missed"
    return [measured, str(len(gaps)), verdict]
