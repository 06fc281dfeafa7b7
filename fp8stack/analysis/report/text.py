"""The report on a run as text for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from fp8stack.analysis.report import summary
from fp8stack.analysis.report.analysis import Analysis, verdict
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.read import RunRecord
from fp8stack.analysis.report.telemetry import (
    Figures,
    joined,
    kinds_of,
    layers_by_steps,
    of_linears,
)

BARS = "▁▂▃▄▅▆▇█"
SHADES, BOUNDS_DB = "█▓▒░·", (13, 18, 22, 27)  # of SQNR, the lowest first
LEGEND = "SQNR in dB: █ below 13, ▓ 13 to 18, ▒ 18 to 22, ░ 22 to 27, · 27 and above"
MOST_LAYERS = 24
COLORS = {"alarm": "bold red", "warning": "yellow", "note": "dim"}


def show(analysis: Analysis, console: Console) -> None:
    """Print a run's figures and findings. The console prints text literally, see `Screen`."""
    for renderable in _parts(analysis, console.width):
        console.print(renderable)


def _parts(analysis: Analysis, width: int) -> Iterator[RenderableType]:
    run = analysis.run
    yield Text(run.name, style="bold underline")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    for fact in summary.headline(run).items():
        facts.add_row(*fact)
    yield facts
    yield Text(f"\n{verdict(analysis)}", style="bold")
    for finding in analysis.findings:
        yield Text.assemble((f"  {finding.level}: ", COLORS[finding.level]), finding.text)
    yield from _table(["worst once settled", "figure", "operand", "step"], analysis.extremes)
    for label, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
        _, values = run.metrics.column(key)
        if values:
            bars = sparkline(values, max(10, min(60, width - 40)))
            yield f"{label:14} {bars} {values[0]:.3g} → {values[-1]:.3g}"
    if missing := summary.without_telemetry(run):
        yield Text(missing, style="dim")
    else:
        yield from _sqnr_map(run, width)
    if (what_if := summary.what_if(analysis)) is not None:
        rows = [
            (f"{name} (this run)" if is_own else name, *map(_cell, cells))
            for name, cells, is_own in what_if.rows
        ]
        yield from _table(["median SQNR, dB", *what_if.kinds], rows)
        yield what_if.sentence
    if run.loss_gap:
        yield run.loss_gap
    if len(run.sessions) > 1:
        sessions = [(it.began, it.first, it.last, it.ended) for it in run.sessions]
        yield from _table(["session began (UTC)", "after step", "to step", "ended"], sessions)
    yield from (f"plan: {reason}" for reason in summary.reasons(run))
    yield from _table(["not in FP8", "because"], summary.not_fp8(run)[:MOST_LAYERS])
    events = [tuple(event.values()) for event in folded(run.metrics.events)]
    yield from _table(["steps", "event", "where", "why", "more"], events)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[Table]:
    """A table without the columns whose cells are all empty; none without rows."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    filled = [any(column) for column in zip(*texts, strict=True)]
    if any(filled):
        columns = (Column(heading, overflow="fold") for heading in compress(header, filled))
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
        for row in texts:
            table.add_row(*compress(row, filled))
        yield table


def _cell(cell: tuple[float | None, float | None]) -> str:
    value, gain = cell
    return "" if value is None else f"{value:.1f}" + ("" if gain is None else f" ({gain:+.1f})")


def _sqnr_map(run: RunRecord, width: int) -> Iterator[RenderableType]:
    """SQNR by layer and sample, darker where worse. With many layers, only the worst are shown."""
    operands = of_linears(run.telemetry.operands)
    kinds = kinds_of(operands)
    room = max(4, min(24, (width - 34) // len(kinds) - 3))
    names: list[str] = []
    grids = []
    for kind in kinds:
        names, steps, values = layers_by_steps(operands, kind, "sqnr_db")
        grids.append(joined(steps, values, False, room)[1])
    lowest = np.fmin.reduce([np.fmin.reduce(grid, axis=1) for grid in grids])
    worst = np.sort(np.argsort(np.nan_to_num(lowest, nan=np.inf), kind="stable")[:MOST_LAYERS])
    rows = [(names[row], *(shades(grid[row]) for grid in grids)) for row in worst]
    yield from _table(["SQNR", *kinds], rows)
    of_all = f"; the worst {MOST_LAYERS} of {len(names)} layers" if len(names) > MOST_LAYERS else ""
    yield Text(f"{LEGEND}{of_all}", style="dim")


def shades(sqnr_db: Figures) -> str:
    """SQNR as characters, see `LEGEND`; blank if unknown."""
    return "".join(
        " " if np.isnan(value) else SHADES[np.digitize(value, BOUNDS_DB)] for value in sqnr_db
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` bars."""
    stretches = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = np.array([stretch.mean() for stretch in stretches])
    low, high = means.min(), means.max()
    levels = (means - low) / (high - low or 1.0) * (len(BARS) - 1)
    return "".join(BARS[int(level)] for level in levels.round())
