"""Published losses of low-precision pretraining, from `published.csv`. Its rows also have the full
source, the metric and the losses; figures are facts of their sources."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class PublishedGap:
    """A published loss gap.

    Attributes:
        source: its address or paper.
        model: the source's name of the model.
        parameters, ratio: the number of parameters, and training tokens per parameter.
        kind: the precision: "FP4", "FP6", "FP8", "FP4 forward only" or "FP4 backward only".
        recipe: the source's name of the recipe.
        baseline: the baseline's loss.
        percent: the gap in percent of it.
        use: the use in the fit of the law, decided before the fit: "gap" for NVFP4's gap;
            "forward", "backward" and "severity" for a pass or a recipe relative to NVFP4;
            "check" for rows that are predicted and not fitted; "no".
        reason: why.
        training: a short name of the training setup; between these, gaps of a recipe vary.
        share: the quantized share of the linear work of the blocks.
        noise: the standard deviation of `percent` between repetitions, in percent points.
        shipped: the shipped recipe that it is; "" if none.
    """

    source: str
    model: str
    parameters: float
    ratio: float
    kind: str
    recipe: str
    baseline: float | None
    percent: float
    use: str
    reason: str
    training: str
    share: float
    noise: float
    shipped: str


@cache
def published() -> tuple[PublishedGap, ...]:
    """The published gaps that the law is fitted to or checked with."""
    file = resources.files("fp8stack.analysis.forecast").joinpath("published.csv")
    return tuple(
        PublishedGap(
            source=row["source"],
            model=row["model"],
            parameters=float(row["N"]),
            ratio=float(row["D_per_N"]),
            kind=row["class"],
            recipe=row["recipe"],
            baseline=float(row["baseline"]) if row["baseline"] else None,
            percent=float(row["gap_percent"]),
            use=row["use"],
            reason=row["reason"],
            training=row["training"],
            share=float(row["share"]),
            noise=float(row["noise_percent"]),
            shipped=row["shipped"],
        )
        for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())
        if row["use"] != "no"
    )
