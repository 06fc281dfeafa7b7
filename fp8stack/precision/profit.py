"""Estimates of whether FP8 pays, in a layer and in a model, from rates measured on an H100 and from
other GPUs' data sheets. Pure; no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.precision.gpus import Gpu

Shape = tuple[int, int, int]
"""The GEMM of a linear's forward pass: M rows (tokens), K in features, N out features."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Assumed rates of a GPU: operations per second in GEMMs and in attention, bytes per second of
    casts and of other kernels; `source` says where they are from, "" for estimates."""

    half: float
    fp8: float
    fp4: float
    attention: float
    fp8_attention: float
    casts: float
    memory: float
    source: str = ""


MEASURED = "measured on one H100, 2026-11-26; the raw output was not kept"
"""The source of the figures of bench/results/h100/README.md."""


def achievable(gpu: Gpu, dtype: str = "bf16") -> Rates:
    """The rates that `gpu` is assumed to reach; `half` and `attention` are those of GEMMs and of
    attention in `dtype`, also for "fp32" and "tf32".

    The rates of an H100 SXM are measured, except attention: copies at 2.60 TB/s, GEMMs in bf16 at
    748 TFLOP/s, in FP8 at 1255 with fast accumulation, as in y, and at 1202 without, as in dx and
    dw, and casts with the transposed copy and the amax at 1.14 TB/s.

    Every other rate is the fraction of the peak rate that we estimate for an H200: GEMMs at 700
    (bf16; fp32 and tf32 reach the same fraction) and 1300 TFLOP/s (FP8), attention at 400 TFLOP/s,
    memory, casts too, at 4.1 TB/s. FP4 GEMMs take FP8's fraction, and FP8 attention the fraction of
    bf16 attention. A GPU without FP8 or FP4 units runs these GEMMs at the rate of the next wider
    format.
    """
    half = gpu.half_tflops * 1e12 * (700 / 989)
    attention = 1e12 * (400 / 989)
    fp8 = gpu.fp8_tflops * 1e12 * (1300 / 1979) if gpu.fp8_tflops else half
    memory = gpu.memory_tb_per_s * 1e12 * (4.1 / 4.8)
    rates = Rates(
        half=half,
        fp8=fp8,
        fp4=gpu.fp4_tflops * 1e12 * (1300 / 1979) if gpu.fp4_tflops else fp8,
        attention=gpu.half_tflops * attention,
        fp8_attention=(gpu.fp8_tflops or gpu.half_tflops) * attention,
        casts=memory,
        memory=memory,
    )
    if gpu.name == "H100":
        fp8 = 3e12 / (1 / 1255 + 2 / 1202)
        measured = {"half": 748e12, "fp8": fp8, "fp4": fp8, "casts": 1.14e12, "memory": 2.60e12}
        rates = replace(rates, **measured, source=f"{MEASURED}; attention is estimated")
    if dtype in ("fp32", "tf32"):
        peak = gpu.peak(dtype)[0] or gpu.fp32_tflops
        rates = replace(rates, half=peak * 1e12 * (700 / 989), attention=peak * attention)
    return rates


def cast_bytes(quantizers: Quantizers, operand: Operand) -> float:
    """The bytes that the casts of an operand move per element: x and dy are bf16, w is float32.

    A single pass writes both copies if one is the transpose of the other, or if a tile contains
    whole blocks of both; else each copy reads the operand. A scale that depends on the amax of the
    whole tensor costs one more read. Scales are counted for blocks of one row; larger blocks have
    few. A copy of w that is not quantized is cast to bf16.
    """
    rowwise, columnwise = quantizers.rowwise(operand), quantizers.columnwise(operand)
    copies = [q for q in (rowwise, columnwise) if isinstance(q, Quantizer)]
    tiled = all(q.blocks for q in copies)
    passes = copies[:1] if tiled or quantizers.reuses_rowwise(operand) else copies
    source = 4 if operand == "weight" else 2
    amaxes = sum(q.scale == "e4m3" or (q.per_tensor and not q.delayed) for q in passes)
    written = sum(q.element_bits / 8 for q in copies)
    written += sum(q.scale_bytes / q.blocks[1] for q in copies if q.blocks and q.blocks[0] == 1)
    plain = 4 + 2 if operand == "weight" and None in (rowwise, columnwise) else 0
    return source * (len(passes) + amaxes) + written + plain


LEAST_GEMM_S = 11.4e-6
"""A GEMM that takes less than this in bf16 does not fill a GPU: M K N = 4e9 on an H200."""


def least_ratio(gpu: Gpu, quantizers: Quantizers, gemms: int = 3) -> float:
    """The K N / (K + N) above which so many FP8 GEMMs of a linear save more time than the casts of
    x and dy take.

    Each saves 2 M K N (1 / bf16 rate - 1 / FP8 rate); the casts move c M (K + N) bytes at their own
    rate. NVFP4 uses the FP4 rate.
    """
    rates = achievable(gpu)
    is_fp4 = all(quantizer.element.bits == 4 for quantizer in quantizers.each.values())
    low = rates.fp4 if is_fp4 else rates.fp8
    saved = 2 * gemms * (1 / rates.half - 1 / low)
    moved = (cast_bytes(quantizers, "input") + cast_bytes(quantizers, "grad_output")) / 2
    return moved / rates.casts / saved


def doubt(shape: Shape, quantizers: Quantizers, gpu: Gpu | None, gemms: int = 3) -> str:
    """The reason that FP8 does not seem to pay for a linear of this shape on `gpu`, of whose GEMMs
    so many are in FP8; "" if it does, or the GPU's rates are not known."""
    rows, inputs, outputs = shape
    gemm = f"{rows} x {inputs} -> {outputs}"
    if gpu is None or gpu.fp8_tflops is None:
        return ""
    ratio = inputs * outputs / (inputs + outputs)
    least = least_ratio(gpu, quantizers, gemms)
    if ratio < least:
        return f"{gemm} on {gpu.name}: K N / (K + N) = {ratio:.0f}, below {least:.0f}"
    least = LEAST_GEMM_S * achievable(gpu).half / 2
    if (work := rows * inputs * outputs) < least:
        return f"{gemm} on {gpu.name}: M K N = {work:.2g}, below {least:.2g}"
    return ""


HOST_BLOCK_S = 5.2e-3
"""Seconds in which the host launches the forward and backward pass of a compiled block in delayed
scaling, by torch: measured on the machine of one H100, 2026-11-26; the raw output was not kept.
Assumed of other recipes and machines."""
HOST_LINEAR_S = HOST_BLOCK_S / 4
"""The share of each linear, as a block has four of them: its launches, casts and GEMMs."""


def host_doubt(work: float, linears: int, fp8_linears: int, gpu: Gpu | None) -> str:
    """The reason that FP8 by compiled torch does not seem to pay in a model on `gpu`; "" if it may,
    or the GPU's rates are not known.

    The host launches kernels while the GPU runs earlier ones, so that a pass takes the longer of
    their two times. FP8 saves time on the GPU; a pass becomes faster only if the host takes less
    time to launch it than the GPU takes in bf16. Of the GPU's time, GEMMs are counted.

    Args:
        work: multiplications of a micro-batch in each of the three GEMMs of all linears.
        linears: the number of linears.
        fp8_linears: the number of those that torch multiplies in FP8.
        gpu: the GPU.
    """
    if gpu is None or not fp8_linears:
        return ""
    host_s = fp8_linears * HOST_LINEAR_S
    gpu_s = 3 * 2 * work / achievable(gpu).half
    if host_s <= gpu_s:
        return ""
    return (
        f"this micro-batch on {gpu.name}: the host takes about {1000 * host_s:.0f} ms to launch "
        f"{fp8_linears} FP8 linears, and the GPU {1000 * gpu_s:.0f} ms for the GEMMs of all "
        f"{linears} in bf16"
    )
