"""The loops of `fused`, which numba compiles for this CPU: amax, scale and rounding, tile by tile.

They compute what `rounding` and `quantized` compute, operation for operation: by default, numba
neither contracts a product and a sum nor reorders sums. A kernel is a C function of a pointer to an
array of `CastWork`, one for each group of rows. Several threads may run it on the same array: each
thread takes the next tile until none is left.

The loops read addresses and numbers; they have no tensors and no quantizers.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic
from numba.np.numpy_support import carray

_INTEGERS = (
    # Counters of tiles; the bits of the amax of the matrix.
    *("next_tile", "tiles_done", "amax"),
    "groups",  # the number of works in the array from this one on
    # Addresses, 0 for none: the matrix, the result, and the result for other blocks. The matrix is
    # float32 or, if `source_bf16`, bfloat16; the results likewise, if `result_bf16`.
    *("source", "result", "other_result"),
    "column_amaxes",  # the address of the amaxes of the columns, int32
    # Addresses: a given scale; the factor of the output, or factors of its rows or columns; the
    # recorded amax; a bool, whether to record. All but the bool are float32.
    *("scale", "factor", "other_factor", "recorded", "is_recording"),
    # Sizes of the source, of the results (padded for a Hadamard transform), and of a tile.
    *("source_rows", "source_columns", "rows", "columns", "tile_rows", "tile_columns"),
    # The block sizes of the two results; 0 stands for all rows or all columns.
    *("height", "width", "other_height", "other_width"),
    *("seed", "stream", "counter", "first_row"),  # of the random bits
    *("hadamard", "minus_signs", "dim"),  # the transform's size, signs and dimension
)
_FLAGS = (
    "scale_kind",  # an index of SCALES
    "power_of_two",
    "carries_scales",  # whether values are multiplied by the scales of their blocks
    "stochastic",
    "mantissa_bits",
    "largest_exponent",  # the exponent of the format's largest value, without the bias
    *("source_bf16", "result_bf16"),
)
_FLOATS = ("max", "min_normal", "min_subnormal", "limit", "eps", "overflow")
SCALES = ("float32", "rceil", "floor", "even", "e4m3", "given")


class CastWork(ctypes.Structure):
    """The addresses and numbers of one cast."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_int32) for name in _FLAGS),
        *((name, ctypes.c_float) for name in _FLOATS),
    ]


_NEXT_TILE, _TILES_DONE = CastWork.next_tile.offset, CastWork.tiles_done.offset
_AMAX = CastWork.amax.offset
intrinsic: Any = _intrinsic  # typed as Any: its signature is another
_WORK = types.CPointer(from_dtype(np.dtype(CastWork)))
_WORK_BYTES = ctypes.sizeof(CastWork)
_LANES = 16  # elements of a vector instruction
_JOINED = 2048  # short rows of up to so many elements together are rounded as one row
_FLOAT32, _RCEIL, _FLOOR, _EVEN, _E4M3, _GIVEN = range(6)
_MAGNITUDE, _EXPONENT, _MANTISSA = 0x7FFFFFFF, 0x7F800000, 0x7FFFFF
_POWER_OF_TWO = np.int32(_EXPONENT)
_TWICE_127 = np.int32(254 << 23)
_NAN = np.int32(0x7FC00000)
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)
_FLT_MAX = np.finfo(np.float32).max
_LEAST_POWER_OF_TWO = np.float32(2.0**-126)
_SIXTH, _OUT_OF_TWO_LEVELS = np.float32(1 / 6), np.float32(1 / 2688)


def _instruction(signature: Any, emit: Callable[..., Any]) -> Any:
    """A numba intrinsic that compiles to the instructions that `emit(builder, *arguments)`
    writes."""

    def typed(typing: Any, *arguments: Any) -> tuple[Any, Callable[..., Any]]:
        return signature, lambda context, builder, _, llvm_arguments: emit(builder, *llvm_arguments)

    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
    return intrinsic(typed)


_INT32, _INT64, _LANES_INT32 = ir.IntType(32), ir.IntType(64), ir.VectorType(ir.IntType(32), _LANES)


def _emit_amax(builder: Any, address: Any) -> Any:
    kind = ir.FunctionType(_INT32, [_LANES_INT32])
    name = "llvm.vector.reduce.smax.v16i32"
    reduce = cgutils.get_or_insert_function(builder.module, kind, name)
    memory = builder.inttoptr(address, _LANES_INT32.as_pointer())
    words = builder.load(memory, align=4, typ=_LANES_INT32)
    sizes = builder.and_(words, ir.Constant(_LANES_INT32, [_MAGNITUDE] * _LANES))
    infinite = ir.Constant(_LANES_INT32, [_EXPONENT] * _LANES)
    is_nan = builder.icmp_signed(">", sizes, infinite)
    zeros = ir.Constant(_LANES_INT32, [0] * _LANES)
    return builder.call(reduce, [builder.select(is_nan, zeros, sizes)])


def _emit_fill(builder: Any, address: Any, value: Any) -> Any:
    lanes = ir.VectorType(ir.FloatType(), _LANES)
    vector = ir.Constant(lanes, ir.Undefined)
    for i in range(_LANES):
        vector = builder.insert_element(vector, value, ir.Constant(_INT32, i))
    builder.store(vector, builder.inttoptr(address, lanes.as_pointer()), align=4)
    return ir.Constant(cgutils.voidptr_t, None)


def _emit_widen(builder: Any, target: Any, source: Any) -> Any:
    halves = builder.inttoptr(source, ir.VectorType(ir.IntType(16), _LANES).as_pointer())
    words = builder.zext(builder.load(halves, align=2), _LANES_INT32)
    bits = builder.shl(words, ir.Constant(_LANES_INT32, [16] * _LANES))
    builder.store(bits, builder.inttoptr(target, _LANES_INT32.as_pointer()), align=4)
    return ir.Constant(cgutils.voidptr_t, None)


def _atomic(operation: str, kind: Any) -> Callable[..., Any]:
    return lambda builder, address, value: builder.atomic_rmw(
        operation, builder.inttoptr(address, kind.as_pointer()), value, "seq_cst"
    )


# The memory at an address.
_address = _instruction(
    types.voidptr(types.int64), lambda builder, at: builder.inttoptr(at, cgutils.voidptr_t)
)
# Add to the int64 at an address, as one atomic step; returns the number before.
_atomic_add = _instruction(types.int64(types.int64, types.int64), _atomic("add", _INT64))
# Raise the int32 at an address to a value that is larger, as one atomic step.
_atomic_max = _instruction(types.int32(types.int64, types.int32), _atomic("max", _INT32))
# The bits of a float32, as int32; and the float32 of these bits.
_bits = _instruction(types.int32(types.float32), lambda builder, x: builder.bitcast(x, _INT32))
_of_bits = _instruction(
    types.float32(types.int32), lambda builder, x: builder.bitcast(x, ir.FloatType())
)
# The largest magnitude of the 16 float32 from an address on, as bits, NaN ignored; a loop in Python
# takes ten times as long.
_amax_of_16 = _instruction(types.int32(types.int64), _emit_amax)
# Set the 16 float32 from an address on to a value.
_fill_16 = _instruction(types.none(types.int64, types.float32), _emit_fill)
# The float32 of the 16 bfloat16 from an address on, written to another address.
_widen_16 = _instruction(types.none(types.int64, types.int64), _emit_widen)
# The address of the work.
_start = _instruction(types.int64(_WORK), lambda builder, work: builder.ptrtoint(work, _INT64))


@njit
def _floats(address, length):
    return carray(_address(address), length, np.float32)


@njit
def _ints(address, length):
    return carray(_address(address), length, np.int32)


@njit
def _halves(address, length):
    return carray(_address(address), length, np.uint16)


@njit
def _copy(target, source):
    for i in range(len(source)):
        target[i] = source[i]


@njit
def _nearest(value, magic, min_spacing):
    """See `cast.round_to_format`; `least` is the spacing of subnormals times `magic`."""
    spacing = _of_bits(_bits(value) & _POWER_OF_TWO) * magic
    spacing = min_spacing if spacing < min_spacing else spacing
    return (value + spacing) - spacing


# Scales multiply into the format, inverse scales out of it.


@njit
def _quotient_scale(amax, limit, eps, overflow, power_of_two):
    """See `cast.tensor_scale`."""
    if amax < eps:
        amax = eps
    if not (amax > _ZERO and amax < _INF):
        return _ONE  # which is a power of two
    scale = limit / amax
    if scale == _INF:
        scale = overflow
    if power_of_two:
        scale = max(_of_bits(_bits(scale) & _POWER_OF_TWO), _LEAST_POWER_OF_TWO)
    return scale


@njit
def _e8m0_code_up(amax, format_max_inverse):
    """The E8M0 code, rounded up: see `scales.e8m0_code`."""
    bits = _bits(amax * format_max_inverse)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    carry = 1 if mantissa > (0x400000 if exponent == 0 else 0) else 0
    return min(exponent + carry, 254)


@njit
def _e8m0_code_near(amax, half_step, largest_exponent):
    """The E8M0 code, rounded down or to the nearest power of two: see `scales.e8m0_code`."""
    return min(max((((_bits(amax) + half_step) >> 23) & 0xFF) - largest_exponent, 0), 254)


@njit
def _write_e8m0_scales(code, scales, inv_scales, i):
    scale_bits = np.int32((254 - code) << 23) if code != 254 else np.int32(0x400000)
    inv_scale_bits = np.int32(code << 23) if code != 0 else np.int32(0x400000)
    scales[i], inv_scales[i] = _of_bits(scale_bits), _of_bits(inv_scale_bits)


@njit
def _e4m3_scales(amax, into_e4m3):
    """The scales of one block in NVFP4, see `scales.scales_of`."""
    exact = min(amax * (into_e4m3 * _SIXTH), np.float32(448))
    # E4M3: three bits of mantissa, from 2^-6 on.
    inv_scale = _nearest(exact, np.float32(1.5 * 2**20), np.float32(1.5 * 2**14))
    return min(_ONE / (inv_scale * (_ONE / into_e4m3)), _FLT_MAX), inv_scale


@njit
def _write_scales(amaxes, scales, inv_scales, w, into_e4m3):
    """Write the scales and inverse scales of blocks, from the bits of their amaxes."""
    # Read before the loops, since numba reads `w` again after each store.
    scale_kind, limit, eps, overflow = w.scale_kind, w.limit, w.eps, w.overflow
    power_of_two, largest_exponent = w.power_of_two, w.largest_exponent
    # Rounding to even adds half a step of the mantissa to the amax.
    half_step = np.int32(1 << (22 - w.mantissa_bits)) if scale_kind == _EVEN else np.int32(0)
    if scale_kind == _FLOAT32:
        for i in range(len(amaxes)):
            scales[i] = _quotient_scale(_of_bits(amaxes[i]), limit, eps, overflow, power_of_two)
            inv_scales[i] = _ONE / scales[i]
    elif scale_kind == _E4M3:
        for i in range(len(amaxes)):
            scales[i], inv_scales[i] = _e4m3_scales(_of_bits(amaxes[i]), into_e4m3)
    elif scale_kind == _RCEIL:
        for i in range(len(amaxes)):
            _write_e8m0_scales(_e8m0_code_up(_of_bits(amaxes[i]), limit), scales, inv_scales, i)
    else:
        for i in range(len(amaxes)):
            code = _e8m0_code_near(_of_bits(amaxes[i]), half_step, largest_exponent)
            _write_e8m0_scales(code, scales, inv_scales, i)


@njit
def _first_level(tensor_amax):
    """See `scales.nvfp4_scale`."""
    scale = min(np.float32(2688) / tensor_amax, _FLT_MAX)
    if tensor_amax == _ZERO or scale == _ZERO:
        return _ONE
    return scale


# A row of a tile.


@njit
def _round(values, scales, inv_scales, result, length, w):
    """`result = inv_scales * round(values * scales)`, to nearest; without the factor `inv_scales`
    unless the rule carries scales."""
    magic = np.float32(12582912.0 / (1 << w.mantissa_bits))  # 1.5 * 2^(23 - mantissa_bits)
    min_spacing = w.min_normal * magic
    high, low, carries = w.max, -w.max, w.carries_scales != 0
    for i in range(length):
        scaled = values[i] * scales[i]
        scaled = high if scaled > high else (low if scaled < low else scaled)
        rounded = _nearest(scaled, magic, min_spacing)
        result[i] = rounded * inv_scales[i] if carries else rounded


@njit
def _round_at_random(values, scales, inv_scales, bits, result, length, w):
    """`_round`, stochastically."""
    per_power = np.float32(1.0 / (1 << w.mantissa_bits))
    min_step, high, low, carries = w.min_subnormal, w.max, -w.max, w.carries_scales != 0
    for i in range(length):
        scaled = values[i] * scales[i]
        scaled = high if scaled > high else (low if scaled < low else scaled)
        step = _of_bits(_bits(scaled) & _POWER_OF_TWO) * per_power
        step = min_step if step < min_step else step
        steps = scaled * _of_bits(_TWICE_127 - _bits(step))
        below = np.trunc(steps)
        threshold = np.ceil(abs(steps - below) * np.float32(4294967296.0))
        away = _ONE if np.float64(bits[i]) < np.float64(threshold) else _ZERO
        rounded = (below + np.copysign(away, steps)) * step
        result[i] = rounded * inv_scales[i] if carries else rounded


@njit
def _draw(bits, first_column, length, row, w):
    """Philox4x32-10 of each element, see `random.RandomBits`; rounds `length` up to fours."""
    low, high = np.uint32(w.counter & 0xFFFFFFFF), np.uint32((w.counter >> 32) & 0xFFFFFFFF)
    row_word = np.uint32(row + w.first_row)
    seed, stream = np.uint32(w.seed), np.uint32(w.stream)
    for lane in range((length + 3) // 4):
        c0, c1, c2, c3 = np.uint32(first_column // 4 + lane), row_word, low, high
        k0, k1 = seed, stream
        for _ in range(10):
            p0, p1 = np.uint64(c0) * np.uint64(0xD2511F53), np.uint64(c2) * np.uint64(0xCD9E8D57)
            c0 = np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0
            c1 = np.uint32(p1)
            c2 = np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1
            c3 = np.uint32(p0)
            k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
            k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
        bits[4 * lane] = c0
        bits[4 * lane + 1] = c1
        bits[4 * lane + 2] = c2
        bits[4 * lane + 3] = c3


@njit
def _rounded_to_bf16(value):
    """Round to bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = _bits(value)
    word = np.uint32(bits)
    odd = (word >> np.uint32(16)) & np.uint32(1)
    rounded = np.int32((word + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))
    return _of_bits(_NAN if (bits & _MAGNITUDE) > _EXPONENT else rounded)


@njit
def _widen(target, source, length):
    """Convert `length` bfloat16 at an address to float32 at another address."""
    in_lanes = length // _LANES * _LANES
    for i in range(0, in_lanes, _LANES):
        _widen_16(target + 4 * i, source + 2 * i)
    floats, halves = _floats(target, length), _halves(source, length)
    for i in range(in_lanes, length):
        floats[i] = _of_bits(np.int32(halves[i]) << 16)


@njit
def _narrow(target, source):
    """Convert float32 to the bits of bfloat16, see `_rounded_to_bf16`."""
    for i in range(len(source)):
        target[i] = np.uint16(np.uint32(_bits(_rounded_to_bf16(source[i]))) >> np.uint32(16))


@njit
def _load(tile, w, top, column):
    """Load a tile of the source to an address as float32, row by row, with zeros outside of the
    matrix."""
    columns = w.tile_columns
    rows, width = min(w.tile_rows, w.source_rows - top), min(columns, w.source_columns - column)
    if rows < w.tile_rows or width < columns:
        _floats(tile, w.tile_rows * columns)[:] = _ZERO
    for r in range(rows):
        start = (top + r) * w.source_columns + column
        if w.source_bf16:
            _widen(tile + 4 * r * columns, w.source + 2 * start, width)
        else:
            _copy(_floats(tile + 4 * r * columns, width), _floats(w.source + 4 * start, width))


@njit
def _magnitude(word):
    """The bits of a float32's magnitude, which sort like magnitudes; 0 for NaN."""
    size = word & np.int32(_MAGNITUDE)
    return np.int32(0) if size > np.int32(_EXPONENT) else size


@njit
def _raise_to_row(column_amaxes, row):
    """Raise `column_amaxes`, as bits, to the magnitudes of a row."""
    words = row.view(np.int32)
    for c in range(len(words)):
        size = _magnitude(words[c])
        column_amaxes[c] = size if size > column_amaxes[c] else column_amaxes[c]


@njit
def _row_amax(values):
    """The bits of the amax of a long row; for blocks, `_block_amax` is faster."""
    words = values.view(np.int32)
    amax = np.int32(0)
    for i in range(len(words)):
        size = _magnitude(words[i])
        amax = size if size > amax else amax
    return amax


@njit
def _store(tile, w, result, top, column):
    """Store a tile, without its elements outside of the matrix."""
    columns = w.tile_columns
    length = min(columns, w.columns - column)
    for r in range(min(w.tile_rows, w.rows - top)):
        start = (top + r) * w.columns + column
        row = tile[r * columns : r * columns + length]
        if w.result_bf16:
            _narrow(_halves(result + 2 * start, length), row)
        else:
            _copy(_floats(result + 4 * start, length), row)


@njit
def _block_amax(address, length):
    """The bits of the amax of `length` float32 from an address on; NaN ignored."""
    amax = np.int32(0)
    if length % _LANES == 0:
        for i in range(0, length, _LANES):
            amax = max(amax, _amax_of_16(address + 4 * i))
        return amax
    words = _ints(address, length)
    for i in range(length):
        amax = max(amax, _magnitude(words[i]))
    return amax


@njit
def _fill(address, width, value):
    if width % _LANES == 0:
        for i in range(0, width, _LANES):
            _fill_16(address + 4 * i, value)
        return
    values = _floats(address, width)
    for i in range(width):
        values[i] = value


@njit
def _set_scales(address, length, amax_address, scales, inv_scales, width, w, into_e4m3):
    """Set the scales of blocks of `width` columns, from the values of a row or, if `address` is
    `amax_address`, from the amaxes of columns. `scales` and `inv_scales` are addresses too."""
    blocks = (length + width - 1) // width
    amaxes = _ints(amax_address, blocks)
    block_scales, block_inv_scales = _floats(scales, blocks), _floats(inv_scales, blocks)
    if width > 1 or address != amax_address:
        for i in range(blocks):
            amaxes[i] = _block_amax(address + 4 * i * width, min(width, length - i * width))
    _write_scales(amaxes, block_scales, block_inv_scales, w, into_e4m3)
    if width > 1:
        for i in range(blocks - 1, -1, -1):  # backward: scales are spread in place
            scale, inv_scale = block_scales[i], block_inv_scales[i]
            _fill(scales + 4 * i * width, width, scale)
            _fill(inv_scales + 4 * i * width, width, inv_scale)


@njit
def _find_column_amaxes(column_amaxes, address, stride, rows):
    """Find the column amaxes, as bits, of rows that are `stride` apart from `address` on."""
    column_amaxes[:] = 0
    for r in range(rows):
        _raise_to_row(column_amaxes, _floats(address + 4 * r * stride, len(column_amaxes)))


@njit
def _butterfly(values, unit, size):
    """Multiply by a Hadamard matrix of `size`, by sums and differences of elements `unit` apart."""
    stride = unit
    while stride < unit * size:
        for first in range(0, len(values), 2 * stride):
            second = first + stride
            upper, lower = values[first:second], values[second : second + stride]
            for i in range(stride):
                a, b = upper[i], lower[i]
                upper[i] = a + b
                lower[i] = a - b
        stride *= 2


@njit
def _transform(tile, w):
    """See `hadamard.hadamard`."""
    size, rows, columns, rowwise = w.hadamard, w.tile_rows, w.tile_columns, w.dim == 1
    factor = np.float32(size**-0.5)
    signs = np.empty(max(rows, columns), np.float32)
    for i in range(len(signs)):
        signs[i] = -_ONE if (w.minus_signs >> (i % size)) & 1 else _ONE
    for r in range(rows):
        row = tile[r * columns : (r + 1) * columns]
        for c in range(columns):
            row[c] = _rounded_to_bf16(row[c]) * (signs[c] if rowwise else signs[r])
    _butterfly(tile, 1 if rowwise else columns, size)
    for i in range(rows * columns):
        tile[i] = _rounded_to_bf16(tile[i] * factor)


@njit
def _raise_columns(column_amaxes, w, column):
    """Raise the amaxes of the matrix's columns, from `column` on, to `column_amaxes`."""
    for c in range(min(len(column_amaxes), w.columns - column)):
        _atomic_max(w.column_amaxes + 4 * (column + c), column_amaxes[c])


@njit
def _tiles(w):
    """The number of tiles in a row of tiles, and the number of all tiles."""
    tiles_per_row = (w.columns + w.tile_columns - 1) // w.tile_columns
    return tiles_per_row, tiles_per_row * ((w.rows + w.tile_rows - 1) // w.tile_rows)


@njit(error_model="numpy")
def _find_amaxes(w, start):
    """Transform a matrix, if the work at the address `start` has a Hadamard transform, and find its
    amax or the amaxes of its columns."""
    columns = w.tile_columns
    loads = w.hadamard or w.source_bf16
    memory = np.empty(columns * (1 + (w.tile_rows if loads else 0)), np.float32)
    # numba counts references to its arrays, but not to addresses: see the last use of `memory`.
    buffer = memory.ctypes.data
    column_amaxes, tile = _ints(buffer, columns), buffer + 4 * columns
    tiles_per_row, tiles = _tiles(w)
    column_amaxes[:] = 0
    while True:
        index = _atomic_add(start + _NEXT_TILE, 1)
        if index >= tiles:
            if w.column_amaxes and tiles_per_row == 1:
                _raise_columns(column_amaxes, w, 0)
            memory[0] = _ZERO  # keeps the memory until here
            return
        top, column = index // tiles_per_row * w.tile_rows, index % tiles_per_row * columns
        rows, length = min(w.tile_rows, w.rows - top), min(columns, w.columns - column)
        source, stride = w.source + 4 * (top * w.source_columns + column), w.source_columns
        if loads:
            _load(tile, w, top, column)
            source, stride = tile, columns
        if w.hadamard:
            values = _floats(tile, w.tile_rows * columns)
            _transform(values, w)
            _store(values, w, w.result, top, column)
        amax = np.int32(0)
        for r in range(rows):
            row = _floats(source + 4 * r * stride, length)
            if w.column_amaxes:
                _raise_to_row(column_amaxes, row)
            else:
                amax = max(amax, _row_amax(row))
        if not w.column_amaxes:
            _atomic_max(start + _AMAX, amax)
        elif tiles_per_row > 1:
            _raise_columns(column_amaxes, w, column)
            column_amaxes[:] = 0


# A thread's memory for rounding: lines of 4-byte words, and a tile after them.
_ROUNDED, _BITS, _AMAXES, _SCALE, _INV_SCALE, _OTHER_SCALE, _OTHER_INV_SCALE, _LINES = range(8)


@njit(error_model="numpy")
def _set_one_scale(lines, w, tensor_amax, into_e4m3):
    """Set the scales of a row to the scale of the matrix."""
    columns = w.tile_columns
    scales, inv_scales = _floats(lines[_SCALE], columns), _floats(lines[_INV_SCALE], columns)
    if w.scale_kind == _GIVEN:
        scales[0] = _floats(w.scale, 1)[0]
        inv_scales[0] = _ONE / scales[0]
    else:
        amaxes = _ints(lines[_AMAXES], 1)
        amaxes[0] = _bits(tensor_amax)
        _write_scales(amaxes, scales, inv_scales, w, into_e4m3)
    scales[:], inv_scales[:] = scales[0], inv_scales[0]


@njit
def _round_tile(lines, w, source, stride, top, column, is_other, sets_columns, into_e4m3):
    """Round a tile, whose rows are `stride` apart from the address `source` on, to one of the two
    results. `sets_columns`: the scales of its columns are not set yet."""
    result = w.other_result if is_other else w.result
    height = w.other_height if is_other else w.height
    width = w.other_width if is_other else w.width
    factor = w.other_factor if is_other else w.factor
    scales = lines[_OTHER_SCALE if is_other else _SCALE]
    inv_scales = lines[_OTHER_INV_SCALE if is_other else _INV_SCALE]
    rows, columns = min(w.tile_rows, w.rows - top), min(w.tile_columns, w.columns - column)
    has_one_scale, to_bf16 = w.height == 0 and w.width == 0, w.result_bf16 != 0
    step = 1  # rows at a time: several, if they are adjacent and consist of whole blocks
    has_whole_rows = w.tile_columns == w.columns
    if height == 1 and width and has_whole_rows and columns % width == 0 and not w.stochastic:
        step = max(1, _JOINED // columns)
    for r in range(0, rows, step):
        length = columns * min(step, rows - r)
        row, amaxes = source + 4 * r * stride, lines[_AMAXES]
        if height == 1:
            size = width if width else length
            _set_scales(row, length, amaxes, scales, inv_scales, size, w, into_e4m3)
        elif height and r % height == 0:
            _find_column_amaxes(_ints(amaxes, length), row, stride, min(height, rows - r))
            _set_scales(amaxes, length, amaxes, scales, inv_scales, width, w, into_e4m3)
        elif height == 0 and not has_one_scale and r == 0 and sets_columns:
            _ints(amaxes, length)[:] = _ints(w.column_amaxes + 4 * column, length)
            _set_scales(amaxes, length, amaxes, scales, inv_scales, 1, w, into_e4m3)
        if factor and not has_one_scale and not w.carries_scales:
            if height == 1:
                _floats(factor, w.rows)[top + r] = _floats(inv_scales, 1)[0]
            elif top == 0 and r == 0:
                _floats(factor + 4 * column, length)[:] = _floats(inv_scales, length)
        index = (top + r) * w.columns + column
        target = _floats(lines[_ROUNDED] if to_bf16 else result + 4 * index, length)
        values = _floats(row, length)
        scale_row, inv_scale_row = _floats(scales, length), _floats(inv_scales, length)
        if w.stochastic:
            bits = carray(_address(lines[_BITS]), length + 3, np.uint32)
            _draw(bits, column, length, top + r, w)
            _round_at_random(values, scale_row, inv_scale_row, bits, target, length, w)
        else:
            _round(values, scale_row, inv_scale_row, target, length, w)
        if to_bf16:
            _narrow(_halves(result + 2 * index, length), target)


@njit(error_model="numpy")
def _round_matrix(w, start):
    """Round a matrix, whose work is at the address `start`, to one or two results."""
    # A result that overwrites the source would keep loops from using vectors.
    loads = w.source_bf16 or w.source == w.result
    line_words = max(w.tile_columns, _JOINED) + 4
    tile_words = w.tile_rows * w.tile_columns if loads else 0
    memory = np.empty(_LINES * line_words + tile_words, np.float32)
    # numba counts references to its arrays, but not to addresses: see the last use of `memory`.
    lines = memory.ctypes.data + 4 * line_words * np.arange(_LINES + 1)
    tensor_amax, into_e4m3 = _ZERO, _ONE
    if not w.recorded:
        tensor_amax = _floats(start + _AMAX, 1)[0]
        into_e4m3 = _first_level(tensor_amax)
    has_one_scale = w.height == 0 and w.width == 0
    if has_one_scale:
        _set_one_scale(lines, w, tensor_amax, into_e4m3)
    if w.factor and (has_one_scale or w.scale_kind == _E4M3):  # also of a matrix without rows
        factor = tensor_amax * _OUT_OF_TWO_LEVELS
        if w.scale_kind != _E4M3:
            factor = _floats(lines[_INV_SCALE], 1)[0]
        _floats(w.factor, 1)[0] = factor
        if w.other_factor:
            _floats(w.other_factor, 1)[0] = factor
    tiles_per_row, tiles = _tiles(w)
    sets_columns = True
    while True:
        index = _atomic_add(start + _NEXT_TILE, 1)
        if index >= tiles:
            memory[0] = _ZERO  # keeps the memory until here
            return
        top, column = index // tiles_per_row * w.tile_rows, index % tiles_per_row * w.tile_columns
        source, stride = w.source + 4 * (top * w.columns + column), w.columns
        if loads:
            _load(lines[_LINES], w, top, column)
            source, stride = lines[_LINES], w.tile_columns
        if w.recorded:
            amax, length = np.int32(0), min(w.tile_columns, w.columns - column)
            for r in range(min(w.tile_rows, w.rows - top)):
                amax = max(amax, _row_amax(_floats(source + 4 * r * stride, length)))
            _atomic_max(start + _AMAX, amax)
        _round_tile(lines, w, source, stride, top, column, False, sets_columns, into_e4m3)
        if w.other_result:
            _round_tile(lines, w, source, stride, top, column, True, sets_columns, into_e4m3)
        sets_columns = tiles_per_row > 1  # else all tiles have the same columns
        if w.recorded and _atomic_add(start + _TILES_DONE, 1) == tiles - 1:
            recorded_amax = _floats(start + _AMAX, 1)[0]
            if w.is_recording and not carray(_address(w.is_recording), 1, np.uint8)[0]:
                recorded_amax = _ZERO
            recorded = _floats(w.recorded, 1)
            if not recorded[0] > recorded_amax:
                recorded[0] = recorded_amax


def _find_tiles(pointer):
    """Call `_find_amaxes` for each group."""
    for i in range(carray(pointer, 1)[0].groups):
        _find_amaxes(carray(pointer, i + 1)[i], _start(pointer) + i * _WORK_BYTES)


def _round_tiles(pointer):
    """Call `_round_matrix` for each group."""
    for i in range(carray(pointer, 1)[0].groups):
        _round_matrix(carray(pointer, i + 1)[i], _start(pointer) + i * _WORK_BYTES)


def _compiled(kernel: Callable[..., None]) -> Any:
    """The compiled C function, cached for other processes if numba has a folder for it."""
    options: dict[str, Any] = {"error_model": "numpy"}
    try:
        return cfunc(types.void(_WORK), cache=True, **options)(kernel)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return cfunc(types.void(_WORK), **options)(kernel)


find_tiles, round_tiles = _compiled(_find_tiles), _compiled(_round_tiles)
