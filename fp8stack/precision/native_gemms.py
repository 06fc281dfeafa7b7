"""The GEMMs of GPUs on FP8 and FP4 operands: which kernel runs the operands of a recipe, by backend
and compute capability, or the reason that none does. Pure; no torch here.

A GEMM whose operands have no kernel multiplies their values in bf16 or float32. Sources:
docs.nvidia.com/cuda/cublas for the GEMMs, Transformer Engine 2.20's recipes and their checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Quantizers
from fp8stack.precision.hardware import TE_REMEDY, Hardware, version_pair


@dataclass(frozen=True)
class Gpus:
    """GPUs of compute capability `least` or later, and of the major numbers `majors` if given.
    `words` describes them in messages."""

    words: str
    least: tuple[int, int]
    majors: tuple[int, ...] | None = None

    def have(self, capability: tuple[int, int] | None) -> bool:
        """Whether GPUs of a compute capability are included; None is a CPU."""
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
        te: those on which Transformer Engine runs it; None where it has no such recipe.
        torch: those on which torch runs it.
        cuda: the CUDA version that torch must be built for, at least.
        torch_on_12: the version of torch that it needs on 12.x, at least.
        torch_on_cpu: the same on a CPU; None where torch has none for CPUs.
        feature_multiple: the divisor of in and out features.
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
        """Whether a backend, te or torch, runs it on a machine whose hardware has it."""
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
    """The reason that a backend, te or torch, runs no linear with these operands on a machine; ""
    if it does. te needs a kernel for all three GEMMs, torch for one of them."""
    plain = plain_gemms(quantizers, hardware, backend=backend)
    problem = next(filter(None, plain.values()), "")
    if len(plain) == len(quantizers.gemms):
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
    if any(q.stochastic for place, q in quantizers.each.items() if place.startswith("weight")):
        return "the torch backend casts a weight once a step, and not at random"
    return ""


def plain_gemms(
    quantizers: Quantizers, hardware: Hardware, groups: int = 0, backend: str = "torch"
) -> dict[str, str]:
    """The GEMMs of a layer that a backend, te or torch, does not multiply in FP8 or FP4, each with
    the reason, or "" if not both operands are quantized. `groups` is the number of groups of a
    grouped linear; Transformer Engine has its kernels for groups as well."""
    plain: dict[str, str] = {}
    for gemm in quantizers.gemms:
        if None in quantizers.values(gemm):
            plain[gemm] = ""
        elif groups and backend == "torch":
            if problem := _lacking_in_groups(quantizers, gemm, hardware, groups):
                plain[gemm] = problem
        elif problem := _lacking(quantizers, gemm, hardware, backend):
            plain[gemm] = problem
    return plain


def _lacking(quantizers: Quantizers, gemm: str, hardware: Hardware, backend: str) -> str:
    """The reason that a backend has no kernel for a GEMM on a machine; "" if it has."""
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
    """The reason that torch has no kernel for a GEMM of a grouped linear; "" if it has.

    torch 2.13 (aten/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu): compute capability 9.0 and
    10.0; sizes divisible by 16; to bfloat16, without a bias; no kernel for CPUs.
    `_scaled_grouped_mm` multiplies E4M3 by E4M3 with float32 scales by row. Of two matrices, as in
    wgrad, each group needs rows, a multiple of 16. There are no scales in blocks of 128.
    `F.scaled_grouped_mm`, which has no meta function, also takes MXFP8, MXFP4 and NVFP4 with scales
    in blocks of 128 x 4 for each group by itself, in builds with FBGEMM alone: not used.
    """
    if not HOPPER_OR_BLACKWELL.have(hardware.capability) or groups > MOST_GROUPS:
        gpus = HOPPER_OR_BLACKWELL.words
        limits = f"compute capability {gpus}, and at most {MOST_GROUPS} groups"
        return f"torch's grouped GEMM needs {limits}"
    takes_forward_values = "forward" in quantizers.gemms[gemm]
    is_e4m3 = all(q is not None and q.format == "e4m3" for q in quantizers.values(gemm))
    scaled = kernels_of(quantizers)[gemm] in SCALED_AFTERWARDS
    if gemm == "wgrad" or takes_forward_values or not is_e4m3 or not scaled:
        return "torch's grouped GEMM takes E4M3 with scales by tensor or row, and not for wgrad"
    return ""


def plain_in_words(plain: dict[str, str]) -> str:
    """A sentence about the GEMMs that `plain_gemms` returns."""
    reason = next(filter(None, plain.values()), "")
    return f"{' and '.join(plain)} in high precision" + f": {reason}" * bool(reason)


def kernels_of(quantizers: Quantizers) -> dict[str, str | None]:
    """The name in `KERNELS` of the GEMM for the operands of each GEMM, fprop, dgrad and wgrad; None
    without one. Values of the forward pass count as quantized where their transposed bytes are the
    bytes of the transposed tensor."""
    kernels: dict[str, str | None] = {}
    for gemm, pair in quantizers.gemms.items():
        first, second = quantizers.values(gemm)
        if first is None or second is None or ("forward" in pair and not second.turns):
            kernels[gemm] = None
        else:
            kernels[gemm] = _kernel_of_gemm(gemm, first, second)
    return kernels


def kernel_of(quantizers: Quantizers) -> str | None:
    """The name in `KERNELS` of the GEMM that all three GEMMs of these operands need; None without
    one."""
    kernels = set(kernels_of(quantizers).values())
    return kernels.pop() if len(kernels) == 1 else None


def _kernel_of_gemm(gemm: str, first: Quantizer, second: Quantizer) -> str | None:
    """The name in `KERNELS` of the GEMM for two quantized operands, x or dy and w, or dy and x."""
    pair, blocks = (first, second), (first.block, second.block)
    if all(q.scale == "e4m3" for q in pair):
        # Only gradients are rounded at random, and only the operands of dw are transformed.
        random = second.stochastic or (first.stochastic and gemm == "fprop")
        square = gemm != "wgrad" and blocks == ((1, 16), (16, 16))
        sizes = (0, 16) if gemm == "wgrad" else (0,)
        fits = (square or blocks == ((1, 16), (1, 16))) and first.hadamard in sizes
        return "nvfp4" if fits and not random else None
    if any(q.stochastic or q.hadamard or q.format not in ("e4m3", "e5m2") for q in pair):
        return None
    if all(q.per_tensor for q in pair):
        return "delayed" if all(q.delayed for q in pair) else "current"
    if any(q.format != "e4m3" for q in pair):
        return None
    if all(isinstance(block, str) for block in blocks):
        return "rowwise"  # a tensor's scale is one for each of its rows
    if any(q.eps for q in pair):
        return None
    squares = (1, 128) if gemm == "wgrad" else (128, 128)
    if blocks == ((1, 128), squares) and all(q.scale in _FLOAT32 for q in pair):
        return "block"
    mx = blocks == ((1, 32), (1, 32)) and all(q.scale == "e8m0" for q in pair)
    return "mxfp8" if mx else None


def te_has(quantizers: Quantizers, capability: tuple[int, int] | None) -> bool:
    """Whether some settings of a recipe of Transformer Engine give these quantizers: of
    `NVFP4BlockScaling`, gradients rounded stochastically or not, Hadamard transforms for dw or not,
    weights in squares or in rows; of the others, one setting for all operands, E4M3 or with
    gradients in E5M2, MXFP8's scales by rceil, and block scales that are powers of two where it
    runs them as MXFP8."""
    by_operand, kernel = quantizers.each, kernel_of(quantizers)
    if kernel is None:
        # Not by `backward_override` either: in high precision, TE 2.20.2 multiplies bfloat16
        # gradients by the float32 weight itself, which no GEMM of cuBLAS does; dequantized, it
        # rounds forward values to bfloat16.
        return False
    x, weight = by_operand["input"], by_operand["weight"]
    if kernel == "mxfp8" and x.scale_rounding != "rceil":
        return False
    if kernel == "block" and x.scale != "power_of_two" and ALL_BLACKWELL.have(capability):
        return False
    if kernel != "nvfp4":
        settings = {replace(q, format=x.format, block=x.block) for q in by_operand.values()}
        shared = all(quantizers.columnwise(name) == by_operand[name] for name in OPERANDS)
        return shared and len(settings) == 1 and weight.format == x.format
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
    """The divisor that a backend's GEMMs require of a layer's in and out features."""
    kernels = set(filter(None, kernels_of(quantizers).values()))
    if "block" in kernels and backend == "torch":
        return 128
    return max((KERNELS[kernel].feature_multiple for kernel in kernels), default=16)


def no_hardware(quantizers: Quantizers) -> str:
    """The reason that no hardware multiplies operands in custom formats; "" without one."""
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
