"""Signal handlers: a run stops after the current step, or at once where nothing would be lost. No
torch import here: the handlers are installed before torch is imported."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fp8stack.common.errors import UserError

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""In order: Ctrl-C, kill and schedulers, a closed terminal, Slurm's --signal=USR1@120."""
STOPPING = "stopping after this step; Ctrl-C again to quit at once"
STOPPED = "Stopped before a step was done; nothing is lost."
NOTHING_DONE = f"{STOPPED} Give the same command again to go on."


Leave = Callable[[FrameType | None, int, str], None]
"""Called with the frame where a signal arrived, an exit code and a message."""


class Preempted(UserError):
    """A signal stopped the run before there was anything to save. Exit code 75."""

    exit_code = 75


class _AtOnce(BaseException):
    """Raised by the handler to stop at once; a BaseException, which `except Exception` does not
    catch."""


def _tell(text: str) -> None:
    # Unbuffered: the signal may have interrupted a print. The terminal may be closed.
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class StopRequests:
    """Records whether a signal requested a stop; calling it returns that.

    Attributes:
        tell: prints, from within the signal handler, that the run will stop.
    """

    def __init__(self, leave: Leave | None = None) -> None:
        self.tell: Callable[[str], None] = _tell
        self._leave = leave
        self._requested = False
        self._message: str | None = None
        self._process = os.getpid()

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._requested

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """A context in which a request stops the run at once: `stop_requests` raises a `Preempted`
        with the text `message`. An earlier request counts too."""
        outer, self._message = self._message, message
        try:
            if self._requested:
                raise _AtOnce(message)
            yield
        finally:
            self._message = outer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A DataLoader worker inherits the handler; its parent process ends it.
        if os.getpid() != self._process:
            return
        if self._requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._requested = True
        if self._message is not None:
            if self._leave is not None:
                self._leave(frame, Preempted.exit_code, self._message)
            raise _AtOnce(self._message)
        self.tell(STOPPING)


@contextmanager
def stop_requests(leave: Leave | None = None) -> Iterator[StopRequests]:
    """A context in which `SIGNALS` request a stop after the current step, and a second SIGINT
    raises KeyboardInterrupt. Raises a Preempted if a stop was requested in the context
    `StopRequests.at_once`, unless `leave` ends the process there."""
    requests = StopRequests(leave)
    # Windows lacks some of them.
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)  # started by nohup
    old = {number: signal.signal(number, requests._handle) for number in numbers}
    try:
        yield requests
    except _AtOnce as stopped:
        raise Preempted(str(stopped)) from None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
