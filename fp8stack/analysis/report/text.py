"""The report as text for a terminal."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8stack.analysis.report import summary
from fp8stack.analysis.report.analysis import Analysis, verdict
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.read import (
    Figures,
    RunRecord,
    column,
    joined,
    kinds_of,
    layers_by_steps,
    of_linears,
)
from fp8stack.common.terminal import printable

BARS = "▁▂▃▄▅▆▇█"
SHADES = "·░▒▓█"  # from high SQNR to low
MOST_LAYERS = 24
COLORS = {"alarm": "bold red", "warning": "yellow", "note": "dim"}


def show(runs: Sequence[Analysis], names: Sequence[str], console: Console) -> None:
    """Print each run; before several runs, a table that compares them."""
    if len(runs) > 1:
        table = _table(["run", *summary.headline(runs[0])])
        for analysis, name in zip(runs, names, strict=True):
            table.add_row(*map(_text, [name, *summary.headline(analysis).values()]))
        console.print(table)
    for analysis, name in zip(runs, names, strict=True):
        console.print()
        console.print(_text(name, style="bold underline"))
        _run(analysis, console)


def _run(analysis: Analysis, console: Console) -> None:
    run = analysis.run
    facts = Table.grid(padding=(0, 2))
    for label, text in summary.headline(analysis).items():
        facts.add_row(_text(label, style="dim"), _text(text))
    console.print(facts)
    console.print()
    console.print(_text(verdict(analysis), style="bold"))
    for finding in analysis.findings:
        line = _text(f"  {finding.level}: ", style=COLORS[finding.level])
        console.print(line + _text(finding.text, style="default"))
    if analysis.extremes:
        table = _table(["worst once settled", "figure", "operand", "step"])
        for label, operand, step, figure in analysis.extremes:
            table.add_row(label, figure, _text(operand), str(step))
        console.print(table)
    width = max(10, min(60, console.width - 40))
    for label, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
        _, values = column(run, key)
        if values:
            ends = f"{values[0]:.3g} → {values[-1]:.3g}"
            console.print(_text(f"{label:14} {sparkline(values, width)} {ends}"))
    if missing := summary.without_telemetry(run):
        console.print(_text(missing, style="dim"))
    else:
        console.print(_map(run, console.width))
    if (what_if := summary.what_if(analysis)) is not None:
        table = _table(["median SQNR, dB", *what_if.kinds])
        for name, cells, is_run_recipe in what_if.rows:
            table.add_row(
                _text(f"{name} (this run)" if is_run_recipe else name), *map(_cell, cells)
            )
        console.print(table)
        console.print(_text(what_if.sentence))
    if run.forecast is not None:
        console.print(_text(f"loss gap to expect: {'; '.join(run.forecast.about)}"))
        table = _table(run.forecast.header[:-1])
        for row in run.forecast.rows():
            table.add_row(*map(_text, row[:-1]))
        console.print(table)
        for note in run.forecast.notes():
            console.print(_text(note))
    for session in run.sessions[1:] and run.sessions:
        to = "" if session.last is None else f" to {session.last}"
        console.print(
            _text(f"session: {session.began} UTC, after step {session.first}{to}: {session.ended}")
        )
    for reason in summary.reasons(run):
        console.print(_text(f"plan: {reason}"))
    for layer, reason in summary.not_fp8(run)[:MOST_LAYERS]:
        console.print(_text(f"not in FP8: {layer}: {reason}"))
    if run.events:
        heads = ["steps", "event", "where", "why", "more"]
        table = _table(heads)
        for event in folded(run.events):
            table.add_row(*(_text(event[key]) for key in heads))
        console.print(table)


def _cell(cell: tuple[float | None, float | None]) -> str:
    value, gain = cell
    return "-" if value is None else f"{value:.1f}" + ("" if gain is None else f" ({gain:+.1f})")


def _map(run: RunRecord, width: int) -> Table:
    """SQNR by layer and sample, darker where worse. With many layers, only the worst are shown."""
    operands = of_linears(run.operands)
    kinds = kinds_of(operands)
    room = max(4, min(24, (width - 34) // len(kinds) - 3))
    table = _table(["SQNR, darker is worse", *kinds])
    grids = {}
    names: list[str] = []
    for kind in kinds:
        names, steps, values = layers_by_steps(operands, kind, "sqnr_db")
        grids[kind] = joined(steps, values, False, room)[1]
    lowest = np.fmin.reduce([np.fmin.reduce(grid, axis=1) for grid in grids.values()])
    worst = np.sort(np.argsort(np.nan_to_num(lowest, nan=np.inf), kind="stable")[:MOST_LAYERS])
    for row in worst:
        table.add_row(_text(names[row]), *(shades(grids[kind][row]) for kind in kinds))
    if len(names) > MOST_LAYERS:
        table.caption = f"the worst {MOST_LAYERS} of {len(names)} layers"
    return table


def shades(values: Figures) -> str:
    """SQNR as characters, from above 27 dB to below 13 dB; blank if unknown."""
    return "".join(
        " " if np.isnan(value) else SHADES[int(np.clip((32 - value) // 4.8, 0, 4))]
        for value in values
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` bars."""
    stretches = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = np.array([stretch.mean() for stretch in stretches])
    low, high = means.min(), means.max()
    levels = (means - low) / (high - low or 1.0) * (len(BARS) - 1)
    return "".join(BARS[int(level)] for level in levels.round())


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    for heading in headings:
        table.add_column(_text(heading), overflow="fold")
    return table
