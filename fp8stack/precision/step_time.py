"""The time of a training step on one GPU, as a range, and that of the same step without FP8. Does
not import torch.

A step takes the larger of two times: the host launches kernels while the GPU runs earlier ones.
The GPU's time is that of GEMMs, attention, casts, other kernels and AdamW at measured rates. Real
steps took up to twice as long in both precisions; this unexplained time is the same in both, so the
ratio of two steps has a narrower range than each of them. Communication is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.precision.gpus import Gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8stack.precision.plan import LayerPlan

EFFICIENCY = (0.5, 1.1)
"""Computed over real GPU time, lowest and highest: contains the steps of bench/results/h100, bf16
and delayed scaling of gpt2-1.5b (0.5) and of two llama-8b blocks (1.0)."""
CAST_RATES = (1.14e12, 2.0e12)
"""Bytes per second of casts on an H100: call by call, launch included, and without the launch."""
HOST_BLOCK_S = {"bf16": 3.7e-3, "fp8": 5.2e-3}
"""Seconds in which the host launches the two passes of a compiled block (four linears) without CUDA
graphs. In FP8 measured with an H100, in delayed scaling; in bf16 at most this, which is all of a
measured step but AdamW. With CUDA graphs, which no GPU has timed yet, the host is not counted."""
LEAST_GEMM_S = 11.4e-6
"""A GEMM that takes less than this in bf16 does not fill a GPU, and FP8 does not shorten it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step on one GPU, without its linear layers.

    Attributes:
        tokens: tokens of a micro-batch.
        accumulate: micro-batches of a step.
        attention_flops: floating-point operations of attention per micro-batch, in both passes.
        head_width: the width of an attention head.
        moved_bytes: bytes that kernels other than GEMMs, attention, casts and AdamW move per
            micro-batch if all operands are in bf16.
        parameters: parameters that AdamW updates on this GPU.
        active: the mean share of tokens that an expert receives.
        recompute: the activation checkpointing.
        graphed: whether passes are replayed as CUDA graphs, except by Transformer Engine.
    """

    tokens: int
    accumulate: int = 1
    attention_flops: float = 0
    head_width: int = 128
    moved_bytes: float = 0
    parameters: float = 0
    active: float = 1.0
    recompute: Literal["none", "selective", "block"] = "none"
    graphed: bool = False


@dataclass(frozen=True, kw_only=True)
class Range:
    """The lowest and the highest value."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a training step on one GPU.

    Attributes:
        gpu: the GPU's name.
        step_ms: milliseconds of the step.
        base_ms: milliseconds of the same step without FP8, in the dtype `base`.
        ratio: `step_ms` over `base_ms` in equal conditions; 1 for a step without FP8.
        host_ms: milliseconds in which the host launches the step, 0 with CUDA graphs.
        base: the compute dtype.
    """

    gpu: str
    step_ms: Range
    base_ms: Range
    ratio: Range
    host_ms: float
    base: str

    @property
    def verdict(self) -> Literal["FP8 pays", "FP8 does not pay", "too close to tell"]:
        """Whether the whole range of the ratio is below 1 or above 1."""
        return verdict(self.ratio)

    @property
    def comparison(self) -> str:
        """The ratio in words."""
        ratio = f"{_span(self.ratio, 2)} of {self.base}'s time on {self.gpu}"
        return f"{ratio}: {self.verdict}"

    def __str__(self) -> str:
        step = f"{_duration(self.step_ms)} on {self.gpu}"
        is_base = self.ratio.low == self.ratio.high == 1
        return step if is_base else f"{step}, {self.comparison}"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The assumed rates of a GPU: operations per second of GEMMs and attention, bytes per second of
    casts (lowest, highest) and of other kernels."""

    half: float
    fp8: float
    fp4: float
    attention: float
    casts: tuple[float, float]
    memory: float


def rates_of(
    gpu: Gpu, dtype: str = "bf16", attention: str = "bf16", head_width: int = 128
) -> Rates:
    """The rates that `gpu` is assumed to reach; `half` is that of GEMMs in `dtype`.

    An H100 SXM reached 748 TFLOP/s in bf16, 1255 (y, fast accumulation) and 1202 (dx, dw) in FP8,
    and copied 2.60 TB/s. Attention reaches 400 TFLOP/s in bf16 and 220 with heads narrower than
    128. Another GPU reaches the same shares of its peak rates. Casts depend on the multiprocessors:
    those of other Hopper GPUs reach the same share of the float32 rate. On other generations they
    reach at most the same share of the bandwidth, and at least the lower of these two shares. A GPU
    without FP8 or FP4 units runs these GEMMs at the rate of the next wider format.
    """
    half = (gpu.peak(dtype)[0] or gpu.fp32_tflops) * 1e12 * (748 / 989)
    fp8 = gpu.fp8_tflops * 1e12 * (3 / (1 / 1255 + 2 / 1202) / 1979) if gpu.fp8_tflops else half
    memory = gpu.memory_tb_per_s * 1e12 * (2.60 / 3.35)
    slow, fast = (rate * gpu.fp32_tflops / 67 for rate in CAST_RATES)
    if gpu.capability != (9, 0):
        slow = min(slow, CAST_RATES[0] / 2.60e12 * memory)
        fast = CAST_RATES[1] / 2.60e12 * memory
    share = (400 if head_width >= 128 else 220) / 989
    return Rates(
        half=half,
        fp8=fp8,
        fp4=gpu.fp4_tflops / gpu.fp8_tflops * fp8 if gpu.fp4_tflops and gpu.fp8_tflops else fp8,
        attention=(gpu.peak(attention)[0] or gpu.fp32_tflops) * 1e12 * share,
        casts=(slow, fast),
        memory=memory,
    )


def step_time(
    layers: Sequence[LayerPlan],
    work: Workload,
    gpu: Gpu,
    *,
    dtype: str = "bf16",
    attention: str = "bf16",
    by_te: bool = False,
) -> StepTime:
    """Predict a step of a model with these linear layers. None of them may be emulated.

    Args:
        layers: the decisions for all linear layers.
        work: the rest of the step.
        gpu: the GPU.
        dtype: the compute dtype, of layers that are not in FP8.
        attention: the dtype of attention; "fp8" for attention in FP8.
        by_te: whether Transformer Engine runs the layers, which is not replayed as CUDA graphs.
    """
    rates = rates_of(gpu, dtype, attention, work.head_width)
    base_rates = rates_of(gpu, dtype, dtype if attention == "fp8" else attention, work.head_width)
    fp8_linears = sum(layer.fp8 for layer in layers)
    base_host = len(layers) * HOST_BLOCK_S["bf16"] / 4
    host = base_host + fp8_linears * (HOST_BLOCK_S["fp8"] - HOST_BLOCK_S["bf16"]) / 4
    if work.graphed:
        base_host, host = 0.0, host if by_te else 0.0
    base_pass, base_once = _gpu_seconds(layers, work, base_rates, None)
    steps, bases, ratios = [], [], []
    gpu_seconds = [_gpu_seconds(layers, work, rates, casts) for casts in rates.casts]
    for (in_pass, once), efficiency, launches in product(gpu_seconds, EFFICIENCY, (0, 1)):
        unexplained = 1 / efficiency - 1
        gpu_s, base_gpu_s = in_pass + unexplained * base_pass, base_pass / efficiency
        step = work.accumulate * max(launches * host, gpu_s) + once + unexplained * base_once
        base = work.accumulate * max(launches * base_host, base_gpu_s) + base_once / efficiency
        steps.append(1000 * step)
        bases.append(1000 * base)
        ratios.append(step / base if fp8_linears or attention == "fp8" else 1.0)
    return StepTime(
        gpu=gpu.name,
        step_ms=_range(steps),
        base_ms=_range(bases),
        ratio=_range(ratios),
        host_ms=1000 * work.accumulate * host,
        base=dtype,
    )


def layer_ratio(layer: LayerPlan, work: Workload, gpu: Gpu, dtype: str = "bf16") -> Range:
    """The time of a linear's GEMMs and casts in FP8, over its time in `dtype`."""
    rates = rates_of(gpu, dtype)
    base, *fp8 = (
        in_pass + once / work.accumulate
        for in_pass, once in (_layer_seconds(layer, work, rates, c) for c in (None, *rates.casts))
    )
    return _range([seconds / base for seconds in fp8])


def layer_doubt(layer: LayerPlan, work: Workload, gpus: Sequence[Gpu], dtype: str = "bf16") -> str:
    """The reason that FP8 does not seem to pay in a linear on one of `gpus`; "" if it does, or they
    have no FP8 units."""
    shape = f"{work.tokens} x {layer.in_features} -> {layer.out_features}"
    for gpu in gpus:
        if gpu.fp8_tflops is None:
            continue
        ratio = layer_ratio(layer, work, gpu, dtype)
        if verdict(ratio) != "FP8 pays":
            return f"{shape} on {gpu.name}: {_span(ratio, 2)} of its time in {dtype}"
    return ""


def verdict(ratio: Range) -> Literal["FP8 pays", "FP8 does not pay", "too close to tell"]:
    """Whether a ratio of times, FP8 over bf16, is below 1 or above 1 in all of its range, in two
    digits."""
    if round(ratio.high, 2) < 1:
        return "FP8 pays"
    return "FP8 does not pay" if round(ratio.low, 2) > 1 else "too close to tell"


@lru_cache(maxsize=256)
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
    amaxes = sum(_needs_amax(q) for q in passes)
    written = sum(q.element_bits / 8 for q in copies)
    written += sum(q.scale_bytes / q.blocks[1] for q in copies if q.blocks and q.blocks[0] == 1)
    plain = 4 + 2 if operand == "weight" and None in (rowwise, columnwise) else 0
    return source * (len(passes) + amaxes) + written + plain


@lru_cache(maxsize=256)
def _is_fp4(quantizers: Quantizers, gemm: str) -> bool:
    """Whether all operands of a GEMM have four bits."""
    return all(q is not None and q.element.bits == 4 for q in quantizers.values(gemm))


def _needs_amax(quantizer: Quantizer) -> bool:
    """Whether a scale depends on the amax of the whole tensor."""
    return quantizer.scale == "e4m3" or (quantizer.per_tensor and not quantizer.delayed)


_BLOCK_LAYERS: dict[str, tuple[Operand, ...]] = {
    "qkv": ("input",),
    "output": ("grad_output",),
    "up": ("input", "grad_output"),
    "down": ("input", "grad_output"),
}
"""The operands that a norm or an activation writes, by the last part of a linear's path; attention
writes the others."""


def _fused_bytes(layer: LayerPlan, operand: Operand) -> float:
    """The bytes per element that other kernels need not move as the cast of an operand is fused
    into the norm or activation that writes it: bf16's copy is neither written nor read, or, where
    the scale depends on the whole tensor, is not read once more for the amax."""
    assert layer.quantizers is not None
    rowwise = layer.quantizers.rowwise(operand)
    if operand not in _BLOCK_LAYERS.get(layer.name.rpartition(".")[2], ()) or rowwise is None:
        return 0
    if _needs_amax(rowwise):
        return 2
    return 0 if layer.quantizers.columnwise(operand) is None else 4


_RECOMPUTED = {
    "none": (1.0, 1.0, 1.0),
    "selective": (1.0, 1.0, 1.5),
    "block": (4 / 3, 9 / 7, 1.5),
}
"""Factors of the time of GEMMs, attention and other kernels of the blocks, by checkpointing."""


def _layer_seconds(
    layer: LayerPlan, work: Workload, rates: Rates, casts: float | None
) -> tuple[float, float]:
    """Seconds of a linear, or of a group of them, per micro-batch and per step: GEMMs, casts of its
    operands and of its gradient. `casts` is the rate of casts, None for a layer without FP8."""
    groups = layer.groups or 1
    rows = work.tokens * groups * (work.active if layer.groups else 1)
    matrix = layer.in_features * layer.out_features
    weights = groups * matrix
    in_block = layer.name.startswith("blocks.")
    gemms, _, kernels = _RECOMPUTED[work.recompute if in_block else "none"]
    half = 2 * rows * matrix / rates.half
    # The gradient of a cast of w is cast back in each micro-batch, and w once.
    cast = 6 * weights / rates.memory
    if layer.quantizers is None or casts is None:
        return 3 * gemms * half + cast, cast
    seconds = 0.0
    for gemm in layer.quantizers.gemms:
        if gemm in layer.plain_gemms:
            seconds += gemms * half
            continue
        low = rates.fp4 if _is_fp4(layer.quantizers, gemm) else rates.fp8
        seconds += gemms * max(half * rates.half / low, min(half, LEAST_GEMM_S))
    if "wgrad" in layer.plain_gemms:
        seconds += cast
    operands: tuple[tuple[Operand, int], ...] = (
        ("input", layer.in_features),
        ("grad_output", layer.out_features),
    )
    for operand, features in operands:
        moved = cast_bytes(layer.quantizers, operand) / casts
        saved = _fused_bytes(layer, operand) / rates.memory
        seconds += (kernels if operand == "input" else 1) * rows * features * (moved - saved)
    return seconds, cast_bytes(layer.quantizers, "weight") * weights / casts


def _gpu_seconds(
    layers: Sequence[LayerPlan], work: Workload, rates: Rates, casts: float | None
) -> tuple[float, float]:
    """Seconds of the GPU per micro-batch, and once per step; `casts` as for `_layer_seconds`."""
    _, attention, kernels = _RECOMPUTED[work.recompute]
    moved = kernels * work.moved_bytes
    # Later micro-batches read a gradient, and read and write the sum.
    moved += 12 * work.parameters * (1 - 1 / work.accumulate)
    in_pass = attention * work.attention_flops / rates.attention + moved / rates.memory
    # AdamW: the gradients' norm reads 4 bytes per parameter; then weight, gradient and two moments
    # are read and written, all float32.
    once = 36 * work.parameters / rates.memory
    for layer in layers:
        layer_pass, layer_once = _layer_seconds(layer, work, rates, casts)
        in_pass, once = in_pass + layer_pass, once + layer_once
    return in_pass, once


def _range(values: Sequence[float]) -> Range:
    return Range(low=min(values), high=max(values))


def _span(values: Range, digits: int) -> str:
    """A range in words."""
    low, high = f"{values.low:.{digits}f}", f"{values.high:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _duration(step_ms: Range) -> str:
    """A range of milliseconds in words."""
    if step_ms.low >= 10_000:
        return f"{_span(Range(low=step_ms.low / 1000, high=step_ms.high / 1000), 0)} s"
    return f"{_span(step_ms, 0 if step_ms.low >= 10 else 1)} ms"
