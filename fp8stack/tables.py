"""Tables of text: in Markdown, in columns, and for a terminal; names and counts in text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fp8stack.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_NAME = 32


def shortened(name: str) -> str:
    """A name; of a long one, such as a file's path, the end."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def counted(count: int, one: str, many: str = "") -> str:
    """A count with what is counted, `many` if not that with an s: "1 step", "3,000 steps".

    >>> counted(1, "step"), counted(3000, "step"), counted(2, "step was", "steps were")
    ('1 step', '3,000 steps', '2 steps were')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line. A | within a cell becomes a /."""
    return [
        "| " + " | ".join(printable(cell).replace("|", "/") for cell in line) + " |"
        for line in (header, ["---"] * len(header), *rows)
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, their columns aligned; the header is the first row."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def rich_table(title: str | None, header: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal, which folds what is too long. Brackets in it are no markup."""
    from rich.table import Column, Table  # which JSON and pipes do not need
    from rich.text import Text

    columns = (Column(heading, overflow="fold") for heading in header)
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made
