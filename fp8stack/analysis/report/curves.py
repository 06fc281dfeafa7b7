"""Plots of loss, learning rate, gradient norm, throughput and amaxes over the steps."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from fp8stack.analysis.report.analysis import Analysis
from fp8stack.analysis.report.drawing import (
    COLORS,
    Picture,
    legend_above,
    mark_events,
    new_figure,
    plain_log_ticks,
    style,
    whole_steps,
)
from fp8stack.analysis.report.run_record import RunRecord
from fp8stack.analysis.report.summary import positive, timed
from fp8stack.analysis.report.telemetry import Operand, of_linears
from fp8stack.common.formats import named_format
from fp8stack.common.tables import counted, shortened
from fp8stack.training.metrics.loss_plot import marker, smoothed, view_range

FEW = 3  # with more runs than this, only the running mean is drawn
WORST = 6  # operands whose amaxes are drawn


@style()
def loss(runs: Sequence[RunRecord], names: Sequence[str], name: str) -> Picture | None:
    """Training loss (raw and smoothed) and validation loss. None if the runs have no losses."""
    figure = new_figure(7.4, 3.6)
    axes = figure.add_subplot()
    whole_steps(axes)
    several = len(runs) > 1
    values: list[float] = []
    raw_losses: list[float] = []
    captions = []
    for run, run_name, color in zip(runs, names, cycle(COLORS)):
        prefix = f"{run_name}: " if several else ""
        steps, losses = run.metrics.column("loss")
        if losses:
            means = smoothed(losses)
            values += means
            if len(runs) <= FEW:
                raw_losses += losses
                _plot(axes, steps, losses, color, alpha=0.28, linewidth=0.8,
                      label=None if several else "training, each step")  # fmt: skip
            _plot(
                axes, steps, means, color, label=run_name if several else "training, running mean"
            )
            captions.append(f"{prefix}running mean from {means[0]:.3f} to {means[-1]:.3f}")
        steps, losses = run.metrics.column("val_loss")
        if losses:
            values += losses
            axes.plot(steps, losses, "o--" if several else "o-", markersize=4.5,
                      color=color if several else COLORS[1], markeredgecolor="white",
                      markeredgewidth=0.6, linewidth=1.1,
                      label=None if several else "validation")  # fmt: skip
            captions.append(f"{prefix}last validation loss {losses[-1]:.4f}")
    if not values:
        return None
    if not several:
        mark_events(axes, runs[0].metrics.events)
    low, high = axes.set_ylim(*view_range(values, raw_losses))
    if beyond := sum(not low <= value <= high for value in raw_losses or values):
        captions.append(f"{counted(beyond, 'step lies', 'steps lie')} beyond the axis")
    axes.set_ylabel("loss (nats per token)")
    legend_above(figure, axes)
    key = "Lines: training, running mean; dots: validation. " if several else ""
    caption = f"{key}{'; '.join(captions)}."
    return Picture(figure=figure, name=name, title="Loss", caption=caption)


@style()
def rates(run: RunRecord, name: str) -> Picture | None:
    """Learning rate, and gradient norm on a logarithmic axis. None if the run has neither."""
    lr_steps, lrs = run.metrics.column("lr")
    steps, norms = positive(run.metrics, "grad_norm")
    if not lrs and not norms:
        return None
    figure = new_figure(7.4, 3.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
    whole_steps(lower)
    _plot(upper, lr_steps, lrs, COLORS[3])
    upper.set_ylabel("learning rate")
    lower.set_ylabel("gradient norm")
    caption = "No gradient norm."
    if norms:
        _plot(lower, steps, norms, COLORS[0], alpha=0.35, linewidth=0.8)
        _plot(lower, steps, np.exp(smoothed(list(np.log(norms)))), COLORS[0])
        lower.set_yscale("log")
        plain_log_ticks(lower.yaxis, min(norms), max(norms))
        largest = int(np.argmax(norms))
        caption = (
            f"Gradient norm: median {np.median(norms):.3g}, largest {norms[largest]:.3g} at "
            f"step {steps[largest]}."
        )
    mark_events(lower, run.metrics.events)
    title = "Learning rate and gradient norm"
    return Picture(figure=figure, name=name, title=title, caption=caption)


@style()
def throughput(runs: Sequence[RunRecord], names: Sequence[str], name: str) -> Picture | None:
    """Tokens per second. None if the runs have no timings."""
    figure = new_figure(7.4, 2.9)
    axes = figure.add_subplot()
    whole_steps(axes)
    tops: list[float] = []
    captions = []
    for run, run_name, color in zip(runs, names, cycle(COLORS)):
        steps, values = timed(run.metrics, "tokens_per_s")
        if not values:
            continue
        if len(runs) <= FEW:
            _plot(axes, steps, values, color, alpha=0.3, linewidth=0.8)
        _plot(axes, steps, smoothed(values), color, label=run_name)
        tops.append(float(np.percentile(values, 99)))
        _, times = timed(run.metrics, "step_ms")
        took = f", {np.median(times):,.0f} ms a step" if times else ""
        prefix = f"{run_name}: " if len(runs) > 1 else ""
        captions.append(f"{prefix}median {np.median(values):,.0f} tokens/s{took}")
    if not tops:
        return None
    axes.set_ylim(0, 1.15 * max(tops))
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if len(runs) > 1:
        legend_above(figure, axes)
    caption = f"{'; '.join(captions)}."
    return Picture(figure=figure, name=name, title="Throughput", caption=caption)


def _plot(
    axes: Any, steps: Sequence[int], values: Any, color: str, linewidth: float = 1.6, **more: Any
) -> None:
    axes.plot(steps, values, marker(steps), color=color, linewidth=linewidth, **more)


@style()
def amaxes(analysis: Analysis, name: str) -> Picture | None:
    """Amaxes of the worst operands, and the range of their scales. None without telemetry."""
    operands = worst(analysis)
    if not operands:
        return None
    columns = min(3, len(operands))
    rows = -(-len(operands) // columns)
    figure = new_figure(10, 0.5 + 2.3 * rows)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axes in panels.flat[len(operands) :]:
        axes.set_visible(False)
    limited = [_amax(axes, operand) for axes, operand in zip(panels.flat, operands, strict=False)]
    for axes in panels[-1]:
        whole_steps(axes)
    legend_above(figure, panels.flat[0])
    caption = f"The {len(operands)} operands that look worst, the worst first."
    if not any(limited):
        caption += " Blocks have a scale each, so no line says what they can hold."
    if any(operand.clipped.any() for operand in operands):
        caption += " A triangle marks an amax that was clipped."
    return Picture(figure=figure, name=name, title="Amax histories", caption=caption, wide=True)


def _amax(axes: Any, operand: Operand) -> bool:
    """Draw the amaxes of `operand`. Returns whether the range of its scale is drawn as well."""
    scale, format = operand.figures["scale"], named_format(operand.format)
    format_max = np.nan if format is None else format.max
    with np.errstate(divide="ignore", invalid="ignore"):
        largest_held = np.where(scale > 0, format_max / scale, np.nan)
    amax = np.where(operand.figures["amax"] > 0, operand.figures["amax"], np.nan)
    steps, clipped, is_limited = operand.steps, operand.clipped, np.isfinite(largest_held).any()
    axes.plot(steps, amax, "o-", color=COLORS[0], markersize=2.5, linewidth=1.2, label="amax")
    if is_limited:
        axes.plot(steps, largest_held, "--", color=COLORS[1], linewidth=1.2,
                  label="largest that the scale can hold")  # fmt: skip
    axes.plot(steps[clipped], amax[clipped], "v", color=COLORS[4], markersize=6)
    drawn = np.concatenate([amax, largest_held])
    if np.isfinite(drawn).any():
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis, np.nanmin(drawn), np.nanmax(drawn))
    axes.set_title(f"{shortened(operand.layer)}\n{shortened(operand.kind)}", fontsize=8)
    return bool(is_limited)


def worst(analysis: Analysis) -> list[Operand]:
    """The operands to look at first: outliers, then the lowest headroom and SQNR."""
    usual = of_linears(analysis.operands)  # softmax needs no headroom
    by_figure = (
        sorted(usual, key=lambda operand: np.nanmin([np.inf, *operand.figures[figure]]))
        for figure in ("headroom_bits", "sqnr_db")
    )
    order = [
        *(out.operand for out in analysis.outliers),
        *(operand for pair in zip(*by_figure, strict=True) for operand in pair),
        *analysis.operands,  # settled samples take precedence
        *analysis.run.telemetry.operands,
    ]
    by_name: dict[str, Operand] = {}
    for operand in order:
        by_name.setdefault(operand.name, operand)
    return list(by_name.values())[:WORST]
