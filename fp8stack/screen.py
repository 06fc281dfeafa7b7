"""The console that tables and status lines go to, by rich."""

import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.segment import Segment

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
