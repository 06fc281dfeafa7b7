"""The plot of a comparison: the gap of each recipe with its interval."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fp8stack.analysis.compare.gaps import RecipeFigures
from fp8stack.analysis.compare.intervals import CONFIDENCE
from fp8stack.common.tables import shortened


def comparison_plot(
    rows: Sequence[RecipeFigures], baseline: str, title: str, confidence: float = CONFIDENCE
) -> bytes:
    """A PNG with the gaps in percent, and intervals of this `confidence`."""
    figure = Figure(figsize=(8, max(3.6, 0.5 * len(rows))), layout="constrained")
    with rc_context({"text.parse_math": False}):  # a name with $ in it is a name
        figure.suptitle(title)
        axes = figure.subplots()
        axes.set_title(f"gap, {100 * confidence:g} % interval over seeds", fontsize=10)
        _draw_gaps(axes, [row for row in rows if row.recipe != baseline], baseline)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _draw_gaps(axes: Axes, rows: Sequence[RecipeFigures], baseline: str) -> None:
    if all(row.gap_percent is None for row in rows):
        verdicts = "\n".join(f"{shortened(row.recipe)}: {row.verdict}" for row in rows)
        message = f"no gap to {baseline} is known\n\n{verdicts}"
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center")
        return
    axes.axvline(0, color="0.5", linewidth=0.8)
    for position, row in enumerate(rows):
        if row.gap_percent is None:
            axes.annotate(f" {row.verdict}", (0, position), va="center", fontsize=8)
            continue
        mean, width = row.gap_percent.mean, row.gap_percent.half_width
        axes.errorbar(mean, position, xerr=width, fmt="o", capsize=4)
        # The verdict goes above the interval.
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(row.verdict, (mean, position), (0, 7), **style)
    axes.set_yticks(range(len(rows)), [shortened(row.recipe) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.margins(x=0.25)
    axes.set(xlabel=f"validation loss at the end, % above {baseline}")
    axes.grid(alpha=0.3, axis="x")
