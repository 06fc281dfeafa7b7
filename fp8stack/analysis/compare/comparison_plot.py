"""The plot of a comparison: validation loss over steps, and gaps with their intervals."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fp8stack.analysis.compare.gaps import RecipeFigures
from fp8stack.analysis.compare.intervals import CONFIDENCE
from fp8stack.common.tables import shortened

# Curves of recipes often coincide; markers and dashes tell them apart where colours do not.
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
ROOM = 0.06  # margin of the loss axis, as a share of the range


def comparison_plot(
    rows: Sequence[RecipeFigures], baseline: str, title: str, confidence: float = CONFIDENCE
) -> bytes:
    """A PNG with the validation loss over steps (mean and range over seeds) and the gaps in
    percent, with intervals of this `confidence`."""
    figure = Figure(figsize=(12, max(4.8, 0.4 * len(rows))), layout="constrained")
    colors = {row.recipe: f"C{index % 10}" for index, row in enumerate(rows)}
    with rc_context({"text.parse_math": False}):  # a name with $ in it is a name
        figure.suptitle(title)
        losses, gaps = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _losses(losses, rows, colors)
        gaps.set_title(f"gap, {100 * confidence:g} % interval over seeds", fontsize=10)
        _gaps(gaps, rows, baseline, colors)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _losses(axes: Axes, rows: Sequence[RecipeFigures], colors: dict[str, str]) -> None:
    for index, row in enumerate(rows):
        if not row.curve:
            continue
        steps, means, lows, highs = zip(*row.curve, strict=True)
        axes.fill_between(steps, lows, highs, color=colors[row.recipe], alpha=0.15, linewidth=0)
        name = shortened(row.recipe)
        label = name if row.done else f"{name} ({row.verdict})"
        marks: dict[str, Any] = {
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 4,
            "linewidth": 1.2,
        }
        dashes = DASHES[index % len(DASHES)]
        axes.plot(steps, means, dashes, **marks, color=colors[row.recipe], label=label)
    # Limit the y axis so that diverged runs do not flatten the others.
    losses = [value for row in rows if row.done for point in row.curve for value in point[2:]]
    if losses:
        room = ROOM * (max(losses) - min(losses)) or 0.1
        axes.set_ylim(min(losses) - room, max(losses) + room)
    axes.set(xlabel="step", ylabel="validation loss (nats per token)")
    axes.set_title("mean and range over seeds", fontsize=10)
    axes.grid(alpha=0.3)
    if any(row.curve for row in rows):
        axes.legend(frameon=False, fontsize=9)
    else:
        _say(axes, "no run has a validation loss")


def _say(axes: Axes, message: str) -> None:
    """Write a message into an empty panel."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center")


def _gaps(axes: Axes, rows: Sequence[RecipeFigures], baseline: str, colors: dict[str, str]) -> None:
    compared = [row for row in rows if row.recipe != baseline]
    if all(row.gap_percent is None for row in compared):
        verdicts = "\n".join(f"{shortened(row.recipe)}: {row.verdict}" for row in rows)
        return _say(axes, f"no gap to {baseline} is known\n\n{verdicts}")
    axes.axvline(0, color="0.5", linewidth=0.8)
    for position, row in enumerate(compared):
        if row.gap_percent is None:
            axes.annotate(f" {row.verdict}", (0, position), va="center", fontsize=8)
            continue
        mean, width = row.gap_percent.mean, row.gap_percent.half_width
        axes.errorbar(mean, position, xerr=width, fmt="o", color=colors[row.recipe], capsize=4)
        # The verdict goes above the interval.
        offset_style: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 8,
        }
        axes.annotate(row.verdict, (mean, position), (0, 7), **offset_style)
    axes.set_yticks(range(len(compared)), [shortened(row.recipe) for row in compared])
    axes.set_ylim(len(compared) - 0.5, -0.7)
    axes.margins(x=0.25)
    axes.set(xlabel=f"validation loss at the end, % above {baseline}")
    axes.grid(alpha=0.3, axis="x")
