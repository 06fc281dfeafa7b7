"""torch's CPU threads: their number, and the way they wait for each other.

On Linux torch computes with GNU's OpenMP, libgomp. An OpenMP thread that waits for others spins for
some milliseconds, so that the next operation begins without delay. If other processes compete for
the cores, the spinning takes time from the thread that it waits for, and steps take 10 to 100 times
as long. While a process has more OpenMP threads than the machine has cores, libgomp spins 100 times
instead of 300,000 (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). `adapting`
causes this, with an idle extra thread, while threads wait for a core.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp8stack.common.errors import UserError

if TYPE_CHECKING:
    import ctypes

USER_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables by which users set the way that threads wait."""
BUSY = 0.2
"""The machine is busy if a thread waits for a core for more than this share of its time."""
LOOK_S = 0.25
_FIRST_TRY, _LAST_TRY = 40, 240  # looks


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Set the number of torch's threads in this process; None keeps torch's choice. Raises a
    UserError for fewer than 1, or more than the number of cores."""
    if count is None:
        return
    limit = cores()
    if not 1 <= count <= limit:
        raise UserError(
            f"threads {count}: this machine has {limit} cores. Give --threads 1 to {limit}."
        )
    import torch

    torch.set_num_threads(count)


def waited_s(thread: str = "thread-self") -> float | None:
    """The seconds that a thread, given by its folder in /proc, was ready to run without a core, as
    counted by Linux. None on other systems, and for a thread that has ended."""
    try:
        return int(Path("/proc", thread, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


class BusySteps:
    """Detects that the steps of a run wait for cores that other processes use."""

    LONG_S = 10.0  # step time that is judged together

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        waited: Callable[[], float | None] = waited_s,
    ) -> None:
        self._clock, self._waited = clock, waited
        self._steps_s = self._waited_s = 0.0
        self._has_warned = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context that measures a step of the calling thread and the threads it waits for."""
        began, before = self._clock(), self._waited()
        yield
        self._steps_s += self._clock() - began
        self._waited_s += (self._waited() or 0.0) - (before or 0.0)

    def note(self, threads: int) -> str | None:
        """A line for the user, once, if the steps of the last `LONG_S` seconds waited for cores."""
        if self._has_warned or self._steps_s < self.LONG_S:
            return None
        share = self._waited_s / self._steps_s
        self._steps_s = self._waited_s = 0.0
        if share <= BUSY:
            return None
        self._has_warned = True
        fewer = f", or try --threads {threads // 2}" if threads > 1 else ""
        return (
            f"this machine is busy: steps wait {100 * share:.0f}% of their time for a core that "
            f"another process has. Close other work{fewer}"
        )


class Waits:
    """Measures how long the threads of this process wait for a core."""

    def __init__(self) -> None:
        self._before = self._now()

    def longest_s(self) -> float:
        """The seconds that the longest waiting thread waited since the last call; 0 if unknown."""
        before, self._before = self._before, self._now()
        return max((now - before.get(name, now) for name, now in self._before.items()), default=0.0)

    def _now(self) -> dict[str, float]:
        try:
            names = os.listdir("/proc/self/task")
        except OSError:
            return {}
        waits = ((name, waited_s(f"self/task/{name}")) for name in names)
        return {name: seconds for name, seconds in waits if seconds is not None}


class Judge:
    """Decides, at each look, whether threads spin while they wait. They stop spinning when a thread
    had to wait for a core, and try again after 10 s; each failure doubles this time, up to a
    minute."""

    def __init__(self) -> None:
        self.spins = True
        self._looks = _FIRST_TRY  # number of looks to sleep for, the next time
        self._left = 0  # looks until the next try; when spinning, until `_looks` is reset

    def look(self, share: float) -> bool:
        """Whether to spin. `share` is the share of the time that the longest waiting thread
        waited."""
        self._left -= 1
        if not self.spins:
            self.spins = self._left <= 0
            if self.spins:
                self._left = _FIRST_TRY
        elif share > BUSY:
            self.spins = False
            self._left = self._looks
            self._looks = min(2 * self._looks, _LAST_TRY)
        elif self._left <= 0:
            self._looks = _FIRST_TRY
        return self.spins


@contextmanager
def adapting() -> Iterator[None]:
    """Context in which threads that wait for each other sleep while other processes compete for the
    cores, and spin otherwise. The number of torch's threads, and every result, stays the same.

    Has no effect if the user's environment sets the way that threads wait (`USER_SETTINGS`), or if
    torch's OpenMP is not libgomp.
    """
    if sys.platform != "linux" or any(name in os.environ for name in USER_SETTINGS):
        yield
        return
    stop = threading.Event()
    watcher = threading.Thread(target=_adapt, args=(stop,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _adapt(stop: threading.Event) -> None:
    """Until `stop`, measure how long threads wait. While they wait long, hold more OpenMP threads
    than cores, so that they sleep instead of spinning. Has no effect without libgomp."""
    judge, waits = Judge(), Waits()
    stop_extra: threading.Event | None = None  # ends the extra threads; None without them
    while not stop.wait(LOOK_S):
        spins = judge.look(waits.longest_s() / LOOK_S)
        if spins and stop_extra is not None:
            stop_extra.set()
            stop_extra = None
        elif not spins and stop_extra is None and (library := _libgomp()) is not None:
            stop_extra = threading.Event()
            threading.Thread(
                target=_hold_extra_thread, args=(library, stop_extra), daemon=True
            ).start()
    if stop_extra is not None:
        stop_extra.set()


def _hold_extra_thread(library: ctypes.CDLL, stop: threading.Event) -> None:
    """Hold one more OpenMP thread than cores until `stop`. The threads end with this thread."""
    import ctypes

    no_op = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)  # run once by each thread
    library.GOMP_parallel(no_op, None, (os.cpu_count() or 1) + 1, 0)
    stop.wait()


def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch computes with. None if it has none, is not loaded, or computes with
    one thread."""
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if count is None or count() == 1:
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    import ctypes

    # Other packages may have loaded their own copies.
    libraries = sorted(files, key=lambda path: "torch" not in path)
    return ctypes.CDLL(libraries[0]) if libraries else None
