"""Every kernel of a profiled training step, as CSV: the whole name, the operator that launched it
with its shapes, the number of launches, and microseconds.

On a CPU, where no kernels run, the operators that compute stand for them.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor.codecache import PyCodeCache

from fp8stack.training.metrics import profiler

GPUS = ("CUDA", "XPU")
# Kinds of kernels, by what their names contain; the first that matches counts.
KINDS = {
    "inductor": r"^triton_(?!tem)",
    "FP8 casts": r"cast_product|cast_weights|transpose_bytes|find_amaxes|nvfp4",
    "attention": r"flash|fmha|sdpa|attention",
    "GEMM": r"gemm|cutlass|cublas|nvjet|wgmma|mm$|splitK",
    "many tensors": r"multi_tensor|adam|foreach",
    "copies": r"memcpy|memset|copy_kernel|CatArrayBatchedCopy",
}


class Launches(NamedTuple):
    """The launches of one kernel by one operator."""

    kernel: str  # its whole name
    op: str  # the operator that launched it; "" if the profiler does not know
    within: str  # the outermost operator, such as a node of autograd or the optimizer's step
    shapes: str  # of the operator's inputs
    count: int  # type: ignore[assignment]  # not the tuple's method
    us: float  # of all of them together


def profiled(step: Callable[[], None], device: str, folder: Path) -> list[Launches]:
    """Run a step, and write `kernels.csv`, the trace, and the code that inductor has made in this
    process, which has its kernels by their names. Returns the kernels, the longest first."""
    with profiler.recording(torch.device(device), shapes=True) as recorded:
        step()
    events: Any = recorded.events  # it has no types
    rows = launches(events() or ())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kernels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Launches._fields)
        writer.writerows(row._replace(us=round(row.us, 3)) for row in rows)
    recorded.export_chrome_trace(str(folder / profiler.TRACE))
    for module in PyCodeCache.modules:
        shutil.copy(str(module.__file__), folder)
    return rows


def launches(events: Iterable[Any]) -> list[Launches]:
    """The kernels among the events of a profile, or without any the operators of a CPU by the time
    that they themselves take. The longest come first, and none is left out."""
    events = list(events)
    kernels = [e for e in events if e.device_type.name in GPUS and not e.is_user_annotation]
    times: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    unknown: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for kernel in kernels:
        unknown[kernel.name][_duration(kernel)] += 1
    for event in events:
        if event.device_type.name in GPUS:
            continue
        parents = list(_parents(event))
        within = parents[-1].name if parents else event.name
        for kernel in event.kernels:
            if unknown[kernel.name][round(kernel.duration, 3)] > 0:
                unknown[kernel.name][round(kernel.duration, 3)] -= 1
                key = (kernel.name, event.name, within, str(event.input_shapes))
                times[key].append(kernel.duration)
        if not kernels and event.self_cpu_time_total > 0:
            key = (event.name, parents[0].name if parents else "", within, str(event.input_shapes))
            times[key].append(event.self_cpu_time_total)
    for name, durations in unknown.items():
        if any(durations.values()):
            times[name, "", "", ""] += durations.elements()
    rows = [Launches(*key, len(us), sum(us)) for key, us in times.items()]
    return sorted(rows, key=lambda row: -row.us)


def _duration(event: Any) -> float:
    us: float = event.time_range.end - event.time_range.start
    return round(us, 3)


def _parents(event: Any) -> Iterable[Any]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def ms_by_kind(rows: Iterable[Launches]) -> dict[str, float]:
    """Milliseconds of each kind of kernels, the longest first; "other" are not in `KINDS`."""
    totals: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        kinds = (kind for kind, words in KINDS.items() if re.search(words, row.kernel, re.I))
        totals[next(kinds, "other")] += row.us / 1000
    return {kind: round(totals[kind], 2) for kind in sorted(totals, key=lambda kind: -totals[kind])}
