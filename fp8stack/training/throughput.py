"""How fast a step was, against what: tokens/s, MFU with its denominator named, peak memory."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from fp8stack.precision import Hardware, Plan
from fp8stack.precision.gpus import find_gpu


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The rate that MFU divides by, and its name; None where none is known."""

    tflops: float | None
    name: str


def peak_rate(hardware: Hardware, plan: Plan) -> Peak:
    """The peak of the units that the plan's GEMMs run on: a data sheet's for a GPU known here,
    measured for a CPU."""
    if hardware.device == "cpu":
        tflops = _measure_cpu()
        return Peak(tflops=tflops, name=f"{1000 * tflops:.0f} GFLOP/s measured fp32 matmul")
    gpu = find_gpu(hardware.name)
    if gpu is not None and plan.compute_dtype not in ("fp32", "tf32"):
        if plan.runs_fp8 and plan.native and gpu.fp8_tflops:
            return Peak(tflops=gpu.fp8_tflops, name=f"{gpu.fp8_tflops:.0f} TFLOP/s fp8")
        return Peak(tflops=gpu.half_tflops, name=f"{gpu.half_tflops:.0f} TFLOP/s half")
    return Peak(tflops=None, name=f"no peak known for {plan.compute_dtype} on {hardware.name}")


def _measure_cpu(size: int = 1024, tries: int = 5) -> float:
    """The best rate of a float32 matmul here, in TFLOP/s."""
    a = torch.ones(size, size)
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def peak_memory_gib(device: torch.device) -> float:
    """The most memory in use so far: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
