"""Operands that are not finite, are zero, or whose scales underflow, and a search for products that
have a number where float32 has NaN."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from fp8stack.analysis.conform.checks import mark_weights_changed
from fp8stack.common.formats import Quantizer
from tests.support.gemm_oracle import run

# The number that fills an operand, or random ones for None; another number at one place.
KINDS: dict[str, tuple[float | None, float | None]] = {
    "numbers": (None, None),
    "zeros": (0.0, None),
    "NaNs": (math.nan, None),
    "infinities": (math.inf, None),
    "numbers and a NaN": (None, math.nan),
    "zeros and a NaN": (0.0, math.nan),
    "numbers and an infinity": (None, -math.inf),
    "zeros and an infinity": (0.0, math.inf),
    "tiny numbers": (1e-40, None),
}


def operand(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """A matrix of a kind of `KINDS`."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    fill, special = KINDS[kind]
    if kind == "tiny numbers":
        x *= 1e-40
    elif fill is not None:
        x.fill_(fill)
    if special is not None:
        x[3, 5] = special
    return x


def hidden(layer: Any, rows: int, forward: Any = None) -> list[str]:
    """The products of a linear without a bias that have a number where float32 has NaN, for
    every pair of kinds of two of x, weight and dy."""
    kinds, wrong = list(KINDS), []
    for first, second in itertools.product(range(len(kinds)), repeat=2):
        # A Latin square: each two of the three meet.
        chosen = [kinds[first], kinds[second], kinds[(first + second) % len(kinds)]]
        sizes = (rows, layer.in_features), tuple(layer.weight.shape), (rows, layer.out_features)
        x, weight, dy = (
            operand(kind, size, seed)
            for seed, (kind, size) in enumerate(zip(chosen, sizes, strict=True))
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
        mark_weights_changed(layer)
        dtype = layer.compute_dtype
        results = run(layer, x.to(dtype), dy.to(dtype), forward)
        expected = products(x, weight, dy)
        saturated = products(*(x.nan_to_num(math.nan, 1e3, -1e3) for x in (x, weight, dy)))
        quantizers = layer.operands.quantizers
        forward_values = (None, quantizers.weight, quantizers.input)
        gemms = [
            (first, values if second == "forward" else second)
            for (first, second), values in zip(
                quantizers.gemms.values(), forward_values, strict=True
            )
        ]
        for name, gemm, result, exact, finite in zip(
            ("y", "dx", "dw"), gemms, results, expected, saturated, strict=False
        ):
            hides = finite.isnan() & ~result.isnan()
            if not any(isinstance(q, Quantizer) and _saturates(q) for q in gemm):
                hides |= exact.isnan() & result.isfinite()
            if hides.any():
                wrong.append(f"{name} of x {chosen[0]}, weight {chosen[1]}, dy {chosen[2]}")
    return wrong


def _saturates(quantizer: Quantizer) -> bool:
    """Whether an infinity becomes a finite number: under two levels of scales, its tensor's scale
    is infinite."""
    return quantizer.scale != "e4m3"


def products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw in float64."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    return x @ weight.t(), dy @ weight, dy.t() @ x
