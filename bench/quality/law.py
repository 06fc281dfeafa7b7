"""The law of `fp8stack forecast`: the fit, the checks of the law, the page and the picture."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bench import report
from bench.cells import json_lines
from bench.quality import law_fit as fits
from bench.quality import rungs, study
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.law import RATIO, Law
from fp8stack.analysis.forecast.published import PublishedGap, published
from fp8stack.analysis.forecast.result import Gap
from fp8stack.common.errors import UserError
from fp8stack.common.io import write_atomically

Rows = Sequence[PublishedGap]
SMALL, LARGE = 4e7, 1.9e8  # parameters: below, the 30M models of Quartet II; above, its 200M
COLORS = {"mxfp4": "C3", "nvfp4": "C1", "mxfp6_e2m3": "C2", "mxfp8": "C0"}
MARKERS = {
    "Quartet II": "o", "nanochat": "D", "torchtitan": "v", "NVIDIA 12B": "s", "NVIDIA 8B": "P",
    fits.STUDY: "x",
}  # fmt: skip
BANDS, BELOW = ("nvfp4", "mxfp8"), "$\\downarrow$"

LADDER = {"nvfp4": (1.0,), "mxfp6_e2m3": (1.0,), "mxfp8": (0.9, 0.75), "delayed": (0.9, 0.75)}
"""Recipes whose training in larger models is predicted, and the shares of their steps."""
PREDICTIONS = "ladder_predictions.json"
LAW = Path(laws.__file__).with_name("law.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="leave the law that fp8stack has")


def run(arguments: argparse.Namespace) -> None:
    folder = study.folder_of(arguments)
    if not (folder / study.NAME).is_file():
        raise UserError(f"{folder / study.NAME} is missing, which the law is fitted to.")
    gaps = fits.study_gaps(json_lines(folder / study.NAME))
    law = fits.fit(published(), gaps)
    text = page(law, published(), gaps)
    write_atomically(folder / "law.md", text.encode())
    figure(law, published(), gaps).savefig(folder / "law.png", dpi=110)
    if not arguments.keep:
        write_atomically(LAW, (json.dumps(asdict(law), indent=1) + "\n").encode())
    if not (folder / PREDICTIONS).exists():  # predictions stay as they were before the training
        predicted = json.dumps(predictions(law), indent=1) + "\n"
        write_atomically(folder / PREDICTIONS, predicted.encode())
    print(text)


def predictions(law: Law) -> dict[str, Any]:
    """The gaps of larger models of the study's kind, at 20 tokens per parameter and for the short
    cell."""

    def gap(ratio: float, recipe: str, share: float = 1.0) -> dict[str, float]:
        values = law.gap(ratio, law.severities[recipe]).model_dump()
        return {key: round(share * value, 4) for key, value in values.items()}

    return {
        "note": "Written before these models were trained. Gaps and 90 % intervals in percent of "
        "the baseline's loss, without the noise of runs. They do not depend on the number of "
        "parameters, and are in proportion to the share of the steps that is in the recipe.",
        "tokens_per_parameter": RATIO,
        "predictions": [
            {"parameters": parameters, "recipe": recipe, "share_of_steps": share}
            | gap(RATIO, recipe, share)
            for parameters in (1_000_000, 3_000_000, 10_000_000)
            for recipe, shares in LADDER.items()
            for share in shares
        ],
        "short_cell": {
            "note": "Written after the models of 1 million parameters, and before this one. Their "
            "gaps were there at once after the switch, so these are the gaps of a whole training, "
            "although only the last quarter of the steps is in the recipe.",
            "parameters": 3_000_000,
            "tokens_per_parameter": rungs.SHORT_CELL[1],
            "predictions": [
                {"recipe": recipe} | gap(rungs.SHORT_CELL[1], recipe)
                for recipe in rungs.SHORT_DESIGNS
            ],
        },
    }


class Check(NamedTuple):
    """A gap and the 90 % interval that the law predicts for it, noise included."""

    name: str
    percent: float
    predicted: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.percent <= self.high


def sources_left_out(rows: Rows, gaps: fits.Gaps, law: Law) -> list[Check]:
    """Predict the level of each training setup from the levels of other sources. The curve stays
    Quartet II's."""
    curve = fits.Curve(law.exponent, law.cap, {})
    used = [row for row in rows if row.use == "gap"]
    levels = fits.source_levels(used, gaps, curve)
    sources = {row.training: row.source for row in used}
    checks = []
    for name, level in levels.items():
        remaining = {
            training: levels[training]
            for training in levels
            if sources.get(training) != sources.get(name)
        }
        predicted, deviation = fits.between(remaining)
        factor = math.exp(fits.student(len(remaining)) * deviation)
        gap = Gap(mean=predicted, low=predicted / factor, high=predicted * factor)
        checks.append(_check(name, level, gap))
    return checks


def fp8_points(rows: Rows, law: Law) -> list[Check]:
    """Predict the published gaps of FP8."""
    checks = []
    for row in rows:
        if row.use == "check" and row.kind == "FP8":
            gap = law.gap(row.ratio, law.severities[row.shipped])
            name = f"{row.model}, {row.recipe}"
            checks.append(_check(name, fits.Level(row.percent, row.noise), gap))
    return checks


def _check(name: str, measured: fits.Level, expected: Gap) -> Check:
    noise = fits.NORMAL * measured.noise
    low = expected.mean - math.hypot(expected.mean - expected.low, noise)
    high = expected.mean + math.hypot(expected.high - expected.mean, noise)
    return Check(name, measured.percent, expected.mean, low, high)


def errors_at_200m(rows: Rows, below: float, recipe: str = "") -> list[float]:
    """The relative errors of Quartet II's gaps at 200M, predicted from models of fewer parameters
    than `below`: of one recipe, or of all in both passes."""
    chosen = [row for row in quartet(rows) if recipe in ("", row.recipe)]
    curve = fits.fit_curve([row for row in chosen if row.parameters < below])
    return [_error(curve, row) for row in chosen if row.parameters > LARGE]


def nanochat_errors(rows: Rows) -> list[float]:
    """The relative errors of the gaps of nanochat's 1.9B, predicted from Quartet II."""
    curve = fits.fit_curve(quartet(rows))
    return [_error(curve, row) for row in rows if row.training == "nanochat"]


def quartet(rows: Rows) -> list[PublishedGap]:
    """The runs of Quartet II in FP4 in both passes."""
    return [row for row in rows if (row.training, row.kind) == ("Quartet II", "FP4")]


def _error(curve: fits.Curve, row: PublishedGap) -> float:
    return abs(curve.percent(row.recipe, row.ratio) / row.percent - 1)


def page(law: Law, rows: Rows, gaps: fits.Gaps) -> str:
    left_out, fp8 = sources_left_out(rows, gaps, law), fp8_points(rows, law)
    larger = {
        "NVFP4": errors_at_200m(rows, SMALL, "nvidia"),
        "all recipes in both passes": errors_at_200m(rows, SMALL),
        "all recipes in both passes, fitted up to 100M": errors_at_200m(rows, LARGE),
        "nanochat 1.9B, fitted to Quartet II": nanochat_errors(rows),
    }
    factor = math.exp(law.quantile * law.deviation)
    exponents = fits.exponents_by_size([row for row in rows if row.use == "gap"], law.cap)
    return "\n".join(
        [
            "# The law of `fp8stack forecast`",
            "",
            "Made by `python -m bench law` from the "
            "[published gaps](../../../fp8stack/analysis/forecast/published.csv), whose columns "
            "`use` and `reason` were written before the fit, and from the runs of "
            "[the study](study.md).",
            "",
            f"gap in % = severity x {law.level:.2f} x (min(D / N, {law.cap:.0f}) / 20)^"
            f"{law.exponent:.2f}, N parameters, D training tokens. NVFP4 has severity 1.",
            "",
            f"90 % intervals: a factor of {factor:.2f} for NVFP4 at 20 tokens per parameter, "
            f"{fits.FP8_FACTOR:.2f} for MXFP8, which is set and not fitted. Away from 20 the "
            "exponent is uncertain: Quartet II's at 30, 50, 100 and 200M are "
            f"{', '.join(f'{exponent:.2f}' for exponent in exponents)}. Larger models show no "
            "growth beyond 20 tokens per parameter.",
            "",
            "The published rows that are used:",
            "",
            _uses(rows),
            "## Training setups left out",
            "",
            "NVFP4's gap at 20 tokens per parameter, with all linears of the blocks in NVFP4 for "
            "all steps, predicted from the other setups; the interval includes noise. The growth "
            "with D / N is Quartet II's alone, so for Quartet II the level alone is a prediction. "
            "The two NVIDIA models are of one paper and left out together.",
            "",
            _checks(left_out, "training"),
            f"{sum(check.holds for check in left_out)} of {len(left_out)} are in their interval. "
            "This does not check the growth: a wrong exponent widens the intervals. The study's "
            "models are hundreds of times smaller than the others, and its first quarter in fp32 "
            "is made up for by 4/3.",
            "",
            "## Larger models",
            "",
            "Predictions for 200M from 30M, and for nanochat:",
            "",
            report.markdown(
                ["gaps", "number", "median error", "largest"],
                [
                    [name, str(len(e)), f"{statistics.median(e):.1%}", f"{max(e):.1%}"]
                    for name, e in larger.items()
                ],
            ),
            "## FP8",
            "",
            "The published gaps of FP8 with N and D; each is the loss of one logged step:",
            "",
            _checks(fp8, "training"),
            "## Severities",
            "",
            f"By training. The forward pass alone has the published severity {law.forward:.3f}.",
            "",
            _severities(law, gaps),
            _head(law, gaps),
            "",
            "## Predictions",
            "",
            f"Gaps of models of 1, 3 and 10 million parameters, [written]({PREDICTIONS}) before "
            "these were trained.",
            "",
            "![Published gaps and our own, by tokens per parameter](law.png)",
            "",
        ]
    )


def _uses(rows: Rows) -> str:
    counts = Counter((row.training, row.use, row.reason) for row in rows)
    lines = [[*names, str(count)] for names, count in sorted(counts.items())]
    return report.markdown(["training", "use", "reason", "rows"], lines)


def _checks(checks: Sequence[Check], title: str) -> str:
    return report.markdown(
        [title, "gap, %", "predicted", "90 % interval", "inside"],
        [
            [c.name, f"{c.percent:.2f}", f"{c.predicted:.2f}", f"{c.low:.2f} to {c.high:.2f}",
             "yes" if c.holds else "no"]
            for c in checks
        ],
    )  # fmt: skip


def _severities(law: Law, gaps: fits.Gaps) -> str:
    study = fits.study_severities(gaps)
    return report.markdown(
        ["recipe", "severity", "the study's", "sources"],
        [
            [
                recipe,
                f"{law.severities[recipe]:.3f}",
                f"{study[recipe]:.3f}",
                ", ".join(law.sources.get(recipe, ())),
            ]
            for recipe in sorted(law.severities, key=lambda recipe: -study[recipe])
        ],
    )


def _head(law: Law, gaps: fits.Gaps) -> str:
    study = fits.study_severities(gaps)
    rises = (
        f"{recipe}'s severity from {study[recipe]:.3f} to {study[f'{recipe}_head']:.3f}"
        for recipe in (fits.NVFP4, "delayed")
    )
    return (
        "The head in the recipe as well, in the study's smallest model with 8 tokens, raises "
        f"{' and '.join(rises)}. By NVFP4's, the head counts {law.head:.2f} times as much as the "
        "same work in the blocks."
    )


def points(rows: Rows, gaps: fits.Gaps) -> Iterator[tuple[str, str, float, float]]:
    """Yield recipe, training, D / N and gap of a picture's points, as if all linears of the blocks
    were quantized in all steps."""
    for row in rows:
        if row.shipped in COLORS:
            yield row.shipped, row.training, row.ratio, row.percent / row.share
    for (_, ratio, recipe), gap in gaps.items():
        if recipe in COLORS:
            yield recipe, fits.STUDY, ratio, gap.percent / (1 - fits.SHARED)


def figure(law: Law, rows: Rows, gaps: fits.Gaps) -> Figure:
    plot = Figure(figsize=(10, 6), layout="constrained")
    axes = plot.subplots()
    ratios = np.geomspace(0.01, 1000, 200)
    for recipe, color in COLORS.items():
        curve = [law.gap(float(ratio), law.severities[recipe]) for ratio in ratios]
        axes.plot(ratios, [gap.mean for gap in curve], color=color, label=recipe)
        if recipe in BANDS:
            low, high = [gap.low for gap in curve], [gap.high for gap in curve]
            axes.fill_between(ratios, low, high, color=color, alpha=0.15, linewidth=0)
    bottom = 0.005
    style: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    for recipe, training, ratio, percent in points(rows, gaps):
        marker = MARKERS[training] if percent > bottom else BELOW
        axes.plot(ratio, max(percent, bottom), marker=marker, color=COLORS[recipe], **style)
    for training, marker in [*MARKERS.items(), ("0.005 % or less", BELOW)]:
        axes.plot([], [], marker=marker, color="0.4", label=training, **style)
    axes.axvline(RATIO, color="0.7", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", ylim=(bottom * 0.8, 12),
        xlabel="training tokens per parameter", ylabel="loss gap, % of the baseline's loss",
    )  # fmt: skip
    axes.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    return plot
