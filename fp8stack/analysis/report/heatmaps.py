"""Heat maps of telemetry: operand figures and gradient norms by step, tokens by expert."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fp8stack.analysis.report.drawing import (
    EVENT_COLORS,
    Picture,
    by_kind,
    new_figure,
    plain_log_ticks,
    style,
)
from fp8stack.analysis.report.gradient_faults import leaves
from fp8stack.analysis.report.outliers import role
from fp8stack.analysis.report.run_record import RunRecord
from fp8stack.analysis.report.telemetry import (
    Figures,
    grid,
    joined,
    kinds_of,
    layers_by_steps,
    of_linears,
)
from fp8stack.common.tables import shortened

MOST_SAMPLES = 240  # columns of a map; neighbouring samples are merged into their worst
RED = "#dc2626"
GREY = (0.55, 0.6, 0.65, 0.22)
LEAST_SHARE = 1e-4  # smaller shares are grey
RANGE = 8.0  # the colours of experts reach from 1/8 of the mean to 8 times the mean
# Figure: title, colour bar, colour map, whether larger is worse, caption.
MAPS = {
    "sqnr_db": ("Signal to quantization noise", "SQNR (dB)", "YlOrRd_r", False,
                "Dark red: 8 dB and less; light yellow: 32 dB and more. E4M3 at its best has "
                "about 31 dB, E5M2 about 25, E2M1 about 20."),
    "saturated": ("Saturation", "share of elements", "YlOrRd", True,
                  "Elements clipped to the format's largest value. Grey: less than 0.01 %; light "
                  "yellow: 0.01 %; dark red: all."),
    "underflow": ("Underflow", "share of elements", "YlOrRd", True,
                  "Elements too small for the format, flushed to zero. Grey: less than 0.01 %; "
                  "light yellow: 0.01 %; dark red: all."),
}  # fmt: skip


@style()
def heat_map(run: RunRecord, figure_name: str, name: str) -> Picture:
    """A figure of `MAPS` by layer and step, one panel per operand kind. Needs telemetry."""
    title, unit, colors, worst_is_high, caption = MAPS[figure_name]
    is_share = figure_name != "sqnr_db"
    norm = LogNorm(LEAST_SHARE, 1) if is_share else Normalize(8, 32)
    operands = of_linears(run.telemetry.operands)
    kinds = kinds_of(operands)
    count = len({operand.layer for operand in operands})
    figure = new_figure(10, _height(count))
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    image: Any = None
    for axes, kind in zip(panels, kinds, strict=True):
        layers, steps, values = layers_by_steps(operands, kind, figure_name)
        steps, values = joined(steps, values, worst_is_high, MOST_SAMPLES)
        image = _image(axes, values, colors, norm, GREY if is_share else None)
        _label(axes, layers, steps)
        _mark(axes, run, steps)
        axes.set_title(shortened(kind), pad=9)
    extend = "min" if is_share else "both"
    bar = _color_bar(figure, image, list(panels), label=unit, extend=extend)
    if is_share:
        bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    marks = sorted(by_kind(run.metrics.events))
    marked = f" Triangles on top mark events: {', '.join(marks)}." if marks else ""
    caption = f"The redder, the worse. {caption}{marked}"
    return Picture(figure=figure, name=name, title=title, caption=caption, wide=True)


@style()
def gradient_map(run: RunRecord, name: str) -> Picture | None:
    """Gradient norms by module and step. None without telemetry."""
    gradients = leaves(run.telemetry.gradients)
    if not gradients:
        return None
    # Merge into the lowest value, so that zeros stay visible.
    steps, values = joined(*grid(gradients, "norm"), False, MOST_SAMPLES)
    alive = values[values > 0]
    low, high = (alive.min(), max(alive.max(), 1.001 * alive.min())) if len(alive) else (0.1, 1.0)
    figure = new_figure(10, _height(len(gradients)))
    axes = figure.subplots()
    image = _image(axes, values, "viridis", LogNorm(low, high), RED)
    _label(axes, [gradient.module for gradient in gradients], steps)
    _mark(axes, run, steps)
    bar = _color_bar(figure, image, axes, label="norm")
    plain_log_ticks(bar.ax.yaxis, low, high)
    title = "Gradient by part of the model"
    caption = "The norm before clipping, without fp16's scale. Red: exactly zero."
    return Picture(figure=figure, name=name, title=title, caption=caption, wide=True)


@style()
def expert_map(run: RunRecord, name: str) -> Picture | None:
    """The tokens of each expert in the last sample. None for a model without experts."""
    layers, loads = run.telemetry.expert_loads()
    if not loads.size:
        return None
    last = max(step for step, _ in run.telemetry.expert_shares.values())
    figure = new_figure(10, _height(len(layers)))
    axes = figure.subplots()
    drawn = np.where(loads == 0, 0, np.clip(loads, 1 / RANGE, RANGE))
    image = _image(axes, drawn, "viridis", LogNorm(1 / RANGE, RANGE), RED)
    _label(axes, layers)
    axes.set_xlabel("expert")
    bar = _color_bar(figure, image, axes, label="tokens / mean")
    bar.set_ticks([1 / RANGE, 0.5, 1, 2, RANGE], labels=["1/8", "1/2", "1", "2", "8"])
    bar.ax.minorticks_off()
    caption = f"Tokens of each expert at step {last}, over the mean of its layer. Red: none."
    return Picture(figure=figure, name=name, title="Tokens by expert", caption=caption, wide=True)


def _height(rows: int) -> float:
    """The height of a figure with a map of some rows, in inches."""
    return 1.1 + (0.19 * rows if rows <= 32 else min(8.0, 6.0 + 0.01 * (rows - 32)))


def _image(axes: Any, values: Figures, colors: str, norm: Normalize, under: Any) -> Any:
    """Draw values [rows, columns]; those below the range in the colour `under`, NaN not at all."""
    cmap = colormaps[colors].with_extremes(bad=(0, 0, 0, 0), under=under)
    if under is not None and norm.vmin is not None:  # a logarithm would hide zeros as it does NaN
        values = np.where(values < norm.vmin, norm.vmin / 10, values)
    axes.grid(False)
    values = np.ma.masked_invalid(values)
    return axes.imshow(values, cmap=cmap, norm=norm, aspect="auto", interpolation="none")


def _color_bar(figure: Figure, image: Any, axes: Any, **options: Any) -> Any:
    """A colour bar without an outline, for the image in `axes`."""
    bar: Any = figure.colorbar(image, ax=axes, pad=0.01, aspect=30, **options)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    return bar


def _label(axes: Any, layers: Sequence[str], steps: Any = None) -> None:
    """Label as many rows as are legible with layers, and columns with steps."""
    every = -(-len(layers) // 40)
    period = len({role(layer) for layer in layers})
    if 1 < every < 4 * period:  # label the same linear in every block, or every other block
        every = -(-every // period) * period
    rows = range(0, len(layers), every)
    axes.set_yticks(rows, [shortened(layers[row]) for row in rows], fontsize=7)
    axes.tick_params(length=2)
    if steps is not None:
        columns = np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int)
        axes.set_xticks(columns, [str(steps[column]) for column in columns], fontsize=7)
        axes.set_xlabel("step")


def _mark(axes: Any, run: RunRecord, steps: Any) -> None:
    """Mark each event by a triangle above the map."""
    for kind, event_steps in by_kind(run.metrics.events).items():
        columns = np.interp(event_steps, steps, np.arange(len(steps)))
        axes.plot(columns, np.full(len(columns), 1.012), "v", color=EVENT_COLORS[kind],
                  markersize=4, transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
