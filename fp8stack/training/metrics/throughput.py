"""The peak rate that MFU divides by, measured or of a data sheet, and peak memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from fp8stack.layers.backend import DTYPES
from fp8stack.layers.emulate import Emulated, EmulatedLayout, emulated_matmul, in_bf16
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.gpus import find_gpu
from fp8stack.precision.recipe import ComputeDtype

BURSTS_S = 0.3
_SHORT_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rate that MFU divides by, None if unknown, and its name. It is `measured` on this
    machine, which may have been busy, or a data sheet's."""

    tflops: float | None
    name: str
    measured: bool = False

    def __str__(self) -> str:
        return f"peak for MFU: {self.name}{', or the fastest step' if self.measured else ''}"

    def mfu(self, tflops: float) -> float | None:
        """`tflops` as a fraction of the peak; at most 1 of a measured one."""
        if not self.tflops:
            return None
        return min(1.0, tflops / self.tflops) if self.measured else tflops / self.tflops

    def at_least(self, tflops: float) -> Peak:
        """The peak, or the rate of a step that was faster than the measured peak."""
        if not self.measured or self.tflops is None or tflops <= self.tflops:
            return self
        return replace(self, tflops=tflops)


def peak_rate(hardware: Hardware, plan: Plan) -> Peak:
    """The peak rate for the plan's GEMMs: of a GPU's data sheet, or measured on a CPU."""
    if hardware.device == "cpu":
        threads = torch.get_num_threads()
        measured = [(measured_cpu_tflops(*kind, threads), kind) for kind in _kinds(hardware, plan)]
        fastest, (dtype, by_bf16) = max(measured)
        matmul = f"{dtype} matmul{' by bf16 instructions' if by_bf16 else ''}"
        name = f"{1000 * fastest:.0f} GFLOP/s measured {matmul}"
        return Peak(tflops=fastest, name=name, measured=True)
    gpu = find_gpu(hardware.name)
    if gpu is not None:
        rate, name = gpu.peak(plan.units)
        if rate is not None:
            return Peak(tflops=rate, name=f"{rate:g} TFLOP/s {name}")
    return Peak(tflops=None, name=f"unknown for {plan.compute_dtype} on {hardware.name}")


def _kinds(hardware: Hardware, plan: Plan) -> set[tuple[ComputeDtype, bool]]:
    """The GEMMs of a plan on a CPU: the dtype of their operands, and whether float32 operands are
    multiplied by bf16 instructions, as those of emulated FP8 may be."""
    kinds: set[tuple[ComputeDtype, bool]] = {(plan.compute_dtype, False)}
    for layer in plan.layers:
        if layer.fp8 and plan.backend_of(layer) != "emulate":
            kinds.add(("fp32", False))
        elif layer.fp8 and in_bf16(plan, layer):
            kinds.add(("bf16", False))
        elif layer.fp8:
            kinds.add(("fp32", hardware.cpu_bf16 and layer.emulated.exact_in_bf16))
    return kinds


@cache
def measured_cpu_tflops(dtype: ComputeDtype, by_bf16: bool, threads: int) -> float:
    """The best rate of a matmul, in TFLOP/s. `threads`, torch's number, is a cache key."""
    layout = EmulatedLayout(transposed=False, in_bf16=by_bf16)

    def burst(size: int) -> float:
        a = torch.ones(size, size, dtype=DTYPES[dtype])
        start = time.perf_counter()
        if by_bf16:
            emulated_matmul(Emulated(a, None, layout), Emulated(a, None, layout), a.dtype)
        else:
            a @ a
        return time.perf_counter() - start

    return best_tflops(burst)


def best_tflops(
    burst: Callable[[int], float], clock: Callable[[], float] = time.perf_counter
) -> float:
    """The best rate of matmuls over `BURSTS_S`, in TFLOP/s; `burst` returns how many seconds a
    product of two matrices [size, size] takes. Each is long enough to keep the threads busy, and
    short enough that some run undisturbed by other processes."""
    began, size, best = clock(), 256, 0.0
    while True:
        seconds = min(burst(size) for _ in range(3))
        best = max(best, 2 * size**3 / seconds / 1e12)
        if seconds < _SHORT_S and size < 4096:
            size *= 2
        elif clock() - began >= BURSTS_S:
            return best


def restart_peak_memory(device: torch.device) -> None:
    """Restart the peak of `peak_memory_gib`; a CPU's process has no such function."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """The peak memory so far: the allocator's on a GPU, the process's on a CPU."""
    if device.type != "cpu":
        allocated: int = torch.get_device_module(device).max_memory_allocated(device)
        return allocated / 2**30
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
