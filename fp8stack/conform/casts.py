"""Checks casts, scales, quantizers and random bits, to the bit, in every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack import numerics
from fp8stack.conform import oracles, te
from fp8stack.conform.checks import Check, Context, Facts, Skipped, merged, same_bits, same_values
from fp8stack.conform.inputs import (
    DTYPES,
    EVERY,
    FORMAT_NAMES,
    MXFP8,
    NVFP4,
    amaxes,
    extreme,
    families,
    matrix,
    ties,
    uneven,
    values_of,
    with_specials,
)
from fp8stack.conform.layouts import tiles
from fp8stack.formats import Quantizer
from fp8stack.numerics import RandomBits, Rounded, fused
from fp8stack.numerics.rounding import rounding, rounding_of_both
from fp8stack.ops.fused_casts import Product, cast_blocks, cast_product, cast_transpose
from fp8stack.ops.kernels import has_kernel
from fp8stack.ops.nvfp4 import cast_nvfp4
from fp8stack.ops.scaled_gemm import Scales, pack_scales
from fp8stack.ops.weights import KeptWeights

# Powers of two and others, from the smallest to the largest scale of a finite amax.
SCALES = (1.0, 0.1, 3.0, 1 / 3, 2.0**-20, 1e5, 1e30, 1.3e-36, oracles.FLT_MAX)
THREADS = 3
DRAWN = (2, 3, 2**33 + 1)  # seed, stream, counter
# Random123, tests/kat_vectors: counter, key and result.
KNOWN_BITS = (0x85A308D3, 0xA4093822, 0x299F31D0, 0x0370734413198A2E)
Function = Callable[..., Any]
Family = dict[str, Quantizer]
Matrix = tuple[str, str]  # see `made_of`
MATRICES: list[Matrix] = [
    ("specials", "bf16"), ("extreme", "fp32"), ("ties", "bf16"), ("specials", "fp32"),
]  # fmt: skip
# Compiled as one graph each, which takes long.
COMPILED: dict[tuple[str, ...], Matrix] = {
    ("tensor", "row"): ("specials", "bf16"),
    ("1x128", "128x128"): ("specials", "bf16"),
    ("mxfp8", "mxfp4", "mxfp6 e2m3"): ("extreme", "fp32"),
    ("nvfp4", "nvfp4 16x16"): ("specials", "bf16"),
    ("stochastic hadamard nvfp4",): ("ties", "bf16"),
}


# Casts with a given scale


def casts(context: Context) -> Iterator[Check]:
    """Check every bfloat16, and float32 ties, limits and special values, with scales of all
    magnitudes."""
    for dtype in DTYPES:
        for format in FORMAT_NAMES:
            ways: dict[str, Function] = {
                "eager": _plain_cast,
                f"with transpose and amax, by {kernel_of(context)}": cast_transpose,
                "by the kernel for many weights": partial(_kept_cast, context),
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
            relu2 = partial(_relu2, backward), partial(_relu2_cast, backward)
            run = partial(cast_check, context, "bf16", format, relu2[1], made=relu2[0])
            yield Check(f"{way} of bf16 to {format}, by {kernel_of(context)}", run)


def kernel_of(context: Context) -> str:
    """What computes the torch backend's fused casts here."""
    return "Triton" if has_kernel(torch.device(context.device)) else "torch's operators"


def _plain_cast(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor]:
    return (numerics.cast_to_fp8(x, scale, format),)


def _relu2_cast(backward: bool, x: Tensor, scale: Tensor, format: str) -> tuple[Any, ...]:
    """The square matrix's ReLU^2, or its gradient where the transpose is that of the result."""
    product = Product("relu2", x, x.t() if backward else None)
    return cast_product(product, scale, format, across=True, record=True, sums=False)[:3]


def _relu2(backward: bool, x: oracles.Array) -> oracles.Array:
    held = np.where(x <= 0, np.float32(0), x)
    return oracles.to_bf16(np.where(x <= 0, 0, x.T * (2 * held)) if backward else held * held)


def need_kernel(context: Context) -> None:
    """Skip the check where Triton's kernels do not run, and nothing stands in for them."""
    if not has_kernel(torch.device(context.device)):
        raise Skipped("the kernel for many weights needs Triton and a GPU with FP8")


def _kept_cast(context: Context, x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, ...]:
    need_kernel(context)
    kept = KeptWeights([x], Quantizer(format=format))  # type: ignore[arg-type]
    kept.cast(scale.view(1), largest := torch.zeros(1, device=x.device))
    along, across = kept.copies[0]
    return along.data, across.data, largest[0], along.inv_scale


def _te_cast(
    context: Context, across: bool, x: Tensor, scale: Tensor, format: str
) -> tuple[Any, ...]:
    context.need_te("delayed")
    made, amax = te.cast(x, scale, format, across)
    return made.along, None if made.across is None else made.across.t(), amax, made.scales


def cast_check(
    context: Context,
    dtype: str,
    format: str,
    cast: Function,
    compiled: bool = False,
    made: Function = np.copy,
) -> Facts:
    """Check `cast(x, scale, format)`: the bytes of what is `made` of x and, if returned, their
    transpose, the amax and the inverse scale."""
    cast = context.compiled(cast) if compiled else cast
    x, parts = values_of(dtype, context.seed), {}
    with np.errstate(all="ignore"):
        values, on_device = made(x.float().numpy()), x.to(context.device)
    for number in SCALES[::3] if context.quick else SCALES:
        scale = np.float32(number)
        with np.errstate(all="ignore"):
            codes = oracles.encode(values * scale, format)
        expected = (codes, codes.T, oracles.amax(values).reshape(()), np.float32(1) / scale)
        found = cast(on_device, torch.tensor(number, device=context.device), format)
        names = ("x", "transpose", "amax", "inverse")
        pairs = {
            name: (part, _tensor(other))
            for name, part, other in zip(names, found, expected, strict=False)
            if part is not None
        }
        parts[f"scale {number:.9g}"] = same_bits(pairs, x=x)
    return merged(parts)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(np.shape(array)))


# Scales


def scales(context: Context) -> Iterator[Check]:
    """Check scales of amaxes of all magnitudes, their inverses, and scales as the hardware reads
    them."""
    for how in ("eager",) if context.quick else ("eager", "compiled"):
        run = partial(scale_check, context, how == "compiled")
        yield Check(f"scales and inverses, {how}", run)


_RULES: tuple[dict[str, Any], ...] = (
    {"format": "e4m3"},
    {"format": "e4m3", "power_of_two": True, "eps": 1e-6},
    {"format": "e5m2", "eps": 0.5, "overflow": 65504.0},
)


def scales_of(largest: Tensor) -> list[Tensor]:
    """Scales by several rules, and their inverses."""
    made = [numerics.tensor_scale(largest, **rule) for rule in _RULES]
    return [*made, *map(numerics.inverse, made)]


def scale_check(context: Context, compiled: bool) -> Facts:
    """Check scales of amaxes, including 0, inf and NaN, against IEEE float32 quotients."""
    largest = amaxes(context.seed)
    known = [oracles.scale_of(largest.numpy(), **rule) for rule in _RULES]
    expected = [*known, *(np.float32(1) / scale for scale in known)]
    function = context.compiled(scales_of) if compiled else scales_of
    found = function(largest.to(context.device))
    pairs = enumerate(zip(found, map(_tensor, expected), strict=True))
    return same_bits({f"rule {number}": pair for number, pair in pairs})


# Quantizers


def quantizers(context: Context) -> Iterator[Check]:
    """Check every kind of quantizer: its codes and scales, and the values that an emulated GEMM
    multiplies."""
    ways: dict[str, tuple[Function, int]] = {
        "bytes, eager": (as_bytes, 0),
        "values, by torch's operators": (as_values, 0),
    }
    if context.device == "cpu":
        for threads, told in ((1, "1 thread"), (THREADS, f"{THREADS} threads")):
            ways[f"values, by numba in {told}"] = partial(as_values, sweep=True), threads
    for kind, family in families().items():
        for way, (function, threads) in ways.items():
            run = partial(family_check, context, family, partial(_all, function), threads=threads)
            yield Check(f"{kind}, {way}", run)
    if not context.quick:
        for names, matrix in COMPILED.items():
            chosen = {name: EVERY[name] for name in names}
            for way, function in (("bytes", as_bytes), ("values", as_values)):
                run = partial(compiled_family, context, chosen, function, matrix)
                yield Check(f"{' and '.join(names)}, {way}, compiled", run)
    run = partial(copies_check, context)
    yield Check(f"nvfp4, both copies at once, by {kernel_of(context)}", run)
    for name, laid in COPIED.items():
        run = partial(blocks_check, context, name, laid)
        yield Check(f"{name}, both copies at once, by {kernel_of(context)}", run)
    for name, laid in KEPT.items():
        run = partial(weights_check, context, name, laid)
        yield Check(f"{name}, by the kernel for many weights", run)
    for dtype in DTYPES:
        for kind in ("ordinary", "special"):
            for way in TE_QUANTIZERS:
                if (way, kind) == ("nvfp4", "special"):
                    continue  # it hides NaN, which ours report
                check = partial(te_check, context, way, kind, dtype)
                yield Check(f"{way} of {kind} {dtype}, by TE", check)


@contextmanager
def _in_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matrices_of(context: Context) -> list[Matrix]:
    """The matrices that quantizers are checked with."""
    return MATRICES[:3] if context.quick else MATRICES


def drawn_bits(context: Context) -> RandomBits:
    """The random bits of `DRAWN`."""
    return RandomBits(DRAWN[0], DRAWN[1], torch.tensor(DRAWN[2], device=context.device))


def _all(function: Function, family: Family, x: Tensor, drawn: RandomBits) -> Any:
    """The results of a function for `x` and each quantizer of a family."""
    return {
        name: function(x, quantizer, drawn if quantizer.stochastic else None)
        for name, quantizer in family.items()
    }


def as_bytes(x: Tensor, quantizer: Quantizer, drawn: RandomBits | None) -> list[Tensor]:
    """Codes and scales for GEMMs over the columns, and over the rows."""
    made = [numerics.quantize(x, quantizer, dim, drawn) for dim in (1, 0)]
    return [part for each in made for part in (each.data, each.scales)]


def as_values(
    x: Tensor, quantizer: Quantizer, drawn: RandomBits | None, sweep: bool = False
) -> list[Tensor]:
    """Values and factors for both directions, by torch's operators, or in one `sweep` where that is
    possible."""
    at_once = rounding_of_both(quantizer, quantizer) if sweep else None
    made: Sequence[Rounded]
    if at_once is None:
        made = [rounding(quantizer, [dim]).round(x, drawn, fuse=sweep)[0] for dim in (1, 0)]
    else:
        made = at_once.round(x)
    one = torch.ones((), device=x.device)
    return [p for r in made for p in (r.values, one if r.factor is None else r.factor)]


@lru_cache(maxsize=8)
def made_of(kind: Matrix, seed: int) -> Tensor:
    """A matrix by its name; 32 and 128 do not divide its sizes."""
    name, dtype = kind
    if name == "extreme":
        return extreme(seed)
    x = ties(136, 330, seed) if name == "ties" else with_specials(uneven(136, 330, seed))
    return x.to(DTYPES[dtype])


@lru_cache(maxsize=256)
def expected_of(kind: Matrix, seed: int, quantizer: Quantizer) -> list[oracles.Quantized]:
    """The expected result of quantizing a matrix, for GEMMs over the columns, and over the rows."""
    return [known_of(made_of(kind, seed), quantizer, dim) for dim in (1, 0)]


def known_of(x: Tensor, quantizer: Quantizer, dim: int) -> oracles.Quantized:
    """What the reference makes of a matrix, with the random bits of `DRAWN`."""
    bits = partial(oracles.philox, *DRAWN) if quantizer.stochastic else None
    overflow = torch.finfo(x.dtype).max
    return oracles.quantize(x.float().numpy(), quantizer, dim, overflow=overflow, bits=bits)


def family_check(
    context: Context,
    family: Family,
    function: Function,
    given: Sequence[Matrix] = (),
    threads: int = 0,
) -> Facts:
    """Check that `function(family, x, drawn)` returns, by quantizer, the results of `as_bytes` or
    `as_values`, numba's kernels in this number of `threads`."""
    if threads and (why_not := fused.why_not()):
        raise Skipped(why_not)
    parts, drawn = {}, drawn_bits(context)
    for each in given or matrices_of(context):
        x = made_of(each, context.seed).to(context.device)
        # Only of ties are a transform's sums exact in any order.
        chosen = {n: q for n, q in family.items() if each[0] == "ties" or not q.hadamard}
        with _in_threads(threads or torch.get_num_threads()):
            made = function(chosen, x, drawn)
        for name, found in made.items():
            known = expected_of(each, context.seed, family[name])
            parts[f"{name} of {' '.join(each)}"] = _compared(found, known, family[name])
    return merged(parts)


def compiled_family(context: Context, family: Family, function: Function, matrix: Matrix) -> Facts:
    """The same, compiled as one graph."""
    if context.device == "cpu" and function is as_bytes and "mxfp8" in family:
        raise Skipped("torch compiles no float8_e8m0fnu for CPUs")
    compiled = context.compiled(partial(_all, function, family))
    return family_check(context, family, lambda _, x, drawn: compiled(x, drawn), [matrix])


def _compared(found: list[Tensor], known: list[oracles.Quantized], quantizer: Quantizer) -> Facts:
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    numbers: dict[str, tuple[Tensor, Tensor]] = {}
    for place, (made, dim) in enumerate(zip(known, (1, 0), strict=True)):
        data, scale = found[2 * place : 2 * place + 2]
        if data.dtype in (torch.float32, torch.bfloat16):
            numbers[f"values, dim {dim}"] = data, _tensor(made.values)
            numbers[f"factor, dim {dim}"] = scale, _like(made.factor, scale)
        else:
            pairs[f"codes, dim {dim}"] = data, _tensor(packed(made.codes, quantizer, dim))
            scale = scale.float() if quantizer.scale == "e4m3" else scale
            pairs[f"scales, dim {dim}"] = scale, _like(_stored(made, quantizer), scale)
    return same_bits(pairs) if pairs else same_values(numbers)


def _stored(made: oracles.Quantized, quantizer: Quantizer) -> oracles.Array:
    return made.stored.astype(np.uint8) if quantizer.scale == "e8m0" else made.stored


def _like(array: oracles.Array, found: Tensor) -> Tensor:
    """The array as a tensor, in the shape of the expected one if the sizes are equal."""
    made = _tensor(array)
    return made.reshape(found.shape) if made.numel() == found.numel() else made


def packed(codes: oracles.Array, quantizer: Quantizer, dim: int) -> oracles.Array:
    """Codes as stored: FP4 two to a byte along `dim`, the even one in the low half."""
    if quantizer.format != "e2m1":
        return codes
    rows = np.moveaxis(codes, dim, -1)
    rows = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
    return np.moveaxis(rows[:, ::2] + 16 * rows[:, 1::2], -1, dim)


def copies_check(context: Context) -> Facts:
    """Check both NVFP4 copies of a matrix, as the torch backend makes them: codes, scales in
    tiles, and the upper scale."""
    pairs, drawn = {}, drawn_bits(context)
    for each, (name, across) in product(matrices_of(context), families()["nvfp4"].items()):
        if across.hadamard and each[0] != "ties":  # see `family_check`
            continue
        x = made_of(each, context.seed)
        x = F.pad(x, (0, -x.shape[1] % 16, 0, -x.shape[0] % 16))
        along, bits = (
            replace(across, hadamard=0),
            (drawn, drawn) if across.stochastic else (None, None),
        )
        made = cast_nvfp4(x.to(context.device), along, across, bits)
        for copy, quantizer, dim in zip(made, (along, across), (1, 0), strict=True):
            assert copy is not None
            assert copy.whole is not None
            known = known_of(x, quantizer, dim)
            codes, scales = (
                packed(known.codes, quantizer, dim),
                oracles.encode(known.stored, "e4m3"),
            )
            if dim == 0:
                codes, scales = codes.T, scales.T
            scales = scales.repeat(len(codes) // len(scales), 0)  # of squares one for each row
            upper = np.where(np.isnan(known.values).any(), np.nan, known.factor).astype(np.float32)
            what = f"{name} of {' '.join(each)}: %s, dim {dim}"
            pairs[what % "codes"] = copy.data, _tensor(codes)
            pairs[what % "scales"] = copy.inv_scale.flatten(), tiles(_tensor(scales))
            pairs[what % "upper scale"] = copy.whole, _tensor(upper.reshape(()))
    return same_values(pairs)


COPIED = {"1x128": Scales.ROWS, "mxfp8": Scales.MX, "mxfp8 e5m2 floor": Scales.MX}
KEPT = {"tensor": Scales.PER_TENSOR, "128x128": Scales.SQUARES, "mxfp8": Scales.MX}


def blocks_check(context: Context, name: str, kind: Scales) -> Facts:
    """Check both copies of a matrix in blocks, as the torch backend makes them."""
    quantizer, parts = EVERY[name], {}
    for each in matrices_of(context):
        x = made_of(each, context.seed).to(context.device)
        made = cast_blocks(Product("cast", x), quantizer, across=True, sums=False)
        copies = (made.data, made.inv_scale), (made.transposed, made.inv_scale_across)
        parts[" ".join(each)] = packed_copies(
            copies, expected_of(each, context.seed, quantizer), kind
        )
    return merged(parts)


def weights_check(context: Context, name: str, kind: Scales) -> Facts:
    """Check the copies of several weights, made anew at once."""
    need_kernel(context)
    quantizer, parts = EVERY[name], {}
    for dtype in DTYPES:
        chosen = [each for each in matrices_of(context) if each[1] == dtype]
        weights = [made_of(each, context.seed).to(context.device) for each in chosen]
        kept = KeptWeights(weights, quantizer)
        kept.cast()
        kept.cast()  # of the first time nothing is left, such as amaxes
        for each, copies in zip(chosen, kept.copies, strict=True):
            known = expected_of(each, context.seed, quantizer)
            pairs = [copy[:2] for copy in copies]
            parts[" ".join(each)] = packed_copies(pairs, known, kind)
    return merged(parts)


def packed_copies(
    found: Sequence[tuple[Any, ...]], known: list[oracles.Quantized], kind: Scales
) -> Facts:
    """Compare the data and scales of two copies, of which the second lies transposed."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for (data, scale), made, dim in zip(found, known, (1, 0), strict=True):
        codes, stored = (part if dim else part.T for part in (made.codes, made.stored))
        expected = _tensor(stored)
        if kind is Scales.MX:
            expected = expected.to(torch.uint8).view(torch.float8_e8m0fnu)
        expected = expected.view(()) if kind is Scales.PER_TENSOR else pack_scales(expected, kind)
        pairs[f"codes, dim {dim}"] = data, _tensor(codes)
        pairs[f"scales, dim {dim}"] = scale, expected
    return same_bits(pairs)


# Transformer Engine's quantizers, of each scaling that it has

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


def rules(quantizer: Quantizer) -> str:
    """What one of these quantizers is, in words."""
    return f"{quantizer.format}, {quantizer.block}, {quantizer.scale}, eps {quantizer.eps:g}"


def te_check(context: Context, scaling: str, kind: str, dtype: str) -> Facts:
    """Check the bytes and scales of TE's quantizers."""
    context.need_te(scaling)
    x = matrix(kind, dtype, context.seed)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for q in TE_QUANTIZERS[scaling]:
        made = te.quantize(x.to(context.device), q)
        ways = ((1, made.along, made.scales), (0, made.across, made.scales_across))
        for dim, data, stored in ways:
            what = f"{rules(q)}: %s, dim {dim}"
            known = known_of(x, q, dim)
            # Both copies have one scale, and TE may omit a copy.
            assert q.per_tensor or not (data is None or stored is None), what % "nothing"
            if stored is not None:
                pairs[what % "scales"] = stored, _like(_stored(known, q), stored)
            if data is not None:
                pairs[what % "bytes"] = data, _tensor(packed(known.codes, q, dim))
    return same_bits(pairs)


# Random bits


def random_bits(context: Context) -> Iterator[Check]:
    """Check the bits of stochastic rounding, Philox4x32-10, for whole matrices and for parts of
    them."""
    for how in ("eager",) if context.quick else ("eager", "compiled"):
        yield Check(f"Philox4x32-10, {how}", partial(bits_check, context, how == "compiled"))


def _draw(seed: int, stream: int, counter: Tensor, first_row: int) -> Tensor:
    return RandomBits(seed, stream, counter, first_row).bits(9, 14)


def bits_check(context: Context, compiled: bool) -> Facts:
    """Check the bits of several keys, passes and rows."""
    draw, pairs = context.compiled(_draw) if compiled else _draw, {}
    first, *known = KNOWN_BITS
    others = (*DRAWN, 5), (0, 2**31, 0, 0), (1, 0, 2**63 - 1, 2**31 + 5)
    for seed, stream, counter, row in ((*known, 0), (*known, first), *others):
        found = draw(seed, stream, torch.tensor(counter, device=context.device), row)
        name = f"seed {seed:#x}, stream {stream:#x}, pass {counter:#x}, from row {row:#x}"
        pairs[name] = found, _tensor(oracles.philox(seed, stream, counter, 9, 14, row))
    return same_bits(pairs)
