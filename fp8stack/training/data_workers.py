"""The processes that read data ahead, and the errors about processes that are lost.

When a process dies, torch's DataLoader raises an error wherever the main thread is, perhaps in the
middle of a step or a save; for a stopped process it waits forever. This module notices both while
it waits for a batch, between two steps, so that the run can be saved.
"""

import errno
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from fp8stack.common.errors import DataWorkerLost, UserError

LOOK_S = 5.0
"""Seconds between two looks at the processes while a batch is waited for."""
_DYING_S = 1.0  # a process whose pipes are closed is gone within this time
_NO_ROOM = (errno.ENOSPC, errno.EFBIG)
_FULL = (
    "/dev/shm, the shared memory, is full. Make room there, or make it larger (docker run "
    "--shm-size=8g)"
)
_PERHAPS: dict[int, str] = {
    signal.SIGKILL: "Perhaps the machine is out of memory",
    signal.SIGBUS: f"Perhaps {_FULL}",
}
_abandoned: list[Any] = []


class DataWorkers:
    """A context manager for the worker processes of a DataLoader, which start at construction.

    Args:
        loader: a DataLoader with `num_workers` above 0.
        timeout_s: seconds without a batch after which the processes count as lost.
        stops: returns whether a stop was requested; `batch` then waits at most `LOOK_S`.

    Raises:
        DataWorkerLost: the processes cannot be started.
    """

    def __init__(
        self, loader: DataLoader[Tensor], timeout_s: float, stops: Callable[[], bool]
    ) -> None:
        self._timeout_s, self._stops = timeout_s, stops
        earlier = set(multiprocessing.active_children())
        try:
            self._batches = _iterator(loader)
        except (OSError, RuntimeError) as error:
            _kill([*{*multiprocessing.active_children()} - earlier])
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC  # no semaphores
            reason = _FULL if full else str(error).partition("\n")[0]
            raise DataWorkerLost(f"Cannot start data workers: {reason}.") from error
        self._workers = [*{*multiprocessing.active_children()} - earlier]
        # Receive in a thread: it would wait forever for a process that a signal stopped.
        self._receiver = ThreadPoolExecutor(1, "data")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let torch end the processes. If a process is lost or stopped, kill them all instead:
        torch would wait for that process, or for a lock that it held when it died."""
        stopped = any(map(_is_stopped, self._workers))
        if stopped or isinstance(error, DataWorkerLost):
            _abandoned.append(self._batches)  # torch's destructor waits
            _kill(self._workers)
        self._receiver.shutdown(wait=False)

    def batch(self) -> Tensor:
        """Return the next batch. Raises a DataWorkerLost if a process died or no batch arrives in
        time, and any error of reading the data."""
        received: Future[Tensor] = self._receiver.submit(next, self._batches)
        # Counted in looks, not by the clock: time in which this process is stopped does not count.
        look_s, waited_s = min(LOOK_S, self._timeout_s), 0.0
        while not futures.wait([received], look_s).done and not self._dead():
            waited_s += look_s
            if waited_s >= self._timeout_s or self._stops():
                raise DataWorkerLost(self._silence(waited_s))
        try:
            return received.result(_DYING_S)
        except UserError:
            raise
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            if "in DataLoader worker process" not in str(error):
                raise DataWorkerLost(self._ending(error)) from error
            if isinstance(error, MemoryError):
                raise DataWorkerLost("A data worker found no memory left.") from error
            raise

    def _dead(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if not worker.is_alive()]

    def _ending(self, error: Exception) -> str:
        """The error message for a batch that could not be received."""
        ended = wait([worker.sentinel for worker in self._workers], _DYING_S)
        for worker in self._workers:
            if worker.sentinel in ended:  # it may not be a dead process yet
                worker.join(_DYING_S)
        if not (dead := self._dead()):
            return f"Data workers cannot be heard: {str(error).partition('. ')[0]}."
        code = dead[0].exitcode or 0
        if code >= 0:
            return f"Data worker {dead[0].pid} ended with exit code {code}."
        names = {int(number): number.name for number in signal.Signals}
        perhaps = f" {_PERHAPS[-code]}." if -code in _PERHAPS else ""
        return (
            f"Data worker {dead[0].pid} was killed by signal {-code} ({names.get(-code)}).{perhaps}"
        )

    def _silence(self, waited_s: float) -> str:
        """The error message for processes that gave no batch."""
        silent = f"Data workers gave no batch for {waited_s:g} s"
        if waited_s >= self._timeout_s:
            silent += " (worker_timeout)"
        stopped = [str(worker.pid) for worker in self._workers if _is_stopped(worker)]
        if stopped:
            return f"{silent}: a signal stopped process {', '.join(stopped)}."
        return f"{silent}. Perhaps the file system of the data does not answer."


def in_shared_memory(tokens: Tensor) -> Tensor:
    """Return `tokens`; in a data worker, moved to shared memory. (torch would move it in a thread,
    whose errors are lost.) Raises a DataWorkerLost if shared memory is full."""
    if get_worker_info() is None:
        return tokens
    try:
        shared: Tensor = tokens.share_memory_()  # type: ignore[no-untyped-call]
        return shared
    except RuntimeError as error:
        code = re.search(r"\((\d+)\)\s*$", str(error))  # errno, at the end of torch's message
        if code is None or int(code[1]) not in _NO_ROOM:
            raise
        raise DataWorkerLost(f"A data worker cannot hand over a batch: {_FULL}.") from error


def _iterator(loader: DataLoader[Tensor]) -> Any:
    """Start the processes, and remove torch's SIGCHLD handler, which raises an error."""
    try:
        return iter(loader)
    finally:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()  # SIGKILL also ends a stopped process
    for worker in workers:
        worker.join(_DYING_S)


def _is_stopped(worker: BaseProcess) -> bool:
    """Whether a signal stopped the process (Linux only)."""
    try:
        status = Path(f"/proc/{worker.pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
