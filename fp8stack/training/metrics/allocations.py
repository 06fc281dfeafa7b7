"""Memory that a step allocates, and that torch's allocator or malloc holds unused."""

import ctypes
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

from fp8stack.tables import counted


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
    """From `torch.cuda.memory_stats` before and after the step; the peak was reset before."""

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
    """From each allocation's bytes (negative for a release), in order, and `heap_bytes()`."""
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
    found = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    return [size for _, size in sorted(found, key=lambda pair: pair[0])]


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap_bytes() -> tuple[int, int] | None:
    """The bytes that malloc holds, and how many of them are free; None without glibc 2.33."""
    if sys.platform != "linux":
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)  # not in every C library
    if ask is None:
        return None
    ask.restype = _Mallinfo2
    found = ask()
    return found.arena + found.hblkhd, found.fordblks


def words(found: Allocations, steps: int = 1) -> str:
    """The figures of so many `steps` as sentences."""
    which, it = ("this step", "the step") if steps == 1 else (f"these {steps} steps", "they")
    text = (
        f"Memory in {which}: {found.count:,} allocations of {_mib(found.bytes)} together, "
        f"{_mib(found.peak_bytes)} at once beyond what {it} began with."
    )
    if found.held_bytes and found.unused_bytes is not None:
        share = 100 * found.unused_bytes / found.held_bytes
        text += (
            f" The allocator holds {_mib(found.held_bytes)}, of which {_mib(found.unused_bytes)} "
            f"({share:.1f} %) lie unused between blocks in use."
        )
    if found.fresh == 0:
        text += " No new segment was asked of the GPU."
    elif found.fresh is not None:
        text += f" Segments newly asked of the GPU: {found.fresh}."
    if found.retries:
        text += (
            f" Memory ran out {counted(found.retries, 'time')} and caches were emptied: lower "
            "--batch or use --activation-checkpointing selective."
        )
    return text


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
