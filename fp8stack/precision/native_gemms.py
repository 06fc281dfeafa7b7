"""The FP8 and FP4 GEMMs of GPUs as data, and `kernel_of`, which finds the GEMM for quantizers.

Quantizers without a kernel are emulated. Sources: docs.nvidia.com/cuda/cublas for the GEMMs,
Transformer Engine 2.20's recipes and their checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8stack.common.formats import OPERANDS, Quantizer, Quantizers


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
BLACKWELL = Gpus("10.x", (10, 0), (10,))
HOPPER_OR_BLACKWELL = Gpus("9.0 or 10.x", (9, 0), (9, 10))
ALL_BLACKWELL = Gpus("10.x or 12.x", (10, 0), (10, 12))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kind of GEMM on quantized operands. It needs one of `gpus` and a torch built for `cuda` or
    later; in and out features must be divisible by `feature_multiple`."""

    name: str
    gpus: Gpus
    cuda: tuple[int, int] | None = None
    feature_multiple: int = 16


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="delayed", gpus=FROM_ADA),
        Kernel(name="current", gpus=FROM_ADA),
        Kernel(name="block", gpus=HOPPER_OR_BLACKWELL, cuda=(12, 9)),
        Kernel(name="mxfp8", gpus=BLACKWELL, cuda=(12, 8), feature_multiple=32),
        Kernel(name="rowwise", gpus=FROM_HOPPER),
        # torch itself checks only for 8.9 or later; cuBLAS has FP4 from CUDA 12.8 on.
        Kernel(name="nvfp4", gpus=ALL_BLACKWELL, cuda=(12, 8), feature_multiple=32),
    )
}

_FLOAT32 = ("float32", "power_of_two")  # scale formats that are stored in float32

SCALED_AFTERWARDS = ("delayed", "current", "rowwise")
"""Kernels that apply scales once, to the final sum: torch's `_scaled_mm`. CPUs have it too, and
Hopper and Ada may accumulate its sums in fewer bits."""


def kernel_of(quantizers: Quantizers) -> str | None:
    """The name in `KERNELS` of the GEMM for these operands; None without one."""
    if _is_nvfp4(quantizers):
        return "nvfp4"
    by_operand = quantizers.each
    if any(
        name not in by_operand or quantizers.across(name) != by_operand[name] for name in OPERANDS
    ):
        return None
    x, w, dy = (by_operand[name] for name in OPERANDS)
    if any(q.stochastic or q.hadamard or q.format not in ("e4m3", "e5m2") for q in (x, w, dy)):
        return None
    if all(q.per_tensor for q in (x, w, dy)):
        delayed = {q.delayed for q in (x, w, dy)}
        return None if len(delayed) > 1 else "delayed" if delayed.pop() else "current"
    if any(q.format != "e4m3" for q in (x, w, dy)) or len({q.scale for q in (x, w, dy)}) > 1:
        return None
    if x.block == w.block == dy.block == "row":
        return "rowwise"
    if any(q.eps for q in (x, w, dy)):
        return None
    if (x.block, w.block, dy.block) == ((1, 128), (128, 128), (1, 128)) and x.scale in _FLOAT32:
        return "block"
    mx = x.block == w.block == dy.block == (1, 32) and x.scale == "e8m0"
    return "mxfp8" if mx and len({q.scale_rounding for q in (x, w, dy)}) == 1 else None


def _is_nvfp4(quantizers: Quantizers) -> bool:
    """Whether some settings of TE's `NVFP4BlockScaling` give these quantizers: gradients rounded
    stochastically or not, Hadamard transforms for dw or not, weights in squares or in rows."""
    by_operand = quantizers.each
    if len(by_operand) < 2 * len(OPERANDS):
        return False
    rows = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")
    gradient = replace(rows, rounding=by_operand["grad_output"].rounding)
    weight, hadamard = by_operand["weight"], by_operand["grad_output.wgrad"].hadamard
    if hadamard == 32 or weight not in (rows, replace(rows, block=(16, 16))):
        return False
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
    kernel = kernel_of(quantizers)
    if kernel == "block" and backend == "torch":
        return 128
    return KERNELS[kernel].feature_multiple if kernel else 16


def lacking_grouped_gemm(
    backend: str, quantizers: Quantizers, capability: tuple[int, int] | None
) -> str:
    """The reason that a backend with a GEMM for these operands has none for groups of rows, whose
    grouped linears are emulated; "" if it has. By source:

    torch 2.13 (aten/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu): compute capability 9.0 and
    10.0; sizes divisible by 16; to bfloat16, without a bias; no kernel for CPUs; for the number of
    groups see `too_many_groups`. `_scaled_grouped_mm` multiplies E4M3 by E4M3 with float32 scales
    by row. Of two matrices, as in wgrad, each group needs rows, a multiple of 16. There are no
    scales in blocks of 128. `F.scaled_grouped_mm`, which has no meta function, also takes MXFP8,
    MXFP4 and NVFP4 with scales in blocks of 128 x 4 for each group by itself, in builds with FBGEMM
    alone: not used.

    Transformer Engine 2.20.2 has `GroupedLinear`, see `TEGroupedLinear`.
    The path with splits on the host, which is used, takes every recipe; it casts all weights, also
    of groups without rows, and wants each group's rows to be divisible by 16 (MXFP8: 32, NVFP4:
    128; `get_align_size_for_quantization`). Its other path, with splits on the device, leaves out
    delayed scaling, custom recipes and `backward_override`; it needs 9.0 to 11.0 and cuBLASLt 13.3
    (Hopper: 13.4, current 13.5, block 13.6); block is for Hopper alone, MXFP8 and NVFP4 (with its
    Hadamard transform) from 10.0.
    """
    if backend != "torch":
        return ""
    if not HOPPER_OR_BLACKWELL.have(capability):
        return f"torch's grouped FP8 GEMM needs compute capability {HOPPER_OR_BLACKWELL.words}"
    kernel, x = kernel_of(quantizers), quantizers.input
    if kernel not in SCALED_AFTERWARDS:
        return f"the torch backend has no grouped GEMM for {kernel}"
    if x is None or x.format != "e4m3":
        return "torch's grouped FP8 GEMM takes E4M3 alone"
    return ""


MOST_GROUPS = 1023
"""The most groups that torch's grouped GEMMs take (ScaledGroupMM.cu and GroupMM.cu of torch 2.8 to
2.13, which have a CUDA thread for each group)."""


def too_many_groups(backend: str, groups: int) -> str:
    """The reason that a backend has no GEMM for so many groups of rows, whose grouped linear is
    emulated; "" if it has."""
    if backend != "torch" or groups <= MOST_GROUPS:
        return ""
    return f"torch's grouped FP8 GEMM takes at most {MOST_GROUPS} groups, not {groups}"


def emulated_grouped_gemms(backend: str, quantizers: Quantizers) -> str:
    """The GEMMs that are emulated in a grouped linear that a backend runs, with the reason; "" if
    there are none."""
    if backend != "torch":
        return ""
    emulated = "wgrad" if kernel_of(quantizers) == "rowwise" else "dgrad and wgrad"
    return f"{emulated} by bf16 GEMMs on the exact operands: torch's takes E4M3 and gives bf16"
