"""A comparison as a picture: validation loss over steps, and the gaps with their intervals."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fp8stack.compare.summary import RecipeFigures
from fp8stack.tables import shortened

# Recipes often lie on one another: markers and dashes tell them apart where colours do not.
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
ROOM = 0.06


def comparison_plot(rows: Sequence[RecipeFigures], baseline: str, title: str) -> bytes:
    """A PNG of the validation losses by step, mean and range over seeds, and of the gaps in
    percent."""
    figure = Figure(figsize=(12, max(4.8, 0.4 * len(rows))), layout="constrained")
    colors = {row.recipe: f"C{index % 10}" for index, row in enumerate(rows)}
    with rc_context({"text.parse_math": False}):  # a name with $ in it is a name
        figure.suptitle(title)
        losses, gaps = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _losses(losses, rows, colors)
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
    # What diverged is not to press the others into one line.
    seen = [value for row in rows if row.done for point in row.curve for value in point[2:]]
    if seen:
        room = ROOM * (max(seen) - min(seen)) or 0.1
        axes.set_ylim(min(seen) - room, max(seen) + room)
    axes.set(xlabel="step", ylabel="validation loss (nats per token)")
    axes.set_title("mean and range over seeds", fontsize=10)
    axes.grid(alpha=0.3)
    if any(row.curve for row in rows):
        axes.legend(frameon=False, fontsize=9)
    else:
        _say(axes, "no run has a validation loss")


def _say(axes: Axes, message: str) -> None:
    """What a panel has in place of figures."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center")


def _gaps(axes: Axes, rows: Sequence[RecipeFigures], baseline: str, colors: dict[str, str]) -> None:
    others = [row for row in rows if row.recipe != baseline]
    axes.set_title("gap, 95 % interval over seeds", fontsize=10)
    if all(row.gap_percent is None for row in others):
        of = "\n".join(f"{shortened(row.recipe)}: {row.verdict}" for row in rows)
        return _say(axes, f"no gap to {baseline} is known\n\n{of}")
    axes.axvline(0, color="0.5", linewidth=0.8)
    for place, row in enumerate(others):
        if row.gap_percent is None:
            axes.annotate(f" {row.verdict}", (0, place), va="center", fontsize=8)
            continue
        mean, width = row.gap_percent.mean, row.gap_percent.half_width
        axes.errorbar(mean, place, xerr=width, fmt="o", color=colors[row.recipe], capsize=4)
        # A verdict over its own line, where no interval lies.
        above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(row.verdict, (mean, place), (0, 7), **above)
    axes.set_yticks(range(len(others)), [shortened(row.recipe) for row in others])
    axes.set_ylim(len(others) - 0.5, -0.7)
    axes.margins(x=0.25)
    axes.set(xlabel=f"validation loss at the end, % above {baseline}")
    axes.grid(alpha=0.3, axis="x")
