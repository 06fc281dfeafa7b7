"""Tables, progress bars and status lines on a terminal, by rich."""

import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from fp8stack.terminal import LAYOUT, printable, silenced_on_error


class Screen(Console):
    """A console that takes text literally: brackets and colons are no markup, and characters that a
    terminal would act on are escaped. On stderr, and with `lasting` on stdout, work goes on where
    the stream cannot be written; else that raises an OSError."""

    def __init__(self, *, stderr: bool = False, lasting: bool = False) -> None:
        stream: IO[str] | None = sys.stderr if stderr else sys.stdout
        if stream is not None and (stderr or lasting):
            stream = cast(IO[str], _Lasting(stream))
        super().__init__(stderr=stderr, file=stream, markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
        """See `Console`."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, such as moving the cursor
                yield segment
            else:
                yield Segment(printable(segment.text, LAYOUT), segment.style)


class _Lasting:
    """A stream that is silenced by its first error."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with silenced_on_error(self._stream):
            self._stream.write(text)

    def flush(self) -> None:
        with silenced_on_error(self._stream):
            self._stream.flush()


class Bar(Progress):
    """A bar that keeps its width, and below it `line`, which goes on in the next row between two of
    its parts where the terminal ends; None: no such line. Then `urgent`. The column `count` shows
    how much of `what` was done; `total` is None where it is not known."""

    line: str | None = None
    urgent: str | None = None

    def __init__(
        self,
        what: str,
        count: ProgressColumn,
        total: float | None,
        done: int,
        console: Console,
        transient: bool = False,
    ) -> None:
        columns = (TextColumn(what), count, BarColumn(), TextColumn("ETA"), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=transient)
        self.task = self.add_task(what, total=total, completed=done)

    def show(self, done: int) -> None:
        """Show that so much was done."""
        self.update(self.task, completed=done)

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
