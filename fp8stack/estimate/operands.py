"""What one linear layer keeps: its operands for the backward pass, and FP8 copies of its weight.

N rows (tokens), K in features, M out features.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8stack.backends.base import DTYPES
from fp8stack.formats import Operand, Quantizer
from fp8stack.precision import Plan
from fp8stack.precision.plan import LayerPlan

SCALE = 4  # bytes of a float32 scale


@dataclass(frozen=True)
class Kept:
    """Bytes that are kept for the backward pass: `activations` grow with the rows, `weights` are
    copies of weights, made for the GEMMs of one micro-batch."""

    activations: int = 0
    weights: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.activations + other.activations, self.weights + other.weights)


def value_bytes(plan: Plan) -> int:
    """The bytes of a value in the plan's compute dtype."""
    return DTYPES[plan.compute_dtype].itemsize


def kept_by_linear(
    layer: LayerPlan, plan: Plan, rows: int, *, save_fp8: bool = False, gathers: bool = False
) -> Kept:
    """The operands that a linear keeps: its input [N, K] and what it makes of its weight [M, K].

    Without FP8 the input in the compute dtype and, unless that is float32, the weight cast to it.
    `emulate`: the values of both in the GEMM's dtype, or FP8 bytes and scales with `save_fp8`.
    `torch`, `te`: the input as FP8 bytes and scales; the weight's are kept by the layer, see
    `fp8_weight_bytes`.

    Args:
        layer: its plan.
        plan: the model's.
        rows: N.
        save_fp8: see `build_backend`.
        gathers: whether the weight is gathered from ranks in each pass (FSDP2).
    """
    inputs, outputs = layer.in_features, layer.out_features
    if layer.quantizers is None:
        size = value_bytes(plan)
        copy = 0 if size == 4 else size * inputs * outputs
        return Kept(size * rows * inputs, copy)
    if plan.runs(layer) == "emulate":
        keeps = _packed if save_fp8 else _values
        return Kept(
            keeps(layer, plan, "input", rows, inputs), keeps(layer, plan, "weight", outputs, inputs)
        )
    x, w = layer.quantizers.input, layer.quantizers.weight
    assert x is not None
    assert w is not None
    padded = round_up(rows, row_multiple(layer, plan))
    # A weight with one scale is gathered again, as FP8.
    weights = fp8_weight_bytes(layer, plan) // 2 if gathers and not w.per_tensor else 0
    return Kept(inputs * padded + _hardware_scales(inputs, padded, x), weights)


def row_multiple(layer: LayerPlan, plan: Plan) -> int:
    """What the scaled GEMMs of `torch` and `te` want the rows of a layer padded to."""
    if layer.quantizers is None or plan.runs(layer) == "emulate":
        return 1
    x = layer.quantizers.input
    return 16 if x is None or x.blocks is None else x.blocks[1]


def fp8_weight_bytes(layer: LayerPlan, plan: Plan) -> int:
    """What `torch` and `te` keep of a weight until it changes: its FP8 bytes, those of its
    transpose, and their scales."""
    if layer.quantizers is None or plan.runs(layer) not in ("torch", "te"):
        return 0
    inputs, outputs, w = layer.in_features, layer.out_features, layer.quantizers.weight
    assert w is not None
    scales = _hardware_scales(outputs, inputs, w)
    if not w.per_tensor:  # per tensor, both have the same one
        scales += _hardware_scales(inputs, outputs, w)
    return 2 * inputs * outputs + scales


def round_up(size: int, multiple: int) -> int:
    """The next multiple of `multiple`, or `size` if it is one."""
    return -(-size // multiple) * multiple


def keeps_input(layer: LayerPlan, plan: Plan) -> bool:
    """Whether what a linear keeps is its input as it came, not a copy."""
    if layer.quantizers is None:
        return True
    plain = layer.quantizers.across("input") is None
    return plain and plan.runs(layer) == "emulate" and plan.holds(layer) == plan.compute_dtype


def _kept(layer: LayerPlan, name: Operand) -> Quantizer | None:
    """What the copy that is kept for the GEMM over the rows was quantized by."""
    assert layer.quantizers is not None
    across = layer.quantizers.across(name)
    return layer.quantizers.along(name) if across == "forward" else across


def _values(layer: LayerPlan, plan: Plan, name: Operand, rows: int, columns: int) -> int:
    """The values of an operand that the emulator keeps for the GEMM over its rows, and what that
    multiplies its output by."""
    quantizer, size = _kept(layer, name), DTYPES[plan.holds(layer)].itemsize
    assert layer.quantizers is not None
    if quantizer is None:
        own = name == "weight" and size == 4  # the parameter itself
        return 0 if own else size * rows * columns
    if quantizer.hadamard:
        rows = round_up(rows, quantizer.hadamard)
    one = quantizer.per_tensor or quantizer.scale == "e4m3"
    factors = columns if quantizer.block == "row" else int(one)
    return size * rows * columns + SCALE * factors


def _packed(layer: LayerPlan, plan: Plan, name: Operand, rows: int, columns: int) -> int:
    """The same as bytes and scales."""
    assert layer.quantizers is not None
    across = layer.quantizers.across(name)
    if across == "forward":
        return _values(layer, plan, name, rows, columns)
    if across is None:
        return 0 if name == "weight" else value_bytes(plan) * rows * columns
    if across.hadamard:
        rows = round_up(rows, across.hadamard)
    held = -(-rows * across.element_bits // 8) * columns
    if across.per_tensor and across.turns and across == layer.quantizers.along(name):
        return held + SCALE
    if across.blocks is None:
        scales = 1 if across.per_tensor else columns
    else:  # turned, as the rows are reduced
        wide, long = across.blocks
        scales = -(-rows // long) * -(-columns // wide)
    return (
        held + across.scale_bytes * scales + SCALE + 1
    )  # and the amax, and whether a NaN was seen


def _hardware_scales(rows: int, columns: int, quantizer: Quantizer) -> int:
    """The scales of an FP8 matrix [rows, columns] that a GEMM reduces over columns, as the hardware
    reads them: see `pack_scales`."""
    if quantizer.blocks is None:
        return SCALE
    high, long = quantizer.blocks
    if quantizer.scale == "e8m0":  # tiles of 128 x 4 bytes
        return round_up(rows, 128) * round_up(-(-columns // long), 4)
    if high > 1:
        return SCALE * -(-rows // high) * round_up(-(-columns // long), 4)
    return SCALE * rows * -(-columns // long)
