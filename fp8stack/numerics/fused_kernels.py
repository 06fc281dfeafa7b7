"""The loops of `fused`, which numba compiles for this CPU: amax, scale and rounding, tile by tile.

The rules are those of `rounding` and `quantized`, operation for operation: numba neither contracts
a product and a sum nor reorders sums unless it is asked to. A kernel is a C function of a pointer
to `CastWork`, one for each group of rows. Several threads may run it on the same work: each takes
the next tile until none is left.

It knows addresses and numbers, no tensors and no quantizers.
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
    # Counters of tiles, and room for the amax of the matrix, as bits.
    *("next_tile", "tiles_done", "amax"),
    "groups",  # the number of works that lie one after the other, of which this is the first
    # Addresses, 0 for none: the matrix, the result, and the result for other blocks. The matrix is
    # float32 or, if `source_bf16`, bfloat16; the results likewise, if `result_bf16`.
    *("source", "result", "other_result"),
    "column_amaxes",  # the address of the amaxes of the columns, int32
    # Addresses of float32: a given scale; factors of the output, one for all, by row or by column;
    # the recorded amax, and a bool: whether to record.
    *("scale", "factor", "other_factor", "recorded", "is_recording"),
    # Sizes of the source, of the results (padded for a Hadamard transform), and of a tile.
    *("source_rows", "source_columns", "rows", "columns", "tile_rows", "tile_columns"),
    # The blocks of the two results: 0 is all rows, or all columns.
    *("height", "width", "other_height", "other_width"),
    *("seed", "stream", "counter", "first_row"),  # of the random bits
    *("hadamard", "minus_signs", "dim"),  # its size, signs, and the dimension that it mixes
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
_LANES = 16  # a row of a tile is a multiple of it, or of a block that is
_JOINED = 2048  # elements of short rows that are rounded as one row
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


def _emit_largest(builder: Any, address: Any) -> Any:
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
_add = _instruction(types.int64(types.int64, types.int64), _atomic("add", _INT64))
# Raise the int32 at an address to a value if that is larger, as one atomic step.
_raise = _instruction(types.int32(types.int64, types.int32), _atomic("max", _INT32))
# The bits of a float32, as int32; and the float32 of these bits.
_bits = _instruction(types.int32(types.float32), lambda builder, x: builder.bitcast(x, _INT32))
_of_bits = _instruction(
    types.float32(types.int32), lambda builder, x: builder.bitcast(x, ir.FloatType())
)
# The largest magnitude of the 16 float32 from an address on, as bits, NaN ignored; a loop in Python
# takes ten times as long.
_largest_of_16 = _instruction(types.int32(types.int64), _emit_largest)
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
def _nearest(value, magic, least):
    """See `cast.round_to_format`; `least` is the spacing of subnormals times `magic`."""
    spacing = _of_bits(_bits(value) & _POWER_OF_TWO) * magic
    spacing = least if spacing < least else spacing
    return (value + spacing) - spacing


# Scales, one at a time: into the format, and out of it.


@njit
def _quotient_scale(largest, limit, eps, overflow, power_of_two):
    """See `cast.tensor_scale`."""
    if largest < eps:
        largest = eps
    if not (largest > _ZERO and largest < _INF):
        return _ONE  # a power of two as it is
    scale = limit / largest
    if scale == _INF:
        scale = overflow
    if power_of_two:
        scale = max(_of_bits(_bits(scale) & _POWER_OF_TWO), _LEAST_POWER_OF_TWO)
    return scale


@njit
def _power_above(largest, format_max_inverse):
    """The E8M0 code, rounded up: see `scales.e8m0_code`."""
    bits = _bits(largest * format_max_inverse)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    carry = 1 if mantissa > (0x400000 if exponent == 0 else 0) else 0
    return min(exponent + carry, 254)


@njit
def _power_near(largest, half, largest_exponent):
    """The E8M0 code of a power of two: of that below, or of the nearest one."""
    return min(max((((_bits(largest) + half) >> 23) & 0xFF) - largest_exponent, 0), 254)


@njit
def _set_powers(code, into, out, i):
    into_bits = np.int32((254 - code) << 23) if code != 254 else np.int32(0x400000)
    out_bits = np.int32(code << 23) if code != 0 else np.int32(0x400000)
    into[i], out[i] = _of_bits(into_bits), _of_bits(out_bits)


@njit
def _e4m3_scales(largest, into_e4m3):
    """The scales of one block in NVFP4, see `scales.scales_of`."""
    exact = min(largest * (into_e4m3 * _SIXTH), np.float32(448))
    # E4M3: three bits of mantissa, from 2^-6 on.
    out = _nearest(exact, np.float32(1.5 * 2**20), np.float32(1.5 * 2**14))
    return min(_ONE / (out * (_ONE / into_e4m3)), _FLT_MAX), out


@njit
def _scales(largest, into, out, w, into_e4m3):
    """Write the scales of blocks, from the bits of their amaxes: into the format, and out of it."""
    # Outside of loops, since numba reads `w` again after each store.
    kind, limit, eps, overflow = w.scale_kind, w.limit, w.eps, w.overflow
    power_of_two, largest_exponent = w.power_of_two, w.largest_exponent
    # Rounded to even, half a step of the mantissa is added to an amax.
    half = np.int32(1 << (22 - w.mantissa_bits)) if kind == _EVEN else np.int32(0)
    if kind == _FLOAT32:
        for i in range(len(largest)):
            into[i] = _quotient_scale(_of_bits(largest[i]), limit, eps, overflow, power_of_two)
            out[i] = _ONE / into[i]
    elif kind == _E4M3:
        for i in range(len(largest)):
            into[i], out[i] = _e4m3_scales(_of_bits(largest[i]), into_e4m3)
    elif kind == _RCEIL:
        for i in range(len(largest)):
            _set_powers(_power_above(_of_bits(largest[i]), limit), into, out, i)
    else:
        for i in range(len(largest)):
            _set_powers(_power_near(_of_bits(largest[i]), half, largest_exponent), into, out, i)


@njit
def _first_level(tensor_amax):
    """See `scales.nvfp4_scale`."""
    scale = min(np.float32(2688) / tensor_amax, _FLT_MAX)
    if tensor_amax == _ZERO or scale == _ZERO:
        return _ONE
    return scale


# A row of a tile.


@njit
def _round(values, into, out, result, length, w):
    """`result = out * round(values * into)`, to the nearest."""
    magic = np.float32(12582912.0 / (1 << w.mantissa_bits))  # 1.5 * 2^(23 - mantissa_bits)
    least = w.min_normal * magic
    high, low, carries = w.max, -w.max, w.carries_scales != 0
    for i in range(length):
        scaled = values[i] * into[i]
        scaled = high if scaled > high else (low if scaled < low else scaled)
        rounded = _nearest(scaled, magic, least)
        result[i] = rounded * out[i] if carries else rounded


@njit
def _round_at_random(values, into, out, bits, result, length, w):
    """`result = out * round(values * into)`, at random."""
    per_power = np.float32(1.0 / (1 << w.mantissa_bits))
    least, high, low, carries = w.min_subnormal, w.max, -w.max, w.carries_scales != 0
    for i in range(length):
        scaled = values[i] * into[i]
        scaled = high if scaled > high else (low if scaled < low else scaled)
        step = _of_bits(_bits(scaled) & _POWER_OF_TWO) * per_power
        step = least if step < least else step
        steps = scaled * _of_bits(_TWICE_127 - _bits(step))
        below = np.trunc(steps)
        threshold = np.ceil(abs(steps - below) * np.float32(4294967296.0))
        away = _ONE if np.float64(bits[i]) < np.float64(threshold) else _ZERO
        rounded = (below + np.copysign(away, steps)) * step
        result[i] = rounded * out[i] if carries else rounded


@njit
def _draw(bits, first_column, length, row, w):
    """Philox4x32-10 of each place, see `random.RandomBits`; `length` is rounded up to fours."""
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
    """Write the float32 of `length` bfloat16 from an address on to another address."""
    in_lanes = length // _LANES * _LANES
    for i in range(0, in_lanes, _LANES):
        _widen_16(target + 4 * i, source + 2 * i)
    floats, halves = _floats(target, length), _halves(source, length)
    for i in range(in_lanes, length):
        floats[i] = _of_bits(np.int32(halves[i]) << 16)


@njit
def _narrow(target, source):
    """The bits of float32 values as bfloat16, see `_rounded_to_bf16`."""
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
def _raise_all(largest, row):
    """Raise `largest`, as bits, to the magnitudes of a row."""
    words = row.view(np.int32)
    for c in range(len(words)):
        size = _magnitude(words[c])
        largest[c] = size if size > largest[c] else largest[c]


@njit
def _amax(values):
    """The largest magnitude of a long row, as bits; of blocks, `_largest` takes less time."""
    words = values.view(np.int32)
    most = np.int32(0)
    for i in range(len(words)):
        size = _magnitude(words[i])
        most = size if size > most else most
    return most


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
def _largest(address, length):
    """The largest magnitude of `length` float32 from an address on, as bits; NaN ignored."""
    most = np.int32(0)
    if length % _LANES == 0:
        for i in range(0, length, _LANES):
            most = max(most, _largest_of_16(address + 4 * i))
        return most
    words = _ints(address, length)
    for i in range(length):
        most = max(most, _magnitude(words[i]))
    return most


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
def _set_scales(address, length, largest, into, out, width, w, into_e4m3):
    """Set the scales of blocks of `width` columns, from the values of a row or, if the address is
    `largest`, the amaxes of columns; `into` and `out` are addresses as well."""
    blocks = (length + width - 1) // width
    amaxes, first, last = _ints(largest, blocks), _floats(into, blocks), _floats(out, blocks)
    if width > 1 or address != largest:
        for i in range(blocks):
            amaxes[i] = _largest(address + 4 * i * width, min(width, length - i * width))
    _scales(amaxes, first, last, w, into_e4m3)
    if width > 1:
        for i in range(blocks - 1, -1, -1):  # those of later blocks lie behind
            into_scale, out_scale = first[i], last[i]
            _fill(into + 4 * i * width, width, into_scale)
            _fill(out + 4 * i * width, width, out_scale)


@njit
def _find_group(largest, address, stride, rows):
    """The amaxes of the columns of some rows, `stride` apart from an address on, as bits."""
    largest[:] = 0
    for r in range(rows):
        _raise_all(largest, _floats(address + 4 * r * stride, len(largest)))


@njit
def _mix(values, unit, size):
    """The sums and differences of a Hadamard matrix of `size`, of elements `unit` apart."""
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
    _mix(tile, 1 if rowwise else columns, size)
    for i in range(rows * columns):
        tile[i] = _rounded_to_bf16(tile[i] * factor)


@njit
def _raise_columns(largest, w, column):
    """Raise the amaxes of the matrix's columns from `column` on to `largest`."""
    for c in range(min(len(largest), w.columns - column)):
        _raise(w.column_amaxes + 4 * (column + c), largest[c])


@njit
def _tiles(w):
    """The number of tiles in a row of tiles, and the number of all tiles."""
    beside = (w.columns + w.tile_columns - 1) // w.tile_columns
    return beside, beside * ((w.rows + w.tile_rows - 1) // w.tile_rows)


@njit(error_model="numpy")
def _find(w, start):
    """Transform a matrix if the work, at the address `start`, has a Hadamard transform, and find
    its amax or the amaxes of its columns."""
    columns = w.tile_columns
    loads = w.hadamard or w.source_bf16
    memory = np.empty(columns * (1 + (w.tile_rows if loads else 0)), np.float32)
    # numba counts references to its arrays, but not to addresses: see the last use of `memory`.
    buffer = memory.ctypes.data
    largest, tile = _ints(buffer, columns), buffer + 4 * columns
    beside, tiles = _tiles(w)
    largest[:] = 0
    while True:
        index = _add(start + _NEXT_TILE, 1)
        if index >= tiles:
            if w.column_amaxes and beside == 1:
                _raise_columns(largest, w, 0)
            memory[0] = _ZERO  # keeps the memory until here
            return
        top, column = index // beside * w.tile_rows, index % beside * columns
        rows, length = min(w.tile_rows, w.rows - top), min(columns, w.columns - column)
        source, stride = w.source + 4 * (top * w.source_columns + column), w.source_columns
        if loads:
            _load(tile, w, top, column)
            source, stride = tile, columns
        if w.hadamard:
            values = _floats(tile, w.tile_rows * columns)
            _transform(values, w)
            _store(values, w, w.result, top, column)
        most = np.int32(0)
        for r in range(rows):
            row = _floats(source + 4 * r * stride, length)
            if w.column_amaxes:
                _raise_all(largest, row)
            else:
                most = max(most, _amax(row))
        if not w.column_amaxes:
            _raise(start + _AMAX, most)
        elif beside > 1:
            _raise_columns(largest, w, column)
            largest[:] = 0


# A thread's memory for rounding: lines of 4-byte words, and behind them a tile.
_ROUNDED, _BITS, _AMAXES, _INTO, _OUT, _OTHER_INTO, _OTHER_OUT, _LINES = range(8)


@njit(error_model="numpy")
def _set_one_scale(lines, w, tensor_amax, into_e4m3):
    """Set the scales of a row to the scale of the matrix."""
    columns = w.tile_columns
    into, out = _floats(lines[_INTO], columns), _floats(lines[_OUT], columns)
    if w.scale_kind == _GIVEN:
        into[0] = _floats(w.scale, 1)[0]
        out[0] = _ONE / into[0]
    else:
        amaxes = _ints(lines[_AMAXES], 1)
        amaxes[0] = _bits(tensor_amax)
        _scales(amaxes, into, out, w, into_e4m3)
    into[:], out[:] = into[0], out[0]


@njit
def _round_tile(lines, w, source, stride, top, column, is_other, sets_columns, into_e4m3):
    """Round a tile of the matrix, whose rows are `stride` apart from the address `source` on, to
    one of the two results. `sets_columns`: the scales of its columns are not set yet."""
    result = w.other_result if is_other else w.result
    height = w.other_height if is_other else w.height
    width = w.other_width if is_other else w.width
    factor = w.other_factor if is_other else w.factor
    into, out = lines[_OTHER_INTO if is_other else _INTO], lines[_OTHER_OUT if is_other else _OUT]
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
            _set_scales(row, length, amaxes, into, out, size, w, into_e4m3)
        elif height and r % height == 0:
            _find_group(_ints(amaxes, length), row, stride, min(height, rows - r))
            _set_scales(amaxes, length, amaxes, into, out, width, w, into_e4m3)
        elif height == 0 and not has_one_scale and r == 0 and sets_columns:
            _ints(amaxes, length)[:] = _ints(w.column_amaxes + 4 * column, length)
            _set_scales(amaxes, length, amaxes, into, out, 1, w, into_e4m3)
        if factor and not has_one_scale and not w.carries_scales:
            if height == 1:
                _floats(factor, w.rows)[top + r] = _floats(out, 1)[0]
            elif top == 0 and r == 0:
                _floats(factor + 4 * column, length)[:] = _floats(out, length)
        index = (top + r) * w.columns + column
        target = _floats(lines[_ROUNDED] if to_bf16 else result + 4 * index, length)
        values = _floats(row, length)
        into_scales, out_scales = _floats(into, length), _floats(out, length)
        if w.stochastic:
            bits = carray(_address(lines[_BITS]), length + 3, np.uint32)
            _draw(bits, column, length, top + r, w)
            _round_at_random(values, into_scales, out_scales, bits, target, length, w)
        else:
            _round(values, into_scales, out_scales, target, length, w)
        if to_bf16:
            _narrow(_halves(result + 2 * index, length), target)


@njit(error_model="numpy")
def _round_matrix(w, start):
    """Round a matrix, whose work is at the address `start`, to one or two results, row by row."""
    # A result that overwrites the source would keep loops from using vectors.
    loads = w.source_bf16 or w.source == w.result
    room = max(w.tile_columns, _JOINED) + 4
    in_tile = w.tile_rows * w.tile_columns if loads else 0
    memory = np.empty(_LINES * room + in_tile, np.float32)
    # numba counts references to its arrays, but not to addresses: see the last use of `memory`.
    lines = memory.ctypes.data + 4 * room * np.arange(_LINES + 1)
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
            factor = _floats(lines[_OUT], 1)[0]
        _floats(w.factor, 1)[0] = factor
        if w.other_factor:
            _floats(w.other_factor, 1)[0] = factor
    beside, tiles = _tiles(w)
    sets_columns = True
    while True:
        index = _add(start + _NEXT_TILE, 1)
        if index >= tiles:
            memory[0] = _ZERO  # keeps the memory until here
            return
        top, column = index // beside * w.tile_rows, index % beside * w.tile_columns
        source, stride = w.source + 4 * (top * w.columns + column), w.columns
        if loads:
            _load(lines[_LINES], w, top, column)
            source, stride = lines[_LINES], w.tile_columns
        if w.recorded:
            most, length = np.int32(0), min(w.tile_columns, w.columns - column)
            for r in range(min(w.tile_rows, w.rows - top)):
                most = max(most, _amax(_floats(source + 4 * r * stride, length)))
            _raise(start + _AMAX, most)
        _round_tile(lines, w, source, stride, top, column, False, sets_columns, into_e4m3)
        if w.other_result:
            _round_tile(lines, w, source, stride, top, column, True, sets_columns, into_e4m3)
        sets_columns = beside > 1  # else all tiles have the same columns
        if w.recorded and _add(start + _TILES_DONE, 1) == tiles - 1:
            largest_seen = _floats(start + _AMAX, 1)[0]
            if w.is_recording and not carray(_address(w.is_recording), 1, np.uint8)[0]:
                largest_seen = _ZERO
            recorded = _floats(w.recorded, 1)
            if not recorded[0] > largest_seen:
                recorded[0] = largest_seen


def _find_tiles(pointer):
    """`_find` of each group."""
    for i in range(carray(pointer, 1)[0].groups):
        _find(carray(pointer, i + 1)[i], _start(pointer) + i * _WORK_BYTES)


def _round_tiles(pointer):
    """`_round_matrix` of each group."""
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
