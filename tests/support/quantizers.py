"""Quantizers of every kind, their random bits, and what they need."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8stack.analysis.conform.check_inputs import MXFP8, NVFP4
from fp8stack.common.formats import Quantizer
from fp8stack.numerics import RandomBits
from fp8stack.precision import load_recipe

MXFP4 = replace(MXFP8, format="e2m1")
# Rounding to nearest, no Hadamard transform.
PLAIN = {
    "tensor": Quantizer(),
    "tensor e5m2": Quantizer(format="e5m2", scale="power_of_two", eps=3.0),
    "row": Quantizer(block="row", eps=0.5),
    "row e5m2": Quantizer(format="e5m2", block="row", scale="power_of_two"),
    "1x128": Quantizer(block=(1, 128), scale="power_of_two"),
    "1x64": Quantizer(block=(1, 64)),
    "128x128": Quantizer(block=(128, 128), scale="power_of_two"),
    "32x32": Quantizer(format="e5m2", block=(32, 32), eps=0.01),
    "fp4 float32": Quantizer(format="e2m1", block=(1, 16)),
    "fp6 power of two": Quantizer(format="e3m2", block=(16, 16), scale="power_of_two"),
    "mxfp8": MXFP8,
    "mxfp8 e5m2 floor": replace(MXFP8, format="e5m2", scale_rounding="floor"),
    "mxfp4": MXFP4,
    "mxfp4 floor": replace(MXFP4, scale_rounding="floor"),
    "mxfp4 even": replace(MXFP4, scale_rounding="even"),
    "mxfp4 32x32": replace(MXFP4, block=(32, 32)),
    "mxfp6 e2m3": replace(MXFP8, format="e2m3"),
    "mxfp6 e2m3 even": replace(MXFP8, format="e2m3", scale_rounding="even"),
    "mxfp6 e3m2": replace(MXFP8, format="e3m2"),
    "mxfp6 e3m2 floor": replace(MXFP8, format="e3m2", scale_rounding="floor"),
    "own e3m4": Quantizer(format="e3m4", eps=0.25),
    "own e3m4 1x64": Quantizer(format="e3m4", block=(1, 64), scale="power_of_two"),
    "own e3m0 even": replace(MXFP8, format="e3m0", scale_rounding="even"),
    "own e7m0": replace(MXFP8, format="e7m0"),
    "own e2m4 32x32": Quantizer(format="e2m4", block=(32, 32)),
    "nvfp4": NVFP4,
    "nvfp4 16x16": replace(NVFP4, block=(16, 16)),
}
HADAMARD = {
    "hadamard nvfp4": replace(NVFP4, hadamard=16),
    "hadamard mxfp4": replace(MXFP4, hadamard=32),
    "hadamard mxfp4 of 16": replace(MXFP4, hadamard=16),
    "hadamard tensor": Quantizer(hadamard=16),
    "hadamard row": Quantizer(block="row", hadamard=32),
    "hadamard 1x128": Quantizer(block=(1, 128), hadamard=16),
}
STOCHASTIC = {
    f"stochastic {name}": replace(quantizer, rounding="stochastic")
    for name, quantizer in (PLAIN | HADAMARD).items()
    if name
    in (
        *("tensor", "tensor e5m2", "row e5m2", "1x128", "mxfp8", "mxfp4", "mxfp6 e2m3", "nvfp4"),
        *("own e3m4", "own e3m0 even", "own e7m0"),
        *("mxfp6 e3m2 floor", "nvfp4 16x16", "hadamard nvfp4", "hadamard mxfp4", "hadamard row"),
    )
}
EVERY = PLAIN | HADAMARD | STOCHASTIC

# MXFP8 and float32 scales in blocks, by every rule.
RULES = {
    f"mxfp8 {format} {rule}": Quantizer(
        format=format, block=(1, 32), scale="e8m0", scale_rounding=rule
    )
    for format in ("e4m3", "e5m2")
    for rule in ("rceil", "floor", "even")
} | {
    f"{tall}x128 {format} {scale}": Quantizer(format=format, block=(tall, 128), scale=scale)
    for tall in (1, 128)
    for format in ("e4m3", "e5m2")
    for scale in ("power_of_two", "float32")
}


def has_amax_of_tensors(recipe: str) -> bool:
    """Whether a scale of this recipe follows from all elements of the tensor that is cast: ranks,
    which have different rows of a batch, then have different scales."""
    return any(not q.delayed and (q.per_tensor or q.scale == "e4m3") for q in _quantizers(recipe))


def has_draws(recipe: str) -> bool:
    """Whether a quantizer of this recipe rounds at random."""
    return any(q.stochastic for q in _quantizers(recipe))


def _quantizers(recipe: str) -> list[Quantizer]:
    return [q for table in load_recipe(recipe).tables for q in table.each.values()]


DRAWN = RandomBits(1, 2, torch.tensor(3))


def generator_of(quantizer: Quantizer) -> RandomBits | None:
    """`DRAWN` if it rounds at random."""
    return DRAWN if quantizer.stochastic else None
