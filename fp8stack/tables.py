"""Tables as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line. A | within a cell becomes a /."""
    return [
        "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |"
        for line in (header, ["---"] * len(header), *rows)
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, their columns aligned; the header is the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
