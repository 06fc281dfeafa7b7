"""Peak rates of GPUs from their data sheets, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp8stack.common.errors import UserError, unknown


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak rates in 10^12 operations per second, without structured sparsity.

    `fp32_tflops` is the rate without tensor cores. The rates of tensor cores assume float32
    accumulation: `tf32_tflops` (None before Ampere), `half_tflops` for bf16 (for fp16 on Volta and
    Turing), `fp8_tflops` and `fp4_tflops` (None without such units). `memory_tb_per_s` is the
    memory's bandwidth in 10^12 bytes per second, `memory_gb` its size in 10^9 bytes (the smaller
    of two sizes). `source` names the data sheet; rates that it gives with sparsity are halved here.
    """

    name: str
    capability: tuple[int, int]
    fp32_tflops: float
    tf32_tflops: float | None
    half_tflops: float
    fp8_tflops: float | None
    memory_tb_per_s: float
    memory_gb: int
    source: str
    fp4_tflops: float | None = None

    def peak(self, units: str) -> tuple[float | None, str]:
        """The peak rate of GEMMs on operands of a dtype ("fp32", "tf32", "bf16", "fp16") or a width
        ("fp8", "fp4"), and the name of that rate. The rate is None without such units."""
        name = units if units in ("fp32", "tf32", "fp8", "fp4") else "half"
        return getattr(self, f"{name}_tflops"), name


_ADA = "NVIDIA Ada GPU architecture white paper"
_HGX_B200 = "NVIDIA Blackwell data sheet, HGX B200"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper"

# `find_gpu` and `gpu_of_capability` take the first match: a longer name goes before its prefix, and
# the usual GPU of a compute capability before the others.
GPUS = (
    Gpu("B200", (10, 0), 75, 1125, 2250, 4500, 7.7, 180, _HGX_B200, 9000),
    Gpu("H200", (9, 0), 67, 494, 989, 1979, 4.8, 141, "NVIDIA H200 data sheet, SXM"),
    Gpu("H100 PCIe", (9, 0), 51, 378, 756, 1513, 2.0, 80, "NVIDIA H100 data sheet, PCIe"),
    Gpu("H100 NVL", (9, 0), 60, 417, 835, 1671, 3.9, 94, "NVIDIA H100 data sheet, NVL"),
    Gpu("H100", (9, 0), 67, 494, 989, 1979, 3.35, 80, "NVIDIA H100 data sheet, SXM"),
    Gpu("GH200", (9, 0), 67, 494, 989, 1979, 4.0, 96, "NVIDIA GH200 data sheet, HBM3"),
    Gpu("L40S", (8, 9), 91.6, 183, 362, 733, 0.864, 48, "NVIDIA L40S data sheet"),
    Gpu("L40", (8, 9), 90.5, 90.5, 181, 362, 0.864, 48, "NVIDIA L40 data sheet"),
    Gpu("L4", (8, 9), 30.3, 60, 121, 242, 0.3, 24, "NVIDIA L4 data sheet"),
    Gpu("RTX 6000 Ada", (8, 9), 91.1, 182, 364, 728, 0.96, 48, "NVIDIA RTX 6000 Ada data sheet"),
    Gpu("RTX 4090", (8, 9), 82.6, 82.6, 165, 330, 1.008, 24, _ADA),
    Gpu("RTX 4080", (8, 9), 48.7, 48.7, 97.5, 195, 0.717, 16, _ADA),
    Gpu("RTX 5090", (12, 0), 104.8, 104.8, 209, 419, 1.792, 32, _RTX_BLACKWELL, 1676),
    Gpu("RTX 5080", (12, 0), 56.3, 56.3, 113, 225, 0.96, 16, _RTX_BLACKWELL, 900),
    Gpu("A100", (8, 0), 19.5, 156, 312, None, 2.039, 80, "NVIDIA A100 data sheet, SXM, 80 GB"),
    Gpu("A30", (8, 0), 10.3, 82, 165, None, 0.933, 24, "NVIDIA A30 data sheet"),
    Gpu("A40", (8, 6), 37.4, 74.8, 149.7, None, 0.696, 48, "NVIDIA A40 data sheet"),
    Gpu("A10", (8, 6), 31.2, 62.5, 125, None, 0.6, 24, "NVIDIA A10 data sheet"),
    Gpu("RTX A6000", (8, 6), 38.7, 77.4, 154.8, None, 0.768, 48, _GA102),
    Gpu("RTX 3090", (8, 6), 35.6, 35.6, 71, None, 0.936, 24, _GA102),
    Gpu("V100", (7, 0), 15.7, None, 125, None, 0.9, 16, "NVIDIA V100 data sheet, SXM2"),
    Gpu("T4", (7, 5), 8.1, None, 65, None, 0.3, 16, "NVIDIA T4 data sheet"),
)

# Suffixes that mean a different card: an RTX 4080 Super is not an RTX 4080.
_OTHER_CARD = r"(?! *(ti|super|d|laptop|max-q)\b)"


def find_gpu(name: str) -> Gpu | None:
    """The entry for a device's full name, such as "NVIDIA H100 80GB HBM3"; None without one."""
    matches = (gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b{_OTHER_CARD}", name, re.I))
    return next(matches, None)


def find_gpus(name: str) -> tuple[Gpu, ...]:
    """The entries for a device's full name; several for an assumed "H200 or H100"."""
    return tuple(gpu for device in name.split(" or ") if (gpu := find_gpu(device)) is not None)


def gpu_named(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        UserError: no entry matches `name`.
    """
    gpu = find_gpu(name) if isinstance(name, str) else None
    if gpu is None:
        problem = unknown("GPU", name, [gpu.name for gpu in GPUS])
        raise UserError(f"{problem} For another NVIDIA GPU give its compute capability instead.")
    return gpu


def gpu_of_capability(capability: tuple[int, int]) -> Gpu | None:
    """The GPU that stands for a compute capability; None without an entry."""
    return next((gpu for gpu in GPUS if gpu.capability == capability), None)


def assumed_name(capability: tuple[int, int]) -> str:
    """The name of the usual GPU of a compute capability, "GPU" without an entry; of both usual ones
    of 9.0, whose memories differ."""
    gpu = gpu_of_capability(capability)
    return "H200 or H100" if capability == (9, 0) else gpu.name if gpu else "GPU"
