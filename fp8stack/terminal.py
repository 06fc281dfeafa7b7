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
    """A bar that keeps its width, and below it `line`, cut where the terminal ends; None: no such
    line."""

    line: str | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from super().get_renderables()
        if self.line is not None:
            yield Text(self.line, no_wrap=True, overflow="ellipsis")
