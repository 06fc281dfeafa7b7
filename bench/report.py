"""The reports of scenarios: rows, bars, tables and figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fp8stack.analysis.benchmark.timing import Timing, machine, median_interval, ratio
from fp8stack.common import tables

Row = dict[str, Any]
Report = dict[str, Any]


def report_of(
    device: str,
    settings: Row,
    rows: Sequence[Row],
    *,
    bars: Sequence[Row] = (),
    packages: Sequence[str] = (),
) -> Report:
    """A report with the machine, the settings and the rows; `packages` are the names of packages
    whose versions to record."""
    return {
        "machine": machine(*packages, device=device),
        "settings": settings,
        "results": list(rows),
        "bars": list(bars),
    }


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A limit in a case: the fastest round of `arm` takes at most `at_most` times as long as the
    fastest round of the arm `of`."""

    case: str
    arm: str
    of: str
    at_most: float


def rows_of(case: str, timings: Mapping[str, Timing], to: str, **facts: object) -> list[Row]:
    """A row for each arm of a case. `ratio` is its time over the time of the arm `to`, in the
    fastest rounds. If arms took turns, `paired` is the median of the ratios within a round, and
    `paired_low` to `paired_high` is its 95 % confidence interval."""
    return [
        {
            "case": case,
            "arm": arm,
            **facts,
            **timing.to_json(),
            "ratio": round(ratio(timing, timings[to]), 4),
            **paired(timing, timings[to]),
            "ratio_to": to,
        }
        for arm, timing in timings.items()
    ]


def paired_ratio(timing: Timing, to: Timing) -> tuple[float, float, float]:
    """The time of `timing` over the time of `to` in the same round: the median over the rounds, and
    the ends of its 95 % confidence interval, see `median_interval`.

    Both must come from the same call of `interleaved`, so that a slow round slows down both arms
    and leaves their ratio. Raises a ValueError if they have different numbers of rounds.
    """
    pairs = zip(timing.samples_ms, to.samples_ms, strict=True)
    pair_ratios = [timing_ms / to_ms for timing_ms, to_ms in pairs]
    return statistics.median(pair_ratios), *median_interval(pair_ratios)


def paired(timing: Timing, to: Timing) -> dict[str, float]:
    """The ratio of two arms within a round, and its interval, by name, see `paired_ratio`; empty if
    they did not take turns."""
    if not (timing.samples_ms and to.samples_ms):
        return {}
    names = ("paired", "paired_low", "paired_high")
    named_ratios = zip(names, paired_ratio(timing, to), strict=True)
    return {name: round(value, 4) for name, value in named_ratios}


def paired_cell(row: Row) -> str:
    return f"{row['paired']:.3f} [{row['paired_low']:.3f}, {row['paired_high']:.3f}]"


def judged(bars: Iterable[Bar], rows: Sequence[Row]) -> list[Row]:
    """The bars whose case and arms were measured, with the measured ratio."""
    fastest = {(row["case"], row["arm"]): row["fastest_ms"] for row in rows}
    judgements = []
    for bar in bars:
        arm, of = fastest.get((bar.case, bar.arm)), fastest.get((bar.case, bar.of))
        if arm is not None and of is not None:
            measured = arm / of
            holds = measured <= bar.at_most
            judgements.append({**asdict(bar), "measured": round(measured, 4), "holds": holds})
    return judgements


# Tables


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(tables.markdown(header, rows)) + "\n"


def crossed(cells: Mapping[tuple[str, str], str], corner: str) -> str:
    """A table of cells, given by the names of their line and column; missing cells are empty."""
    across = list(dict.fromkeys(column for _, column in cells))
    down = dict.fromkeys(line for line, _ in cells)
    body = ([line, *(cells.get((line, column), "") for column in across)] for line in down)
    return markdown([corner, *across], body)


def heading(report: Report, title: str, text: str) -> str:
    """The beginning of a page: its title and text, the command, the machine and the settings."""
    facts = ", ".join(
        f"{name} {value}"
        for name, value in report["machine"].items()
        if value is not None and name not in ("machine", "slug")
    )
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    return (
        f"# {title}\n\n{text}\n\nMade by `{report['command']}` on {report['machine']['machine']}: "
        f"{facts}.\nSettings: {settings}.\n{form(report)}{load(report)}\n{left_out_list(report)}"
    )


def form(report: Report) -> str:
    """A sentence on whether all requested rounds were timed; "" if the scenario has no budget."""
    if "budget_s" not in report["settings"] or not report["results"]:
        return ""
    rounds, counts = report["settings"]["rounds"], [row["rounds"] for row in report["results"]]
    if min(counts) >= rounds:
        return f"All {rounds} rounds of every arm were timed.\n"
    return (
        f"Short form: {min(counts)} to {max(counts)} rounds of an arm instead of {rounds}, as the "
        "budget allowed.\n"
    )


def load(report: Report) -> str:
    """A sentence on the CPU time that other processes took; "" if unknown."""
    shares = [row.get("others_share") for row in report["results"]]
    known_shares = [share for share in shares if share is not None]
    if not known_shares:
        return ""
    return f"Other processes took up to {max(known_shares):.0%} of the CPUs' time meanwhile.\n"


def left_out_list(report: Report) -> str:
    """A list of the arms that were not measured, with the reasons; "" if all were measured."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in report.get("left_out", ()):
        cases.setdefault((row["arm"], row["left_out"]), []).append(row["case"])
    lines = [
        f"- {arm} ({', '.join(case_names)}): {reason}"
        for (arm, reason), case_names in cases.items()
    ]
    return "\n".join(["Not measured:", "", *lines, "", ""]) if lines else ""


def timing_table(rows: Sequence[Row], extra: Mapping[str, Callable[[Row], str]]) -> str:
    """A table of timings by case and arm: the median with its confidence interval, the fastest
    round, the number of rounds, the seconds to build and compile an arm, if recorded, and the
    `extra` columns by their titles."""
    if any("first_s" in row for row in rows):
        extra = {"first call s": number("first_s", 1)} | dict(extra)
    cells = (
        [
            row["case"],
            row["arm"],
            f"{row['median_ms']:.2f} [{row['low_ms']:.2f}, {row['high_ms']:.2f}]",
            f"{row['fastest_ms']:.2f}",
            str(row["rounds"]),
            *(cell(row) for cell in extra.values()),
        ]
        for row in rows
    )
    header = ["case", "arm", "median ms [95 % interval]", "fastest ms", "rounds", *extra]
    return markdown(header, cells)


def page(data: Report, title: str, text: str, extra: Mapping[str, Callable[[Row], str]]) -> str:
    """A page with a table of all timings, with `extra` columns, and the ratios of the bars."""
    timings = timing_table(data["results"], extra)
    return heading(data, title, text) + timings + ratios_table(data["bars"])


def number(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A function from a row to a cell with its number `key`; an empty cell if it has none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:,.{digits}f}"

    return cell


def ratios_table(bars: Sequence[Row]) -> str:
    """A table of the measured ratios of the bars; "" if there are none."""
    if not bars:
        return ""
    cells = ([bar["case"], bar["arm"], bar["of"], f"{bar['measured']:.3f}"] for bar in bars)
    header = ["case", "arm", "relative to", "measured"]
    return "\nRatios of the fastest rounds:\n\n" + markdown(header, cells)


# Figures


RELATIVE_TIME = "time, relative to {ratio_to}"


def ratios(
    title: str, value: str = "ratio", label: str = RELATIVE_TIME
) -> Callable[[Report], Figure]:
    """A scenario's `figure`: see `ratio_figure`."""
    return lambda data: ratio_figure(data["results"], title, value, label)


def ratio_figure(
    rows: Sequence[Row], title: str, value: str = "ratio", label: str = RELATIVE_TIME
) -> Figure:
    """Horizontal bars of `value` by arm, a panel for each case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    most = max(sum(row["case"] == case for row in rows) for case in cases)
    figure = Figure(figsize=(5.0 * len(cases), 1.2 + 0.3 * most), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for panel, case in zip(panels, cases, strict=True):
        chosen = [row for row in rows if row["case"] == case and row.get(value) is not None]
        names, values = [row["arm"] for row in chosen], [row[value] for row in chosen]
        drawn = panel.barh(names, values, color="tab:blue")
        panel.bar_label(drawn, fmt="{:,.3g}", padding=2, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(case, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.set_xlabel(label.format(**chosen[0]))
    return figure


def line_figure(rows: Sequence[Row], title: str, x: str, y: str) -> Figure:
    """Lines of `y` over `x` by arm, a panel for each case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(4.5 * len(cases), 3.6), layout="constrained")
    figure.suptitle(title)
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows if row["case"] == case):
            points = [row for row in rows if (row["case"], row["arm"]) == (case, arm)]
            panel.plot([p[x] for p in points], [p[y] for p in points], marker="o", label=arm)
        panel.set(title=case, xlabel=case, ylabel=y)
        panel.legend(fontsize=8)
    return figure


def write(report: Report, text: str, figure: Figure, folder: Path) -> None:
    """Write `<scenario>.json`, `.md` and `.png` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / report["scenario"]
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    figure.savefig(stem.with_suffix(".png"), dpi=100)
