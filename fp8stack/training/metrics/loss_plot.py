"""The plot of a run's loss."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure


def loss_plot(metrics: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG of training and validation loss over steps, from rows of `metrics.jsonl`. If a step has
    several rows, as after a roll-back, the last counts."""
    train = _curve(metrics, "loss")
    validation = _curve(metrics, "val_loss")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        dot = marker(steps)
        axes.plot(steps, losses, dot, color="0.8", linewidth=0.8, label="training, each step")
        axes.plot(steps, smoothed(losses), dot, color="C0", label="training, running mean")
        usual = [*smoothed(losses), *(loss for _, loss in validation)]
        axes.set_ylim(*view_range(usual, losses))
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o-", color="C1", markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, -14),
            ha="right",
            color="C1",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a model's name with $ in it is a name
    axes.grid(alpha=0.3)
    if train or validation:
        axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _curve(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    values = {row["step"]: row[key] for row in metrics if row.get(key) is not None}
    return sorted(values.items())


def marker(points: Sequence[object]) -> str:
    """The matplotlib format of a line through `points`. A single point needs a dot to show."""
    return "o-" if len(points) == 1 else "-"


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential moving average, with bias correction as in Adam."""
    mean, total_weight, means = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total_weight = weight * total_weight + (1 - weight)
        means.append(mean / total_weight)
    return means


def view_range(usual: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """The y limits for the losses `usual` and `losses`, with a margin. Losses that would flatten
    the curve are left out: usual ones above three times the first, as where a run diverges, and
    `losses` above twice the largest usual one or below half the smallest."""
    low, high = min(usual), max(loss for loss in usual if loss <= max(3 * usual[0], min(usual)))
    low = min([low, *(loss for loss in losses if loss >= low / 2)])
    high = max([high, *(loss for loss in losses if loss <= 2 * high)])
    room = 0.08 * (high - low) or 0.1
    return low - room, high + room
