"""The `fp8stack` command, a file for each group of subcommands. They are imported by `main`, once
Ctrl-C and closed streams are taken care of; until then, nothing that takes long is imported."""

import _signal as signal  # type: ignore[import-not-found]  # signal makes its enums in 10 ms
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import IO, NoReturn

INTERRUPTED = 130
SPIN_COUNT = "1000"
"""How often a thread of GNU's OpenMP, by which torch computes on Linux, looks for work before it
sleeps. With libgomp's 300,000, threads that wait take the cores from those that they wait for as
soon as other processes use the machine, and steps take 10 to 100 times as long."""


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
        if "OMP_WAIT_POLICY" not in os.environ:  # before torch is imported
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        from fp8stack.cli.app import main as run

        run(arguments)
    except SystemExit as end:
        if arguments is None and end.code == INTERRUPTED:
            _leave(INTERRUPTED)  # at once: tearing down torch takes long
        raise
    finally:
        if has_handler:
            ended = arguments is None
            signal.signal(signal.SIGINT, _end if ended else signal.default_int_handler)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    leave_while_importing(frame, INTERRUPTED)
    raise KeyboardInterrupt


def _end(number: int, frame: "FrameType | None") -> None:
    _leave(INTERRUPTED)


def leave_while_importing(frame: "FrameType | None", code: int, message: str = "") -> None:
    """End the process at once if modules are imported at `frame`, where a signal arrived. An
    exception raised there gets lost, or C extensions such as numpy's turn it into an ImportError, a
    traceback or an abort."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if message:
                os.write(2, f"\nfp8stack: {message}\n".encode())
            _leave(code)
        frame = frame.f_back


def _leave(code: int) -> "NoReturn":
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
