"""The reports of scenarios: rows and tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8stack.analysis.benchmark.timing import Timing, machine, median_interval, ratio
from fp8stack.common import tables

Row = dict[str, Any]
Report = dict[str, Any]


def report_of(
    device: str, settings: Row, rows: Sequence[Row], packages: Sequence[str] = ()
) -> Report:
    """A report with the machine, the settings and the rows; `packages` are the names of packages
    whose versions to record."""
    return {
        "machine": machine(*packages, device=device),
        "settings": settings,
        "results": list(rows),
    }


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


def number(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A function from a row to a cell with its number `key`; an empty cell if it has none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:,.{digits}f}"

    return cell


def write(report: Report, text: str, folder: Path) -> None:
    """Write `<scenario>.json` and `<scenario>.md` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / report["scenario"]
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
