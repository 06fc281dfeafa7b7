"""The law of `fp8stack forecast`, fitted to one half of `python -m bench study` and judged on the
other half.

Each model that the study trained in float32 is measured once. The law fitted to one half shows how
well a law predicts; then a law fitted to both halves is written to the file that `fp8stack
forecast` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy import optimize

from bench import report
from bench.cells import append_line, json_lines
from bench.quality import study, study_tables
from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.forecast import ForecastOptions, find_trained, load_trained
from fp8stack.analysis.forecast.sensitivity import sensitivities
from fp8stack.common.errors import UserError
from fp8stack.common.io import write_atomically
from fp8stack.precision import load_recipe

SENSITIVITY = "sensitivity.jsonl"
SEEDS = 3  # models of a cell that are measured
FITTED = (
    "nvfp4",
    "nvfp4_forward_high",
    "nvfp4_last_bf16",
    "mxfp4",
    "mxfp6_e3m2",
    "mxfp8",
    "current",
)
LARGEST = "0.9M"
"""The law is fitted to these recipes on the smaller models, and judged on the other recipes on the
smaller models and on all recipes on the largest model. This was chosen before the first fit."""
RESOLVED = 0.15
"""A gap counts for the median error if its standard error is at most this fraction of it."""
LAW = Path(laws.__file__).with_name("law.json")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A recipe at one size and ratio: its gap in nats per token, and its measured sensitivities."""

    size: str
    ratio: int
    recipe: str
    parameters: int
    pairs: int
    gap: float
    error: float  # the gap's standard error
    forward: float
    backward: float

    @property
    def fitted(self) -> bool:
        """Whether the cell is in the half that the law is fitted to."""
        return self.recipe in FITTED and self.size != LARGEST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs/study"), help="the study's (default: %(default)s)")
    add("--keep", action="store_true", help="leave the law that fp8stack has as it is")


def run(arguments: argparse.Namespace) -> None:
    """Measure the models that are not measured yet, fit, judge and write."""
    folder = study.folder_of(arguments)
    rows = json_lines(folder / study.NAME)
    _measure(rows, folder / SENSITIVITY, arguments.runs)
    cells = cells_of(rows, json_lines(folder / SENSITIVITY))
    law = fit([cell for cell in cells if cell.fitted])
    law_of_all = fit(cells)
    text = page(law, law_of_all, cells)
    write_atomically(folder / "law.md", text.encode())
    figure(law, cells).savefig(folder / "law.png", dpi=110)
    if not arguments.keep:
        write_atomically(LAW, (json.dumps(asdict(law_of_all), indent=1) + "\n").encode())
    print(text)


def _measure(rows: study_tables.Rows, path: Path, runs: Path) -> None:
    """Measure the study's float32 models, and add the sensitivities to the file at `path`."""
    measured_pairs = {(row["name"], row["recipe"]) for row in json_lines(path)}
    cpu = machine(device="cpu")["machine"]
    for row in study_tables.base_of(rows):
        folder = runs / row["name"]
        names = [r for r in study.LADDER + study.ARMS if (row["name"], r) not in measured_pairs]
        if row["seed"] >= SEEDS or not names or not folder.exists() or row["cpu"] != cpu:
            continue
        recipes = {name: load_recipe(study.source_of(name)) for name in names}
        request = ForecastOptions(run=str(folder), device="cpu")
        trained = load_trained(request, *find_trained(request))
        text, hardware = trained.windows.tokens, trained.hardware
        for name, measured in sensitivities(trained.model, recipes, text, hardware):
            facts = {key: row[key] for key in ("name", "size", "ratio")}
            row_facts = {
                "recipe": name,
                "forward": measured.forward,
                "layers": round(sum(measured.layers.values()), 9),
                "backward": measured.backward,
            }
            append_line(path, facts | row_facts)
        print(f"measured: {row['name']}", flush=True)


def cells_of(rows: study_tables.Rows, measured: study_tables.Rows) -> list[Cell]:
    """The cells that have both pairs of runs and a measured model."""
    gaps: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    parameters = {row["size"]: row["parameters"] for row in rows}
    for row, base in study_tables.pairs_of(rows, study_tables.SHARED):
        place = (row["size"], row["ratio"], row["recipe"])
        gaps[place].append(row["val_loss"] - base["val_loss"])
    looked: dict[tuple[str, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in measured:
        looked[row["size"], row["ratio"], row["recipe"]].append(row)
    pooled = _pooled(gaps)
    return [
        Cell(
            size=size,
            ratio=ratio,
            recipe=recipe,
            parameters=parameters[size],
            pairs=len(cell_gaps),
            gap=statistics.fmean(cell_gaps),
            # If no recipe has two pairs here yet, use the largest variance of all places.
            error=_error(cell_gaps, pooled.get((size, ratio), max(pooled.values()))),
            forward=statistics.fmean(row["forward"] for row in looked[size, ratio, recipe]),
            backward=statistics.fmean(row["backward"] for row in looked[size, ratio, recipe]),
        )
        for (size, ratio, recipe), cell_gaps in sorted(gaps.items())
        if looked[size, ratio, recipe] and pooled
    ]


def _pooled(gaps: Mapping[tuple[str, int, str], Sequence[float]]) -> dict[tuple[str, int], float]:
    """The variance of a pair's gap at each size and ratio: the median over its recipes."""
    variances: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (size, ratio, _), values in gaps.items():
        if len(values) > 1:
            variances[size, ratio].append(statistics.variance(values))
    return {place: statistics.median(values) for place, values in variances.items()}


def _error(gaps: Sequence[float], pooled: float) -> float:
    """The standard error of a mean gap. The variance of a few pairs is uncertain, so the pooled
    variance of their neighbours counts like two more pairs."""
    own_squares = statistics.variance(gaps) * (len(gaps) - 1) if len(gaps) > 1 else 0.0
    return math.sqrt((own_squares + 2 * pooled) / (len(gaps) + 1) / len(gaps))


# The fit


def fit(cells: Sequence[Cell]) -> laws.Law:
    """The maximum-likelihood law: gaps are normal about the predicted gap, with their standard
    errors and a common deviation that is a fraction of the prediction.

    Raises:
        UserError: there are too few cells.
    """
    if len(cells) < 8:
        raise UserError(f"{len(cells)} cells are too few for a law. Run python -m bench study on.")
    gaps = np.array([cell.gap for cell in cells])
    errors = np.array([cell.error for cell in cells])

    def unlikely(logs: npt.NDArray[np.float64]) -> float:
        law = _law(logs, cells)
        means = np.array([law.mean(cell.forward, cell.backward) for cell in cells])
        variances = errors**2 + (law.deviation * means) ** 2
        return float((np.log(variances) + (gaps - means) ** 2 / variances).sum())

    begin = np.log([1.3, 1.0, 0.1, 0.15])
    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-6, "fatol": 1e-9}
    optimum = optimize.minimize(unlikely, begin, method="Nelder-Mead", options=options)
    return _law(optimum.x, cells)


def _law(logs: npt.NDArray[np.float64], cells: Sequence[Cell]) -> laws.Law:
    forward, power, backward, deviation = (float(value) for value in np.exp(logs))
    sizes = [cell.parameters for cell in cells]
    ratios = [cell.ratio for cell in cells]
    return laws.Law(
        forward=forward,
        power=power,
        backward=backward,
        deviation=deviation,
        parameters=(min(sizes), max(sizes)),
        ratio=(min(ratios), max(ratios)),
        largest=max(cell.forward for cell in cells),
        runs=sum(cell.pairs for cell in cells),
    )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The errors of a law on some cells."""

    cells: int
    resolved: int
    median_error: float | None  # |predicted - gap| / gap, over the cells with a resolved gap
    covered: float  # the fraction of cells whose gap lies in the 90 % interval


def judge(law: laws.Law, cells: Sequence[Cell]) -> Judgement:
    """Judge a law on some cells. The interval of a prediction is widened by the standard error of
    the gap."""
    resolved = [cell for cell in cells if 0 < cell.error <= RESOLVED * abs(cell.gap)]
    errors = [abs(law.mean(c.forward, c.backward) / c.gap - 1) for c in resolved]
    inside = 0
    for cell in cells:
        mean = law.mean(cell.forward, cell.backward)
        width = laws.QUANTILE * math.hypot(law.deviation * mean, cell.error)
        inside += abs(cell.gap - mean) <= width
    return Judgement(
        cells=len(cells),
        resolved=len(resolved),
        median_error=statistics.median(errors) if errors else None,
        covered=inside / max(1, len(cells)),
    )


# The page


def page(law: laws.Law, law_of_all: laws.Law, cells: Sequence[Cell]) -> str:
    """The page: the law of one half, its errors, the law of all cells, and every cell."""
    halves = {
        "fitted": [cell for cell in cells if cell.fitted],
        "held out": [cell for cell in cells if not cell.fitted],
        "held out, recipes": [c for c in cells if not c.fitted and c.size != LARGEST],
        f"held out, {LARGEST}": [c for c in cells if not c.fitted and c.size == LARGEST],
    }
    lines = []
    for name, half in halves.items():
        if half:
            judgement = judge(law, half)
            median_error = "" if judgement.median_error is None else f"{judgement.median_error:.0%}"
            lines.append([name, str(judgement.cells), str(judgement.resolved), median_error])
    header = ["half", "cells", "resolved", "median error"]
    return "\n".join(
        [
            "# The law of `fp8stack forecast`",
            "",
            "Made by `python -m bench law` from the runs of [the study](study.md) and the models "
            "that it trained in fp32.",
            "",
            f"{_formula(law)} within {law.deviation:.0%} (one standard deviation). KL: of the "
            "quantized forward pass, nats per token. e: the relative squared error of a product "
            "of the backward pass. The gap is in nats per token, of runs whose first quarter is in "
            "fp32.",
            "",
            f"Fitted to {', '.join(FITTED)} on the smaller models, {law.runs} pairs of runs. A "
            f"gap is resolved if its standard error is at most {RESOLVED:.0%} of it.",
            "",
            report.markdown(header, lines),
            *_coverage(law, halves["held out"]),
            *_drift(cells),
            "What `fp8stack forecast` uses is fitted to all cells afterwards, "
            f"{law_of_all.runs} pairs of runs: {_formula(law_of_all)} within "
            f"{law_of_all.deviation:.0%}.",
            "",
            "Every cell, gaps in thousandths of a nat per token; the law is that of the half:",
            "",
            report.markdown(
                ["model", "recipe", "half", "KL", "e", "gap", "pairs", "the law says"],
                map(list, _rows(law, cells)),
            ),
            "![What the law says, and what training found](law.png)",
            "",
        ]
    )


def _coverage(law: laws.Law, cells: Sequence[Cell]) -> list[str]:
    """The reason why the page gives no coverage of the 90 % interval, if most gaps are
    uncertain."""
    means = [law.mean(cell.forward, cell.backward) for cell in cells]
    vague = sum(c.error > law.deviation * mean for c, mean in zip(cells, means, strict=True))
    if 2 * vague <= len(cells):
        return []
    return [
        f"Of {len(cells)} gaps held out, {vague} are known less well than the law says them. How "
        "many lie in its 90 % interval is therefore no test of the interval: almost all would.",
        "",
    ]


def _drift(cells: Sequence[Cell]) -> list[str]:
    """The errors, at the larger ratio, of a law that is fitted to the smaller ratio alone."""
    low, high = min(cell.ratio for cell in cells), max(cell.ratio for cell in cells)
    if low == high:
        return []
    far = [cell for cell in cells if cell.ratio == high]
    judgement = judge(fit([cell for cell in cells if cell.ratio == low]), far)
    error = (
        ""
        if judgement.median_error is None
        else f", the median error is {judgement.median_error:.0%}"
    )
    return [
        f"Fitted to {low} tokens per parameter alone, its 90 % interval holds "
        f"{judgement.covered:.0%} of the {len(far)} gaps at {high}{error}.",
        "",
    ]


def _formula(law: laws.Law) -> str:
    return f"gap = {law.forward:.3f} KL^{law.power:.3f} + {law.backward:.4f} e,"


def _rows(law: laws.Law, cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in sorted(cells, key=lambda cell: (cell.size, cell.ratio, -cell.forward)):
        yield [
            f"{cell.size}, {cell.ratio} tokens",
            cell.recipe,
            "fitted" if cell.fitted else "held out",
            f"{1e3 * cell.forward:.3f}",
            f"{cell.backward:.4f}",
            f"{1e3 * cell.gap:.2f} ± {1e3 * cell.error:.2f}",
            str(cell.pairs),
            f"{1e3 * law.mean(cell.forward, cell.backward):.2f}",
        ]


def figure(law: laws.Law, cells: Sequence[Cell]) -> Figure:
    plot = Figure(figsize=(7, 6.5), layout="constrained")
    axes = plot.subplots()
    for number, (size, ratio) in enumerate(sorted({(c.size, c.ratio) for c in cells})):
        for fitted in (True, False):
            points = [c for c in cells if (c.size, c.ratio, c.fitted) == (size, ratio, fitted)]
            predicted = [1e3 * law.mean(cell.forward, cell.backward) for cell in points]
            half = "fitted" if fitted else "held out"
            axes.errorbar(
                predicted,
                [1e3 * cell.gap for cell in points],
                yerr=[2e3 * cell.error for cell in points],
                fmt="o" if fitted else "s",
                markerfacecolor=f"C{number}" if fitted else "none",
                color=f"C{number}",
                label=f"{size}, {ratio} tokens per parameter, {half}" if points else None,
                capsize=2,
                markersize=5,
            )
    span = np.geomspace(0.3, 1e3 * max((c.gap for c in cells), default=1.0) * 1.3, 50)
    axes.plot(span, span, color="0.5", linewidth=0.8)
    wide = laws.QUANTILE * law.deviation
    axes.fill_between(span, span * (1 - wide), span * (1 + wide), color="0.5", alpha=0.15)
    axes.set(
        xscale="log",
        xlabel="gap that the law says, thousandths of a nat per token",
        ylabel="gap that training found, ± 2 standard errors",
    )
    axes.set_yscale("symlog", linthresh=1.0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return plot
