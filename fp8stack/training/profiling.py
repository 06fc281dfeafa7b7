"""What one step spends its time on, by torch's profiler. It must not know how a step is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fp8stack.training.allocations import (
    Allocations,
    changes_in,
    heap_bytes,
    on_cpu,
    on_gpu,
    words,
)
from fp8stack.training.storage import storage_errors, write_atomically

WARM_UP = 4
"""Steps before the one that is profiled: they compile, tune and fill caches."""
TOP = 10
TRACE, TABLE = "trace.json.gz", "profile.md"


class Recording(profile):
    """A profile, and what was allocated while it was made; None before its end."""

    allocations: Allocations | None = None


@contextmanager
def recording(device: torch.device) -> Iterator[Recording]:
    """Profile what runs within, on `device` all of it: the work that was under way before is waited
    for, and so is that which was begun."""
    activities = [ProfilerActivity.CPU]
    on_cuda = device.type == "cuda"
    before: dict[str, int] = {}
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)
    with Recording(activities=activities, profile_memory=not on_cuda) as recorded:
        yield recorded
        if on_cuda:
            torch.cuda.synchronize(device)
    if on_cuda:
        recorded.allocations = on_gpu(before, torch.cuda.memory_stats(device))
    else:
        recorded.allocations = on_cpu(changes_in(recorded), heap_bytes())


def write(recorded: Recording, folder: Path, step: int) -> str:
    """Write the trace, and the table with a line about memory, into `folder`; return the latter.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    text = table(recorded, step)
    if recorded.allocations is not None:
        text += f"\n{words(recorded.allocations)}\n"
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(folder / TRACE))
    write_atomically(folder / TABLE, text.encode())
    return text


def table(recorded: profile, step: int) -> str:
    """The operators with the most time of their own, without what they call: a Markdown table.

    Time is a GPU's where one worked, the CPU's otherwise; shares are of all of it.
    """
    events = recorded.key_averages()
    operators = [
        event for event in events if event.device_type.name == "CPU" and event.key != "[memory]"
    ]
    kernels_us = sum(
        event.self_device_time_total
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    if kernels_us:
        where, total_us = "the GPU", kernels_us
        rows = [(event.self_device_time_total, event.key, event.count) for event in operators]
    else:
        where, total_us = "the CPU", sum(event.self_cpu_time_total for event in operators)
        rows = [(event.self_cpu_time_total, event.key, event.count) for event in operators]
    rows = sorted(rows, reverse=True)[:TOP]
    width = max(len(key) for _, key, _ in rows)
    lines = [
        f"Step {step}: {total_us / 1000:.2f} ms on {where}. The operators that took the longest, "
        "without what they call:",
        "",
        f"| {'operator':{width}} | calls |        ms | share |",
        f"|{'-' * (width + 2)}|------:|----------:|------:|",
    ]
    for time_us, key, count in rows:
        share = 100 * time_us / total_us
        lines.append(f"| {key:{width}} | {count:5} | {time_us / 1000:9.3f} | {share:3.0f} % |")
    return "\n".join(lines) + "\n"
