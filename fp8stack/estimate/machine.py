"""How much memory a machine has, one that is not here included. Data alone."""

from __future__ import annotations

from fp8stack.precision import Hardware
from fp8stack.precision.gpus import find_gpu, gpu_of_capability


def memory_of(hardware: Hardware) -> tuple[int, str] | None:
    """The memory of a machine in bytes, and whose it is; None if that is not known."""
    if hardware.memory_gib:
        return round(hardware.memory_gib * 2**30), hardware.name or "this machine"
    if hardware.capability is None:
        return None
    gpu = find_gpu(hardware.name) or gpu_of_capability(hardware.capability)
    if gpu is None:
        return None
    capability = "{}.{}".format(*hardware.capability)
    stands = f"{gpu.name}, which stands for compute capability {capability}; others: --memory"
    return gpu.memory_gb * 10**9, stands
