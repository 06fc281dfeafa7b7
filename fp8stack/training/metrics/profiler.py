"""Profiles of training steps by torch.profiler."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fp8stack.common.io import storage_errors, write_atomically
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.metrics import allocations
from fp8stack.training.metrics.allocations import Allocations

WARM_UP = 4  # steps before the first profiled one: they compile, autotune and fill caches
TOP = 10
TRACE, TABLE = "trace.json.gz", "profile.md"
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
_GPUS = [activity.name for activity in _ACTIVITIES.values()]  # also as types of devices


class Recording(profile):
    """A torch profile, with allocations and duration, None until it ends."""

    allocations: Allocations | None = None
    wall_s: float | None = None


class StepProfiler:
    """Profiles consecutive steps of a run in one trace.

    Args:
        done: the last step that is already done.
        folder: where trace and table are written.

    Attributes:
        first: the first step to profile; None if it is already done.
    """

    def __init__(self, config: RunConfig, done: int, device: torch.device, folder: Path) -> None:
        self.config, self.device, self.folder = config, device, folder
        first = config.profile_step or min(done + WARM_UP + 1, config.steps)
        self.first = first if config.profile and first > done else None
        self._steps: list[int] = []
        self._open = ExitStack()
        self._recorded: Recording | None = None

    def wants(self, step: int) -> bool:
        """Whether to profile this step."""
        is_short = len(self._steps) < self.config.profile_steps
        return is_short and self.first is not None and step >= self.first

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile what runs within, and up to the next profiled step if there is one."""
        config = self.config
        if self._recorded is None:
            options = {"shapes": config.profile_shapes, "memory": config.profile_memory}
            self._recorded = self._open.enter_context(recording(self.device, **options))
        with torch.profiler.record_function(f"step {step}"):
            yield
        self._steps.append(step)
        if self._is_over and self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()  # include what still runs on the GPU

    @property
    def _is_over(self) -> bool:
        last = self._steps[-1]
        return not self.wants(last) or last == self.config.steps

    def close(self) -> None:
        """Stop recording, even before the last step to profile."""
        self._open.close()

    def written(self) -> str | None:
        """After the last profiled step, write the profile and return its table; else None."""
        recorded = self._recorded
        if recorded is None or not self._is_over:
            return None
        self.close()
        self._recorded, self.first = None, None
        return write(recorded, self.folder, *self._steps)


@contextmanager
def recording(
    device: torch.device, *, shapes: bool = False, memory: bool = False
) -> Iterator[Recording]:
    """Profile what runs within; `device` is synchronized before and after. `shapes` records
    operands' shapes, `memory` each allocation on a GPU (on a CPU they always are)."""
    activities, on_gpu = [ProfilerActivity.CPU], device.type != "cpu"
    gpu, before = torch.get_device_module(device), {}
    if on_gpu:
        activities.append(_ACTIVITIES[device.type])
        gpu.synchronize(device)
        gpu.reset_peak_memory_stats(device)
        before = gpu.memory_stats(device)
    options: dict[str, Any] = {"record_shapes": shapes, "profile_memory": memory or not on_gpu}
    recorded = Recording(activities=activities, **options)
    with recorded:
        began = time.perf_counter()
        yield recorded
        if on_gpu:
            gpu.synchronize(device)
        wall_s = time.perf_counter() - began
    if on_gpu:
        recorded.allocations = allocations.on_gpu(before, gpu.memory_stats(device))
    else:
        changes = allocations.changes_in(recorded)
        recorded.allocations = allocations.on_cpu(changes, allocations.heap_bytes())
    recorded.wall_s = wall_s


def write(recorded: Recording, folder: Path, *steps: int) -> str:
    """Write the trace, and the table with a line about memory, into `folder`; return the table.
    Raises a StorageError if the disk cannot be written."""
    text = table(recorded, *steps)
    if (share := busy(recorded)) is not None:
        text += f"\nThe GPU was busy {100 * share:.1f} % of the time.\n"
    if recorded.allocations is not None:
        text += f"\n{allocations.words(recorded.allocations, len(steps))}\n"
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(folder / TRACE))
    write_atomically(folder / TABLE, text.encode())
    return text


def busy(recorded: Recording) -> float | None:
    """The share of the recorded time in which a GPU ran a kernel or copy: 0 to 1; None without
    any."""
    events: Any = recorded.events  # it has no types
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events() or ()
        if event.device_type.name in _GPUS and not event.is_user_annotation
    )
    if not spans or not recorded.wall_s:
        return None
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return min(1.0, covered / (recorded.wall_s * 1e6))


def table(recorded: Recording, *steps: int) -> str:
    """torch.profiler's table of the operators that took the most time in these steps, without the
    time of the operators that they call: GPU time if a kernel ran, else CPU time. With shapes,
    there is a row for each operator and shape."""
    averages = recorded.key_averages(group_by_input_shape=recorded.record_shapes)
    on_gpu = any(event.device_type.name in _GPUS for event in averages)
    key = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    rows = averages.table(sort_by=key, row_limit=TOP, max_name_column_width=40)
    named = f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"
    return f"{named}: the operators that took the longest.\n\n```\n{rows.strip()}\n```\n"
