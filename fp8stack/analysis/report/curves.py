"""Plots of loss, learning rate, gradient norm, throughput and amaxes over the steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8stack.analysis.report.analysis import Analysis
from fp8stack.analysis.report.drawing import (
    COLORS,
    Picture,
    legend_above,
    mark_events,
    new_figure,
    plain_log,
    style,
    thinned,
    whole_steps,
)
from fp8stack.analysis.report.read import Operand, RunRecord, column, of_linears, positive, timed
from fp8stack.common.formats import named_format
from fp8stack.common.tables import counted
from fp8stack.training.metrics.loss_plot import smoothed, view_range

FEW = 3  # with more runs than this, only the running mean is drawn
WORST = 6  # operands whose amaxes are drawn


def loss(runs: Sequence[RunRecord], names: Sequence[str], name: str) -> Picture | None:
    """Training loss (raw and smoothed) and validation loss. None if the runs have no losses."""
    with style():
        figure = new_figure(7.4, 3.6)
        axes = figure.add_subplot()
        values: list[float] = []
        raw_losses: list[float] = []
        captions = []
        for index, (run, run_name) in enumerate(zip(runs, names, strict=True)):
            color = COLORS[index % len(COLORS)]
            prefix = f"{run_name}: " if len(runs) > 1 else ""
            steps, losses = column(run, "loss")
            if losses:
                smooth = smoothed(losses)
                values += smooth
                if len(runs) <= FEW:
                    raw_losses += losses
                    axes.plot(*thinned(steps, losses), color=color, alpha=0.28, linewidth=0.8,
                              label=None if prefix else "training, each step")  # fmt: skip
                axes.plot(*thinned(steps, smooth), color=color, linewidth=1.7,
                          label=run_name if prefix else "training, running mean")  # fmt: skip
                captions.append(f"{prefix}running mean from {smooth[0]:.3f} to {smooth[-1]:.3f}")
            steps, losses = column(run, "val_loss")
            if losses:
                values += losses
                color = color if prefix else COLORS[1]
                axes.plot(steps, losses, "o--" if prefix else "o-", color=color, markersize=4.5,
                          markeredgecolor="white", markeredgewidth=0.6, linewidth=1.1,
                          label=None if prefix else "validation")  # fmt: skip
                captions.append(f"{prefix}last validation loss {losses[-1]:.4f}")
        if not values:
            return None
        if len(runs) == 1:
            mark_events(axes, runs[0].events)
        low, high = axes.set_ylim(*view_range(values, raw_losses))
        if beyond := sum(not low <= value <= high for value in raw_losses or values):
            captions.append(f"{counted(beyond, 'step lies', 'steps lie')} beyond the axis")
        axes.set_ylabel("loss (nats per token)")
        whole_steps(axes)
        legend_above(figure, axes)
        key = "Lines: training, running mean; dots: validation. " if len(runs) > 1 else ""
        text = f"{'; '.join(captions)}."
        caption, alt = f"{key}{text}", f"Loss over the steps. {text}"
        return Picture(figure=figure, name=name, title="Loss", caption=caption, alt=alt)


def rates(run: RunRecord, name: str) -> Picture | None:
    """Learning rate, and gradient norm on a logarithmic axis. None if the run has neither."""
    with style():
        figure = new_figure(7.4, 3.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
        lr_steps, lrs = column(run, "lr")
        steps, norms = positive(run, "grad_norm")
        if not lrs and not norms:
            return None
        upper.plot(*thinned(lr_steps, lrs), color=COLORS[3], linewidth=1.5)
        upper.set_ylabel("learning rate")
        caption = "No gradient norm."
        if norms:
            lower.plot(*thinned(steps, norms), color=COLORS[0], alpha=0.35, linewidth=0.8)
            smooth = np.exp(smoothed(list(np.log(norms))))
            lower.plot(*thinned(steps, list(smooth)), color=COLORS[0], linewidth=1.6)
            plain_log(lower, norms)
            largest = int(np.argmax(norms))
            caption = (
                f"Gradient norm: median {np.median(norms):.3g}, largest {norms[largest]:.3g} at "
                f"step {steps[largest]}."
            )
        mark_events(lower, run.events)
        lower.set_ylabel("gradient norm")
        whole_steps(lower)
        title = "Learning rate and gradient norm"
        alt = f"{title} over the steps. {caption}"
        return Picture(figure=figure, name=name, title=title, caption=caption, alt=alt)


def throughput(runs: Sequence[RunRecord], names: Sequence[str], name: str) -> Picture | None:
    """Tokens per second. None if the runs have no timings."""
    with style():
        figure = new_figure(7.4, 2.9)
        axes = figure.add_subplot()
        tops: list[float] = []
        captions = []
        for index, (run, run_name) in enumerate(zip(runs, names, strict=True)):
            steps, values = timed(run, "tokens_per_s")
            if not values:
                continue
            color = COLORS[index % len(COLORS)]
            if len(runs) <= FEW:
                axes.plot(*thinned(steps, values), color=color, alpha=0.3, linewidth=0.8)
            axes.plot(*thinned(steps, smoothed(values)), color=color, linewidth=1.7, label=run_name)
            tops.append(float(np.percentile(values, 99)))
            _, times = timed(run, "step_ms")
            took = f", {np.median(times):,.0f} ms a step" if times else ""
            prefix = f"{run_name}: " if len(runs) > 1 else ""
            captions.append(f"{prefix}median {np.median(values):,.0f} tokens/s{took}")
        if not tops:
            return None
        axes.set_ylim(0, 1.15 * max(tops))
        axes.set_ylabel("tokens per second")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        whole_steps(axes)
        if len(runs) > 1:
            legend_above(figure, axes)
        caption = "; ".join(captions) + "."
        alt = f"Tokens per second over the steps. {caption}"
        return Picture(figure=figure, name=name, title="Throughput", caption=caption, alt=alt)


def amaxes(analysis: Analysis, name: str) -> Picture | None:
    """Amaxes of the worst operands, and the range of their scales. None without telemetry."""
    operands = worst(analysis)
    if not operands:
        return None
    with style():
        columns = min(3, len(operands))
        rows = -(-len(operands) // columns)
        figure = new_figure(10, 0.5 + 2.3 * rows)
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False)
        for axes in panels.flat[len(operands) :]:
            axes.set_visible(False)
        limited = [
            _amax(axes, operand) for axes, operand in zip(panels.flat, operands, strict=False)
        ]
        for axes in panels[-1]:
            whole_steps(axes)
        legend_above(figure, panels.flat[0])
        notes = " Blocks have a scale each, so no line says what they can hold."
        if any(limited):
            notes = ""
        if any(operand.clipped.any() for operand in operands):
            notes += " A triangle marks an amax that was clipped."
        names = "; ".join(operand.name for operand in operands)
        return Picture(
            figure=figure,
            name=name,
            title="Amax histories",
            caption=f"The {len(operands)} operands that look worst, the worst first.{notes}",
            alt=f"Amax over the steps of {names}.{notes}",
            wide=True,
        )


def _amax(axes: Any, operand: Operand) -> bool:
    """Draw the amaxes of `operand`. Returns whether the range of its scale is drawn as well."""
    amax, scale = operand.figures["amax"], operand.figures["scale"]
    format = named_format(operand.format)
    format_max = np.nan if format is None else format.max
    with np.errstate(divide="ignore", invalid="ignore"):
        largest_held = np.where(scale > 0, format_max / scale, np.nan)
    positive_amax = np.where(amax > 0, amax, np.nan)
    plot = axes.plot
    plot(
        operand.steps,
        positive_amax,
        "o-",
        color=COLORS[0],
        markersize=2.5,
        linewidth=1.2,
        label="amax",
    )
    limited = bool(np.isfinite(largest_held).any())
    if limited:
        plot(operand.steps, largest_held, color=COLORS[1], linewidth=1.2, linestyle="--",
             label="largest that the scale can hold")  # fmt: skip
    clipped = operand.clipped
    if clipped.any():
        plot(operand.steps[clipped], positive_amax[clipped], "v", color=COLORS[4], markersize=6)
    all_values = np.concatenate([positive_amax, largest_held])
    if len(all_values := all_values[np.isfinite(all_values)]):
        plain_log(axes, all_values)
    axes.set_title(f"{operand.layer}\n{operand.kind}", fontsize=8)
    return limited


def worst(analysis: Analysis, most: int = WORST) -> list[Operand]:
    """The `most` operands to look at first: outliers, then the lowest headroom and SQNR."""
    everything = {
        (operand.layer, operand.kind): operand
        for operand in [*analysis.run.operands, *analysis.operands]
    }  # settled samples take precedence
    order = [(out.operand.layer, out.operand.kind) for out in analysis.outliers]
    usual = of_linears(analysis.operands)  # softmax needs no headroom
    by_headroom = sorted(usual, key=lambda operand: _least(operand, "headroom_bits"))
    by_sqnr = sorted(usual, key=lambda operand: _least(operand, "sqnr_db"))
    for pair in zip(by_headroom, by_sqnr, strict=True):
        order += [(operand.layer, operand.kind) for operand in pair]
    order += list(everything)
    return [everything[key] for key in dict.fromkeys(order)][:most]


def _least(operand: Operand, figure: str) -> float:
    values = operand.figures[figure]
    values = values[np.isfinite(values)]
    return float(values.min()) if len(values) else np.inf
