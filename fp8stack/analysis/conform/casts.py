"""Checks casts with given scales, and scales of amaxes, to the bit, in every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.check_inputs import DTYPES, FORMAT_NAMES, amaxes, values_of
from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    Skipped,
    as_tensor,
    merged,
    same_bits,
)
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_product, cast_transpose
from fp8stack.layers.kernels.variants import has_kernel
from fp8stack.layers.kernels.weight_casts import BatchedCast

# Powers of two and others, from the smallest to the largest scale of a finite amax.
SCALES = (1.0, 0.1, 3.0, 1 / 3, 2.0**-20, 1e5, 1e30, 1.3e-36, oracles.FLT_MAX)
Cast = Callable[..., Any]
"""`cast(x, scale, format)` -> bytes and, optionally, their transpose, amax and inverse scale."""


# Casts with a given scale


def casts(context: Context) -> Iterator[Check]:
    """Check every bfloat16, and float32 ties, limits and special values, with scales of all
    magnitudes."""
    for dtype in DTYPES:
        for format in FORMAT_NAMES:
            ways: dict[str, Cast] = {
                "eager": _plain_cast,
                f"with transpose and amax, by {kernel_of(context)}": cast_transpose,
                "by the kernel for many weights": partial(_weight_cast, context),
                "by TE": partial(_te_cast, context, False),
                "by TE, with transpose": partial(_te_cast, context, True),
            }
            for way, cast in ways.items():
                run = partial(cast_check, context, dtype, format, cast)
                yield Check(f"{dtype} to {format}, {way}", run)
            if not context.quick:
                run = partial(cast_check, context, dtype, format, _plain_cast, compiled=True)
                yield Check(f"{dtype} to {format}, compiled", run)
    for format in FORMAT_NAMES:
        for way, backward in (("relu2", False), ("the gradient of relu2", True)):
            cast, expected = partial(_relu2_cast, backward), partial(_relu2, backward)
            run = partial(cast_check, context, "bf16", format, cast, expected)
            yield Check(f"{way} of bf16 to {format}, by {kernel_of(context)}", run)


def kernel_of(context: Context) -> str:
    """The name of the kernels behind the torch backend's fused casts on this machine."""
    return "Triton" if has_kernel(torch.device(context.device)) else "torch's operators"


def _plain_cast(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor]:
    return (numerics.cast_to_fp8(x, scale, format),)


def _relu2_cast(backward: bool, x: Tensor, scale: Tensor, format: str) -> tuple[Any, ...]:
    """ReLU^2 of a square matrix, or its gradient, where the matrix's transpose is the gradient of
    the output."""
    product = FusedInput("relu2", x, x.t() if backward else None)
    return cast_product(product, scale, format, columnwise=True, record=True, sums=False)[:3]


def _relu2(backward: bool, x: oracles.Array) -> oracles.Array:
    positive = np.where(x <= 0, np.float32(0), x)
    values = np.where(x <= 0, 0, x.T * (2 * positive)) if backward else positive * positive
    return oracles.to_bf16(values)


def need_kernel(context: Context) -> None:
    """Skip the check where Triton's kernels do not run."""
    if not has_kernel(torch.device(context.device)):
        raise Skipped("the kernel for many weights needs Triton and a GPU with FP8")


def _weight_cast(context: Context, x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, ...]:
    need_kernel(context)
    weights = BatchedCast([x], Quantizer(format=format))
    weights.cast(scale.view(1), largest := torch.zeros(1, device=x.device))
    rowwise, columnwise = weights.copies[0]
    return rowwise.data, columnwise.data, largest[0], rowwise.inv_scale


def _te_cast(
    context: Context, transpose: bool, x: Tensor, scale: Tensor, format: str
) -> tuple[Any, ...]:
    context.need_te("delayed")
    copies, amax = te.cast(x, scale, format, transpose)
    return (
        copies.rowwise,
        None if copies.columnwise is None else copies.columnwise.t(),
        amax,
        copies.scales,
    )


def cast_check(
    context: Context,
    dtype: str,
    format: str,
    cast: Cast,
    function: Cast = np.copy,
    compiled: bool = False,
) -> Facts:
    """Check that `cast` returns the bytes of `function(x)` and, if it returns more, their
    transpose, the amax and the inverse scale."""
    cast = context.compiled(cast) if compiled else cast
    x, results = values_of(dtype, context.seed), {}
    with np.errstate(all="ignore"):
        values, on_device = function(x.float().numpy()), x.to(context.device)
    for number in SCALES[::3] if context.quick else SCALES:
        scale = np.float32(number)
        with np.errstate(all="ignore"):
            codes = oracles.encode(values * scale, format)
        expected = (codes, codes.T, oracles.amax(values).reshape(()), np.float32(1) / scale)
        actual = cast(on_device, torch.tensor(number, device=context.device), format)
        names = ("x", "transpose", "amax", "inverse")
        pairs = {
            name: (tensor, as_tensor(array))
            for name, tensor, array in zip(names, actual, expected, strict=False)
            if tensor is not None
        }
        results[f"scale {number:.9g}"] = same_bits(pairs, x=x)
    return merged(results)


# Scales


def scales(context: Context) -> Iterator[Check]:
    """Check scales of amaxes of all magnitudes, and their inverses."""
    yield Check("scales and inverses, eager", partial(scale_check, context, False))
    if not context.quick:
        yield Check("scales and inverses, compiled", partial(scale_check, context, True))


_RULES: tuple[dict[str, Any], ...] = (
    {"format": "e4m3"},
    {"format": "e4m3", "power_of_two": True, "eps": 1e-6},
    {"format": "e5m2", "eps": 0.5, "overflow": 65504.0},
)


def scales_of(largest: Tensor) -> list[Tensor]:
    """Scales by several rules, and their inverses."""
    scales = [numerics.tensor_scale(largest, **rule) for rule in _RULES]
    return [*scales, *map(numerics.inverse, scales)]


def scale_check(context: Context, compiled: bool) -> Facts:
    """Check scales of amaxes, including 0, inf and NaN, against IEEE float32 quotients."""
    largest = amaxes(context.seed)
    scales = [oracles.scale_of(largest.numpy(), **rule) for rule in _RULES]
    expected = [*scales, *(np.float32(1) / scale for scale in scales)]
    function = context.compiled(scales_of) if compiled else scales_of
    actual = function(largest.to(context.device))
    pairs = enumerate(zip(actual, map(as_tensor, expected), strict=True))
    return same_bits({f"rule {number}": pair for number, pair in pairs})
