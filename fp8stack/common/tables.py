"""Text tables in Markdown, in aligned columns and for a terminal; names and counts in text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fp8stack.common.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_NAME = 32


def shortened(name: str) -> str:
    """`name` for a plot: printable, and only its end if it is longer than `LONGEST_NAME`."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """A count with its noun: "1 step", "3,000 steps". `plural` is by default `singular` with an s.

    >>> counted(1, "step"), counted(3000, "step"), counted(2, "step was", "steps were")
    ('1 step', '3,000 steps', '2 steps were')
    """
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table. A | in a cell becomes a /."""
    return [
        "| " + " | ".join(printable(cell).replace("|", "/") for cell in line) + " |"
        for line in (header, ["---"] * len(header), *rows)
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines with aligned columns. The first row is the header."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def rich_table(title: str | None, header: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal. Long cells are wrapped, and brackets in them are no markup."""
    from rich.table import Column, Table  # not needed for JSON and pipes
    from rich.text import Text

    columns = (Column(heading, overflow="fold") for heading in header)
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
