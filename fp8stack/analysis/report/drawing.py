"""The style of a report's plots: no background, legible on light and dark pages."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fp8stack.common.tables import shortened
from fp8stack.training.metrics.read import Row

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

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # a name with $ in it is a name
    "axes.grid": True,
    "grid.alpha": 0.12,
    "path.simplify_threshold": 0.25,  # pixels: a long line keeps its extremes, not its points
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color", "legend.labelcolor"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "svg.fonttype": "none",  # text stays text
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot for the HTML page, also written as a PNG file."""

    figure: Figure
    name: str  # of the file
    title: str
    caption: str  # below the plot
    wide: bool = False  # keeps more width on a small screen

    @property
    def alt(self) -> str:
        """The text for screen readers."""
        return f"{self.title}: {self.caption}"

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
        with style(), matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(stream, format="svg", transparent=True, metadata=no_metadata)
        text = stream.getvalue().replace(INK, "currentColor")
        text = re.sub(r'\sid="((?!C\d)[\w.]+_\d+|image\w+)"', "", text)  # nothing refers to these
        _, box, content = re.split(r'<svg[^>]*viewBox="([^"]*)"[^>]*>', text, maxsplit=1)
        return f'<svg viewBox="{box}" aria-hidden="true">{content.strip()}'


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


def plain_log_ticks(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis from `low` to `high` with plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / 100 < low else (1,), numticks=8))
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


def by_kind(events: Sequence[Row]) -> dict[str, list[int]]:
    """The steps of the events that changed the run, by the kinds of `EVENT_COLORS`."""
    steps = {
        kind: sorted({event["step"] for event in events if event["event"] == kind})
        for kind in EVENT_COLORS
    }
    return {kind: steps for kind, steps in steps.items() if steps}


def mark_events(axes: Any, events: Sequence[Row]) -> None:
    """Draw a vertical line at each event that changed the run, with a legend entry per kind."""
    up = axes.get_xaxis_transform()  # y from 0 to 1
    for kind, steps in by_kind(events).items():
        axes.vlines(steps, 0, 1, color=EVENT_COLORS[kind], linewidth=0.9, linestyle="--",
                    alpha=0.8, label=kind, zorder=1, transform=up)  # fmt: skip
