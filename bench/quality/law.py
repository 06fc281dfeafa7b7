"""The law of `fp8stack forecast`: its fit to published gaps and to the study, its page and picture.

`published.csv` says which of its rows are used, and why; that was decided before the fit."""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import optimize, special, stats

from bench import report
from bench.cells import json_lines
from bench.quality import study, study_tables
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.forecast import STUDY
from fp8stack.analysis.forecast.law import RATIO, Law
from fp8stack.analysis.forecast.result import Gap, quantity
from fp8stack.common.errors import UserError
from fp8stack.common.io import write_atomically

PUBLISHED = Path(__file__).with_name("published.csv")
LAW = Path(laws.__file__).with_name("law.json")
NVFP4, QUARTET = "nvfp4", "Quartet II"
STUDY_PAGE = "bench/results/cpu/study.md"
STUDY_RATIO = 8  # with 2 tokens per parameter, the smallest model trains for 225 steps
SHARED = 0.25  # of the study's steps are in fp32, and a gap grows with the share in a recipe
NORMAL = 1.645  # half-width of a 90 % interval of noise, in standard deviations
FP8_FACTOR = 3.0
"""The factor of the 90 % interval for MXFP8. Few published gaps at real sizes support no less."""
COLORS = {"mxfp4": "C3", "nvfp4": "C1", "mxfp6_e2m3": "C2", "mxfp8": "C0"}
BANDS, MODEL = ("nvfp4", "mxfp8"), 8e9
MARKERS = "oDvsP^x*"
UNFITTED = "not fitted"


class PublishedGap(NamedTuple):
    """A published loss gap, `percent` of the baseline's loss.

    Attributes:
        source: its address or paper.
        name: the model and the source's name of the recipe.
        training: a short name of the training setup; between these, gaps of a recipe vary.
        parameters, ratio: the number of parameters, and training tokens per parameter.
        baseline: the baseline's loss; NaN if it is not published.
        noise: the standard deviation of `percent` between repetitions.
        use: "gap": fitted; "backward", "severity": a pass or a recipe relative to NVFP4; "check":
            predicted and not fitted.
        share: the quantized share of the linear work of the blocks.
        shipped: the shipped recipe that it is.
        is_limit: whether the gap is published as below `percent`.
    """

    source: str
    name: str
    training: str
    parameters: float
    ratio: float
    percent: float
    noise: float
    use: str
    share: float
    shipped: str
    baseline: float = math.nan
    is_limit: bool = False


class Level(NamedTuple):
    """A gap in percent of the loss, and the standard deviation of its noise."""

    percent: float
    noise: float


Rows = Sequence[PublishedGap]
Gaps = Mapping[tuple[str, int, str], Level]  # by size, ratio and recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="leave the law that fp8stack has")


def run(arguments: argparse.Namespace) -> None:
    folder = study.folder_of(arguments)
    if not (folder / study.NAME).is_file():
        raise UserError(f"{folder / study.NAME} is missing, which the law is fitted to.")
    gaps = study_gaps(json_lines(folder / study.NAME))
    rows = published() + study_rows(gaps)
    law = fit(rows, gaps)
    text = page(law, rows, gaps)
    write_atomically(folder / "law.md", text.encode())
    figure(law, rows, gaps).savefig(folder / "law.png", dpi=110)
    if not arguments.keep:
        write_atomically(LAW, (law.model_dump_json(indent=1) + "\n").encode())
    print(text)


def published() -> list[PublishedGap]:
    """The published gaps that the law is fitted to or checked with."""
    return [
        PublishedGap(
            source=row["source"],
            name=f"{row['model']}, {row['recipe']}",
            training=row["training"],
            parameters=float(row["N"]),
            ratio=float(row["D_per_N"]),
            baseline=float(row["baseline"] or "nan"),
            percent=float(row["gap_percent"]),
            noise=float(row["noise_percent"]),
            use=row["use"],
            share=float(row["share"]),
            shipped=row["shipped"],
            is_limit=row["metric"] == "upper limit",
        )
        for row in csv.DictReader(PUBLISHED.read_text(encoding="utf-8").splitlines())
        if row["use"] != "no"
    ]


def study_gaps(runs: study_tables.Rows) -> Gaps:
    """The study's gaps. The recipes of a size and ratio share the variance of a pair, the median
    over recipes; where no recipe has two pairs, the largest variance of all."""
    cells = study_tables.cells_of(runs)
    variances: dict[tuple[str, int], list[float]] = defaultdict(list)
    for cell in cells:
        if cell.gap.deviation:
            variances[cell.size, cell.ratio].append(cell.gap.deviation**2)
    pooled = {place: statistics.median(values) for place, values in variances.items()}
    most = max(pooled.values())
    return {
        (cell.size, cell.ratio, cell.recipe): Level(
            cell.gap.mean,
            math.sqrt(pooled.get((cell.size, cell.ratio), most) / cell.gap.samples),
        )
        for cell in cells
    }


def study_rows(gaps: Gaps) -> list[PublishedGap]:
    """The study's gaps of NVFP4, as published ones."""
    return [
        PublishedGap(
            source=STUDY_PAGE,
            name=f"{size}, {recipe}",
            training=STUDY,
            parameters=1e6 * float(size.removesuffix("M")),
            ratio=ratio,
            percent=gap.percent,
            noise=gap.noise,
            use="gap",
            share=1 - SHARED,
            shipped=NVFP4,
        )
        for (size, ratio, recipe), gap in gaps.items()
        if (ratio, recipe) == (STUDY_RATIO, NVFP4)
    ]


def fit(rows: Rows, gaps: Gaps, *, without: str = "", grows: bool = True) -> Law:
    """Fit the law.

    Args:
        rows: the published gaps and `study_rows`.
        gaps: the study's.
        without: a source that does not count for the level. The growth is always Quartet II's.
        grows: whether gaps grow with D / N; if not, the law is a constant per recipe.
    """
    used = [row for row in rows if row.use == "gap"]
    quartet = [row for row in used if row.training == QUARTET]
    exponent, cap = fit_growth(quartet)
    severities = study_severities(gaps)
    sources: dict[str, tuple[str, ...]] = dict.fromkeys(severities, (STUDY,))
    for recipe in severities.keys() - {NVFP4}:
        if relatives := [
            r for r in rows if r.shipped == recipe and r.use in ("backward", "severity")
        ]:
            # Each source counts once.
            severities[recipe] = math.sqrt(severities[recipe] * relative(relatives, used))
            sources[recipe] += (relatives[0].training,)
    shipped = [recipe for recipe in sorted(severities) if study.source_of(recipe) == recipe]
    slope, decline = fit_slope(quartet)
    law = Law(
        level=1.0,
        exponent=exponent if grows else 0.0,
        cap=cap,
        deviation=0.0,
        exponent_deviation=statistics.stdev(exponents_by_size(quartet, cap)) if grows else 0.0,
        severity_deviation=0.0,
        quantile=1.0,
        severities={recipe: severities[recipe] for recipe in shipped},
        sources={recipe: sources[recipe] for recipe in shipped},
        addresses={row.training: row.source for row in used},
        parameters=(min(r.parameters for r in used), max(r.parameters for r in used)),
        ratio=(min(row.ratio for row in used), max(row.ratio for row in used)),
        slope=slope,
        decline=decline,
    )
    levels = source_levels([row for row in used if row.source != without], law)
    level, deviation = between(levels)
    quantile = float(stats.t.ppf(0.95, len(levels) - 1))  # for another setup
    fp8 = max(0.0, (math.log(FP8_FACTOR) / quantile) ** 2 - deviation**2)
    between_setups = {"level": level, "deviation": deviation, "quantile": quantile}
    between_setups["severity_deviation"] = math.sqrt(fp8) / abs(math.log(severities["mxfp8"]))
    return law.model_copy(update=between_setups | {"sources": law.sources | {NVFP4: tuple(levels)}})


def fit_growth(rows: Rows) -> tuple[float, float]:
    """The exponent and the cap of the growth, by least squares of the logarithms of gaps."""

    def residual(cap: float) -> float:
        growth, logs = _logs(rows, cap)
        return float((1 - stats.linregress(growth, logs).rvalue ** 2) * np.var(logs))

    cap = min(np.geomspace(60, 1000, 200).tolist(), key=residual)
    return float(stats.linregress(*_logs(rows, cap)).slope), cap


def _logs(rows: Rows, cap: float) -> tuple[list[float], list[float]]:
    growth = [math.log(min(row.ratio, cap) / RATIO) for row in rows]
    return growth, [math.log(row.percent) for row in rows]


def exponents_by_size(rows: Rows, cap: float) -> list[float]:
    """The exponents of the sizes of models."""
    sizes = sorted({row.parameters for row in rows})
    of_size = [[row for row in rows if row.parameters == size] for size in sizes]
    return [float(stats.linregress(*_logs(chosen, cap)).slope) for chosen in of_size]


def fit_slope(rows: Rows) -> tuple[float, float]:
    """The slope and decline of baselines, see `Law`, by least squares of
    log L = (slope / decline) (D / N / 20)^-decline + a constant of each size."""
    sizes, ratios, losses = (
        np.array([getattr(row, key) for row in rows]) for key in ("parameters", "ratio", "baseline")
    )
    is_size = [sizes == size for size in np.unique(sizes)]

    def solved(decline: float) -> tuple[float, float]:
        terms = np.column_stack([*is_size, (ratios / RATIO) ** -decline / decline])
        solution = np.linalg.lstsq(terms, np.log(losses), rcond=None)[0]
        return float(np.sum((terms @ solution - np.log(losses)) ** 2)), float(solution[-1])

    decline = min(np.linspace(0.1, 1, 91).tolist(), key=lambda decline: solved(decline)[0])
    return solved(decline)[1], decline


def source_levels(rows: Rows, law: Law) -> dict[str, Level]:
    """The level of each training setup: the weighted mean of its gaps, each divided by what the law
    has for a level of 1."""
    levels: dict[str, list[Level]] = defaultdict(list)
    for row in rows:
        growth = row.share * law.growth(row.parameters, row.ratio)
        levels[row.training].append(Level(row.percent / growth, row.noise / growth))
    weights = {name: [level.noise**-2 for level in setup] for name, setup in levels.items()}
    return {
        name: Level(
            statistics.fmean((level.percent for level in setup), weights[name]),
            sum(weights[name]) ** -0.5,
        )
        for name, setup in levels.items()
    }


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


def study_severities(gaps: Gaps) -> dict[str, float]:
    """The severity of each recipe relative to NVFP4, by weighted least squares."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (size, ratio, recipe), gap in gaps.items():
        if (nvfp4 := gaps.get((size, ratio, NVFP4))) is not None:
            sums[recipe][0] += gap.percent * nvfp4.percent / gap.noise**2
            sums[recipe][1] += nvfp4.percent**2 / gap.noise**2
    return {recipe: product / square for recipe, (product, square) in sorted(sums.items())}


def relative(rows: Rows, to: Rows) -> float:
    """The geometric mean of gaps, relative to the gaps `to` of the same model and tokens."""
    percent = {(row.training, row.parameters, row.ratio): row.percent for row in to}
    return statistics.geometric_mean(
        row.percent / percent[row.training, row.parameters, row.ratio]
        for row in rows
        if (row.training, row.parameters, row.ratio) in percent
    )


def log_score(law: Law, row: PublishedGap) -> float:
    """The logarithm of the probability density that the law gives a gap, noise included."""
    severity = row.share * law.severities[row.shipped]
    count = 2001
    quantiles = stats.t.ppf((np.arange(count) + 0.5) / count, len(law.sources[NVFP4]) - 1)
    mean = law.gap(row.parameters, row.ratio, severity).mean
    percents = mean * np.exp(law.spread(row.ratio, severity) * quantiles)
    densities = stats.norm.logpdf(row.percent, percents, row.noise)
    return float(special.logsumexp(densities) - math.log(count))


def scores_left_out(rows: Rows, gaps: Gaps) -> dict[str, tuple[float, float]]:
    """The mean log score of NVFP4's gaps of each source, predicted from the other sources: of the
    law, and of a constant per recipe."""
    used = [row for row in rows if row.use == "gap"]
    scores = {}
    for source in dict.fromkeys(row.source for row in used):
        trainings = dict.fromkeys(row.training for row in used if row.source == source)
        law, constant = (
            statistics.fmean(log_score(fitted, row) for row in used if row.source == source)
            for fitted in (fit(rows, gaps, without=source, grows=grows) for grows in (True, False))
        )
        scores[", ".join(trainings)] = law, constant
    return scores


def size_errors(rows: Rows) -> dict[float, list[float]]:
    """The median relative error of Quartet II's gaps of each size, predicted from its other sizes:
    of their growth, and of their geometric mean."""
    quartet = [row for row in rows if (row.training, row.use) == (QUARTET, "gap")]
    errors: dict[float, list[float]] = defaultdict(list)
    for size in sorted({row.parameters for row in quartet}):
        predicted = [row for row in quartet if row.parameters == size]
        used = [row for row in quartet if row.parameters != size]
        exponent, cap = fit_growth(used)
        for power in (exponent, 0.0):
            levels = [row.percent / min(row.ratio, cap) ** power for row in used]
            level = statistics.geometric_mean(levels)
            error = (abs(level * min(r.ratio, cap) ** power / r.percent - 1) for r in predicted)
            errors[size].append(statistics.median(error))
    return errors


def interval(law: Law, row: PublishedGap) -> tuple[Gap, bool]:
    """The gap that the law expects of a row, its 90 % interval with noise, and whether the
    published gap, or one below a limit, is in the interval."""
    gap = law.gap(row.parameters, row.ratio, row.share * law.severities[row.shipped])
    noise = NORMAL * row.noise
    low = gap.mean - math.hypot(gap.mean - gap.low, noise)
    high = gap.mean + math.hypot(gap.high - gap.mean, noise)
    is_inside = low <= row.percent and (row.is_limit or row.percent <= high)
    return Gap(mean=gap.mean, low=low, high=high), is_inside


def page(law: Law, rows: Rows, gaps: Gaps) -> str:
    return "\n".join(
        [
            "# The law of `fp8stack forecast`",
            "",
            "Made by `python -m bench law` from the [published gaps](../../quality/published.csv), "
            "whose columns `use` and `reason` were written before the fit, and from the runs of "
            "[the study](study.md).",
            "",
            f"gap in % = severity x {formula(law)}, N parameters, D training tokens. NVFP4 has "
            "severity 1. Beyond 20 tokens per parameter the exponent is that of models of up to "
            "200M parameters; it falls linearly in log N to 0 at 1B, and gaps of larger models are "
            "flat.",
            "",
            f"90 % intervals: a factor of {math.exp(law.quantile * law.deviation):.2f} for NVFP4 "
            f"at 20 tokens per parameter, {FP8_FACTOR:.2f} for MXFP8, which is set and not fitted. "
            "The exponents of Quartet II's models of 30, 50, 100 and 200M, which widen intervals "
            f"away from 20, are {_exponents(law, rows)}.",
            "",
            *_left_out(rows, gaps),
            *_checks(law, fit(rows, gaps, grows=False), rows),
            "## Severities",
            "",
            _severities(law, gaps),
            "![Published gaps and our own, by tokens per parameter](law.png)",
            "",
        ]
    )


def formula(law: Law) -> str:
    return f"{law.level:.2f} x (min(D / N, {law.cap:.0f}) / 20)^{law.exponent:.2f}"


def _exponents(law: Law, rows: Rows) -> str:
    quartet = [row for row in rows if (row.training, row.use) == (QUARTET, "gap")]
    return ", ".join(f"{exponent:.2f}" for exponent in exponents_by_size(quartet, law.cap))


def _left_out(rows: Rows, gaps: Gaps) -> list[str]:
    scores, sizes = scores_left_out(rows, gaps), size_errors(rows)
    means = [statistics.fmean(pair) for pair in zip(*scores.values(), strict=True)]
    lines = [[name, *(f"{score:.2f}" for score in pair)] for name, pair in scores.items()]
    lines.append(["mean", *(f"{mean:.2f}" for mean in means)])
    return [
        "## Sources left out",
        "",
        "The score is the mean logarithm of the probability density of NVFP4's gaps, predicted "
        "from the other sources: larger is better. The constant is one gap per recipe, whatever N "
        "and D, fitted in the same way. The growth is always Quartet II's.",
        "",
        report.markdown(["source left out", "the law", "a constant"], lines),
        f"Over sources left out, {_winner(*means)} wins. The constant wins for "
        f"{'; '.join(name for name, pair in scores.items() if pair[1] > pair[0])}.",
        "",
        "Within Quartet II, with one size left out, the median error is:",
        "",
        report.markdown(
            ["size left out", "growth of the other sizes", "their mean"],
            [
                [f"{quantity(size)}", *(f"{error:.1%}" for error in pair)]
                for size, pair in sizes.items()
            ],
        ),
    ]


def _checks(law: Law, constant: Law, rows: Rows) -> list[str]:
    checked = [row for row in rows if row.use == "check"]
    means, inside = [], []
    cells: list[list[str]] = [[r.name, f"{'< ' * r.is_limit}{r.percent:.2f}"] for r in checked]
    for rule in (law, constant):
        scores = [math.nan if row.is_limit else log_score(rule, row) for row in checked]
        intervals = [interval(rule, row) for row in checked]
        means.append(float(np.nanmean(scores)))
        inside.append(sum(is_inside for _, is_inside in intervals))
        for line, score, (gap, is_inside) in zip(cells, scores, intervals, strict=True):
            line.append(f"{gap.mean:.2f} ({gap.low:.2f} to {gap.high:.2f})")
            line += ["in" if is_inside else "out", "" if math.isnan(score) else f"{score:.2f}"]
    return [
        "## Trainings that are not fitted",
        "",
        "Gaps in percent with 90 % intervals, noise included. Those marked secondary in the list "
        "of published gaps were known when the rule was chosen, and the rule was committed before "
        "these scores: they show what it says and are no test of it. The list says where tokens "
        "or the quantized share are inferred.",
        "",
        report.markdown(["training", "gap", "law", "", "score", "constant", "", "score"], cells),
        f"{inside[0]} of {len(checked)} are in the law's interval and {inside[1]} in the "
        f"constant's. The mean score is {means[0]:.2f} for the law and {means[1]:.2f} for the "
        f"constant: {_winner(*means)} wins.",
        "",
    ]


def _winner(law: float, constant: float) -> str:
    return "the law" if law > constant else "the constant"


def _severities(law: Law, gaps: Gaps) -> str:
    of_study = study_severities(gaps)
    lines = [
        [
            recipe,
            f"{severity:.3f}",
            f"{of_study[recipe]:.3f}",
            ", ".join(law.sources[recipe]),
        ]
        for recipe, severity in sorted(law.severities.items(), key=lambda item: -item[1])
    ]
    return report.markdown(["recipe", "severity", "the study's", "sources"], lines)


def figure(law: Law, rows: Rows, gaps: Gaps) -> Figure:
    """Gaps as if all linears of the blocks were quantized in all steps, and the law for a model of
    `MODEL` parameters; dashed, for one of 100M."""
    plot = Figure(figsize=(10, 6), layout="constrained")
    axes = plot.subplots()
    ratios = np.geomspace(0.01, 1000, 200).tolist()
    for recipe, color in COLORS.items():
        severity = law.severities[recipe]
        curve = [law.gap(MODEL, ratio, severity) for ratio in ratios]
        axes.plot(ratios, [gap.mean for gap in curve], color=color, label=recipe)
        small = [law.gap(1e8, ratio, severity).mean for ratio in ratios]
        axes.plot(ratios, small, color=color, linestyle="--", linewidth=0.8)
        if recipe in BANDS:
            low, high = [gap.low for gap in curve], [gap.high for gap in curve]
            axes.fill_between(ratios, low, high, color=color, alpha=0.15, linewidth=0)
    points = [
        (r.shipped, UNFITTED if r.use == "check" else r.training, r.ratio, r.percent / r.share)
        for r in rows
    ]
    points += [
        (recipe, STUDY, float(ratio), gap.percent / (1 - SHARED))
        for (_, ratio, recipe), gap in gaps.items()
    ]
    bottom, below = 0.005, "$\\downarrow$"
    trainings = list(dict.fromkeys(training for _, training, *_ in points))
    markers = dict(zip(trainings, MARKERS, strict=False))
    style: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    for recipe, training, ratio, percent in points:
        if recipe in COLORS:
            marker = markers[training] if percent > bottom else below
            axes.plot(ratio, max(percent, bottom), marker=marker, color=COLORS[recipe], **style)
    for training, marker in [*markers.items(), ("0.005 % or less", below)]:
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
