"""What GPUs can do at most, from their data sheets. Data alone: it must not ask the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8stack.errors import unknown


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak rates, without structured sparsity.

    `half_tflops` is the rate of bf16 (fp16 on Volta and Turing) with float32 accumulation,
    `fp8_tflops` that of FP8, None without FP8 units; `memory_tb_per_s` is the memory's bandwidth in
    10^12 bytes per second, `memory_gb` its size in 10^9 bytes, of two sizes the smaller. `source`
    names the data sheet; where that gives rates with sparsity, these are half of them.
    """

    name: str
    capability: tuple[int, int]
    half_tflops: float
    fp8_tflops: float | None
    memory_tb_per_s: float
    memory_gb: int
    source: str


# The longer of two names that begin alike comes first; of a capability, the usual GPU.
GPUS = (
    Gpu("B200", (10, 0), 2250, 4500, 7.7, 180, "NVIDIA Blackwell data sheet, HGX B200"),
    Gpu("H200", (9, 0), 989, 1979, 4.8, 141, "NVIDIA H200 data sheet, SXM"),
    Gpu("H100 PCIe", (9, 0), 756, 1513, 2.0, 80, "NVIDIA H100 data sheet, PCIe"),
    Gpu("H100 NVL", (9, 0), 835, 1671, 3.9, 94, "NVIDIA H100 data sheet, NVL"),
    Gpu("H100", (9, 0), 989, 1979, 3.35, 80, "NVIDIA H100 data sheet, SXM"),
    Gpu("L40S", (8, 9), 362, 733, 0.864, 48, "NVIDIA L40S data sheet"),
    Gpu("L4", (8, 9), 121, 242, 0.3, 24, "NVIDIA L4 data sheet"),
    Gpu("RTX 4090", (8, 9), 165, 330, 1.008, 24, "NVIDIA Ada GPU architecture white paper"),
    Gpu(
        "RTX 5090",
        (12, 0),
        209,
        419,
        1.792,
        32,
        "NVIDIA RTX Blackwell GPU architecture white paper",
    ),
    Gpu("A100", (8, 0), 312, None, 2.039, 80, "NVIDIA A100 data sheet, SXM, 80 GB"),
    Gpu("V100", (7, 0), 125, None, 0.9, 16, "NVIDIA V100 data sheet, SXM2"),
    Gpu("T4", (7, 5), 65, None, 0.3, 16, "NVIDIA T4 data sheet"),
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU that a device's full name, such as "NVIDIA H100 80GB HBM3", speaks of, if known."""
    found = (gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b", name, re.IGNORECASE))
    return next(found, None)


def gpu_named(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        UserError: none is.
    """
    gpu = find_gpu(name)
    if gpu is None:
        raise unknown("GPU", name, [gpu.name for gpu in GPUS])
    return gpu


def gpu_of_capability(capability: tuple[int, int]) -> Gpu | None:
    """The GPU that stands for a compute capability, if one is known."""
    return next((gpu for gpu in GPUS if gpu.capability == capability), None)
