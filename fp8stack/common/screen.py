"""The rich console for tables and status lines."""

import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.segment import Segment

from fp8stack.common.terminal import LAYOUT, printable, silenced_on_error


class Screen(Console):
    """A console that prints text literally: brackets and colons are no markup, and characters that
    control a terminal are escaped. If the stream cannot be written, output to stderr, and with
    `lasting` to stdout, is discarded; otherwise an OSError is raised."""

    def __init__(self, *, stderr: bool = False, lasting: bool = False) -> None:
        stream: IO[str] | None = sys.stderr if stderr else sys.stdout
        if stream is not None and (stderr or lasting):
            stream = cast(IO[str], _Lasting(stream))
        super().__init__(stderr=stderr, file=stream, markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
        """See `Console`."""
        for segment in super().render(renderable, options):
            if segment.control:  # a control code of rich, such as moving the cursor
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
