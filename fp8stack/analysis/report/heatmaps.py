"""Heat maps of telemetry: operand figures by layer and step, and gradient norms."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fp8stack.analysis.report.drawing import (
    EVENT_COLORS,
    Picture,
    new_figure,
    plain_log_ticks,
    style,
)
from fp8stack.analysis.report.gradient_faults import leaves
from fp8stack.analysis.report.outliers import role
from fp8stack.analysis.report.read import (
    Figures,
    RunRecord,
    grid,
    joined,
    kinds_of,
    layers_by_steps,
    of_linears,
)

MOST_SAMPLES = 240  # columns of a map; neighbouring samples are merged into their worst
DEAD = "#dc2626"
NONE = (0.55, 0.6, 0.65, 0.22)
LEAST_SHARE = 1e-4  # smaller shares are drawn as `NONE`
# Figure: title, colour bar, colour map, whether larger is worse, caption.
MAPS = {
    "sqnr_db": ("Signal to quantization noise", "SQNR (dB)", "YlOrRd_r", False,
                "E4M3 at its best has about 31 dB, E5M2 about 25, E2M1 about 20."),
    "saturated": ("Saturation", "share of elements", "YlOrRd", True,
                  "Elements clipped to the format's largest value. Grey: less than 0.01 %."),
    "underflow": ("Underflow", "share of elements", "YlOrRd", True,
                  "Elements too small for the format, flushed to zero. Grey: less than 0.01 %."),
}  # fmt: skip


def gradient_map(run: RunRecord, prefix: str) -> Picture | None:
    """Gradient norms by module and step. None without telemetry."""
    gradients = leaves(run.gradients)
    if not gradients:
        return None
    steps, values = grid(gradients, "norm")
    # Merge into the lowest value, so that zeros stay visible.
    steps, values = joined(steps, values, False, MOST_SAMPLES)
    alive = values[values > 0]
    low, high = (alive.min(), alive.max()) if len(alive) else (1e-1, 1.0)
    with style():
        figure = new_figure(10, map_height(len(gradients)))
        axes = figure.subplots()
        cmap = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0), under=DEAD)
        drawn = np.where(values == 0, low / 10, values)
        axes.grid(False)
        image = axes.imshow(
            np.ma.masked_invalid(drawn), cmap=cmap, norm=LogNorm(low, max(high, 1.001 * low)),
            aspect="auto", interpolation="none",
        )  # fmt: skip
        _label(axes, [gradient.module for gradient in gradients], steps)
        _mark(axes, run, steps)
        bar = color_bar(figure, image, axes, label="norm")
        plain_log_ticks(bar.ax.yaxis, [low, max(high, 1.001 * low)])
        return Picture(
            figure=figure,
            name=f"{prefix}-gradient",
            title="Gradient by part of the model",
            caption="The norm before clipping, without fp16's scale. Red: exactly zero.",
            alt=f"Heat map of the gradient's norm for {len(gradients)} parts over the sampled "
            "steps.",
            wide=True,
        )


def map_height(rows: int) -> float:
    """The height of a figure with a map of some rows, in inches."""
    return 1.1 + (0.19 * rows if rows <= 32 else min(8.0, 6.0 + 0.01 * (rows - 32)))


def heat_map(run: RunRecord, figure_name: str, name: str) -> Picture:
    """A figure of `MAPS` by layer and step, one panel per operand kind. Needs telemetry."""
    title, unit, colors, worst_is_high, caption = MAPS[figure_name]
    operands = of_linears(run.operands)
    kinds = kinds_of(operands)
    count = len({operand.layer for operand in operands})
    with style():
        figure = new_figure(10, map_height(count))
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        image: Any = None
        for axes, kind in zip(panels, kinds, strict=True):
            layers, steps, values = layers_by_steps(operands, kind, figure_name)
            steps, values = joined(steps, values, worst_is_high, MOST_SAMPLES)
            image = _panel(axes, steps, values, figure_name, colors)
            _label(axes, layers, steps)
            _mark(axes, run, steps)
            axes.set_title(kind, pad=9)
        extend, shrink = "both" if figure_name == "sqnr_db" else "min", 0.9 if count > 6 else 1.0
        bar = color_bar(figure, image, list(panels), label=unit, extend=extend, shrink=shrink)
        if figure_name != "sqnr_db":
            bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        marks = sorted({str(event.get("event")) for event in run.events} & set(EVENT_COLORS))
        marked = f" Triangles on top mark events: {', '.join(marks)}." if marks else ""
        return Picture(
            figure=figure,
            name=name,
            title=title,
            caption=f"The redder, the worse. {caption}{marked}",
            alt=f"Heat map of {title.lower()} for {count} layers over the sampled steps, by "
            f"operand: {', '.join(kinds)}. {caption}",
            wide=True,
        )


def color_bar(figure: Figure, image: Any, axes: Any, **options: Any) -> Any:
    """A colour bar without an outline, for the image in `axes`."""
    bar: Any = figure.colorbar(image, ax=axes, pad=0.01, aspect=30, **options)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    return bar


def _panel(axes: Any, steps: Any, values: Figures, figure: str, colors: str) -> Any:
    cmap, norm = colormaps[colors].with_extremes(bad=(0, 0, 0, 0)), Normalize(8, 32)
    if figure != "sqnr_db":
        cmap, norm = cmap.with_extremes(under=NONE), LogNorm(LEAST_SHARE, 1)
        values = np.where(values < LEAST_SHARE, LEAST_SHARE / 10, values)
    axes.grid(False)
    values = np.ma.masked_invalid(values)
    return axes.imshow(values, cmap=cmap, norm=norm, aspect="auto", interpolation="none")


def _label(axes: Any, layers: Sequence[str], steps: Any) -> None:
    """Label as many rows as are legible with layers, and columns with steps."""
    every = -(-len(layers) // 40)
    period = len({role(layer) for layer in layers})
    if 1 < every < 4 * period:  # label the same linear in every block, or every other block
        every = -(-every // period) * period
    rows = list(range(0, len(layers), every))
    names = [layers[row] for row in rows]
    short = [name if len(name) <= 34 else f"...{name[-31:]}" for name in names]
    axes.set_yticks(rows, short, fontsize=7)
    columns = np.unique(np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int))
    axes.set_xticks(columns, [str(steps[column]) for column in columns], fontsize=7)
    axes.set_xlabel("step")
    axes.tick_params(length=2)


def _mark(axes: Any, run: RunRecord, steps: Any) -> None:
    """Mark each event by a triangle above the map."""
    for kind, color in EVENT_COLORS.items():
        event_steps = sorted({event["step"] for event in run.events if event.get("event") == kind})
        if event_steps:
            places = np.interp(event_steps, steps, np.arange(len(steps)))
            axes.plot(places, np.full(len(places), 1.012), "v", color=color, markersize=4,
                      transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
