"""The FP8 and FP4 GEMMs of GPUs as data, and `kernels_of`, which finds those for quantizers.

A GEMM whose operands have no kernel multiplies their values in bf16 or float32. Sources:
docs.nvidia.com/cuda/cublas for the GEMMs, Transformer Engine 2.20's recipes and their checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Quantizers


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
HOPPER_OR_ANY_BLACKWELL = Gpus("9.0, 10.x or 12.x", (9, 0), (9, 10, 12))
RTX_BLACKWELL = Gpus("12.x", (12, 0), (12,))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kind of GEMM on quantized operands. It needs one of `gpus`, a torch built for `cuda` or
    later, and on 12.x at least the version `torch_on_12` of torch; in and out features must be
    divisible by `feature_multiple`."""

    name: str
    gpus: Gpus
    cuda: tuple[int, int] | None = None
    torch_on_12: tuple[int, int] | None = None
    feature_multiple: int = 16


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="delayed", gpus=FROM_ADA),
        Kernel(name="current", gpus=FROM_ADA),
        Kernel(name="block", gpus=HOPPER_OR_ANY_BLACKWELL, cuda=(12, 9)),
        # On 12.x, cuBLAS has MXFP8 for the layout of our operands alone, which torch 2.14 allows
        # (pytorch pull request 198126).
        Kernel(
            name="mxfp8",
            gpus=ALL_BLACKWELL,
            cuda=(12, 8),
            torch_on_12=(2, 14),
            feature_multiple=32,
        ),
        # On 12.x, torch 2.10 fails with CUBLAS_STATUS_NOT_SUPPORTED (pytorch issue 192707); 2.15
        # has CUTLASS's kernel there.
        Kernel(name="rowwise", gpus=FROM_HOPPER, torch_on_12=(2, 15)),
        # torch itself checks only for 8.9 or later; cuBLAS has FP4 from CUDA 12.8 on.
        Kernel(name="nvfp4", gpus=ALL_BLACKWELL, cuda=(12, 8), feature_multiple=32),
    )
}

_FLOAT32 = ("float32", "power_of_two")  # scale formats that are stored in float32

SCALED_AFTERWARDS = ("delayed", "current", "rowwise")
"""Kernels that apply scales once, to the final sum: torch's `_scaled_mm`. CPUs have it too, and
Hopper and Ada may accumulate its sums in fewer bits."""


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


def te_has(quantizers: Quantizers) -> bool:
    """Whether some settings of a recipe of Transformer Engine give these quantizers, which have a
    kernel: of `NVFP4BlockScaling`, gradients rounded stochastically or not, Hadamard transforms for
    dw or not, weights in squares or in rows; of the others, one setting for all operands, E4M3 or
    with gradients in E5M2."""
    by_operand = quantizers.each
    if kernel_of(quantizers) != "nvfp4":
        x, w = by_operand["input"], by_operand["weight"]
        settings = {replace(q, format=x.format, block=x.block) for q in by_operand.values()}
        shared = all(quantizers.across(name) == by_operand[name] for name in OPERANDS)
        return shared and len(settings) == 1 and w.format == x.format
    rows = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")
    gradient = replace(rows, rounding=by_operand["grad_output"].rounding)
    weight = by_operand["weight"]
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
    kernels = kernels_of(quantizers)
    if len(plain_grouped_gemms(backend, quantizers)) < len(kernels):
        return ""
    for kernel in kernels.values():
        if kernel is not None and kernel not in SCALED_AFTERWARDS:
            return f"the torch backend has no grouped GEMM for {kernel}"
    return _GROUPED_TAKES


MOST_GROUPS = 1023
"""The most groups that torch's grouped GEMMs take (ScaledGroupMM.cu and GroupMM.cu of torch 2.8 to
2.13, which have a CUDA thread for each group)."""


def too_many_groups(backend: str, groups: int) -> str:
    """The reason that a backend has no GEMM for so many groups of rows, whose grouped linear is
    emulated; "" if it has."""
    if backend != "torch" or groups <= MOST_GROUPS:
        return ""
    return f"torch's grouped FP8 GEMM takes at most {MOST_GROUPS} groups, not {groups}"


def plain_grouped_gemms(backend: str, quantizers: Quantizers) -> dict[str, str]:
    """The GEMMs of a grouped linear that a backend runs which are not scaled ones, each with the
    reason, or "" if not both operands are quantized."""
    if backend != "torch":
        return {}
    plain: dict[str, str] = {}
    kernels = kernels_of(quantizers)
    for gemm, pair in quantizers.gemms.items():
        formats = {q and q.format for q in quantizers.values(gemm)}
        if None in formats:
            plain[gemm] = ""
        elif gemm == "wgrad" or formats != {"e4m3"}:
            plain[gemm] = "torch's takes E4M3 and gives bf16"
        elif "forward" in pair:
            plain[gemm] = "it takes forward values"
        elif kernels[gemm] not in SCALED_AFTERWARDS:
            plain[gemm] = f"the torch backend has no grouped GEMM for {kernels[gemm] or 'them'}"
    return plain


_GROUPED_TAKES = "torch's grouped FP8 GEMM takes E4M3 alone"


def plain_in_words(plain: Mapping[str, str], dtype: str) -> str:
    """A sentence about the GEMMs of a quantized layer that multiply in `dtype`, see
    `plain_grouped_gemms`."""
    by_reason: dict[str, list[str]] = {}
    for gemm, reason in plain.items():
        by_reason.setdefault(reason, []).append(gemm)
    return "; ".join(
        f"{' and '.join(gemms)} by {dtype} GEMMs on the exact operands: {reason}"
        if reason
        else f"{' and '.join(gemms)} in {dtype}: not both operands are quantized"
        for reason, gemms in by_reason.items()
    )
