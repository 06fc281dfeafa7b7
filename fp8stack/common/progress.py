"""Progress bars, drawn by rich."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


class Bar(Progress):
    """A progress bar of constant width, with an optional text in the row below, `urgent`. The
    column `count` shows the amount of `label` that is done, which `figures` follow at the end of
    the bar. `total` is None if unknown."""

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
        super().__init__(
            TextColumn(label),
            count,
            BarColumn(bar_width=20),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=transient,
        )
        self.task = self.add_task(label, total=total, completed=done, figures="")

    def show(self, done: int, figures: str) -> None:
        """Update the bar to the amount `done`."""
        self.update(self.task, completed=done, figures=figures)

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from super().get_renderables()
        if self.urgent is not None:
            yield Text(self.urgent, no_wrap=True, overflow="ellipsis")
