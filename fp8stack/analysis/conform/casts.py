"""The rows of casts: bytes, scales and values of every quantizer, to the bit, in every
implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.check_inputs import (
    DTYPES,
    FORMAT_NAMES,
    MXFP8,
    NVFP4,
    codes_and_ties,
    extreme,
    uneven,
    values_of,
    with_specials,
)
from fp8stack.analysis.conform.checks import Context, Facts, Results, Row, Skipped, equal
from fp8stack.analysis.conform.oracles import Array, QuantizedMatrix
from fp8stack.common.formats import Quantizer, quantized_format
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_blocks, cast_product
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from fp8stack.layers.kernels.scaled_gemm import ScaleLayout, pack_scales
from fp8stack.layers.kernels.variants import has_kernel
from fp8stack.layers.kernels.weight_casts import BatchedCast
from fp8stack.numerics import RandomBits, fused
from fp8stack.numerics.rounding import rounding, rounding_of_both
from fp8stack.precision import Recipe, load_recipe
from fp8stack.precision.native_gemms import kernel_of

RECIPES = (
    *("delayed", "current", "block", "mxfp8", "rowwise", "rowwise_wgrad_hp"),
    *("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"),
)
"""Recipes for training that have, together, every quantizer of such recipes."""
SERVED_RECIPES = ("served:fp8_dynamic", "served:fp8_block", "served:mxfp4")
"""Schemes of inference servers with further quantizers."""
# Powers of two and others, from the smallest to the largest scale of a finite amax.
SCALES = (1.0, 0.1, 3.0, 1 / 3, 2.0**-20, 1e5, 1e30, 1.3e-36, oracles.FLT_MAX)
GIVEN_SCALES = (2.0, 3.0)
"""Scales for delayed scaling, by which the largest values overflow: a power of two, which keeps
ties, and one that is none."""
DRAWN = (2, 3, 2**33 + 1)  # seed, stream, counter
THREADS = 3
Matrix = tuple[str, str]
"""The kind and the dtype of a matrix, see `matrix_of`."""
MATRICES: tuple[Matrix, ...] = (
    *(("codes", "fp32"), ("specials", "bf16"), ("extreme", "fp32"), ("specials", "fp32")),
)


class CastCall(NamedTuple):
    """The arguments of a cast; `scale` is the scale of delayed scaling."""

    x: Tensor
    quantizer: Quantizer
    bits: RandomBits | None
    scale: Tensor | None

    @property
    def given(self) -> Tensor:
        """The scale of delayed scaling, which has to be there."""
        assert self.scale is not None
        return self.scale


Cast = Callable[[CastCall], Results]
"""Returns what `named` names."""
Layout = Callable[[Sequence[QuantizedMatrix], Quantizer], Results]
"""The same results of the oracle's two copies."""


class Case(NamedTuple):
    """A matrix and its quantizer; `scale` is the scale of delayed scaling."""

    matrix: Matrix
    seed: int
    quantizer: Quantizer
    scale: float | None = None

    @property
    def x(self) -> Tensor:
        """The matrix on the CPU."""
        return matrix_of(self.matrix, self.quantizer.format, self.seed)

    def __str__(self) -> str:
        eps = f", eps {self.quantizer.eps:g}" * bool(self.quantizer.eps)
        scale = "" if self.scale is None else f", scale {self.scale:.9g}"
        return f"{self.quantizer}{eps}{scale}"


@lru_cache(maxsize=32)
def matrix_of(name: Matrix, format: str, seed: int) -> Tensor:
    """A matrix by its name: "codes" and ties of a format, all "values" of a dtype, ReLU^2 of them,
    ... Neither 32 nor 128 divides the sizes of most, but for GEMMs 16 does."""
    kind, dtype = name
    match kind:
        case "values":
            return values_of(dtype, seed)
        case "relu2" | "relu2 gradient":
            return _relu2(values_of(dtype, seed), kind == "relu2 gradient")
        case "codes":
            x = codes_and_ties(quantized_format(format), 144, 336, seed)
        case "extreme":
            x = F.pad(extreme(seed), (0, 4, 0, 10))
        case "specials":
            x = with_specials(uneven(144, 336, seed))
        case "odd":
            x = with_specials(uneven(129, 101, seed))
        case _:
            x = uneven(144, 336, seed)
    return x.to(torch.float16 if dtype == "fp16" else DTYPES[dtype])


def _relu2(x: Tensor, backward: bool) -> Tensor:
    """ReLU^2 of a square matrix in NumPy, or its gradient, where the matrix's transpose is the
    gradient of the output."""
    values = x.float().numpy()
    with np.errstate(all="ignore"):
        positive = np.where(values <= 0, np.float32(0), values)
        exact = positive * positive
        if backward:
            exact = np.where(values <= 0, np.float32(0), values.T * (2 * positive))
        return torch.from_numpy(oracles.to_bf16(exact)).to(x.dtype)


@lru_cache(maxsize=32)
def copies_of(case: Case) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """The oracle's copies of a matrix, for GEMMs over the columns and over the rows, with the
    random bits of `DRAWN`."""
    first, second = (quantized(case.x, case.quantizer, dim, case.scale) for dim in (1, 0))
    return first, second


def quantized(
    x: Tensor, quantizer: Quantizer, dim: int, scale: float | None = None
) -> QuantizedMatrix:
    """The oracle's copy of `x` for a GEMM over dimension `dim`."""
    bits = partial(oracles.philox, *DRAWN) if quantizer.stochastic else None
    overflow = torch.finfo(x.dtype).max
    values = x.float().numpy()
    return oracles.quantize(values, quantizer, dim, overflow=overflow, bits=bits, scale=scale)


def cast_row(
    context: Context,
    group: str,
    name: str,
    cast: Cast,
    layout: Layout,
    cases: Mapping[str, Sequence[Case]],
    *,
    compiled: bool = False,
    threads: int = 0,
) -> Row:
    """A row of casts; compiled as one graph for all cases of a name, or by numba's kernels in this
    number of threads."""

    def implementation(case: Sequence[Case]) -> Results:
        if threads and (reason := fused.why_not()):
            raise Skipped(reason)
        device, rules = context.device, [c.quantizer for c in case]
        e8m0 = any(q.scale == "e8m0" for q in rules)
        if compiled and e8m0 and device == "cpu" and layout is as_stored:
            raise Skipped("torch compiles no float8_e8m0fnu for CPUs")
        bits = RandomBits(*DRAWN[:2], torch.tensor(DRAWN[2], device=device))
        xs = [c.x.to(device) for c in case]
        scales = [None if c.scale is None else torch.tensor(c.scale, device=device) for c in case]

        def cast_each(
            xs: list[Tensor], scales: list[Tensor | None], bits: RandomBits
        ) -> list[Results]:
            inputs = zip(xs, rules, scales, strict=True)
            return [cast(CastCall(x, q, bits if q.stochastic else None, s)) for x, q, s in inputs]

        run = context.compiled(cast_each) if compiled else cast_each
        with _in_threads(threads or torch.get_num_threads()):
            copies = run(xs, scales, bits)
        of_cases = zip(case, copies, strict=True)
        return {f"{c}: {key}": value for c, of in of_cases for key, value in of.items()}

    def oracle(case: Sequence[Case]) -> Results:
        layouts = ((c, layout(copies_of(c), c.quantizer)) for c in case)
        return {f"{c}: {key}": value for c, of in layouts for key, value in of.items()}

    def agrees(actual: Results, expected: Results, case: Sequence[Case]) -> Facts:
        return equal(actual, expected, {f"{c}: rowwise": c.x for c in case if c.scale is not None})

    return Row(group, name, implementation, oracle, lambda: cases.items(), agrees)


@contextmanager
def _in_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The rows


def casts(context: Context) -> Iterator[Row]:
    """Every bfloat16, and float32 ties, limits and special values, with scales of all
    magnitudes."""
    scales = SCALES[::3] if context.quick else SCALES
    ways: dict[str, Cast] = {
        "eager": by_cast,
        f"with transpose and amax, by {fused_kernels(context)}": by_product,
        "by the kernel for many weights": partial(by_weight_kernel, context),
        "by TE": partial(by_te, context, False),
        "by TE, with transpose": partial(by_te, context, True),
    }
    if not context.quick:
        ways["compiled"] = by_cast

    def cases(kind: str, dtype: str, format: str) -> dict[str, list[Case]]:
        quantizer, seed = Quantizer(format=format, amax="delayed"), context.seed
        of_scales = {"": [Case((kind, dtype), seed, quantizer, scale) for scale in scales]}
        odd = {"odd sizes": [Case(("odd", dtype), seed, quantizer, 3.0)]}
        return of_scales | (odd if kind == "values" else {})

    for dtype, format, (way, cast) in product(DTYPES, FORMAT_NAMES, ways.items()):
        yield cast_row(
            *(context, "casts", f"{dtype} to {format}, {way}", cast, with_amax),
            cases("values", dtype, format),
            compiled=way == "compiled",
        )
    for format, kind in product(FORMAT_NAMES, ("relu2", "relu2 gradient")):
        name = f"{kind} of bf16 to {format}, by {fused_kernels(context)}"
        cast = partial(by_relu2, context, kind)
        yield cast_row(context, "casts", name, cast, with_amax, cases(kind, "bf16", format))


def quantizers(context: Context) -> Iterator[Row]:
    """The quantizers of a recipe, or of every recipe, in every implementation; and TE's."""
    if context.recipe is not None:
        yield from recipe_rows(context, context.recipe)
        return
    for name in (*RECIPES, *SERVED_RECIPES):
        yield from recipe_rows(context, load_recipe(name))
    kinds = product(DTYPES, ("uneven", "specials"), TE_QUANTIZERS.items())
    for dtype, kind, (scaling, rules) in kinds:
        if (scaling, kind) == ("nvfp4", "specials"):
            continue  # it hides NaN, which ours report
        cases = {"": [Case((kind, dtype), context.seed, rule) for rule in rules]}
        name, cast = (
            f"{scaling} of {kind} {dtype}, by TE",
            partial(by_te_quantizer, context, scaling),
        )
        yield cast_row(context, "quantizers", name, cast, as_stored, cases)


def recipe_rows(context: Context, recipe: Recipe) -> Iterator[Row]:
    """The rows of a recipe's quantizers."""
    kernels: dict[str | None, list[Quantizer]] = {}
    for table in recipe.tables:
        for quantizer in dict.fromkeys(table.each.values()):
            kernels.setdefault(kernel_of(table), []).append(quantizer)
    for place, (kernel, rules) in enumerate(kernels.items()):
        name = recipe.name if place == 0 else f"{recipe.name}, {place + 1}"
        yield from quantizer_rows(context, name, rules, kernel)


def quantizer_rows(
    context: Context,
    name: str,
    rules: Sequence[Quantizer],
    kernel: str | None = None,
    matrices: Sequence[Matrix] = (),
) -> Iterator[Row]:
    """The rows of quantizers: by each implementation of any quantizer, and by the kernels that make
    the operands of a GEMM of this kind."""
    matrices = matrices or (MATRICES[:3] if context.quick else MATRICES)

    def row(
        way: str,
        cast: Cast,
        layout: Layout,
        rules: Sequence[Quantizer] = rules,
        matrices: Sequence[Matrix] = matrices,
        **options: Any,
    ) -> Row:
        cases = {
            " ".join(matrix): [
                Case(matrix, context.seed, quantizer, scale)
                for quantizer in rules
                for scale in (GIVEN_SCALES if quantizer.delayed else (None,))
            ]
            for matrix in matrices
        }
        return cast_row(context, "quantizers", f"{name}, {way}", cast, layout, cases, **options)

    yield row("bytes, eager", by_quantize, as_stored)
    yield row("values, by torch's operators", by_operators, as_multiplied)
    if context.device == "cpu":
        for threads, count in ((1, "1 thread"), (THREADS, f"{THREADS} threads")):
            yield row(f"values, by numba in {count}", by_numba, as_multiplied, threads=threads)
        cast, layout = partial(by_numba, bf16=True), partial(as_multiplied, bf16=True)
        yield row("values in bfloat16, by numba", cast, layout, threads=1)
    if not context.quick:
        few = MATRICES[1:2]  # each takes long to compile
        yield row("bytes, compiled", by_quantize, as_stored, matrices=few, compiled=True)
        yield row("values, compiled", by_operators, as_multiplied, matrices=few, compiled=True)
    of_rows = [q for q in rules if kernel == "nvfp4" or not q.turns]
    if kernel in ("block", "mxfp8", "nvfp4") and of_rows:
        kernel_cast = by_nvfp4_kernel if kernel == "nvfp4" else by_block_kernel
        way = f"both copies at once, by {fused_kernels(context)}"
        yield row(way, kernel_cast, as_operands, of_rows)
    of_weights = [q for q in rules if kernel != "block" or q.turns]
    if kernel in ("current", "block", "mxfp8") and of_weights:
        cast, matrices = partial(by_weight_kernel, context), [*matrices, ("odd", "fp32")]
        yield row("by the kernel for many weights", cast, as_operands, of_weights, matrices)


def layouts(context: Context) -> Iterator[Row]:
    """`pack_scales` element by element in memory: tiles of 128 x 4 for MX and NVFP4, as cuBLAS
    documents them ("Block scaling factors layouts"), contiguous columns for 1x128, rows padded to
    multiples of 4 for 128x128."""
    sizes = ((128, 4), (256, 8), (130, 5), (1, 1), (384, 3))  # whole and partial tiles

    def inputs(kind: ScaleLayout) -> Iterator[tuple[str, Tensor]]:
        for rows, columns in sizes:  # scales that differ as far as there are codes
            scales = torch.arange(rows * columns).view(rows, columns)
            codes = (scales * 37 % 251 + 1).to(torch.uint8)
            dtype = _TILED.get(kind)
            yield f"{rows} x {columns}", scales.float() if dtype is None else codes.view(dtype)

    def computed(kind: ScaleLayout, scales: Tensor) -> Results:
        packed = pack_scales(scales.to(context.device), kind)
        size = packed.untyped_storage().nbytes() // packed.element_size()
        return {"memory": packed.as_strided((size,), (1,))}

    def expected(kind: ScaleLayout, scales: Tensor) -> Results:
        if kind in _TILED:
            return {"memory": tiles(scales.view(torch.uint8))}
        padded = F.pad(scales, (0, -scales.shape[1] % 4))
        return {"memory": (scales.t() if kind is ScaleLayout.ROWS else padded).reshape(-1)}

    for kind in (*_TILED, ScaleLayout.ROWS, ScaleLayout.SQUARES):
        name, cases = f"scales {kind.value}", partial(inputs, kind)
        yield Row("layouts", name, partial(computed, kind), partial(expected, kind), cases)


_TILED = {ScaleLayout.MX: torch.float8_e8m0fnu, ScaleLayout.NV: torch.float8_e4m3fn}
"""The dtypes of scales that lie in tiles; others are float32."""


def tiles(codes: Tensor) -> Tensor:
    """Consecutive tiles of 128 rows and 4 columns, zeros where there are no scales: within a tile
    the scale of row r and column c is at 16 (r % 32) + 4 (r // 32) + c."""
    rows, columns = codes.shape
    across = -(-columns // 4)
    packed = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = r // 128 * across + c // 4
    packed[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = codes
    return packed


# Implementations. Each uses only the arguments of a `CastCall` that it needs.


def fused_kernels(context: Context) -> str:
    """The name of the kernels behind the torch backend's fused casts on this machine."""
    return "Triton" if has_kernel(torch.device(context.device)) else "torch's operators"


def named(*copies: Sequence[Any], amax: Any = None) -> Results:
    """The data, the scales and an upper scale of a rowwise and a columnwise copy, by name; None is
    not compared."""
    results: dict[str, Any] = {"amax": amax}
    for way, copy in zip(("rowwise", "columnwise"), copies, strict=False):
        data, scales, *upper_scale = copy
        results |= {way: data, f"{way} scales": None if scales is None else scales.reshape(-1)}
        results |= {f"{way} upper scale": upper for upper in upper_scale}
    return results


def by_cast(call: CastCall) -> Results:
    """Bytes by `cast_to_fp8`, the inverse scale and the amax."""
    data = numerics.cast_to_fp8(call.x, call.given, call.quantizer.format)
    return named((data, numerics.inverse(call.given)), amax=numerics.amax(call.x))


def by_product(call: CastCall) -> Results:
    """Bytes, transpose and amax by `cast_product`."""
    return _of_product(FusedInput("cast", call.x), call)


def by_relu2(context: Context, kind: str, call: CastCall) -> Results:
    """A fused ReLU^2 or its gradient. `call.x` is the oracle's result."""
    source = matrix_of(("values", "bf16"), "", context.seed).to(context.device)
    dy = source.t() if kind == "relu2 gradient" else None
    return _of_product(FusedInput("relu2", source, dy), call)


def _of_product(source: FusedInput, call: CastCall) -> Results:
    options = {"columnwise": True, "record": True, "sums": False}
    copies = cast_product(source, call.given, call.quantizer.format, **options)
    return named((copies.data, None), (copies.transposed, None), amax=copies.amax)


def by_weight_kernel(context: Context, call: CastCall) -> Results:
    """Both copies of a weight that is not the first one, cast a second time."""
    if not has_kernel(torch.device(context.device)):
        raise Skipped("the kernel for many weights needs Triton and a GPU with FP8")
    weights, amaxes = BatchedCast([call.x[:40], call.x], call.quantizer), None
    if call.scale is not None:
        amaxes = torch.zeros(2, device=call.x.device)
    for _ in range(2):
        weights.cast(None if amaxes is None else call.given.expand(2).contiguous(), amaxes)
    scaled = [copy[:2] for copy in weights.copies[1]]
    return named(*scaled, amax=None if amaxes is None else amaxes[1])


def by_te(context: Context, transpose: bool, call: CastCall) -> Results:
    """TE's `Float8Quantizer`, which takes a given scale."""
    context.need_te("delayed")
    copies, amax = te.cast(call.x, call.given, call.quantizer.format, transpose)
    columnwise = None if copies.columnwise is None else copies.columnwise.t()
    return named((copies.rowwise, copies.scales), (columnwise, None), amax=amax)


def by_te_quantizer(context: Context, scaling: str, call: CastCall) -> Results:
    """TE's quantizer of this kind; both copies of a tensor have one scale, and TE may omit one."""
    context.need_te(scaling)
    copies = te.quantize(call.x, call.quantizer)
    assert call.quantizer.per_tensor or copies.columnwise is not None
    return named(copies[:2], copies[2:])


def by_quantize(call: CastCall) -> Results:
    """Codes and scales by `numerics.quantize`."""
    copies = []
    for dim in (1, 0):
        copy = numerics.quantize(call.x, call.quantizer, dim, call.bits, scale=call.scale)
        is_float8 = call.quantizer.scale == "e4m3"
        copies.append((copy.data, copy.scales.float() if is_float8 else copy.scales))
    return named(*copies)


def by_operators(call: CastCall) -> Results:
    """Values and factors by torch's operators."""
    rules = [rounding(call.quantizer, [dim]) for dim in (1, 0)]
    return _of_rounded([rule.round(call.x, call.bits, call.scale, fuse=False)[0] for rule in rules])


def by_numba(call: CastCall, bf16: bool = False) -> Results:
    """Values and factors by numba, of both copies at once where that is possible."""
    at_once = rounding_of_both(call.quantizer, call.quantizer)
    if at_once is not None:
        return _of_rounded(at_once.round(call.x, bf16=bf16))
    rules = [rounding(call.quantizer, [dim]) for dim in (1, 0)]
    return _of_rounded([rule.round(call.x, call.bits, call.scale, bf16=bf16)[0] for rule in rules])


def _of_rounded(copies: Sequence[numerics.Rounded]) -> Results:
    factors = (torch.ones(()) if factor is None else factor for _, factor in copies)
    values = (values + 0.0 for values, _ in copies)  # zeros are equal whatever their signs
    return named(*zip(values, factors, strict=True))


def by_nvfp4_kernel(call: CastCall) -> Results:
    """Both copies by `cast_nvfp4`, which transforms only the second one."""
    rowwise = replace(call.quantizer, hadamard=0)
    first, second = cast_nvfp4(call.x, rowwise, call.quantizer, (call.bits, call.bits))
    assert second is not None
    columnwise = second.data, second.inv_scale, second.upper_scale
    if call.quantizer.hadamard:
        return named((None, None), columnwise)
    return named((first.data, first.inv_scale, first.upper_scale), columnwise)


def by_block_kernel(call: CastCall) -> Results:
    """Both copies by `cast_blocks`."""
    source = FusedInput("cast", call.x)
    copies = cast_blocks(source, call.quantizer, columnwise=True, sums=False)
    assert copies.inv_scale is not None
    assert copies.columnwise_inv_scale is not None
    rowwise = copies.data, copies.inv_scale
    return named(rowwise, (copies.transposed, copies.columnwise_inv_scale))


# The oracle's copies as implementations lay them out


def as_stored(copies: Sequence[QuantizedMatrix], quantizer: Quantizer) -> Results:
    """Codes, two to a byte in FP4, and scales by block."""
    tensors = []
    for copy, dim in zip(copies, (1, 0), strict=True):
        stored = copy.stored.astype(np.uint8) if quantizer.scale == "e8m0" else copy.stored
        tensors.append((packed(copy.codes, quantizer, dim), stored))
    return named(*tensors)


def packed(codes: Array, quantizer: Quantizer, dim: int) -> Array:
    """Codes of at most 4 bits two to a byte along `dim`, the even element in the low half; other
    codes as they are."""
    if sum(oracles.layout(quantizer.format)[:2]) > 3:
        return codes
    rows = np.moveaxis(codes, dim, -1)
    rows = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
    return np.moveaxis(rows[:, ::2] + 16 * rows[:, 1::2], -1, dim)


def as_multiplied(
    copies: Sequence[QuantizedMatrix], quantizer: Quantizer, bf16: bool = False
) -> Results:
    """The values that a GEMM multiplies, and the factors of its output."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    values = [torch.from_numpy(copy.values).to(dtype) + 0.0 for copy in copies]  # as `_of_rounded`
    return named(*zip(values, (copy.factor for copy in copies), strict=True))


def with_amax(copies: Sequence[QuantizedMatrix], quantizer: Quantizer) -> Results:
    """`as_operands`, and the amax."""
    return dict(as_operands(copies, quantizer)) | {"amax": copies[0].amax}


def as_operands(copies: Sequence[QuantizedMatrix], quantizer: Quantizer) -> Results:
    """Codes with the reduction last, scales as the hardware reads them, and the upper scales."""
    tensors = []
    for copy, dim in zip(copies, (1, 0), strict=True):
        codes, stored = packed(copy.codes, quantizer, dim), copy.stored
        if dim == 0:
            codes, stored = codes.T, stored.T
        scales: Any = stored
        if quantizer.scale == "e8m0":
            scales = tiles(torch.from_numpy(stored.astype(np.uint8)))
        elif quantizer.scale == "e4m3":
            lines = oracles.encode(stored, "e4m3").repeat(len(codes) // len(stored), 0)
            scales = tiles(torch.from_numpy(lines))
        elif quantizer.turns and not quantizer.per_tensor:  # [K / 128 rounded up to 4, rows / 128]
            scales = np.pad(stored, ((0, 0), (0, -stored.shape[1] % 4))).T
        upper = np.where(
            np.isnan(copy.values).any(), np.float32(np.nan), copy.factor.reshape(-1)[0]
        )
        tensors.append((codes, scales, upper))
    return named(*tensors)


# Quantizers that TE has, by scaling.
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
