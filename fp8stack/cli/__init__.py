"""The `fp8stack` command, a file for each group of subcommands. They are imported by `main`, once
Ctrl-C and closed streams are taken care of; until then, nothing that takes long is imported."""

import _signal as signal  # type: ignore[import-not-found]  # signal makes its enums in 10 ms
import os
import sys

from fp8stack.interrupts import imports_under_way, leave

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit. Bad input is one line on stderr and the error's exit code.

    Args:
        arguments: the words of the command; None for this process's own, which then ends.
    """
    has_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_handler:  # else Ctrl-C is ignored, as by nohup, or somebody else's
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _open_streams()
        from fp8stack.cli.app import main as run

        run(arguments)
    except SystemExit as end:
        if arguments is None and end.code == INTERRUPTED:
            leave(INTERRUPTED)  # at once: tearing down torch takes long
        raise
    finally:
        if has_handler:
            last = _leave if arguments is None else signal.default_int_handler
            signal.signal(signal.SIGINT, last)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    if imports_under_way(frame):
        leave(INTERRUPTED)
    raise KeyboardInterrupt


def _leave(number: int, frame: "FrameType | None") -> None:
    leave(INTERRUPTED)


def _open_streams() -> None:
    """Open the standard streams that the command was started without (`>&-`) as /dev/null. Else the
    next file that is opened would take their place, and printing would fail."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
