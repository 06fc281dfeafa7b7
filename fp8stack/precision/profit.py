"""Whether FP8 pays in a layer on a GPU: by a measurement there, else by its data sheet's rates.

Estimates, no measurement of ours stands behind them. Pure; no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8stack.formats import Operand, Quantizer, Quantizers
from fp8stack.precision.gpus import Gpu

Shape = tuple[int, int, int]
"""The GEMM of a linear's forward pass: M rows (tokens), K in features, N out features."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU is assumed to do per second: operations in GEMMs and in attention, and bytes."""

    half: float
    fp8: float
    fp4: float
    attention: float
    fp8_attention: float
    memory: float


def achievable(gpu: Gpu) -> Rates:
    """The rates that `gpu` is assumed to reach; without FP8 or FP4 units those GEMMs run at the
    rate of more bits.

    Of each peak it is the share that we estimate for an H200: GEMMs at 700 (bf16) and 1300 TFLOP/s
    (FP8), attention at 400, 4.1 TB/s; FP4 is to reach FP8's share, and attention in FP8 of FP8's
    peak the share that attention has of bf16's.
    """
    half = gpu.half_tflops * 1e12 * (700 / 989)
    attention = 1e12 * (400 / 989)
    fp8 = gpu.fp8_tflops * 1e12 * (1300 / 1979) if gpu.fp8_tflops else half
    return Rates(
        half=half,
        fp8=fp8,
        fp4=gpu.fp4_tflops * 1e12 * (1300 / 1979) if gpu.fp4_tflops else fp8,
        attention=gpu.half_tflops * attention,
        fp8_attention=(gpu.fp8_tflops or gpu.half_tflops) * attention,
        memory=gpu.memory_tb_per_s * 1e12 * (4.1 / 4.8),
    )


def cast_bytes(quantizers: Quantizers, operand: Operand) -> float:
    """The bytes that the casts of an operand move per element: x and dy come in bf16, w in float32.

    Both copies are written in one pass where the bytes of one are those of the other, turned, or
    where a tile has all that the scales of either's blocks follow from; else each reads the operand
    for itself. A scale that follows from the amax of the whole tensor has it read once more before.
    Scales are counted where a block is a row of elements: those of larger blocks are few. A copy of
    w that is not quantized is cast to bf16.
    """
    along, across = quantizers.along(operand), quantizers.across(operand)
    copies = [q for q in (along, across) if isinstance(q, Quantizer)]
    tiled = all(q.blocks for q in copies)
    passes = copies[:1] if tiled or quantizers.turned(operand) else copies
    source = 4 if operand == "weight" else 2
    amaxes = sum(q.scale == "e4m3" or (q.per_tensor and not q.delayed) for q in passes)
    written = sum(q.element_bits / 8 for q in copies)
    written += sum(q.scale_bytes / q.blocks[1] for q in copies if q.blocks and q.blocks[0] == 1)
    plain = 4 + 2 if operand == "weight" and None in (along, across) else 0
    return source * (len(passes) + amaxes) + written + plain


LEAST_GEMM_S = 11.4e-6
"""A GEMM that takes less than this in bf16 does not fill a GPU: M K N = 4e9 on an H200."""


def least_ratio(gpu: Gpu, quantizers: Quantizers) -> float:
    """The K N / (K + N) from which three FP8 GEMMs save more than the casts of x and dy take.

    They save 6 M K N (1 / bf16 rate - 1 / FP8 rate), the casts move c M (K + N) bytes. In NVFP4,
    FP4's rate stands for FP8's.
    """
    rates = achievable(gpu)
    saved = 6 * (1 / rates.half - 1 / (rates.fp4 if quantizers.bits == 4 else rates.fp8))
    moved = (cast_bytes(quantizers, "input") + cast_bytes(quantizers, "grad_output")) / 2
    return moved / rates.memory / saved


def doubt(shape: Shape, quantizers: Quantizers, gpu: Gpu | None) -> str:
    """Why FP8 does not seem to pay for a GEMM of this shape on `gpu`; "" if it does, or the GPU's
    rates are not known."""
    rows, inputs, outputs = shape
    what = f"{rows} x {inputs} -> {outputs}"
    if gpu is None or gpu.fp8_tflops is None:
        return ""
    ratio, least = inputs * outputs / (inputs + outputs), least_ratio(gpu, quantizers)
    if ratio < least:
        return f"{what} on {gpu.name}: K N / (K + N) = {ratio:.0f}, below {least:.0f}"
    least = LEAST_GEMM_S * achievable(gpu).half / 2
    if (work := rows * inputs * outputs) < least:
        return f"{what} on {gpu.name}: M K N = {work:.2g}, below {least:.2g}"
    return ""
