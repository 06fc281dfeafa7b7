"""Signals as requests: a run stops between two steps, or at once where nothing would be lost. No
torch here: requests are heard before torch is imported."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fp8stack.errors import UserError

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Ctrl-C; what kill and schedulers send; a terminal that closes; Slurm's --signal=USR1@120."""
STOPPING = "stopping after this step; Ctrl-C again to quit at once"
NOTHING_DONE = (
    "Stopped before a step was done; nothing is lost. Start it again with --resume auto to go on."
)


class Preempted(UserError):
    """A signal stopped the run while there was nothing to be saved. Exit code 75."""

    exit_code = 75


class _AtOnce(BaseException):
    """Leaves whatever is under way; no `except Exception` holds it up."""


def _tell(text: str) -> None:
    # Unbuffered: the signal may have come in the middle of a print. The terminal may be gone.
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class StopRequests:
    """Whether a signal asked for a stop: call it.

    Attributes:
        tell: says that a request was heard, from within a signal handler.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = _tell
        self._asked = False
        self._said: str | None = None
        self._process = os.getpid()

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked

    @contextmanager
    def at_once(self, said: str) -> Iterator[None]:
        """Within, a request does not wait for a step: `stop_requests` ends by raising `Preempted`,
        which says `said`. One that came before counts."""
        outer, self._said = self._said, said
        try:
            if self._asked:
                raise _AtOnce(said)
            yield
        finally:
            self._said = outer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # one that reads data inherited this; it is told to end
            return
        if self._asked:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._asked = True
        if self._said is not None:
            raise _AtOnce(self._said)
        self.tell(STOPPING)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Within, the `SIGNALS` ask for a stop after the step; a second SIGINT interrupts. Raises a
    Preempted if a stop was asked for within `StopRequests.at_once`."""
    requests = StopRequests()
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]  # Windows: some
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
