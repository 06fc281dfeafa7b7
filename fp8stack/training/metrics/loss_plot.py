"""The plot of a run's loss."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from fp8stack.training.metrics.read import Metrics


def loss_plot(metrics: Metrics, title: str) -> bytes:
    """A PNG of training and validation loss over steps."""
    steps, losses = metrics.column("loss")
    val_steps, val_losses = metrics.column("val_loss")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if losses:
        dot = marker(steps)
        axes.plot(steps, losses, dot, color="0.8", linewidth=0.8, label="training, each step")
        axes.plot(steps, smoothed(losses), dot, color="C0", label="training, running mean")
        usual = [*smoothed(losses), *val_losses]
        axes.set_ylim(*view_range(usual, losses))
    if val_losses:
        axes.plot(val_steps, val_losses, "o-", color="C1", markersize=4, label="validation")
        axes.annotate(
            f"{val_losses[-1]:.3f}",
            (val_steps[-1], val_losses[-1]),
            textcoords="offset points",
            xytext=(0, -14),
            ha="right",
            color="C1",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a model's name with $ in it is a name
    axes.grid(alpha=0.3)
    if losses or val_losses:
        axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


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
