"""Whether FP8 pays in a layer on a GPU: by a measurement there, else by its data sheet's rates.

Estimates, no measurement of ours stands behind them. Pure; no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8stack.precision.gpus import Gpu

Shape = tuple[int, int, int]
"""The GEMM of a linear's forward pass: M rows (tokens), K in features, N out features."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which share of its peak rates a GPU is assumed to reach.

    The default is our estimate for an H200: GEMMs at 700 (bf16) and 1300 TFLOP/s (FP8), attention
    at 400, 4.1 TB/s. No measurement of this project stands behind it.
    """

    half: float = 700 / 989
    fp8: float = 1300 / 1979
    attention: float = 400 / 989
    memory: float = 4.1 / 4.8


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU is assumed to do per second: operations in GEMMs and in attention, and bytes."""

    half: float
    fp8: float
    attention: float
    memory: float


def achievable(gpu: Gpu, efficiency: Efficiency) -> Rates:
    """The rates that `gpu` is assumed to reach; without FP8 units those GEMMs run at bf16's."""
    half = gpu.half_tflops * 1e12 * efficiency.half
    return Rates(
        half=half,
        fp8=gpu.fp8_tflops * 1e12 * efficiency.fp8 if gpu.fp8_tflops else half,
        attention=gpu.half_tflops * 1e12 * efficiency.attention,
        memory=gpu.memory_tb_per_s * 1e12 * efficiency.memory,
    )


# Bytes moved per element of x and of dy, whose casts make two copies of 1 byte, and per element of
# w, which is float32: read it, for current scaling once more for the amax, and write both copies.
# Block scaling quantizes x and dy in two passes, mxfp8 w as well, and writes 4 bytes of scale per
# 128 elements or 1 per 32, for each copy.
_SCALES = 2 * 4 / 128
CAST_BYTES = {
    "delayed": (2 + 1 + 1, 4 + 1 + 1),
    "current": (2 + 2 + 1 + 1, 4 + 4 + 1 + 1),
    "block": (2 * (2 + 1) + _SCALES, 4 + 1 + 1),
    "mxfp8": (2 * (2 + 1) + _SCALES, 2 * (4 + 1) + _SCALES),
}

LEAST_GEMM_S = 11.4e-6
"""A GEMM that takes less than this in bf16 does not fill a GPU: M K N = 4e9 on an H200."""


def least_ratio(gpu: Gpu, scaling: str) -> float:
    """The K N / (K + N) from which three FP8 GEMMs save more than the casts of x and dy take.

    They save 6 M K N (1 / bf16 rate - 1 / FP8 rate), the casts move c M (K + N) bytes.
    """
    rates = achievable(gpu, Efficiency())
    saved = 6 * (1 / rates.half - 1 / rates.fp8)
    return CAST_BYTES[scaling][0] / rates.memory / saved


def doubt(shape: Shape, scaling: str, gpu: Gpu | None, measured: Mapping[Shape, float]) -> str:
    """Why FP8 does not seem to pay for a GEMM of this shape; "" if it does, or nothing is known.

    Args:
        shape: of the forward pass.
        scaling: "delayed", "current", "block" or "mxfp8".
        gpu: whose rates count, for a shape that was not measured.
        measured: bf16's time / FP8's time by shape; it decides alone.
    """
    rows, inputs, outputs = shape
    what = f"{rows} x {inputs} -> {outputs}"
    if shape in measured:
        # 0.9996 is not to read as "1".
        speed = min(round(measured[shape], 3), 0.999)
        return f"{what} measured at {speed:g} of bf16's speed" if measured[shape] < 1.0 else ""
    if gpu is None or gpu.fp8_tflops is None:
        return ""
    ratio, least = inputs * outputs / (inputs + outputs), least_ratio(gpu, scaling)
    if ratio < least:
        return f"{what} on {gpu.name}: K N / (K + N) = {ratio:.0f}, below {least:.0f}"
    least = LEAST_GEMM_S * achievable(gpu, Efficiency()).half / 2
    if (work := rows * inputs * outputs) < least:
        return f"{what} on {gpu.name}: M K N = {work:.2g}, below {least:.2g}"
    return ""
