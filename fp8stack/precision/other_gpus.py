"""GPUs of AMD, Intel and Apple. No such GPU has run fp8stack: on AMD's and Intel's, bf16 and fp32
run by plain torch, and FP8 is emulated; Apple's cannot emulate it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

APPLE_PROBLEM = "Apple's GPU (mps) has neither float64 nor float8, which emulated FP8 needs"
FNUZ = ("gfx940", "gfx941", "gfx942")
"""AMD's GPUs whose FP8 formats are e4m3fnuz and e5m2fnuz, without infinities or a negative zero."""


@dataclass(frozen=True, kw_only=True)
class OtherGpu:
    """A GPU that torch finds and that is not NVIDIA's.

    Attributes:
        device: torch's name of it, "cuda" or "xpu".
        kind: its maker and architecture, as messages name them.
        name: the product's name.
        memory_gib: its memory.
        problem: why it cannot be used, and the remedy; "" if it can.
    """

    device: str
    kind: str
    name: str
    memory_gib: float
    problem: str = ""


def other_gpu(device: str, build: Mapping[str, Any]) -> OtherGpu | None:
    """The first GPU of AMD or Intel; None without one.

    Args:
        device: "auto", "cuda" (AMD's) or "xpu" (Intel's).
        build: the variables of `torch.version`.
    """
    if device != "xpu" and build.get("hip") is not None:
        return _amd_gpu(build["__version__"])
    if device != "cuda" and build.get("xpu") is not None:
        return _intel_gpu()
    return None


def _amd_gpu(torch_version: str) -> OtherGpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    architecture = properties.gcnArchName.partition(":")[0]
    built_for = torch.cuda.get_arch_list()
    problem = ""
    if built_for and architecture not in built_for:
        problem = (
            f"torch {torch_version} has no kernels for {properties.name} ({architecture}): install "
            "a torch that is built for it"
        )
    return OtherGpu(
        device="cuda",
        kind=f"AMD {architecture}",
        name=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        problem=problem,
    )


def _intel_gpu() -> OtherGpu | None:
    import torch

    if not torch.xpu.is_available():
        return None
    properties: Any = torch.xpu.get_device_properties(0)
    problem = ""
    if not properties.has_fp64:
        problem = f"{properties.name} has no float64, which training and emulated FP8 need"
    return OtherGpu(
        device="xpu",
        kind="Intel XPU",
        name=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        problem=problem,
    )


def has_apple_gpu() -> bool:
    """Whether this machine has a GPU of Apple, all of whose own processors have one."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def no_fp8_units(kind: str) -> str:
    """The reason that FP8 is emulated on such a GPU, see `OtherGpu.kind`."""
    if kind.removeprefix("AMD ") in FNUZ:
        return f"this is {kind}, whose FP8 formats (fnuz) have other values"
    return f"this is {kind}, whose FP8 GEMMs are not used"
