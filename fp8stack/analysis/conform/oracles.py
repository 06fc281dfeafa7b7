"""The rules of formats and recipes in numpy, sharing no code with what is checked.

Values of a format are enumerated from its definition, and a number is rounded by searching for its
neighbours among them; all comparisons are exact in float64. Sources: OCP Microscaling 1.0, "FP8
formats for deep learning" (arXiv 2209.05433), Transformer Engine 2.20's kernels, Random123.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp8stack.common.formats import Quantizer

Array = np.ndarray[Any, Any]
f32 = np.float32
FLT_MAX = float(np.finfo(f32).max)
# Exponent bits, mantissa bits, bias, largest value.
_FORMATS = {
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e2m1": (2, 1, 1, 6.0),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28.0),
}
_POWERS_OF_TWO = np.ldexp(1.0, np.arange(-127, 128))  # E8M0's values


@lru_cache
def layout(name: str) -> tuple[int, int, int, float]:
    """The exponent bits, mantissa bits, bias and largest value of a format.

    Below 8 bits, every code of a format of one's own, `eXmY`, is a finite value. With 8 bits the
    codes of the topmost exponent are not, as in IEEE 754; with a single exponent bit or without
    mantissa bits, only the code of all ones is not.
    """
    if name in _FORMATS:
        return _FORMATS[name]
    exponents, mantissa = map(int, name.removeprefix("e").split("m"))
    bias, top, fraction = 2 ** (exponents - 1) - 1, 2**exponents - 1, 1 - 2.0**-mantissa
    if exponents + mantissa == 7 and (exponents == 1 or mantissa == 0):
        top, fraction = (top, fraction - 2.0**-mantissa) if mantissa else (top - 1, 0.0)
    elif exponents + mantissa == 7:
        top -= 1
    return exponents, mantissa, bias, (1 + fraction) * 2.0 ** (top - bias)


def largest_of(name: str) -> float:
    """The largest value of a format."""
    return layout(name)[3]


@lru_cache
def grid(name: str) -> Array:
    """The values of the codes 0, 1, 2, ... of a format, up to its largest: float64."""
    exponents, mantissa, bias, largest = layout(name)
    codes = np.arange(1 << (exponents + mantissa))
    exponent, fraction = codes >> mantissa, codes % (1 << mantissa) / (1 << mantissa)
    values = np.where(exponent > 0, 1 + fraction, 2 * fraction) * 2.0 ** (exponent - bias)
    finite: Array = values[values <= largest]
    return finite


def encode(scaled: Array, name: str, bits: Array | None = None) -> Array:
    """The codes of float32 numbers, saturated: uint8. NaN becomes 0x7F in formats of 8 bits, else
    the largest value.

    Rounds to nearest, ties to the even code; without mantissa bits, ties of two powers of two to
    the larger one, since the digit of both is 1 (IEEE 754-2019, 4.3.1). With `bits`, rounds away
    from zero if they are below the position between both neighbours times 2^32, rounded up.
    """
    values = grid(name)
    size = np.minimum(np.abs(np.nan_to_num(scaled, nan=0.0, posinf=FLT_MAX)), values[-1])
    size = size.astype(np.float64)
    below = np.searchsorted(values, size, side="right") - 1
    above = np.minimum(below + 1, len(values) - 1)
    down, up = size - values[below], values[above] - size
    if bits is None:
        odd = below > 0 if layout(name)[1] == 0 else below % 2 == 1
        farther = (up < down) | ((up == down) & odd)
    else:
        gap = np.where(above > below, values[above] - values[below], 1.0)
        farther = bits < np.ceil(down / gap * 2.0**32)
    sign = 1 << sum(layout(name)[:2])
    code = np.where(farther, above, below) + np.where(np.signbit(scaled), sign, 0)
    nan = 0x7F if sign == 0x80 else sign - 1
    return np.where(np.isnan(scaled), nan, code).astype(np.uint8)


def decode(codes: Array, name: str) -> Array:
    """The values of codes: float32; NaN for codes without a value."""
    sign = 1 << sum(layout(name)[:2])
    table = np.full(sign, np.nan)
    table[: len(grid(name))] = grid(name)
    values: Array = np.concatenate([table, -table]).astype(f32)[codes]
    return values


def amax(x: Array, axis: Any = None) -> Array:
    """The largest magnitude, NaN ignored: float32."""
    sizes: Array = np.where(np.isnan(x), f32(0), np.abs(x))
    largest: Array = sizes.max(axis=axis, keepdims=True, initial=f32(0))
    return largest


def scale_of(
    largest: Array | float,
    format: str,
    power_of_two: bool = False,
    eps: float = 0.0,
    overflow: float = FLT_MAX,
) -> Array:
    """`fp8_max / amax` in float32; 1 for an amax of 0, inf or NaN."""
    largest = np.where(largest < f32(eps), f32(eps), largest).astype(f32)
    with np.errstate(all="ignore"):
        scale = f32(largest_of(format)) / largest
    scale = np.where(np.isinf(scale), f32(overflow), scale)
    scale = np.where((largest > 0) & (largest < np.inf), scale, f32(1))
    if power_of_two:  # frexp's mantissa is in [0.5, 1)
        scale = np.maximum(np.ldexp(f32(0.5), np.frexp(scale)[1]), f32(2.0**-126))
    return scale.astype(f32)


def e8m0_code(largest: Array, name: str, rounding: str) -> Array:
    """The E8M0 code of a block's scale, by one of the three rules."""
    _, mantissa, _, limit = layout(name)
    if rounding == "rceil":
        with np.errstate(all="ignore"):
            ratio = largest * f32(1 / limit)
        return np.searchsorted(_POWERS_OF_TWO[:255], ratio).clip(max=254)
    fraction, exponent = np.frexp(np.where(np.isinf(largest), 0, largest).astype(np.float64))
    exponent = np.maximum(exponent - 1, -127)  # subnormals count as float32's least exponent
    if rounding == "even":
        carry = np.floor(fraction * 2 ** (mantissa + 1) + 0.5) == 2 ** (mantissa + 1)
        exponent = exponent + (carry & (exponent > -127))
    exponent = np.where(np.isinf(largest), 128, np.where(largest == 0, -127, exponent))
    return (exponent - int(np.log2(limit)) + 127).clip(0, 254)


class QuantizedMatrix(NamedTuple):
    """A quantized matrix.

    Attributes:
        codes: one per element, uint8.
        stored: the scales as stored, one per block: E8M0 codes, or float32.
        values: what a GEMM multiplies: float32, including the scales of blocks.
        factor: the factor of the GEMM's output: float32, broadcasts to `values`.
        amax: the amax of the matrix: float32, 0-dim.
        into: the factor of each element before the cast: float32.
        out: the factor of each code's value, likewise; with two levels of scales, the lower one.
    """

    codes: Array
    stored: Array
    values: Array
    factor: Array
    amax: Array
    into: Array
    out: Array

    @property
    def exact(self) -> Array:
        """The matrix in float64."""
        return self.values.astype(np.float64) * self.factor


def quantize(
    x: Array,
    quantizer: Quantizer,
    dim: int,
    *,
    overflow: float = FLT_MAX,
    bits: Callable[[int, int], Array] | None = None,
    scale: float | None = None,
) -> QuantizedMatrix:
    """Quantize a float32 matrix, for a GEMM that reduces over `dim`.

    `overflow` replaces a block's scale beyond float32's range: the largest value of the matrix's
    original dtype. `bits(rows, columns)` returns the bits of stochastic rounding, `scale` is the
    scale of delayed scaling.
    """
    name, kind = quantizer.format, quantizer.scale
    if quantizer.hadamard:
        x, overflow = hadamard(x, quantizer.hadamard, dim), 2.0**127 * (2 - 2**-7)
    blocks, restore = _split(x, _block(quantizer, x.shape, dim))
    largest = amax(blocks, (1, 3))
    factor = np.ones((1, 1), f32)
    with np.errstate(all="ignore"):
        if scale is not None:
            into = np.full(largest.shape, scale, f32)
            stored = out = f32(1) / into
        elif kind == "e8m0":
            stored = e8m0_code(largest, name, quantizer.scale_rounding)
            into, out = (np.ldexp(1.0, sign * (stored - 127)).astype(f32) for sign in (-1, 1))
        elif kind == "e4m3":
            of_tensor = amax(largest)
            g = np.minimum(f32(2688) / np.where(of_tensor > 0, of_tensor, f32(2688)), f32(FLT_MAX))
            g = np.where(g == 0, f32(1), g)
            stored = out = decode(
                encode(np.minimum(largest * (g * f32(1 / 6)), f32(448)), "e4m3"), "e4m3"
            )
            into = np.minimum(f32(1) / (out * (f32(1) / g)), f32(FLT_MAX))
            factor = of_tensor.reshape(1, 1) * f32(1 / 2688)
        else:
            assert kind in ("float32", "power_of_two"), kind
            limit = FLT_MAX if isinstance(quantizer.block, str) else overflow
            into = scale_of(largest, name, kind == "power_of_two", quantizer.eps, limit)
            stored = out = f32(1) / into
        drawn = None if bits is None else bits(*x.shape)
        codes = encode(restore(blocks * into), name, drawn)
        values = np.where(np.isnan(x), f32(np.nan), decode(codes, name))
        into, spread = (
            restore(np.broadcast_to(per_block, blocks.shape)) for per_block in (into, out)
        )
        if isinstance(quantizer.block, str):
            factor = out[:, 0, :, 0]
        else:
            values = values * spread
    return QuantizedMatrix(
        codes, stored[:, 0, :, 0], values, factor, amax(x).reshape(()), into, spread
    )


def _block(quantizer: Quantizer, shape: tuple[int, ...], dim: int) -> tuple[int, int]:
    match quantizer.block:
        case "tensor":
            return shape[0], shape[1]
        case "row":
            return (1, shape[1]) if dim == 1 else (shape[0], 1)
        case columnwise, rowwise:
            return (columnwise, rowwise) if dim == 1 else (rowwise, columnwise)
    raise AssertionError(quantizer)


def _split(x: Array, block: tuple[int, int]) -> tuple[Array, Any]:
    """The matrix as [n0, b0, n1, b1], padded with zeros, and the inverse function."""
    (rows, columns), (tall, wide) = x.shape, block
    padded = np.pad(x, ((0, -rows % tall), (0, -columns % wide)))
    blocks = padded.reshape(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
    return blocks, lambda result: result.reshape(padded.shape)[:rows, :columns]


def hadamard(x: Array, size: int, dim: int) -> Array:
    """Each block of `size` along `dim` times `diag(signs) H / sqrt(size)`, rounded to bfloat16.
    Sums and differences are float32's, over strides 1, 2, 4, ..."""
    lines = np.moveaxis(x, dim, -1)
    lines = np.pad(lines, [(0, 0)] * (x.ndim - 1) + [(0, -lines.shape[-1] % size)])
    minus = [3, 5, 6, 7, 8, 9, 10, 12, 14, 15] if size == 16 else []  # TE's get_wgrad_sign_vector
    blocks = to_bf16(lines).reshape(-1, size)
    blocks[:, minus] *= -1
    stride = 1
    with np.errstate(all="ignore"):
        while stride < size:
            pairs = blocks.reshape(-1, 2, stride)
            sums = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
            blocks, stride = np.stack(sums, 1), 2 * stride
        mixed = to_bf16(blocks * f32(size**-0.5))
    return np.moveaxis(mixed.reshape(lines.shape), -1, dim)


def to_bf16(x: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even, as float32."""
    exponent = np.maximum(np.frexp(x)[1], -125) - 8
    steps: Array = np.rint(np.ldexp(x.astype(np.float64), -exponent))
    rounded: Array = np.ldexp(steps, exponent).astype(f32)
    return np.where(np.isfinite(x), rounded, x)


def philox(
    seed: int, stream: int, counter: int, rows: int, columns: int, first_row: int = 0
) -> Array:
    """The Philox4x32-10 bits of each element of a matrix: int64 [rows, columns]. The counter is the
    group of four columns, the row, and the pass in two words; the key is the seed and the
    stream."""
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    lanes = np.arange(-(-columns // 4), dtype=np.uint64)
    lines = np.arange(rows, dtype=np.uint64) + np.uint64(first_row & 0xFFFFFFFF) & word
    zero = np.zeros((rows, len(lanes)), np.uint64)
    c0, c1 = lanes + zero, lines[:, None] + zero
    c2, c3 = (
        zero + np.uint64(word_source & 0xFFFFFFFF) for word_source in (counter, counter >> 32)
    )
    for turn in range(10):
        k0 = np.uint64(seed + turn * 0x9E3779B9 & 0xFFFFFFFF)
        k1 = np.uint64(stream + turn * 0xBB67AE85 & 0xFFFFFFFF)
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = p1 >> shift ^ c1 ^ k0, p1 & word, p0 >> shift ^ c3 ^ k1, p0 & word
    return np.stack([c0, c1, c2, c3], -1).reshape(rows, -1)[:, :columns].astype(np.int64)


class DelayedSlot:
    """One slot of delayed scaling as in Transformer Engine: a list of past amaxes."""

    def __init__(self, name: str, length: int, margin: int = 0, algorithm: str = "max") -> None:
        self.target = f32(largest_of(name) * 2.0**-margin)
        self.window = [0.0] * length  # the first element is the amax being recorded
        self.algorithm = algorithm
        self.scale = 1.0

    def record(self, largest: float) -> None:
        """Record the amax of a cast; NaN is ignored."""
        if largest > self.window[0]:
            self.window[0] = largest

    def update(self) -> None:
        """Move the recorded amax into the window and compute the next scale."""
        last = self.window[0]
        if last == 0.0:
            return
        largest = last if self.algorithm == "most_recent" else max(self.window)
        self.window = [0.0, *self.window[2:], last] if len(self.window) > 1 else [0.0]
        if np.isfinite(largest):
            with np.errstate(over="ignore"):
                self.scale = min(float(self.target / f32(largest)), FLT_MAX)
