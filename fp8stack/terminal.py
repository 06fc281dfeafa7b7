"""What every command that takes long prints with. It must not know what is being done."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import Progress
from rich.text import Text


def say(*lines: str) -> None:
    """Print lines at once. Where the reader of the output has gone, the work goes on in silence."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Bar(Progress):
    """A bar that keeps its width, and below it `line`, which goes on in the next row between two of
    its parts where the terminal ends; None: no such line. Then `urgent`."""

    line: str | None = None
    urgent: str | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from super().get_renderables()
        rows = [] if self.line is None else rows_of(self.line, self.console.width)
        for row in [*rows, *([] if self.urgent is None else [self.urgent])]:
            yield Text(row, no_wrap=True, overflow="ellipsis")


def rows_of(line: str, width: int) -> list[str]:
    """The parts of `line`, which " | " separates, in rows of at most `width` characters; a part
    that is longer has a row of its own."""
    rows = [""]
    for number, part in enumerate(line.split(" | ")):
        joined = f"{rows[-1]} | {part}" if number else part
        if number and len(joined) > width:
            rows.append(part)
        else:
            rows[-1] = joined
    return rows
