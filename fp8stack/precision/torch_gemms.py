"""The GEMMs that torch multiplies in FP8 or FP4 on a machine, and the reasons for the others. Pure;
no torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision.hardware import Hardware, version_pair
from fp8stack.precision.native_gemms import (
    ALL_BLACKWELL,
    KERNELS,
    RTX_BLACKWELL,
    SCALED_AFTERWARDS,
    kernels_of,
    plain_in_words,
)
from fp8stack.precision.other_gpus import no_fp8_units

ROWS_ON_CPU = (2, 12)  # 2.11 asserts that there is one scale
NO_GEMM = "no GEMM of the GPU backends takes these operands"


def plain_gemms(quantizers: Quantizers, hardware: Hardware) -> dict[str, str]:
    """The GEMMs of these operands that torch does not multiply in FP8 or FP4 here, each with the
    reason, or "" if not both operands are quantized."""
    plain: dict[str, str] = {}
    kernels = kernels_of(quantizers)
    for gemm in quantizers.gemms:
        special = too_special(quantizers.only([gemm]))
        own_format = without_hardware(quantizers.only([gemm]))
        if None in quantizers.values(gemm):
            plain[gemm] = ""
        elif problem := own_format or lacking_hardware(kernels[gemm], hardware) or special:
            plain[gemm] = problem
        elif kernels[gemm] == "block" and ALL_BLACKWELL.have(hardware.capability):
            # Only TE can run it there: as MXFP8 with the block recipe's scales.
            plain[gemm] = f"the torch backend has no block scaling on {ALL_BLACKWELL.words}"
    return plain


def unable_in_all_gemms(quantizers: Quantizers, hardware: Hardware) -> str:
    """The reasons that torch multiplies no GEMM of these operands in FP8 or FP4 here; "" if it
    multiplies one."""
    plain = plain_gemms(quantizers, hardware)
    if len(plain) < len(quantizers.gemms):
        return ""
    return "; ".join(dict.fromkeys(filter(None, plain.values()))) or NO_GEMM


def gemms_in_words(quantizers: Quantizers, plain: Mapping[str, str], dtype: str) -> str:
    """A sentence about the GEMMs that torch multiplies in FP8 or FP4, and those in `dtype`."""
    low = [gemm for gemm in quantizers.gemms if gemm not in plain]
    run = "run" if len(low) > 1 else "runs"
    bits = sorted({quantizers.only([gemm]).bits for gemm in low}, reverse=True)
    formats = " and ".join(f"FP{number}" for number in bits)
    return f"{' and '.join(low)} {run} in {formats}, {plain_in_words(plain, dtype)}"


def slow_gemms(tables: Sequence[Quantizers], hardware: Hardware) -> list[str]:
    """The GEMMs, of any of these tables, that are slow by torch's `_scaled_mm`, see
    `Hardware.slow_scaled_mm`."""
    slow: set[str] = set()
    for quantizers in tables if hardware.slow_scaled_mm else ():
        for gemm in quantizers.gemms.keys() - plain_gemms(quantizers, hardware).keys():
            pair = [q for q in quantizers.values(gemm) if q is not None]
            if all(q.per_tensor for q in pair) and len({q.format for q in pair}) == 1:
                slow.add(gemm)
    return [gemm for gemm in tables[0].gemms if gemm in slow]


SLOW_GEMM = (
    "torch's scaled_mm is oneDNN's reference code for operands of one format on this CPU, which "
    "has AMX without AMX-FP16"
)


def lacking_hardware(name: str | None, hardware: Hardware) -> str:
    """The reason that a GPU, or torch on a CPU, has no GEMM called `name`; "" if it has."""
    if hardware.other_gpu:
        return f"FP8 GEMMs need a GPU of NVIDIA, {no_fp8_units(hardware.other_gpu)}"
    if hardware.capability is None:
        if name not in SCALED_AFTERWARDS:
            return f"torch's scaled_mm on a CPU has no {name or 'such'} scaling"
        if name == "rowwise" and is_older(version_pair(hardware.torch_version), ROWS_ON_CPU):
            least = ".".join(map(str, ROWS_ON_CPU))
            return f"torch's scaled_mm on a CPU has no rowwise scaling before torch {least}"
        return ""
    if name is None:
        return NO_GEMM
    kernel = KERNELS[name]
    if not kernel.gpus.have(hardware.capability):
        return f"{name} needs compute capability {kernel.gpus.words}, this is {kind_of(hardware)}"
    if kernel.cuda is not None and is_older(hardware.cuda_version, kernel.cuda):
        return "{} needs CUDA {}.{}".format(name, *kernel.cuda)
    oldest = kernel.torch_on_12 if RTX_BLACKWELL.have(hardware.capability) else None
    if oldest is not None and is_older(version_pair(hardware.torch_version), oldest):
        needed = "{} needs torch {}.{} on compute capability 12.x".format(name, *oldest)
        return f"{needed}, this is torch {hardware.torch_version}"
    return ""


def too_special(quantizers: Quantizers) -> str:
    """The reason that no FP8 unit multiplies these operands; "" if some do."""
    for gemm in quantizers.gemms:
        if all(q is not None and q.format == "e5m2" for q in quantizers.values(gemm)):
            return "FP8 units take one E5M2 operand at most, and forward_format = e5m2 makes it two"
    return ""


def without_hardware(quantizers: Quantizers) -> str:
    """The reason that no hardware multiplies operands in formats of one's own; "" without one."""
    names = quantizers.own_formats
    return f"no hardware multiplies {' and '.join(names)}" if names else ""


def kind_of(hardware: Hardware) -> str:
    """The kind of machine, as messages name it."""
    if hardware.capability is None:
        return hardware.other_gpu or "a CPU"
    return "compute capability {}.{}".format(*hardware.capability)


def is_older(version: tuple[int, int] | None, least: tuple[int, int]) -> bool:
    """Whether a version is older than `least`; an unknown version counts as current."""
    return version is not None and version < least
