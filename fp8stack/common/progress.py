"""Progress bars, drawn by rich."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


class Bar(Progress):
    """A progress bar of constant width, with two optional texts in the rows below: `line`, whose
    fields wrap at the width of the terminal, and `urgent`. The column `count` shows the amount of
    `label` that is done. `total` is None if unknown."""

    line: str | None = None
    urgent: str | None = None

    def __init__(
        self,
        label: str,
        count: ProgressColumn,
        total: float | None,
        done: int,
        console: Console,
        transient: bool = False,
    ) -> None:
        columns = (TextColumn(label), count, BarColumn(), TextColumn("ETA"), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=transient)
        self.task = self.add_task(label, total=total, completed=done)

    def show(self, done: int) -> None:
        """Update the bar to the amount `done`."""
        self.update(self.task, completed=done)

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from super().get_renderables()
        rows = [] if self.line is None else rows_of(self.line, self.console.width)
        for row in [*rows, *([] if self.urgent is None else [self.urgent])]:
            yield Text(row, no_wrap=True, overflow="ellipsis")


def rows_of(line: str, width: int) -> list[str]:
    """Wrap the fields of `line`, separated by " | ", into rows of at most `width` characters. A
    longer field has its own row."""
    rows = [""]
    for number, field in enumerate(line.split(" | ")):
        joined = f"{rows[-1]} | {field}" if number else field
        if number and len(joined) > width:
            rows.append(field)
        else:
            rows[-1] = joined
    return rows
