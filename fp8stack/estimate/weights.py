"""The bytes of parameters and optimizer state, from their shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit", "adamwfp8"]
Shapes = dict[str, tuple[int, ...]]

FLOAT = 4  # bytes of a float32
STEP = 4  # an optimizer counts its steps in a float32 for each tensor

# torchao's optimizers: a float32 scale per block, and in 8 bits a table of 256 values per moment.
# Smaller tensors, and those that are no whole blocks, keep float32 moments.
BLOCK, SMALLEST, TABLE = 256, 4096, 256


def sharded(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Shapes:
    """The shapes of FSDP2's largest shards: rows are divided by the ranks, rounded up."""
    return {name: (-(-first // ranks), *rest) for name, (first, *rest) in shapes.items()}


def float_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The bytes of float32 tensors of these shapes."""
    return FLOAT * sum(map(math.prod, shapes.values()))


def optimizer_bytes(
    shapes: Mapping[str, tuple[int, ...]], optimizer: OptimizerName, momentum: float = 0.9
) -> int:
    """The bytes of an optimizer's state after a step, for parameters of these shapes.

    AdamW (fused) has two float32 moments and a step count for each tensor; SGD one float32 buffer,
    or nothing if `momentum` is 0. The others handle the matrices of the blocks and leave the rest
    to AdamW: Muon has one float32 buffer, torchao's AdamW two moments of a byte per value, with
    their scales.
    """
    if optimizer == "sgd":
        return float_bytes(shapes) if momentum else 0
    return sum(_state_of(name, shape, optimizer) for name, shape in shapes.items())


def _state_of(name: str, shape: tuple[int, ...], optimizer: OptimizerName) -> int:
    count = math.prod(shape)
    inner = name.startswith("blocks.") and len(shape) == 2
    if inner and optimizer == "muon":
        return FLOAT * count
    if inner and optimizer != "adamw" and count >= SMALLEST and count % BLOCK == 0:
        table = FLOAT * TABLE if optimizer == "adamw8bit" else 0
        return 2 * (count + FLOAT * count // BLOCK + table) + STEP
    return 2 * FLOAT * count + STEP
