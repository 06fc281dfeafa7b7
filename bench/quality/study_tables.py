"""The tables and the picture of `python -m bench study`, from the finished runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bench import report
from fp8stack.analysis.compare.intervals import Interval, mean_interval
from fp8stack.common.io import write_atomically

BASELINE = "fp32"
SHARED = "first quarter in fp32"
SCRATCH = "from scratch"
AA = "gradients in two parts"
"""A design of float32 runs that differ from the plain ones only in rounding."""
LAST = 3  # evaluations to average
MARKERS = "osD^vPX*"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A recipe at one size and ratio, over its pairs."""

    size: str
    ratio: int
    recipe: str
    gap: Interval  # percent of the float32 loss
    nats: float  # the mean gap, per token
    multiplier: float | None  # of parameters; see `cells_of`
    multiplier_range: tuple[float, float] | None
    errors: dict[str, float]  # relative squared errors of operands, means over runs


def cells_of(rows: Rows) -> list[Cell]:
    """The cells that have a pair: runs of a recipe and of float32 with the same seed, on the same
    kind of CPU.

    The effective-parameter multiplier is N' / N, where N' is the number of parameters of a float32
    model that has this loss after the same tokens D. From log L = a + b log N + c log D, fitted to
    the float32 runs, it is (L / L_fp32)^(1 / b).
    """
    pairs: dict[tuple[str, int, str], list[tuple[Any, Any]]] = defaultdict(list)
    for row, base in pairs_of(rows, SHARED):
        pairs[row["size"], row["ratio"], row["recipe"]].append((row, base))
    slope = loss_slope(base_of(rows))
    return [_cell(*place, cell_pairs, slope) for place, cell_pairs in sorted(pairs.items())]


def pairs_of(rows: Rows, design: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The runs of all recipes in this design, each with the float32 run of the same size, ratio,
    seed and kind of CPU: of this design, or, if it has none, of the plain design."""
    done = [row for row in rows if row["val_loss"] is not None]
    place = ("size", "ratio", "seed", "cpu")
    base: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for base_design in (SHARED, "plain", design):
        base_rows = (
            row for row in done if (row["recipe"], row["design"]) == (BASELINE, base_design)
        )
        base |= {tuple(row[key] for key in place): row for row in base_rows}
    for row in done:
        base_row = base.get(tuple(row[key] for key in place))
        if base_row is not None and row["design"] == design and row["recipe"] != BASELINE:
            yield row, base_row


def base_of(rows: Rows) -> list[Mapping[str, Any]]:
    """The float32 runs of the design that the tables use."""
    base_rows = (row for row in rows if (row["recipe"], row["design"]) == (BASELINE, SHARED))
    return [row for row in base_rows if row["val_loss"] is not None]


def loss_slope(base: Rows) -> float | None:
    """b of log L = a + b log N + c log D by least squares; None without two sizes and ratios."""
    if len({row["size"] for row in base}) < 2 or len({row["ratio"] for row in base}) < 2:
        return None
    terms = [[1.0, math.log(row["parameters"]), math.log(row["tokens"])] for row in base]
    losses = [math.log(row["val_loss"]) for row in base]
    return float(np.linalg.lstsq(np.array(terms), np.array(losses), rcond=None)[0][1])


def _cell(
    size: str, ratio: int, recipe: str, pairs: Sequence[tuple[Any, Any]], slope: float | None
) -> Cell:
    gaps = [100 * (row["val_loss"] / base["val_loss"] - 1) for row, base in pairs]
    gap = mean_interval(gaps)

    def multiplier(percent: float) -> float:
        return math.exp(math.log1p(percent / 100) / (slope or math.nan))

    width = gap.half_width
    errors = {
        kind: statistics.fmean(row["operand_errors"][kind] for row, _ in pairs)
        for kind in pairs[0][0]["operand_errors"]
    }
    return Cell(
        size=size,
        ratio=ratio,
        recipe=recipe,
        gap=gap,
        nats=statistics.fmean(row["val_loss"] - base["val_loss"] for row, base in pairs),
        multiplier=multiplier(gap.mean) if slope else None,
        multiplier_range=(multiplier(gap.mean + width), multiplier(gap.mean - width))
        if slope and width is not None
        else None,
        errors=errors,
    )


def write(rows: Rows, folder: Path, section: Sequence[str] = ()) -> str:
    """Write `study.json`, `study.md` and `study.png`, and return the page. `section` holds the
    lines of another section of the page."""
    cells = cells_of(rows)
    facts = {
        "runs": len(rows),
        "hours of one core": round(sum(row["seconds"] for row in rows) / 3600, 1),
        "machines": sorted({row["cpu"] for row in rows}),
        "not done": sorted(row["name"] for row in rows if row["val_loss"] is None),
    }
    data = {"facts": facts, "cells": [asdict(cell) for cell in cells]}
    text = page(cells, rows, facts, section)
    write_atomically(folder / "study.json", (json.dumps(data, indent=1) + "\n").encode())
    write_atomically(folder / "study.md", text.encode())
    figure(cells).savefig(folder / "study.png", dpi=110)
    return text


def page(
    cells: Sequence[Cell], rows: Rows, facts: Mapping[str, Any], section: Sequence[str] = ()
) -> str:
    places = sorted({(cell.size, cell.ratio) for cell in cells})
    by = {(cell.recipe, cell.size, cell.ratio): cell for cell in cells}

    def table(cell_text: Callable[[Cell], str]) -> str:
        cell_texts = {
            (recipe, f"{size}, {ratio} tokens"): cell_text(by[recipe, size, ratio])
            if (recipe, size, ratio) in by
            else ""
            for recipe in _order(cells)
            for size, ratio in places
        }
        return report.crossed(cell_texts, "recipe")

    base = base_of(rows)
    losses = ", ".join(
        f"{size} with {ratio} tokens {statistics.fmean(losses_of_cell):.4f}"
        for size, ratio in places
        if (
            losses_of_cell := [
                r["val_loss"] for r in base if (r["size"], r["ratio"]) == (size, ratio)
            ]
        )
    )
    slope = loss_slope(base)
    missing = f" Not done: {', '.join(facts['not done'])}." if facts["not done"] else ""
    law = "" if slope is None else f"The loss falls as N^{slope:.3f} here. "
    return "\n".join(
        [
            "# What a recipe costs",
            "",
            "Models of gpt-nano's kind, trained on Python's standard library in every recipe and, "
            "with the same seed, data, order and first weights, in fp32; the learning rate falls "
            "to zero, the guard is off. Tokens are per parameter. **The first quarter of both runs "
            "is in fp32**, so that pairs spread less: gaps are of training the other three "
            f"quarters in the recipe. {_dtypes(rows)}",
            "",
            f"Made by `python -m bench study`: {facts['runs']} runs, {facts['hours of one core']} "
            f"hours of one core, on {'; '.join(facts['machines'])}.{missing}",
            "",
            "## Loss gap to fp32",
            "",
            "In percent of fp32's loss: the mean over pairs of runs ± the half-width of a 95 % "
            f"interval by Student's t, and the number of pairs. Losses in fp32, nats per token: "
            f"{losses}.",
            "",
            table(_gap),
            "## Effective parameters",
            "",
            f"{law}The factor by which a model in fp32 could have fewer parameters for the same "
            "loss after the same tokens, with the interval that the gap's gives.",
            "",
            table(_multiplier),
            "## Relative squared error of operands",
            "",
            "Of inputs and of weights, in dB below their squares: means over layers, sampled "
            "steps and runs.",
            "",
            table(_errors),
            *_designs(rows),
            *section,
            "![Gaps, gaps beside operand errors, and multipliers](study.png)",
            "",
        ]
    )


def _dtypes(rows: Rows) -> str:
    """A sentence about the compute dtypes of float32 and of the recipes. Rows without one are of
    versions that emulated recipes in float32."""
    kinds = sorted(
        {row.get("compute_dtype") or "fp32" for row in rows if row["recipe"] != BASELINE}
    )
    computes = " or ".join(kinds) or "fp32"
    return f"{BASELINE} computes in fp32; recipes, where they do not quantize, in {computes}."


def _designs(rows: Rows) -> list[str]:
    """A section about the spread of gaps, by the design of the pairs."""
    names = list(dict.fromkeys(row["design"] for row in rows if row["design"] != AA))
    pairs_by_design = {name: list(pairs_of(rows, name)) for name in names}
    averaged = f"mean of the last {LAST} evaluations"
    pairs_by_design[averaged] = [
        ({**row, "val_loss": _mean_of_last(row)}, {**base, "val_loss": _mean_of_last(base)})
        for row, base in pairs_by_design.get("plain", [])
    ]
    compared = {
        (row["size"], row["ratio"], row["recipe"]) for row, _ in pairs_by_design.get("plain", [])
    }
    lines = []
    for name, pairs in pairs_by_design.items():
        for size, ratio, recipe in sorted(compared):
            gaps = [
                100 * (row["val_loss"] / base["val_loss"] - 1)
                for row, base in pairs
                if (row["size"], row["ratio"], row["recipe"]) == (size, ratio, recipe)
            ]
            if len(gaps) > 1:
                gap = mean_interval(gaps)
                numbers = [f"{gap.mean:+.2f} ± {gap.half_width:.2f}", f"{gap.deviation:.3f}"]
                lines.append([name, f"{size}, {ratio} tokens", recipe, *numbers, str(len(gaps))])
    if not lines:
        return []
    header = ["design", "model", "recipe", "gap, %", "its standard deviation, %", "pairs"]
    return [
        "## How pairs are made",
        "",
        "How much the gaps of pairs spread, by what the two runs have in common and how they are "
        f"judged; `{SHARED}` is what the tables above are of.",
        "",
        report.markdown(header, sorted(lines, key=lambda line: (line[2], -float(line[4])))),
    ]


def rounding(rows: Rows) -> list[str]:
    """A section about pairs of float32 runs that differ only in rounding."""
    losses: dict[tuple[str, int], dict[tuple[str, int], dict[str, float]]] = {}
    for row in rows:
        if row["recipe"] == BASELINE and row["val_loss"] is not None:
            pairs = losses.setdefault((row["size"], row["ratio"]), defaultdict(dict))
            pairs[row["cpu"], row["seed"]][row["design"]] = row["val_loss"]
    lines = []
    for (size, ratio), pairs in sorted(losses.items()):
        gaps = [100 * (pair[AA] / pair["plain"] - 1) for pair in pairs.values() if AA in pair]
        if len(gaps) > 1:
            numbers = [f"{statistics.stdev(gaps):.4f}", f"{max(map(abs, gaps)):.4f}"]
            lines.append([f"{size}, {ratio} tokens", *numbers, str(len(gaps))])
    if not lines:
        return []
    header = ["model", "standard deviation of the gap, %", "largest gap, %", "pairs"]
    return [
        "## Rounding alone",
        "",
        "Pairs of fp32 runs of which one adds up its gradients in two parts, and so rounds "
        "otherwise.",
        "",
        report.markdown(header, lines),
    ]


def _mean_of_last(row: Mapping[str, Any]) -> float:
    return statistics.fmean(loss for _, loss in row["curve"][-LAST:])


def _order(cells: Sequence[Cell]) -> list[str]:
    """The recipes, with the largest gap first."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        gaps[cell.recipe].append(cell.gap.mean)
    return sorted(gaps, key=lambda recipe: -statistics.fmean(gaps[recipe]))


def _gap(cell: Cell) -> str:
    width = cell.gap.half_width
    half_width = "" if width is None else f" ± {width:.2f}"
    return f"{cell.gap.mean:+.2f}{half_width} ({cell.gap.samples})"


def _multiplier(cell: Cell) -> str:
    if cell.multiplier is None:
        return ""
    if cell.multiplier_range is None:
        return f"{cell.multiplier:.3f}"
    return f"{cell.multiplier:.3f} [{cell.multiplier_range[0]:.3f}, {cell.multiplier_range[1]:.3f}]"


def _errors(cell: Cell) -> str:
    names = ("input", "weight")
    return ", ".join(f"{-10 * math.log10(cell.errors[n]):.1f}" for n in names if n in cell.errors)


# The picture


def figure(cells: Sequence[Cell]) -> Figure:
    plot = Figure(figsize=(17, 6), layout="constrained")
    by_recipe, by_error, sizes = plot.subplots(1, 3)
    recipes = _order(cells)
    places = sorted({(cell.size, cell.ratio) for cell in cells})
    for number, place in enumerate(places):
        place_cells = [cell for cell in cells if (cell.size, cell.ratio) == place]
        style: dict[str, Any] = {
            "color": f"C{number}",
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "none",
            "markersize": 5,
        }
        label = f"{place[0]}, {place[1]} tokens per parameter"
        shift = 0.7 * ((number + 0.5) / len(places) - 0.5)
        rows = [recipes.index(cell.recipe) + shift for cell in place_cells]
        widths = [cell.gap.half_width or 0.0 for cell in place_cells]
        means = [cell.gap.mean for cell in place_cells]
        by_recipe.errorbar(means, rows, xerr=widths, label=label, capsize=2, **style)
        errors = [sum(cell.errors.get(n, 0.0) for n in ("input", "weight")) for cell in place_cells]
        by_error.errorbar(errors, means, yerr=widths, capsize=2, **style)
        for cell, row in zip(place_cells, rows, strict=True):
            if cell.multiplier is not None:
                low, high = cell.multiplier_range or (cell.multiplier, cell.multiplier)
                around = [[cell.multiplier - low], [high - cell.multiplier]]
                sizes.errorbar([cell.multiplier], [row], xerr=around, capsize=2, **style)
    for axes in (by_recipe, sizes):
        axes.set_yticks(range(len(recipes)), recipes)
        axes.invert_yaxis()
    _describe(by_recipe, "loss gap to fp32, %", "what each recipe costs, 95 % interval", zero=0.0)
    _describe(sizes, "effective parameters / parameters", "as a smaller model", zero=1.0)
    by_error.set_xscale("log")
    by_error.xaxis.set_minor_formatter(NullFormatter())
    by_error.set(ylabel="loss gap to fp32, %")
    by_error.set_yscale("symlog", linthresh=0.1)
    _describe(by_error, "relative squared error of inputs + of weights", "why", zero=None)
    if cells:
        by_recipe.legend(frameon=False, fontsize=8, loc="lower right")
    return plot


def _describe(axes: Axes, x: str, title: str, zero: float | None) -> None:
    axes.set_xlabel(x)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    if zero is not None:
        axes.axvline(zero, color="0.5", linewidth=0.8)
