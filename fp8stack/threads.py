"""torch's CPU threads: how many compute, and how they wait for each other.

On Linux torch computes by GNU's OpenMP, libgomp. A thread of it that waits for the others spins for
some milliseconds, so that the next operation begins at once. Where other processes want the same
cores, it takes that time from the very thread that it waits for, and steps take 10 to 100 times as
long. While a process has more OpenMP threads than the machine has cores, libgomp spins 100 times in
place of 300,000 (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html): `adapting` has
it do so, by threads that do nothing, as long as threads wait for a core.
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

from fp8stack.errors import UserError

if TYPE_CHECKING:
    import ctypes

OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables by which a user says how threads wait."""
BUSY = 0.2
"""The share of its time that a thread waits for a core, from which the machine counts as busy."""
LOOK_S = 0.25
_FIRST_TRY, _LAST_TRY = 40, 240  # looks


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Have torch compute with `count` threads in this process; None: with as many as it chose.
    Raises a UserError for fewer than 1, or more than the machine has cores."""
    if count is None:
        return
    most = cores()
    if not 1 <= count <= most:
        raise UserError(
            f"threads {count}: this machine has {most} cores. Give 1 to {most}, or leave it out."
        )
    import torch

    torch.set_num_threads(count)


def waited_s(thread: str = "thread-self") -> float | None:
    """For how many seconds of its life a thread, by its folder in /proc, was ready to run and had
    no core, as Linux counts it; None where it does not, and for a thread that ended."""
    try:
        return int(Path("/proc", thread, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


class BusySteps:
    """Finds out whether the steps of a run wait for cores that other processes have."""

    LONG_S = 10.0  # how much time of steps is looked at together

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        waited: Callable[[], float | None] = waited_s,
    ) -> None:
        self._clock, self._waited = clock, waited
        self._taken_s = self._waited_s = 0.0
        self._told = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, a step is computed, by the calling thread and others that it waits for."""
        began, before = self._clock(), self._waited()
        yield
        self._taken_s += self._clock() - began
        self._waited_s += (self._waited() or 0.0) - (before or 0.0)

    def note(self, threads: int) -> str | None:
        """A line for the user, once: the steps of the last `LONG_S` seconds waited for cores."""
        if self._told or self._taken_s < self.LONG_S:
            return None
        share = self._waited_s / self._taken_s
        self._taken_s = self._waited_s = 0.0
        if share <= BUSY:
            return None
        self._told = True
        fewer = f", or try --threads {threads // 2}" if threads > 1 else ""
        return (
            f"this machine is busy: steps wait {100 * share:.0f}% of their time for a core that "
            f"another process has. Close other work{fewer}"
        )


class Waits:
    """How long each thread of this process waited for a core."""

    def __init__(self) -> None:
        self._before = self._now()

    def longest_s(self) -> float:
        """The seconds of the thread that waited longest since the last call; 0 if none counts."""
        before, self._before = self._before, self._now()
        return max((now - before.get(name, now) for name, now in self._before.items()), default=0.0)

    def _now(self) -> dict[str, float]:
        try:
            names = os.listdir("/proc/self/task")
        except OSError:
            return {}
        found = ((name, waited_s(f"self/task/{name}")) for name in names)
        return {name: seconds for name, seconds in found if seconds is not None}


class Judge:
    """Decides, look by look, whether threads spin while they wait. They stop when one had to wait
    for a core, and try again after 10 s, after twice as long each time that it fails, up to a
    minute."""

    def __init__(self) -> None:
        self.spins = True
        self._looks = _FIRST_TRY  # to sleep for, the next time
        self._left = 0  # of those looks; when spinning, until all is forgotten

    def look(self, share: float) -> bool:
        """Whether to spin, where the thread that waited longest did so for this share of the
        time."""
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
    """Within, threads that wait for each other sleep while other processes want the cores, and
    spin while they do not. The number of threads stays, and so does every result.

    Nothing changes where the user's environment says how they wait (`OWN_SETTINGS`), or where
    torch's OpenMP is not libgomp.
    """
    if sys.platform != "linux" or any(name in os.environ for name in OWN_SETTINGS):
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_adapt, args=(over,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _adapt(over: threading.Event) -> None:
    """Look at how long threads wait, until it is `over`, and have torch's OpenMP threads sleep
    instead of spinning by more of them than cores; without effect where torch has no libgomp."""
    judge, waits = Judge(), Waits()
    enough: threading.Event | None = None  # ends the many threads, if there are
    while not over.wait(LOOK_S):
        spins = judge.look(waits.longest_s() / LOOK_S)
        if spins and enough is not None:
            enough.set()
            enough = None
        elif not spins and enough is None and (library := _libgomp()) is not None:
            enough = threading.Event()
            threading.Thread(target=_be_many, args=(library, enough), daemon=True).start()
    if enough is not None:
        enough.set()


def _be_many(library: ctypes.CDLL, over: threading.Event) -> None:
    """Have one OpenMP thread more than cores until it is `over`: they end with this thread."""
    import ctypes

    nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)  # run once by each
    library.GOMP_parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)
    over.wait()


def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch computes with; None if there is none, if torch is not loaded, or
    computes with one thread, which waits for no other."""
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if count is None or count() == 1:
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    import ctypes

    own = sorted(files, key=lambda path: "torch" not in path)  # others bring their own
    return ctypes.CDLL(own[0]) if own else None
