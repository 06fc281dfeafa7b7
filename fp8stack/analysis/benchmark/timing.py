"""Timing side by side: arms take turns in one process."""

import math
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from fp8stack.common.version import __version__
from fp8stack.precision import Hardware, probe
from fp8stack.precision.gpus import find_gpu
from fp8stack.training.memory_check import keep_freed_memory

Arm = Callable[[], object]

LEAST_ROUNDS = 6  # the fewest rounds whose range encloses the median with a confidence of 95 %
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one arm over all its rounds."""

    median_ms: float
    low_ms: float  # to `high_ms`: the 95 % confidence interval of the median, see `median_interval`
    high_ms: float
    fastest_ms: float
    rounds: int
    peak_memory_gib: float | None = None  # of one call on a GPU, beyond what was there before
    samples_ms: tuple[float, ...] = ()  # all rounds, in order, if arms took turns

    def to_json(self) -> dict[str, float | int | None]:
        """The figures by name, milliseconds to 4 and GiB to 3 decimals; without the samples."""
        names = ("median_ms", "low_ms", "high_ms", "fastest_ms")
        times = {name: round(getattr(self, name), 4) for name in names}
        peak = None if self.peak_memory_gib is None else round(self.peak_memory_gib, 3)
        return {**times, "rounds": self.rounds, "peak_memory_gib": peak}


def summarize(samples_ms: Sequence[float], peak_memory_gib: float | None = None) -> Timing:
    """The samples of one arm as a `Timing`. There must be one at least."""
    low, high = median_interval(samples_ms)
    return Timing(
        median_ms=statistics.median(samples_ms),
        low_ms=low,
        high_ms=high,
        fastest_ms=min(samples_ms),
        rounds=len(samples_ms),
        peak_memory_gib=peak_memory_gib,
    )


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, whatever the distribution.

    Of n sorted samples, the k-th from below and the k-th from above enclose the median with
    probability 1 - 2 P(B < k), B binomial (n, 1/2); k is the largest for which that is 95 % or
    more (H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1). With fewer than
    `LEAST_ROUNDS` samples there is none, and this is their whole range, of less confidence.
    """
    from scipy import stats  # takes a second to import

    ordered = sorted(samples)
    k = max(1, int(stats.binom.ppf((1 - CONFIDENCE) / 2, len(ordered), 0.5)))
    return ordered[k - 1], ordered[-k]


def interleaved(
    arms: Mapping[str, Arm],
    *,
    rounds: int = 100,
    warm_up: int = 10,
    device: str = "cpu",
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """The timings of all arms, which take turns: what disturbs a shared machine hits all alike.
    Take ratios of timings from one call only.

    Args:
        arms: what is timed, by name; each is called once per round.
        rounds: how many rounds are timed.
        warm_up: how many are run before and not timed; the first compiles and tunes.
        device: see `Hardware.device`; a GPU is waited for before and after each call, and in a last
            round of its own each arm's peak memory is taken.
        budget_s: stop before `rounds`, but not before `LEAST_ROUNDS`, where one more would end
            later than this after the first round of the warm-up, which compiles; warming up stops
            after a tenth of it, but not before two rounds.
    """
    if device == "cpu":
        allocator()
    budget, begin = math.inf if budget_s is None else budget_s, clock()
    for number in range(warm_up):
        _round(arms, device, clock)
        if number == 0:
            begin = clock()
        elif clock() - begin > budget / 10:
            break
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        start = clock()
        for name, ms in _round(arms, device, clock).items():
            samples[name].append(ms)
        now = clock()
        if number + 1 >= LEAST_ROUNDS and (now - begin) + (now - start) > budget:
            break
    on_gpu = device != "cpu"
    peaks = {name: _peak_gib(arm, device) if on_gpu else None for name, arm in arms.items()}
    return {
        name: replace(summarize(values, peaks[name]), samples_ms=tuple(values))
        for name, values in samples.items()
    }


def _round(arms: Mapping[str, Arm], device: str, clock: Callable[[], float]) -> dict[str, float]:
    times_ms = {}
    for name, arm in arms.items():
        wait_for(device)
        start = clock()
        arm()
        wait_for(device)
        times_ms[name] = 1000 * (clock() - start)
    return times_ms


def wait_for(device: str) -> None:
    """Wait until the GPU has done what it was given; nothing on a CPU."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def _peak_gib(arm: Arm, device: str) -> float:
    """The most GPU memory during one call, beyond what was there before."""
    gpu = torch.get_device_module(device)
    gpu.synchronize()
    before: int = gpu.memory_allocated()
    gpu.reset_peak_memory_stats()
    arm()
    gpu.synchronize()
    peak: int = gpu.max_memory_allocated()
    return (peak - before) / 2**30


def ratio(timing: Timing, to: Timing) -> float:
    """The time of `timing` relative to `to`, by the fastest rounds, the least disturbed ones."""
    return timing.fastest_ms / to.fastest_ms


# The machine that measures


def allocator(device: str = "cpu") -> str:
    """The allocator of memory, in words. On a CPU, let it keep freed memory, as training does."""
    if device == "cuda":
        setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        return f"torch's {torch.cuda.get_allocator_backend()}, {setting or 'default settings'}"
    if device != "cpu":
        return "torch's"
    if keep_freed_memory():
        return "glibc, keeps freed memory"
    settings = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    return f"the system's own{f', {settings}' if settings else ''}"


def machine(*packages: str, device: str = "auto") -> dict[str, Any]:
    """The facts of this machine that stand with a result: its threads, the allocator, the driver,
    and the versions of fp8stack, torch and `packages` (distributions); None for a package that is
    not installed. For `device` see `probe`."""
    hardware = probe(device)
    facts: dict[str, Any] = {
        "machine": str(hardware),
        "slug": slug(hardware),
        "threads": torch.get_num_threads(),
        "memory_gib": hardware.memory_gib,
        "allocator": allocator(hardware.device),
    }
    if hardware.other_gpu:
        facts |= {"hip": torch.version.hip, "xpu": torch.version.xpu}
    elif hardware.device == "cuda":
        te = hardware.te_version if hardware.has_te else None
        facts |= {"driver": _driver(), "cuda": torch.version.cuda, "transformer-engine": te}
    facts |= {"fp8stack": __version__, "torch": torch.__version__}
    return facts | {package: version(package) for package in packages}


def slug(hardware: Hardware) -> str:
    """A folder's name for a machine: cpu, or the GPU's, such as h200."""
    if hardware.device == "cpu":
        return "cpu"
    gpu = find_gpu(hardware.name)
    name = gpu.name if gpu else hardware.name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def version(package: str) -> str | None:
    """The version of a package that is installed, None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's driver, None if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None
