"""The style of a report's plots: no background, legible on light and dark pages."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fp8stack.common.tables import shortened
from fp8stack.training.metrics.loss_plot import marker

INK = "#1a1b1c"  # becomes the colour of the page's text
COLORS = (
    *("#3b82f6", "#e8710a", "#16a34a", "#a855f7", "#dc2626"),
    *("#0d9ba8", "#d6479a", "#a16207", "#64748b", "#65a30d"),
)
EVENT_COLORS = {
    "skip": "#94a3b8",
    "rollback": "#dc2626",
    "demote": "#a855f7",
    "restore": "#16a34a",
    "stop": "#dc2626",
    "non-finite": "#dc2626",
}
MOST_POINTS = 1200  # per line: more than a screen has pixels

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # a name with $ in it is a name
    "axes.grid": True,
    "grid.alpha": 0.12,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color", "legend.labelcolor"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fp8stack",  # the same plot has the same bytes
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot for the HTML page, also written as a PNG file."""

    figure: Figure
    name: str  # of the file
    title: str
    caption: str  # below the plot
    alt: str  # for screen readers
    wide: bool = False  # keeps more width on a small screen

    def png(self) -> bytes:
        """The plot as a PNG file, on white."""
        stream = io.BytesIO()
        with style():
            self.figure.savefig(
                stream, format="png", dpi=120, facecolor="white", metadata={"Software": None}
            )
        return stream.getvalue()

    def svg(self) -> str:
        """The plot as an <svg> element whose ids are unique on the page."""
        stream = io.StringIO()
        no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        with style():
            self.figure.savefig(stream, format="svg", transparent=True, metadata=no_metadata)
        text = stream.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">',
                      text, count=1)  # fmt: skip
        # Make ids unique on the page; the plot refers to them by #id.
        used_ids: set[str] = set()

        def once(match: re.Match[str]) -> str:
            # matplotlib names these by content, so equal names mean equal elements.
            if match[1] in used_ids:
                return ""
            used_ids.add(match[1])
            return f' id="{self.name}-{match[1]}"'

        text = re.sub(r'\sid="([^"]+)"', once, text)
        text = re.sub(r'(href="|url\()#', rf"\1#{self.name}-", text)
        return text.replace(INK, "currentColor").strip()


@contextmanager
def style() -> Iterator[None]:
    """Context in which plots are drawn in this style."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        warnings.filterwarnings("ignore", message="overflow", category=RuntimeWarning)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def plain_log(axes: Any, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with plain numbers as labels."""
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis, values)


def plain_log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers."""
    narrow = max(values) / 100 < min(values)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def whole_steps(axes: Any) -> None:
    """Label the x axis as steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))


def legend_above(figure: Figure, axes: Any) -> None:
    """Place the legend above the plot; the figure grows so that the plot keeps its height."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        labels = [shortened(label) for label in labels]
        fit = int(12 * figure.get_figwidth() / (max(map(len, labels)) + 6))
        columns = max(1, min(fit, 7))
        figure.set_figheight(figure.get_figheight() + 0.17 * ((len(labels) - 1) // columns))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=8)


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[Any, Any, str]:
    """Reduce a line to its extremes, at most `MOST_POINTS`, which look the same when drawn. Returns
    x, y and matplotlib's format string for the line."""
    x, y = np.asarray(steps), np.asarray(values)
    if len(x) <= MOST_POINTS:
        return x, y, marker(steps)
    extremes = set()
    for stretch in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        extremes |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    indices = sorted(extremes)
    return x[indices], y[indices], "-"


def mark_events(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    """Draw a vertical line at each event that changed the run, with a legend entry per kind."""
    labeled_kinds = set()
    for event in {(event["step"], event.get("event")): event for event in events}.values():
        kind = event.get("event")
        if not isinstance(kind, str) or kind not in EVENT_COLORS:
            continue
        label = None if kind in labeled_kinds else kind
        labeled_kinds.add(kind)
        axes.axvline(event["step"], color=EVENT_COLORS[kind], linewidth=0.9, linestyle="--",
                     alpha=0.8, label=label, zorder=1)  # fmt: skip
