"""Quantizers of every kind, and matrices with what is hard in them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fp8stack.formats import Quantizer
from fp8stack.numerics import RandomBits
from fp8stack.precision import load_recipe

MXFP8 = Quantizer(block=(1, 32), scale="e8m0")
MXFP4 = replace(MXFP8, format="e2m1")
NVFP4 = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")

# Rounded to the nearest, no Hadamard transform.
PLAIN = {
    "tensor": Quantizer(),
    "tensor e5m2": Quantizer(format="e5m2", scale="power_of_two", eps=3.0),
    "row": Quantizer(block="row", eps=0.5),
    "row e5m2": Quantizer(format="e5m2", block="row", scale="power_of_two"),
    "1x128": Quantizer(block=(1, 128), scale="power_of_two"),
    "1x64": Quantizer(block=(1, 64)),
    "128x128": Quantizer(block=(128, 128), scale="power_of_two"),
    "32x32": Quantizer(format="e5m2", block=(32, 32), eps=0.01),
    "mxfp8": MXFP8,
    "mxfp8 e5m2 floor": Quantizer(
        format="e5m2", block=(1, 32), scale="e8m0", scale_rounding="floor"
    ),
    "mxfp4": MXFP4,
    "mxfp4 floor": replace(MXFP4, scale_rounding="floor"),
    "mxfp4 even": replace(MXFP4, scale_rounding="even"),
    "mxfp4 32x32": replace(MXFP4, block=(32, 32)),
    "mxfp6 e2m3": replace(MXFP8, format="e2m3"),
    "mxfp6 e2m3 even": replace(MXFP8, format="e2m3", scale_rounding="even"),
    "mxfp6 e3m2": replace(MXFP8, format="e3m2"),
    "mxfp6 e3m2 floor": Quantizer(
        format="e3m2", block=(1, 32), scale="e8m0", scale_rounding="floor"
    ),
    "fp4 float32": Quantizer(format="e2m1", block=(1, 16)),
    "fp6 power of two": Quantizer(format="e3m2", block=(16, 16), scale="power_of_two"),
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
        *("mxfp6 e3m2 floor", "nvfp4 16x16", "hadamard nvfp4", "hadamard mxfp4", "hadamard row"),
    )
}
EVERY = PLAIN | HADAMARD | STOCHASTIC


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal values whose magnitudes differ by rows and columns by up to 2^16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    return x * 2.0 ** torch.randint(-3, 3, (1, columns), generator=generator)


def with_specials(x: Tensor) -> Tensor:
    """A copy with a few elements that are not finite, zeros in blocks, and subnormal values."""
    x = x.clone()
    x[1, 3], x[40, 7], x[5, 0], x[41, 100] = math.nan, math.inf, -math.inf, -math.nan
    x[64:96, 64:96], x[9], x[33, :16] = 0.0, -0.0, -0.0
    x[12, 32:64], x[13, 32:64] = 2.0**-140, -(2.0**-126)
    return x


def extreme(seed: int = 0) -> Tensor:
    """Every magnitude of float32, a block of its like beside the other; float32 bits at random."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**23, (70, 300), generator=generator, dtype=torch.int32)
    exponents = (
        torch.arange(70 * 300, dtype=torch.int32).div(83, rounding_mode="floor").view(70, 300)
    )
    signs = torch.randint(0, 2, (70, 300), generator=generator, dtype=torch.int32) << 31
    return (bits | (exponents.clamp(max=254) << 23) | signs).view(torch.float32)


def numbers(x: Tensor) -> Tensor:
    """Values on half steps: ties in every format."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(-64, 64, x.shape, generator=generator)
        / 16
        * 2.0 ** torch.randint(-4, 4, (x.shape[0], 1), generator=generator)
    )


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
