"""Checks the quantizers of every recipe, to the bit, in every implementation: codes and scales, and
the values that an emulated GEMM multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.casts import kernel_of, need_kernel
from fp8stack.analysis.conform.check_inputs import (
    DTYPES,
    MXFP8,
    NVFP4,
    QUANTIZED_RECIPES,
    SERVED_RECIPES,
    codes_and_ties,
    extreme,
    matrix,
    ties,
    uneven,
    with_specials,
)
from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    Skipped,
    as_tensor,
    merged,
    same_values,
)
from fp8stack.analysis.conform.scale_layouts import tiles
from fp8stack.common.formats import ELEMENT_FORMATS, Quantizer
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_blocks
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales
from fp8stack.layers.kernels.weight_casts import BatchedCast
from fp8stack.numerics import RandomBits, Rounded, fused
from fp8stack.numerics.rounding import rounding, rounding_of_both
from fp8stack.precision import load_recipe

THREADS = 3
DRAWN = (2, 3, 2**33 + 1)  # seed, stream, counter
Matrix = tuple[str, str]
"""The name and the dtype of a matrix, see `matrix_of`."""
MATRICES: list[Matrix] = [
    ("specials", "bf16"), ("extreme", "fp32"), ("ties", "bf16"), ("specials", "fp32"),
]  # fmt: skip

Copy = tuple[Tensor | None, ...]
"""Data and scales of one copy of a matrix, and of NVFP4 the upper scale; None is not compared."""
Cast = Callable[..., Sequence[Copy]]
"""`cast(x, quantizer, bits)`, with the scale of delayed scaling as a fourth argument, which gives
the copies of a matrix for GEMMs over the columns, and over the rows."""
Layout = Callable[[oracles.QuantizedMatrix, Quantizer, int], Sequence[oracles.Array | Tensor]]
"""The parts of a copy as a cast lays them out, for a GEMM over dimension 1 or 0."""


def quantizers(context: Context) -> Iterator[Check]:
    """Check the quantizers of every recipe in every implementation."""
    for recipe in (*QUANTIZED_RECIPES, *SERVED_RECIPES):
        yield from checks_of(context, recipe, recipe, quantizers_of(recipe), MATRICES)
    for dtype in DTYPES:
        for kind in ("ordinary", "special"):
            for scaling in TE_QUANTIZERS:
                if (scaling, kind) == ("nvfp4", "special"):
                    continue  # it hides NaN, which ours report
                run = partial(te_check, context, scaling, kind, dtype)
                yield Check(f"{scaling} of {kind} {dtype}, by TE", run)


def checks_of(
    context: Context,
    name: str,
    kernel: str | None,
    cases: Sequence[Quantizer],
    matrices: Sequence[Matrix],
    scale: float | None = None,
) -> Iterator[Check]:
    """Check quantizers in every implementation: those for any quantizer, and the fused kernels for
    GEMMs of the kind `kernel`. `scale` is that of delayed scaling."""
    ways: dict[str, tuple[Cast, Layout, dict[str, Any]]] = {
        "bytes, eager": (as_bytes, stored_bytes, {}),
        "values, by torch's operators": (as_values, multiplied_values, {}),
    }
    if context.device == "cpu":
        for threads, count in ((1, "1 thread"), (THREADS, f"{THREADS} threads")):
            way = f"values, by numba in {count}"
            ways[way] = in_one_sweep, multiplied_values, {"threads": threads}
    if not context.quick:
        ways["bytes, compiled"] = as_bytes, stored_bytes, {"compiled": True}
        ways["values, compiled"] = as_values, multiplied_values, {"compiled": True}
    for way, (cast, layout, options) in ways.items():
        check = partial(quantizer_check, context, cases, cast, layout, matrices, scale, **options)
        yield Check(f"{name}, {way}", check)
    of_rows = [q for q in cases if kernel == "nvfp4" or not q.turns]
    if kernel in KERNEL_CASTS and of_rows:
        cast = KERNEL_CASTS[kernel]
        check = partial(quantizer_check, context, of_rows, cast, gemm_operand, matrices)
        yield Check(f"{name}, both copies at once, by {kernel_of(context)}", check)
    of_weights = [q for q in cases if kernel != "block" or q.turns]
    if kernel in WEIGHT_RECIPES and of_weights:
        cast = partial(by_weight_kernel, context)
        check = partial(quantizer_check, context, of_weights, cast, gemm_operand, matrices)
        yield Check(f"{name}, by the kernel for many weights", check)


def quantizers_of(recipe: str) -> list[Quantizer]:
    """The different quantizers of a recipe."""
    tables = load_recipe(recipe).tables
    return list(dict.fromkeys(q for table in tables for q in table.each.values()))


def rules(quantizer: Quantizer) -> str:
    """The name of a quantizer in the report."""
    words = [quantizer.format, str(quantizer.block), quantizer.scale, f"eps {quantizer.eps:g}"]
    words += [quantizer.scale_rounding] * (quantizer.scale_rounding != "rceil")
    words += [f"hadamard {quantizer.hadamard}"] * bool(quantizer.hadamard)
    return ", ".join(words + ["stochastic"] * quantizer.stochastic)


def quantizer_check(
    context: Context,
    cases: Sequence[Quantizer],
    cast: Cast,
    layout: Layout,
    matrices: Sequence[Matrix],
    scale: float | None = None,
    threads: int = 0,
    compiled: bool = False,
) -> Facts:
    """Check that `cast` returns the copies of each quantizer in `cases`, as `layout` lays them out;
    compiled as one graph, or by numba's kernels in this number of `threads`."""
    if threads and (reason := fused.why_not()):
        raise Skipped(reason)
    powers_of_two = any(q.scale == "e8m0" for q in cases)
    if compiled and powers_of_two and context.device == "cpu" and layout is stored_bytes:
        raise Skipped("torch compiles no float8_e8m0fnu for CPUs")
    bits = RandomBits(*DRAWN[:2], torch.tensor(DRAWN[2], device=context.device))

    scales = () if scale is None else (torch.tensor(scale, device=context.device),)

    def cast_each(x: Tensor, bits: RandomBits) -> list[Sequence[Copy]]:
        return [cast(x, q, bits if q.stochastic else None, *scales) for q in cases]

    matrices = matrices[:3] if context.quick else matrices
    if compiled:
        cast_each = context.compiled(cast_each)
        matrices = [matrices[powers_of_two]]  # each takes long to compile
    results = {}
    for name in matrices:
        x = matrix_of(name, context.seed)
        with _in_threads(threads or torch.get_num_threads()):
            copies_of_each = cast_each(x.to(context.device), bits)
        for quantizer, copies in zip(cases, copies_of_each, strict=True):
            expected = expected_of(name, context.seed, quantizer, scale)
            facts = compare_copies(copies, expected, quantizer, layout)
            results[f"{rules(quantizer)} of {' '.join(name)}"] = facts
    return merged(results)


def compare_copies(
    copies: Sequence[Copy],
    expected: Sequence[oracles.QuantizedMatrix],
    quantizer: Quantizer,
    layout: Layout,
) -> Facts:
    """Compare copies with the expected ones, as `layout` lays them out."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for copy, quantized, dim in zip(copies, expected, (1, 0), strict=True):
        fields = zip(copy, layout(quantized, quantizer, dim), strict=False)
        for place, (tensor, field) in enumerate(fields):
            if tensor is None:
                continue
            expected_field = field if isinstance(field, Tensor) else as_tensor(field)
            if (
                place and expected_field.numel() == tensor.numel()
            ):  # scales of rows have several shapes
                expected_field = expected_field.reshape(tensor.shape)
            pairs[f"{('data', 'scales', 'upper scale')[place]}, dim {dim}"] = tensor, expected_field
    return same_values(pairs)


@contextmanager
def _in_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=8)
def matrix_of(name: Matrix, seed: int) -> Tensor:
    """A matrix by its name. Neither 32 nor 128 divides its sizes, but for GEMMs 16 does."""
    kind, dtype = name
    if kind == "extreme":
        return F.pad(extreme(seed), (0, 4, 0, 10))
    if kind in ELEMENT_FORMATS:
        return codes_and_ties(ELEMENT_FORMATS[kind], 144, 336, seed).to(DTYPES[dtype])
    x = ties(144, 336, seed) if kind == "ties" else with_specials(uneven(144, 336, seed))
    return x.to(DTYPES[dtype])


@lru_cache(maxsize=256)
def expected_of(
    name: Matrix, seed: int, quantizer: Quantizer, scale: float | None = None
) -> list[oracles.QuantizedMatrix]:
    """The oracle's copies of a matrix, for GEMMs over the columns, and over the rows."""
    return [quantized(matrix_of(name, seed), quantizer, dim, scale) for dim in (1, 0)]


def quantized(
    x: Tensor, quantizer: Quantizer, dim: int, scale: float | None = None
) -> oracles.QuantizedMatrix:
    """The oracle's copy of a matrix, with the random bits of `DRAWN`."""
    bits = partial(oracles.philox, *DRAWN) if quantizer.stochastic else None
    overflow = torch.finfo(x.dtype).max
    return oracles.quantize(
        x.float().numpy(), quantizer, dim, overflow=overflow, bits=bits, scale=scale
    )


# Bytes


def as_bytes(
    x: Tensor, quantizer: Quantizer, bits: RandomBits | None, scale: Tensor | None = None
) -> list[Copy]:
    """Codes and scales by `numerics.quantize`."""
    copies = [numerics.quantize(x, quantizer, dim, bits, scale=scale) for dim in (1, 0)]
    return [(q.data, q.scales.float() if quantizer.scale == "e4m3" else q.scales) for q in copies]


def stored_bytes(
    expected: oracles.QuantizedMatrix, quantizer: Quantizer, dim: int
) -> tuple[oracles.Array, oracles.Array]:
    """Codes, two to a byte in FP4, and scales by block."""
    stored = expected.stored.astype(np.uint8) if quantizer.scale == "e8m0" else expected.stored
    return packed(expected.codes, quantizer, dim), stored


def packed(codes: oracles.Array, quantizer: Quantizer, dim: int) -> oracles.Array:
    """Codes of at most 4 bits two to a byte along `dim`, the even element in the low half; other
    codes as they are."""
    if sum(oracles.layout(quantizer.format)[:2]) > 3:
        return codes
    rows = np.moveaxis(codes, dim, -1)
    rows = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
    return np.moveaxis(rows[:, ::2] + 16 * rows[:, 1::2], -1, dim)


# Values


def as_values(
    x: Tensor, quantizer: Quantizer, bits: RandomBits | None, scale: Tensor | None = None
) -> list[Copy]:
    """Values and factors by torch's operators."""
    return _with_factors(
        [rounding(quantizer, [dim]).round(x, bits, scale, fuse=False)[0] for dim in (1, 0)]
    )


def in_one_sweep(
    x: Tensor, quantizer: Quantizer, bits: RandomBits | None, scale: Tensor | None = None
) -> list[Copy]:
    """Values and factors by numba, of both copies at once where that is possible."""
    at_once = rounding_of_both(quantizer, quantizer)
    if at_once is not None:
        return _with_factors(at_once.round(x))
    return _with_factors([rounding(quantizer, [dim]).round(x, bits, scale)[0] for dim in (1, 0)])


def _with_factors(copies: Sequence[Rounded]) -> list[Copy]:
    return [(c.values, c.values.new_ones(()) if c.factor is None else c.factor) for c in copies]


def multiplied_values(
    expected: oracles.QuantizedMatrix, quantizer: Quantizer, dim: int
) -> tuple[oracles.Array, oracles.Array]:
    """The values that a GEMM multiplies, and the factor of its output."""
    return expected.values, expected.factor


# Operands of scaled GEMMs


def by_nvfp4_kernel(x: Tensor, quantizer: Quantizer, bits: RandomBits | None) -> list[Copy]:
    """Both copies by `cast_nvfp4`, which transforms only the second one."""
    rowwise = replace(quantizer, hadamard=0)
    first, second = cast_nvfp4(x, rowwise, quantizer, (bits, bits))
    assert second is not None
    untransformed = (None,) if quantizer.hadamard else _operand(first)
    return [untransformed, _operand(second)]


def by_block_kernel(x: Tensor, quantizer: Quantizer, bits: RandomBits | None) -> list[Copy]:
    """Both copies by `cast_blocks`."""
    copies = cast_blocks(FusedInput("cast", x), quantizer, columnwise=True, sums=False)
    return [(copies.data, copies.inv_scale), (copies.transposed, copies.columnwise_inv_scale)]


def by_weight_kernel(
    context: Context, x: Tensor, quantizer: Quantizer, bits: RandomBits | None
) -> list[Copy]:
    """Both copies by the kernel for many weights, of a weight that is not the first one, cast a
    second time."""
    need_kernel(context)
    weights = BatchedCast([x[:40], x], quantizer)
    weights.cast()
    weights.cast()
    return [_operand(copy) for copy in weights.copies[1]]


def _operand(copy: Scaled) -> Copy:
    return copy.data, copy.inv_scale, copy.upper_scale


def gemm_operand(
    expected: oracles.QuantizedMatrix, quantizer: Quantizer, dim: int
) -> tuple[oracles.Array | Tensor, ...]:
    """Codes with the reduction last, scales as the hardware reads them, and the upper scale."""
    codes, stored = packed(expected.codes, quantizer, dim), expected.stored
    if dim == 0:
        codes, stored = codes.T, stored.T
    if quantizer.per_tensor:
        return codes, stored
    if quantizer.scale == "e8m0":
        return codes, tiles(as_tensor(stored.astype(np.uint8)))
    if quantizer.scale != "e4m3":
        return codes, pack_scales(
            as_tensor(stored), ScaleLayout.SQUARES if quantizer.turns else ScaleLayout.ROWS
        )
    scales = oracles.encode(stored, "e4m3").repeat(len(codes) // len(stored), 0)
    has_nan = np.isnan(expected.values).any()
    return codes, tiles(as_tensor(scales)), np.where(has_nan, np.float32(np.nan), expected.factor)


KERNEL_CASTS: dict[str, Cast] = {
    "block": by_block_kernel,
    "mxfp8": by_block_kernel,
    "nvfp4": by_nvfp4_kernel,
}
WEIGHT_RECIPES = ("current", "block", "mxfp8")


# Transformer Engine's quantizers

TE_QUANTIZERS: dict[str, list[Quantizer]] = {
    "current": [
        Quantizer(), Quantizer(format="e5m2", eps=1e-3), Quantizer(scale="power_of_two"),
    ],
    "block": [
        *(Quantizer(block=block, scale="power_of_two") for block in ((1, 128), (128, 128))),
        *(Quantizer(block=block) for block in ((1, 128), (128, 128))),
    ],
    "mxfp8": [MXFP8],
    "nvfp4": [NVFP4, replace(NVFP4, block=(16, 16))],
}  # fmt: skip
"""Quantizers that TE has, by scaling."""


def te_check(context: Context, scaling: str, kind: str, dtype: str) -> Facts:
    """Check the bytes and scales of TE's quantizers."""
    context.need_te(scaling)
    x, results = matrix(kind, dtype, context.seed), {}
    for quantizer in TE_QUANTIZERS[scaling]:
        copies = te.quantize(x.to(context.device), quantizer)
        # Both copies of a tensor have one scale, and TE may omit a copy.
        assert quantizer.per_tensor or copies.columnwise is not None
        expected = [quantized(x, quantizer, dim) for dim in (1, 0)]
        pairs = (copies.rowwise, copies.scales), (copies.columnwise, copies.columnwise_scales)
        results[rules(quantizer)] = compare_copies(pairs, expected, quantizer, stored_bytes)
    return merged(results)
