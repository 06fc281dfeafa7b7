"""The fit of the law of `fp8stack forecast` to published gaps and to the study.

`published.csv` says which of its rows are used, and why; that was decided before the fit."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from bench.quality import study, study_tables
from fp8stack.analysis.forecast.law import RATIO, Law
from fp8stack.analysis.forecast.published import PublishedGap
from fp8stack.analysis.forecast.severity import severity_of
from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe

STUDY, NVFP4, QUANTIZED_HEAD = "fp8stack's study", "nvfp4", "nvfp4_head"
STUDY_RATIO = 8  # with 2 tokens per parameter, the smallest model trains for 225 steps
SHARED = 0.25  # of the study's steps are in fp32, and a gap grows with the share in a recipe
NORMAL = 1.645  # half-width of a 90 % interval of noise, in standard deviations
FP8_FACTOR = 3.0
"""The factor of the 90 % interval for MXFP8. Three published gaps at real sizes support no less."""


class Curve(NamedTuple):
    """The growth of gaps with D / N: the exponent, the cap, and the gap of each recipe at 20."""

    exponent: float
    cap: float
    levels: dict[str, float]

    def percent(self, recipe: str, ratio: float) -> float:
        return float(self.levels[recipe] * (min(ratio, self.cap) / RATIO) ** self.exponent)


class Level(NamedTuple):
    """A gap in percent of the loss, and the standard deviation of its noise."""

    percent: float
    noise: float


Gaps = Mapping[tuple[str, int, str], Level]  # by size, ratio and recipe


def fit(rows: Sequence[PublishedGap], gaps: Gaps) -> Law:
    used = [row for row in rows if row.use == "gap"]
    curve = fit_curve([row for row in used if row.training == "Quartet II"])
    levels = source_levels(used, gaps, curve)
    level, deviation = between(levels)
    quantile = student(len(levels))
    severities, sources = study_severities(gaps), {NVFP4: tuple(levels)}
    forward = relative([row for row in rows if row.use == "forward"], used)
    for recipe in severities.keys() - {NVFP4}:
        sources[recipe] = (STUDY,)
        if published := [
            row for row in rows if (row.shipped, row.use != "check") == (recipe, True)
        ]:
            # Each source counts once.
            severities[recipe] = math.sqrt(severities[recipe] * relative(published, used))
            sources[recipe] += (published[0].training,)
    slope, decline = fit_slope(rows)
    fp8 = max(0.0, (math.log(FP8_FACTOR) / quantile) ** 2 - deviation**2)
    shipped = [recipe for recipe in sorted(severities) if study.source_of(recipe) == recipe]
    law = Law(
        level=level,
        exponent=curve.exponent,
        cap=curve.cap,
        deviation=deviation,
        exponent_deviation=statistics.stdev(exponents_by_size(used, curve.cap)),
        severity_deviation=math.sqrt(fp8) / abs(math.log(severities["mxfp8"])),
        quantile=quantile,
        forward=forward,
        head=1.0,
        severities={recipe: severities[recipe] for recipe in shipped},
        sources={recipe: sources[recipe] for recipe in shipped},
        parameters=(1e5, max(row.parameters for row in used)),
        ratio=(min(row.ratio for row in used), max(row.ratio for row in used)),
        slope=slope,
        decline=decline,
    )
    return replace(law, head=head_factor(severities, law))


def head_factor(severities: Mapping[str, float], law: Law) -> float:
    """The severity of NVFP4's head relative to its work, from the study's model whose head was
    quantized."""
    recipe = load_recipe(study.source_of(QUANTIZED_HEAD))
    model = load_config(study.MODEL, study.SIZES[study.FILES_CELL[0]])
    return (severities[QUANTIZED_HEAD] - 1) / severity_of(recipe, model, law).head


def fit_slope(rows: Sequence[PublishedGap]) -> tuple[float, float]:
    """The slope and decline of Quartet II's baselines, see `Law`, by least squares of
    log L = (slope / decline) (D / N / 20)^-decline + a constant of each size."""
    losses = {
        (row.parameters, row.ratio): row.baseline
        for row in rows
        if row.training == "Quartet II" and row.baseline is not None
    }
    sizes = sorted({parameters for parameters, _ in losses})
    logs = np.log([*losses.values()])

    def solved(decline: float) -> tuple[float, float]:
        terms = np.array(
            [
                [*(n == size for size in sizes), (ratio / RATIO) ** -decline / decline]
                for n, ratio in losses
            ],
            dtype=float,
        )
        solution = np.linalg.lstsq(terms, logs, rcond=None)[0]
        return float(np.sum((terms @ solution - logs) ** 2)), float(solution[-1])

    decline = min(np.linspace(0.1, 1, 91).tolist(), key=lambda decline: solved(decline)[0])
    return solved(decline)[1], decline


def fit_curve(rows: Sequence[PublishedGap]) -> Curve:
    """Fit exponent, cap and levels by least squares of the logarithms of gaps."""
    recipes = sorted({row.recipe for row in rows})
    logs = np.log([row.percent for row in rows])
    levels = [[row.recipe == recipe for recipe in recipes] for row in rows]

    def solved(cap: float) -> tuple[float, Any]:
        growth = [math.log(min(row.ratio, cap) / RATIO) for row in rows]
        terms = np.column_stack([levels, growth])
        terms_solution = np.linalg.lstsq(terms, logs, rcond=None)[0]
        return float(np.sum((terms @ terms_solution - logs) ** 2)), terms_solution

    cap = min(np.geomspace(60, 1000, 200).tolist(), key=lambda cap: solved(cap)[0])
    *log_levels, exponent = solved(cap)[1].tolist()
    return Curve(exponent, cap, dict(zip(recipes, map(math.exp, log_levels), strict=True)))


def exponents_by_size(rows: Iterable[PublishedGap], cap: float) -> list[float]:
    """The exponents of the sizes of models with gaps at several ratios."""
    by_size: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.training == "Quartet II":
            growth = math.log(min(row.ratio, cap) / RATIO)
            by_size[row.parameters].append((growth, math.log(row.percent)))
    columns = (np.array(points).T for points in by_size.values())
    return [float(stats.linregress(growth, logs).slope) for growth, logs in columns]


def source_levels(rows: Iterable[PublishedGap], gaps: Gaps, curve: Curve) -> dict[str, Level]:
    """The level of each training setup: the mean of its gaps, each divided by what the law has for
    a level of 1."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        growth = row.share * (min(row.ratio, curve.cap) / RATIO) ** curve.exponent
        points[row.training].append((row.percent / growth, row.noise / growth))
    growth = (1 - SHARED) * (STUDY_RATIO / RATIO) ** curve.exponent
    points[STUDY] = [
        (gap.percent / growth, gap.noise / growth)
        for (_, ratio, recipe), gap in gaps.items()
        if (ratio, recipe) == (STUDY_RATIO, NVFP4)
    ]
    return {training: _mean(values) for training, values in points.items()}


def _mean(values: Sequence[tuple[float, float]]) -> Level:
    weights = [noise**-2 for _, noise in values]
    mean = statistics.fmean((value for value, _ in values), weights)
    return Level(mean, sum(weights) ** -0.5)


def between(levels: Mapping[str, Level]) -> tuple[float, float]:
    """The mean level of training setups, and the standard deviation of the logarithm of another
    setup's level around it, by maximum likelihood."""
    logs = np.log([level.percent for level in levels.values()])
    noise = np.array([level.noise / level.percent for level in levels.values()])

    def center(spread: float) -> tuple[float, Any]:
        variances = spread**2 + noise**2
        return float(np.average(logs, weights=1 / variances)), variances

    def unlikely(spread: float) -> float:
        mean, variances = center(spread)
        return float(np.sum(np.log(variances) + (logs - mean) ** 2 / variances))

    spread = float(optimize.minimize_scalar(unlikely, bounds=(0.01, 2), method="bounded").x)
    count = len(levels)
    return math.exp(center(spread)[0]), spread * math.sqrt((count + 1) / (count - 1))


def student(count: int) -> float:
    """Half-width of a 90 % interval for another setup, in standard deviations, after `count`."""
    return float(stats.t.ppf(0.95, count - 1))


def study_gaps(rows: study_tables.Rows) -> Gaps:
    """The study's gaps. The recipes of a size and ratio share the variance of a pair, the median
    over recipes; where no recipe has two pairs, the largest variance of all."""
    cells = study_tables.cells_of(rows)
    variances: dict[tuple[str, int], list[float]] = defaultdict(list)
    for cell in cells:
        if cell.gap.deviation:
            variances[cell.size, cell.ratio].append(cell.gap.deviation**2)
    pooled = {place: statistics.median(values) for place, values in variances.items()}
    return {
        (cell.size, cell.ratio, cell.recipe): Level(
            cell.gap.mean,
            math.sqrt(pooled.get((cell.size, cell.ratio), max(pooled.values())) / cell.gap.samples),
        )
        for cell in cells
    }


def study_severities(gaps: Gaps) -> dict[str, float]:
    """The severity of each recipe relative to NVFP4, by weighted least squares."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (size, ratio, recipe), gap in gaps.items():
        if (nvfp4 := gaps.get((size, ratio, NVFP4))) is not None:
            sums[recipe][0] += gap.percent * nvfp4.percent / gap.noise**2
            sums[recipe][1] += nvfp4.percent**2 / gap.noise**2
    return {recipe: product / square for recipe, (product, square) in sorted(sums.items())}


def relative(rows: Sequence[PublishedGap], to: Sequence[PublishedGap]) -> float:
    """The geometric mean of gaps, relative to the gaps `to` of the same model and tokens."""
    percent = {(row.training, row.parameters, row.ratio): row.percent for row in to}
    return statistics.geometric_mean(
        row.percent / percent[row.training, row.parameters, row.ratio]
        for row in rows
        if (row.training, row.parameters, row.ratio) in percent
    )
