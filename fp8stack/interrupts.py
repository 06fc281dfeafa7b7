"""Signals that arrive while modules are imported. Nothing that takes long is imported here."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import IO, NoReturn


def imports_under_way(frame: "FrameType | None") -> int:
    """The number of frames of the import system that lead to `frame`. An exception that a signal
    handler raises there gets lost, or C extensions such as numpy's turn it into an ImportError, a
    traceback or an abort."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count


def leave(code: int) -> "NoReturn":
    """End the process at once, with what was printed and a cursor that can be seen."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # status lines hide it
    os._exit(code)


def _flush(stream: "IO[str] | None") -> None:
    try:
        if stream is not None:
            stream.flush()
    except (OSError, RuntimeError, ValueError):  # closed, or in the middle of it
        return
