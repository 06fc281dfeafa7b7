"""Progress bars, by rich."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


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
