"""The pictures of docs/recipes.md, drawn from the results of our casts. Nothing is timed.

Each picture has a function for its data (`formats`, `spike`, `blocks`, `relative_error`), which
tests check, and one that draws it. The PNG also has, as text, the figures that the page states.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fp8stack.common.formats import FORMATS, Quantizer
from fp8stack.numerics import (
    AmaxHistory,
    amax,
    cast_to_fp8,
    dequantize,
    quantize,
    tensor_scale,
)
from fp8stack.numerics.error import FIGURES, quantization_error, sqnr_db

FOLDER = Path(__file__).parents[2] / "docs" / "images"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#555555"
LOWEST, HIGHEST = -18, 17  # powers of two on the number line
STEPS, SPIKE_AT, SPIKE = 60, 20, 1000.0
WINDOWS = (16, 1024)
ROWS, COLUMNS, OUTLIERS, OUTLIER = 64, 192, (40, 150), 10_000.0

Floats = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(out=FOLDER)


def run(arguments: argparse.Namespace) -> None:
    for name, (figure, facts) in pictures().items():
        path = arguments.out / f"{name}.png"
        figure.savefig(path, dpi=110, metadata={"Description": json.dumps(facts)})
        print(f"written: {path}, {json.dumps(facts)}")


def pictures() -> dict[str, tuple[Figure, dict[str, float]]]:
    """The pictures of docs/recipes.md by name, with the figures that the page states."""
    return {"formats": formats_picture(), "spike": spike_picture(), "blocks": blocks_picture()}


# Formats on the number line


def formats(name: str) -> list[float]:
    """The positive finite values of a format between the ends of the number line."""
    target = FORMATS[name]
    values = (target.decode(code) for code in range(1, 1 << target.bits - 1))
    return [v for v in values if 2.0**LOWEST <= v <= 2.0**HIGHEST]


def relative_error(name: str, points: int = 997) -> tuple[Floats, Floats]:
    """The largest relative error of a cast with scale 1, over `points` evenly spaced values in each
    half of a power of two: the start of each half, and the error. (The number of points is prime,
    or they would be values of bf16.)"""
    halves = np.repeat(2.0 ** np.arange(LOWEST, HIGHEST), 2) * np.tile([1.0, 1.5], HIGHEST - LOWEST)
    widths = np.repeat(2.0 ** np.arange(LOWEST, HIGHEST), 2) / 2
    values = halves[:, None] + widths[:, None] * np.arange(points) / points
    x = torch.from_numpy(values).to(torch.float32)
    cast = x.to(torch.bfloat16) if name == "bf16" else cast_to_fp8(x, 1.0, name)
    errors = ((cast.to(torch.float64) - x) / x).abs()
    return halves, errors.amax(dim=1).numpy()


def formats_picture() -> tuple[Figure, dict[str, float]]:
    """All values of e4m3, e5m2 and bf16, and the relative error of a cast by magnitude."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    line, error = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
    looks = {"bf16": (GREY, ":"), "e5m2": (ORANGE, "--"), "e4m3": (BLUE, "-")}
    for place, (name, (color, dashes)) in enumerate(looks.items()):
        values = formats(name)
        line.vlines(values, place - 0.36, place + 0.36, color=color, linewidth=0.9)
        starts, errors = relative_error(name)
        error.step(starts, 100 * errors, dashes, where="post", color=color, lw=1.6)
    line.set_yticks(range(3), ["bf16", "E5M2", "E4M3"])
    line.set_title("every positive value (bf16 goes on to 2^-133 and 2^127)", fontsize=10)
    error.set_title("largest change by a cast with scale 1", fontsize=10)
    error.set(yscale="log", xlabel="magnitude", ylabel="percent of the value")
    error.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    error.set_xscale("log", base=2)
    error.set_xlim(2.0**LOWEST, 2.0**HIGHEST)
    error.set_xticks([2.0**power for power in range(LOWEST, HIGHEST, 3)])
    for name, color, dashes in (("e4m3", BLUE, "-"), ("e5m2", ORANGE, "--")):
        for axes in (line, error):
            axes.axvline(FORMATS[name].max, color=color, linestyle=dashes, linewidth=0.7, alpha=0.7)
        limit = (FORMATS[name].max, 0.13)
        error.annotate(
            f"{FORMATS[name].max:g} ", limit, color=color, fontsize=9, ha="right", va="bottom"
        )
    error.grid(alpha=0.3)
    error.legend(frameon=False, loc="upper center", ncols=3, labels=["bf16", "E5M2", "E4M3"])
    facts = {f"{name}_values": float(len(formats(name))) for name in ("e4m3", "e5m2")}
    return figure, facts


# Delayed against current scaling on a spike


class Course(NamedTuple):
    """The results of a way of scaling, by step: the largest value that its scale can hold, the
    fractions of elements that were clipped and that became zero, and the signal-to-noise ratio in
    dB."""

    limit: Floats
    clipped: Floats
    zeroed: Floats
    sqnr: Floats


def spiky_tensor(step: int) -> Tensor:
    """The tensor of a step, float32 [128, 256]: normal, with rows of very different size, and a
    thousand times as large in one step."""
    sizes = np.exp(1.5 * np.random.default_rng(0).standard_normal((128, 1)))
    x = np.random.default_rng(step + 1).standard_normal((128, 256)) * sizes
    return torch.from_numpy(x * (SPIKE if step == SPIKE_AT else 1.0)).to(torch.float32)


def spike() -> tuple[Floats, dict[str, Course]]:
    """The amax of each step, and the courses of current scaling and of delayed scaling with each
    window, in E4M3."""
    histories = {f"delayed, window {n}": AmaxHistory({"x": "e4m3"}, length=n) for n in WINDOWS}
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("current", *histories)}
    amaxes = []
    for step in range(STEPS):
        x = spiky_tensor(step)
        largest = amax(x)
        amaxes.append(float(largest))
        rows["current"].append(_figures(x, tensor_scale(largest)))
        for name, history in histories.items():
            rows[name].append(_figures(x, history.scale("x")))
            history.record("x", largest)
            history.update()
    courses = {
        name: Course(*map(np.array, zip(*figures, strict=True))) for name, figures in rows.items()
    }
    return np.array(amaxes), courses


def _figures(x: Tensor, scale: Tensor) -> tuple[float, ...]:
    figures = quantization_error(x, Quantizer(), scale=scale)
    by_name = dict(zip(FIGURES, figures.tolist(), strict=True))
    ratio = sqnr_db(by_name["signal"], by_name["noise"])
    assert ratio is not None
    limit = FORMATS["e4m3"].max / float(scale)
    return limit, by_name["saturated"], by_name["underflow"], ratio


def spike_picture() -> tuple[Figure, dict[str, float]]:
    """Current and delayed scaling when the amax is a thousand times as large for one step."""
    amaxes, courses = spike()
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(1.6, 1, 1, 1))
    panels[0].plot(amaxes, "k.", markersize=5, label="amax of the tensor")
    looks = dict(zip(courses, ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":")), strict=True))
    for name, course in courses.items():
        color, dashes = looks[name]
        series = (course.limit, 100 * course.clipped, 100 * course.zeroed, course.sqnr)
        for axes, values in zip(panels, series, strict=True):
            axes.step(range(STEPS), values, dashes, where="mid", color=color, label=name, lw=1.6)
    panels[0].set(yscale="log", ylabel="value")
    panels[0].set_title("the largest value that the scale can hold", fontsize=10)
    panels[1].set(ylabel="% of elements", title="clipped")
    panels[2].set(ylabel="% of elements", title="lost to zero")
    panels[3].set(ylabel="dB", xlabel="step", title="signal to quantization noise")
    for axes in panels:
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.set_xlim(0, STEPS - 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    long = courses["delayed, window 1024"]
    facts = {
        "clipped_at_spike_percent": _round(100 * long.clipped[SPIKE_AT]),
        "sqnr_at_spike_db": _round(long.sqnr[SPIKE_AT]),
        "zeroed_after_percent": _round(100 * long.zeroed[-1]),
        "zeroed_current_percent": _round(100 * courses["current"].zeroed[-1]),
        "sqnr_after_db": _round(long.sqnr[-1]),
        "sqnr_current_db": _round(courses["current"].sqnr[-1]),
    }
    return figure, facts


# MX blocks


def outlier_matrix() -> Tensor:
    """A normal matrix, float32 [64, 192], with two columns ten thousand times as large."""
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
    x[:, OUTLIERS] *= OUTLIER
    return torch.from_numpy(x).to(torch.float32)


def blocks(x: Tensor) -> dict[str, Floats]:
    """The relative error of each element of `x` in a cast to E4M3: with one scale for the tensor,
    and in MXFP8, with one scale per 32 elements of a row."""
    scale = tensor_scale(amax(x))
    mxfp8 = Quantizer(block=(1, 32), scale="e8m0")
    one_scale = cast_to_fp8(x, scale).to(torch.float64) / float(scale)
    dequantized = {
        "one scale": one_scale,
        "MXFP8": dequantize(quantize(x, mxfp8)).to(torch.float64),
    }
    return {name: ((q - x).abs() / x.abs()).numpy() for name, q in dequantized.items()}


def blocks_picture() -> tuple[Figure, dict[str, float]]:
    """The relative error of each element of a matrix with outliers."""
    x = outlier_matrix()
    errors = blocks(x)
    figure = Figure(figsize=(10, 8.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    look: dict[str, Any] = {"cmap": "cividis", "aspect": "auto", "interpolation": "nearest"}
    image = panels[0].imshow(x.abs().clamp(min=1e-2), norm=LogNorm(1e-2, 1e5), **look)
    figure.colorbar(image, ax=panels[0], label="magnitude", pad=0.01)
    panels[0].set_title(f"a matrix; columns {OUTLIERS[0]} and {OUTLIERS[1]} are outliers")
    titles = {
        "one scale": "E4M3 with one scale for the tensor",
        "MXFP8": "MXFP8: one scale per 32 elements of a row",
    }
    facts: dict[str, float] = {}
    for axes, (name, error) in zip(panels[1:], errors.items(), strict=True):
        percent = np.clip(100 * error, 0.1, 100)
        image = axes.imshow(percent, norm=LogNorm(0.1, 100), **look)
        bar = figure.colorbar(image, ax=axes, label="error, % of the element", pad=0.01)
        bar.set_ticks([0.1, 1, 10, 100], labels=["0.1", "1", "10", "100"])
        zeroed, median = float((error == 1).mean()), float(np.median(error))
        axes.set_title(f"{titles[name]}: {zeroed:.1%} of elements lost, median error {median:.1%}")
        key = name.replace(" ", "_").lower()
        facts |= {f"{key}_lost_percent": _round(100 * zeroed)}
        facts |= {f"{key}_median_percent": _round(100 * median)}
    for axes in panels:
        _cells(axes)
    panels[-1].set_xlabel("column, with the borders of blocks")
    return figure, facts


def _cells(axes: Axes) -> None:
    axes.title.set_fontsize(10)
    axes.set_ylabel("row")
    axes.set_xticks(range(0, COLUMNS + 1, 32))
    for border in range(32, COLUMNS, 32):
        axes.axvline(border - 0.5, color="white", linewidth=0.6, linestyle="--")


def _round(value: float) -> float:
    """Round to three digits, in which machines agree."""
    return float(f"{value:.3g}") if math.isfinite(value) else value
