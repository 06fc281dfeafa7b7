"""FP8 and FP4 GEMMs of GPUs: the kernel for the operands of a recipe, by backend and compute
capability, or the reason that there is none. Pure; no torch here.

A GEMM without a kernel runs in high precision: bf16 or float32, on the values of its operands.
Sources: docs.nvidia.com/cuda/cublas for the GEMMs, Transformer Engine 2.20's recipes and their
checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Quantizers
from fp8stack.precision.hardware import TE_REMEDY, Hardware, version_pair


@dataclass(frozen=True)
class Gpus:
    """GPUs of compute capability `least` or later, with the major numbers `majors` if given.
    `words` describes them in messages."""

    words: str
    least: tuple[int, int]
    majors: tuple[int, ...] | None = None

    def have(self, capability: tuple[int, int] | None) -> bool:
        """Whether a compute capability is included; None stands for a CPU."""
        return (
            capability is not None
            and capability >= self.least
            and (self.majors is None or capability[0] in self.majors)
        )


FROM_ADA, FROM_HOPPER = Gpus("8.9", (8, 9)), Gpus("9.0", (9, 0))
HOPPER = Gpus("9.0", (9, 0), (9,))
BLACKWELL = Gpus("10.x", (10, 0), (10,))
HOPPER_OR_BLACKWELL = Gpus("9.0 or 10.x", (9, 0), (9, 10))
ALL_BLACKWELL = Gpus("10.x or 12.x", (10, 0), (10, 12))
HOPPER_UP = Gpus("9.0, 10.x or 12.x", (9, 0), (9, 10, 12))
RTX_BLACKWELL = Gpus("12.x", (12, 0), (12,))


@dataclass(frozen=True)
class Kernel:
    """A kind of GEMM on quantized operands, see `kernels_of`.

    Attributes:
        name: the name of the recipe that it is for.
        gpus: the GPUs that have it.
        te: the GPUs on which Transformer Engine runs it; None without such a recipe.
        torch: the GPUs on which torch runs it.
        cuda: the minimal CUDA version of the torch build.
        torch_on_12: the minimal version of torch on 12.x.
        torch_on_cpu: the minimal version of torch on a CPU; None if torch has it only on GPUs.
        feature_multiple: in and out features must be multiples of this.
    """

    name: str
    gpus: Gpus
    te: Gpus | None
    torch: Gpus
    cuda: tuple[int, int] | None = None
    torch_on_12: tuple[int, int] | None = None
    torch_on_cpu: tuple[int, int] | None = None
    feature_multiple: int = 16

    def runs_by(self, backend: str, hardware: Hardware) -> bool:
        """Whether a backend, te or torch, runs it on hardware that has it."""
        if backend == "torch" and hardware.capability is None:
            return self.torch_on_cpu is not None and not hardware.other_gpu
        gpus = self.torch if backend == "torch" else self.te
        return gpus is not None and gpus.have(hardware.capability)


TORCH_MINIMUM = (2, 10)  # torch.nn.functional.scaled_mm
KERNELS = {
    kernel.name: kernel
    for kernel in (
        #      name       GPUs      by TE     by torch
        Kernel("delayed", FROM_ADA, FROM_ADA, FROM_ADA, torch_on_cpu=TORCH_MINIMUM),
        Kernel("current", FROM_ADA, FROM_ADA, FROM_ADA, torch_on_cpu=TORCH_MINIMUM),
        # On Blackwell, TE runs it as MXFP8 with the block recipe's scales.
        Kernel("block", HOPPER_UP, HOPPER_UP, HOPPER, cuda=(12, 9)),
        # On 12.x, cuBLAS has MXFP8 for the layout of our operands alone, which torch 2.14 allows
        # (pytorch pull request 198126).
        Kernel(
            *("mxfp8", ALL_BLACKWELL, BLACKWELL, ALL_BLACKWELL),
            cuda=(12, 8),
            torch_on_12=(2, 14),
            feature_multiple=32,
        ),
        # On 12.x, torch 2.10 fails with CUBLAS_STATUS_NOT_SUPPORTED (pytorch issue 192707); 2.15
        # has CUTLASS's kernel there. On a CPU, torch 2.11 asserts that there is one scale.
        Kernel(
            *("rowwise", FROM_HOPPER, None, FROM_HOPPER),
            torch_on_12=(2, 15),
            torch_on_cpu=(2, 12),
        ),
        # torch itself checks only for 8.9 or later; cuBLAS has FP4 from CUDA 12.8 on. TE accepts
        # 12.x too, where its stochastic casts gave gradients of 0 and its Hadamard transforms fail
        # (TransformerEngine issue 3062, pull request 3281).
        Kernel(
            *("nvfp4", ALL_BLACKWELL, BLACKWELL, ALL_BLACKWELL),
            cuda=(12, 8),
            feature_multiple=32,
        ),
    )
}

SCALED_AFTERWARDS = tuple(kernel.name for kernel in KERNELS.values() if kernel.torch_on_cpu)
"""Kernels that apply scales once, to the final sum: torch's `_scaled_mm`. CPUs have it too, Hopper
and Ada may accumulate its sums in fewer bits, and torch has it for groups of rows."""
_FLOAT32 = ("float32", "power_of_two")  # scale formats that are stored in float32

NO_TE = f"Transformer Engine is not installed ({TE_REMEDY})"
NO_KERNEL = "no GEMM of the GPU backends takes these operands"
TWO_E5M2 = "no FP8 unit multiplies E5M2 by E5M2"
MOST_GROUPS = 1023
"""The most groups that torch's grouped GEMMs take (ScaledGroupMM.cu and GroupMM.cu of torch 2.8 to
2.13, which have a CUDA thread for each group)."""
_BACKENDS = {"te": "Transformer Engine", "torch": "torch"}


def unable(backend: str, quantizers: Quantizers, hardware: Hardware) -> str:
    """The reason that a backend, te or torch, cannot run a linear with these operands on a machine;
    "" if it can. te needs kernels for all three GEMMs, torch for at least one."""
    high_precision = plain_gemms(quantizers, hardware, backend=backend)
    problem = next(filter(None, high_precision.values()), "")
    if len(high_precision) == len(quantizers.gemms):
        return problem or NO_KERNEL
    if backend == "te":
        if problem or not te_has(quantizers, hardware.capability):
            return problem or "Transformer Engine has no recipe with these operands"
        return "" if hardware.has_te else hardware.te_problem or NO_TE
    if is_older(version_pair(hardware.torch_version), TORCH_MINIMUM):
        least = "{}.{}".format(*TORCH_MINIMUM)
        return (
            f"the torch backend needs torch {least} or later, this is {hardware.torch_version} "
            f"(pip install --upgrade 'torch>={least}')"
        )
    if any(q.stochastic for key, q in quantizers.each.items() if key.startswith("weight")):
        return "the torch backend casts a weight once a step, and not at random"
    return ""


def plain_gemms(
    quantizers: Quantizers, hardware: Hardware, groups: int = 0, backend: str = "torch"
) -> dict[str, str]:
    """The GEMMs of a layer that a backend, te or torch, runs in high precision, and their reasons:
    "" if an operand is not quantized. `groups` is the number of groups of a grouped linear, for
    which Transformer Engine has the same kernels as for linears."""
    high_precision: dict[str, str] = {}
    for gemm in quantizers.gemms:
        if None in quantizers.values(gemm):
            high_precision[gemm] = ""
        elif groups and backend == "torch":
            if problem := _lacking_in_groups(quantizers, gemm, hardware, groups):
                high_precision[gemm] = problem
        elif problem := _lacking(quantizers, gemm, hardware, backend):
            high_precision[gemm] = problem
    return high_precision


def _lacking(quantizers: Quantizers, gemm: str, hardware: Hardware, backend: str) -> str:
    """The reason that a backend has no kernel for a GEMM on a machine; "" if it has one."""
    if problem := no_hardware(quantizers.only([gemm])):
        return problem
    kernel = KERNELS.get(kernels_of(quantizers)[gemm] or "")
    if kernel is None:
        return NO_KERNEL
    machine, capability = kind_of(hardware), hardware.capability
    if capability is not None and not kernel.gpus.have(capability):
        return f"{kernel.name} needs compute capability {kernel.gpus.words}, this is {machine}"
    if capability is not None and kernel.cuda and is_older(hardware.cuda_version, kernel.cuda):
        return "{} needs CUDA {}.{}".format(kernel.name, *kernel.cuda)
    if all(q is not None and q.format == "e5m2" for q in quantizers.values(gemm)):
        return TWO_E5M2
    if not kernel.runs_by(backend, hardware):
        return f"{_BACKENDS[backend]} has no {kernel.name} GEMM on {machine}"
    least = kernel.torch_on_12 if RTX_BLACKWELL.have(capability) else None
    least = kernel.torch_on_cpu if capability is None else least
    if least is not None and is_older(version_pair(hardware.torch_version), least):
        needed = "{} needs torch {}.{} on".format(kernel.name, *least)
        return f"{needed} {machine}, this is torch {hardware.torch_version}"
    return ""


def _lacking_in_groups(quantizers: Quantizers, gemm: str, hardware: Hardware, groups: int) -> str:
    """The reason that torch has no kernel for a GEMM of a grouped linear; "" if it has one.

    torch 2.13 (aten/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu): compute capability 9.0 and
    10.0; sizes divisible by 16; bfloat16 outputs, no bias; no kernel for CPUs.
    `_scaled_grouped_mm` multiplies E4M3 by E4M3 with float32 scales by row. For two matrices, as in
    wgrad, the rows of each group must be a positive multiple of 16. There are no scales in blocks
    of 128. Not used: `F.scaled_grouped_mm`, which has no meta function, also takes MXFP8, MXFP4 and
    NVFP4, with scales in blocks of 128 x 4 for each group, but only in builds with FBGEMM.
    """
    if not HOPPER_OR_BLACKWELL.have(hardware.capability) or groups > MOST_GROUPS:
        gpus = HOPPER_OR_BLACKWELL.words
        limits = f"compute capability {gpus}, and at most {MOST_GROUPS} groups"
        return f"torch's grouped GEMM needs {limits}"
    reuses_forward_values = "forward" in quantizers.gemms[gemm]
    is_e4m3 = all(q is not None and q.format == "e4m3" for q in quantizers.values(gemm))
    scales_afterwards = kernels_of(quantizers)[gemm] in SCALED_AFTERWARDS
    if gemm == "wgrad" or reuses_forward_values or not is_e4m3 or not scales_afterwards:
        return "torch's grouped GEMM takes E4M3 with scales by tensor or row, and not for wgrad"
    return ""


def plain_in_words(high_precision: dict[str, str]) -> str:
    """A sentence about the GEMMs that `plain_gemms` returns."""
    reason = next(filter(None, high_precision.values()), "")
    return f"{' and '.join(high_precision)} in high precision" + f": {reason}" * bool(reason)


def kernels_of(quantizers: Quantizers) -> dict[str, str | None]:
    """The name in `KERNELS` of the kernel for each GEMM, fprop, dgrad and wgrad; None without one.
    A GEMM that reuses the values of the forward pass has a kernel only if their transposed bytes
    are the bytes of the transposed tensor."""
    kernels: dict[str, str | None] = {}
    for gemm, pair in quantizers.gemms.items():
        first, second = quantizers.values(gemm)
        if first is None or second is None or ("forward" in pair and not second.turns):
            kernels[gemm] = None
        else:
            kernels[gemm] = _kernel_of_gemm(gemm, first, second)
    return kernels


def kernel_of(quantizers: Quantizers) -> str | None:
    """The name in `KERNELS` of the kernel for all three GEMMs of a layer; None without one."""
    kernels = set(kernels_of(quantizers).values())
    return kernels.pop() if len(kernels) == 1 else None


def _kernel_of_gemm(gemm: str, first: Quantizer, second: Quantizer) -> str | None:
    """The name in `KERNELS` of the kernel for quantized operands: x or dy and w, or dy and x."""
    pair, blocks = (first, second), (first.block, second.block)
    if all(q.scale == "e4m3" for q in pair):
        # Only gradients are rounded stochastically, and only the operands of dw are transformed.
        is_stochastic = second.stochastic or (first.stochastic and gemm == "fprop")
        has_square_weights = gemm != "wgrad" and blocks == ((1, 16), (16, 16))
        sizes = (0, 16) if gemm == "wgrad" else (0,)
        fits = (has_square_weights or blocks == ((1, 16), (1, 16))) and first.hadamard in sizes
        return "nvfp4" if fits and not is_stochastic else None
    if any(q.stochastic or q.hadamard or q.format not in ("e4m3", "e5m2") for q in pair):
        return None
    if all(q.per_tensor for q in pair):
        return "delayed" if all(q.delayed for q in pair) else "current"
    if any(q.format != "e4m3" for q in pair):
        return None
    if all(isinstance(block, str) for block in blocks):
        return "rowwise"  # a scale per tensor is the same scale for each row
    if any(q.eps for q in pair):
        return None
    second_block = (1, 128) if gemm == "wgrad" else (128, 128)
    if blocks == ((1, 128), second_block) and all(q.scale in _FLOAT32 for q in pair):
        return "block"
    is_mxfp8 = blocks == ((1, 32), (1, 32)) and all(q.scale == "e8m0" for q in pair)
    return "mxfp8" if is_mxfp8 else None


def te_has(quantizers: Quantizers, capability: tuple[int, int] | None) -> bool:
    """Whether a recipe of Transformer Engine can have these quantizers.

    `NVFP4BlockScaling`: gradients rounded stochastically or to nearest, dw with or without Hadamard
    transforms, weights in square or row blocks. Other recipes: the same settings for all operands,
    except that gradients may be E5M2; MXFP8's scales by rceil; block scales that are powers of two
    on GPUs that run them as MXFP8.
    """
    by_operand, kernel = quantizers.each, kernel_of(quantizers)
    if kernel is None:
        # `backward_override` does not help: with "high_precision", TE 2.20.2 multiplies bfloat16
        # gradients by the float32 weight, which no GEMM of cuBLAS does; with "dequantized", it
        # rounds forward values to bfloat16.
        return False
    x, weight = by_operand["input"], by_operand["weight"]
    if kernel == "mxfp8" and x.scale_rounding != "rceil":
        return False
    if kernel == "block" and x.scale != "power_of_two" and ALL_BLACKWELL.have(capability):
        return False
    if kernel != "nvfp4":
        settings = {replace(q, format=x.format, block=x.block) for q in by_operand.values()}
        is_shared = all(quantizers.columnwise(name) == by_operand[name] for name in OPERANDS)
        return is_shared and len(settings) == 1 and weight.format == x.format
    rows = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")
    gradient = replace(rows, rounding=by_operand["grad_output"].rounding)
    hadamard = by_operand["grad_output.wgrad"].hadamard
    return quantizers == Quantizers(
        input=rows,
        input_wgrad=replace(rows, hadamard=hadamard),
        weight=weight,
        weight_dgrad=weight,
        grad_output=gradient,
        grad_output_wgrad=replace(gradient, hadamard=hadamard),
    )


def feature_multiple(quantizers: Quantizers, backend: str) -> int:
    """A backend's GEMMs require in and out features that are multiples of this."""
    kernels = set(filter(None, kernels_of(quantizers).values()))
    if "block" in kernels and backend == "torch":
        return 128
    return max((KERNELS[kernel].feature_multiple for kernel in kernels), default=16)


def no_hardware(quantizers: Quantizers) -> str:
    """The reason that no hardware multiplies these operands: custom formats; "" without any."""
    names = quantizers.own_formats
    return f"no hardware multiplies {' and '.join(names)}" if names else ""


def kind_of(hardware: Hardware) -> str:
    """The kind of machine, as messages name it."""
    if hardware.capability is None:
        return f"an {hardware.other_gpu}" if hardware.other_gpu else "a CPU"
    return "compute capability {}.{}".format(*hardware.capability)


def is_older(version: tuple[int, int] | None, least: tuple[int, int]) -> bool:
    """Whether a version is older than `least`; an unknown version counts as current."""
    return version is not None and version < least
