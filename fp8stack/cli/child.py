"""A run of a comparison: the command, in a process that ends when the comparison does.

Its stdin is a pipe that the comparison holds open. At its end this process requests a stop of
itself, as a signal would, so that the run is saved; the program reads from an empty stdin.
"""

import os
import signal
import threading

from fp8stack import cli


def main() -> None:
    """Run the command with the process's arguments."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_stop_at_end, args=(pipe,), daemon=True).start()
    cli.main()


def _stop_at_end(pipe: int) -> None:
    """Wait until the other end of a pipe is closed."""
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
