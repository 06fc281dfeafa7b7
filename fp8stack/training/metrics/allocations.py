"""Memory that a step allocates, and that torch's allocator or malloc holds unused."""

import ctypes
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

from fp8stack.common.tables import counted


@dataclass(frozen=True, kw_only=True)
class Allocations:
    """The allocations of a step in steady state. None if unknown, like `fresh` on a CPU."""

    count: int  # allocations of tensors in the step
    bytes: int  # of these allocations
    peak_bytes: int  # the peak above the bytes in use when the step began
    held_bytes: int | None = None  # reserved by the allocator after the step
    unused_bytes: int | None = None  # of these, not in use
    fresh: int | None = None  # new segments reserved on a GPU
    retries: int = 0  # times that a GPU ran out of memory and the caches were emptied


def on_gpu(before: Mapping[str, Any], after: Mapping[str, Any]) -> Allocations:
    """The allocations on a GPU, given the device module's `memory_stats` before and after the
    step; the peak was reset before."""

    def grown(key: str) -> int:
        return int(after.get(key, 0)) - int(before.get(key, 0))

    return Allocations(
        count=grown("allocation.all.allocated"),
        bytes=grown("allocated_bytes.all.allocated"),
        peak_bytes=int(after.get("allocated_bytes.all.peak", 0))
        - int(before.get("allocated_bytes.all.current", 0)),
        held_bytes=int(after.get("reserved_bytes.all.current", 0)),
        unused_bytes=int(after.get("inactive_split_bytes.all.current", 0)),
        fresh=grown("segment.all.allocated"),
        retries=grown("num_alloc_retries"),
    )


def on_cpu(changes: Iterable[int], heap: tuple[int, int] | None) -> Allocations:
    """The allocations on a CPU, given the bytes of each allocation in order (negative for a
    release), and `heap_bytes()`."""
    count = total = now = peak = 0
    for change in changes:
        if change > 0:
            count, total = count + 1, total + change
        now += change
        peak = max(peak, now)
    held, unused = heap or (None, None)
    return Allocations(
        count=count, bytes=total, peak_bytes=peak, held_bytes=held, unused_bytes=unused
    )


def changes_in(recorded: profile) -> list[int]:
    """Bytes of each allocation on the CPU in a profile, negative for releases."""
    results = getattr(recorded.profiler, "kineto_results", None)  # torch 2.13 has no public way
    events = [] if results is None else results.events()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    return [size for _, size in sorted(changes, key=lambda pair: pair[0])]


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap_bytes() -> tuple[int, int] | None:
    """The bytes that malloc holds, and how many of them are free; None without glibc 2.33."""
    if sys.platform != "linux":
        return None
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # not in every C library
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.arena + info.hblkhd, info.fordblks


def words(used: Allocations, steps: int = 1) -> str:
    """The figures of so many `steps` as sentences."""
    text = (
        f"Memory in {counted(steps, 'step')}: {used.count:,} allocations of {_mib(used.bytes)} "
        f"together, {_mib(used.peak_bytes)} at once beyond what was in use before."
    )
    if used.held_bytes and used.unused_bytes is not None:
        share = 100 * used.unused_bytes / used.held_bytes
        text += (
            f" The allocator holds {_mib(used.held_bytes)}, of which {_mib(used.unused_bytes)} "
            f"({share:.1f} %) lie unused between blocks in use."
        )
    if used.fresh is not None:
        text += f" Segments newly reserved on the GPU: {used.fresh}."
    if used.retries:
        text += (
            f" Memory ran out {counted(used.retries, 'time')} and caches were emptied: lower "
            "--batch or use --activation-checkpointing selective."
        )
    return text


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
