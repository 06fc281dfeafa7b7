"""What one linear layer keeps: its operands for the backward pass, and FP8 copies of its weight.

N rows (tokens), K in features, M out features.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8stack.backends.base import DTYPES
from fp8stack.precision import Plan
from fp8stack.precision.plan import LayerPlan
from fp8stack.precision.recipe import BlockRecipe

SCALE = 4  # bytes of a float32 scale
MX, BLOCK = 32, 128
ROW_MULTIPLES = {"delayed": 16, "current": 16, "mxfp8": MX, "block": BLOCK}
"""What the scaled GEMMs of `torch` and `te` want rows padded to."""


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
    if not layer.fp8:
        size = value_bytes(plan)
        copy = 0 if size == 4 else size * inputs * outputs
        return Kept(size * rows * inputs, copy)
    if plan.backend == "emulate":
        if save_fp8:
            return Kept(
                _packed(rows, inputs, plan.scaling, (BLOCK, 1)),
                _packed(outputs, inputs, plan.scaling, (BLOCK, BLOCK)),
            )
        size = _emulated_bytes(plan)
        return Kept(
            _values(rows, inputs, plan.scaling, size), _values(outputs, inputs, plan.scaling, size)
        )
    padded = round_up(rows, ROW_MULTIPLES[plan.scaling])
    weights = 0
    if gathers and plan.scaling in ("block", "mxfp8"):  # else it is gathered again, as FP8
        weights = fp8_weight_bytes(layer, plan) // 2
    return Kept(inputs * padded + _hardware_scales(inputs, padded, plan.scaling, False), weights)


def fp8_weight_bytes(layer: LayerPlan, plan: Plan) -> int:
    """What `torch` and `te` keep of a weight until it changes: its FP8 bytes, those of its
    transpose, and their scales."""
    if not layer.fp8 or plan.backend not in ("torch", "te"):
        return 0
    inputs, outputs = layer.in_features, layer.out_features
    scales = _hardware_scales(outputs, inputs, plan.scaling, True)
    if plan.scaling in ("block", "mxfp8"):  # per tensor, both have the same one
        scales += _hardware_scales(inputs, outputs, plan.scaling, True)
    return 2 * inputs * outputs + scales


def _emulated_bytes(plan: Plan) -> int:
    """The bytes of an emulated operand's value: see `EmulateBackend`."""
    recipe = plan.recipe
    exact = not (isinstance(recipe, BlockRecipe) and not recipe.power_of_two)
    return 4 if plan.device == "cpu" or not exact else value_bytes(plan)


def round_up(size: int, multiple: int) -> int:
    """The next multiple of `multiple`, or `size` if it is one."""
    return -(-size // multiple) * multiple


def _values(rows: int, columns: int, scaling: str, size: int) -> int:
    """The values of an emulated operand. Blocks are padded: rows that were added stay in the
    memory, columns that were added are cut off by a copy without either."""
    if scaling in ("delayed", "current"):
        return size * rows * columns + SCALE
    block = MX if scaling == "mxfp8" else BLOCK
    return size * columns * (rows if columns % block else round_up(rows, block))


def _packed(rows: int, columns: int, scaling: str, block: tuple[int, int]) -> int:
    """FP8 bytes and scales that the emulator packs, for the GEMM that reduces over rows."""
    if scaling in ("delayed", "current"):
        return rows * columns + SCALE
    if scaling == "mxfp8":  # a byte of scale for each 32 rows of a column
        padded = round_up(rows, MX)
        return padded * columns + padded // MX * columns
    down, along = block
    held = rows if columns % along else round_up(rows, down)
    return held * columns + SCALE * -(-rows // down) * -(-columns // along)


def _hardware_scales(rows: int, columns: int, scaling: str, square: bool) -> int:
    """The scales of an FP8 matrix [rows, columns] that a GEMM reduces over columns, as the hardware
    reads them: see `pack_scales`. `square`: a block is 128 x 128, as that of weights."""
    if scaling in ("delayed", "current"):
        return SCALE
    if scaling == "mxfp8":  # tiles of 128 x 4 bytes
        return round_up(rows, 128) * round_up(-(-columns // MX), 4)
    if square:
        return SCALE * -(-rows // BLOCK) * round_up(-(-columns // BLOCK), 4)
    return SCALE * rows * -(-columns // BLOCK)
