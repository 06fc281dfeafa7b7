"""Quantizers beside those of `fp8stack.conform.inputs`, their random bits, and what they need."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8stack.conform.inputs import ties
from fp8stack.formats import Quantizer
from fp8stack.numerics import RandomBits
from fp8stack.precision import load_recipe

# Those of `quantize_mxfp8` and `quantize_blocks`, in all their forms.
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


def numbers(x: Tensor) -> Tensor:
    """Values on half steps, of the shape of `x`."""
    return ties(*x.shape)


def has_amax_of_tensors(recipe: str) -> bool:
    """Whether a scale of this recipe follows from the whole of the tensor that is cast: then each
    rank has those of its own part of a batch."""
    return any(not q.delayed and (q.per_tensor or q.scale == "e4m3") for q in _each(recipe))


def has_draws(recipe: str) -> bool:
    """Whether a quantizer of this recipe rounds at random."""
    return any(q.stochastic for q in _each(recipe))


def _each(recipe: str) -> list[Quantizer]:
    return [q for table in load_recipe(recipe).tables for q in table.each.values()]


DRAWN = RandomBits(1, 2, torch.tensor(3))


def generator_of(quantizer: Quantizer) -> RandomBits | None:
    """`DRAWN` if it rounds at random."""
    return DRAWN if quantizer.stochastic else None
