"""The Triton kernels: products cast as they are computed, many weights cast at once, and bytes
transposed.

Imported to launch one alone: torch's builds for CUDA bring Triton. What a kernel is compiled for is
a `variants.KernelVariant`, `HOW`; a matrix is treated in tiles of `HOW.rows` x `HOW.columns`.
"""

from __future__ import annotations

import triton
import triton.language as tl

MX_BLOCK = tl.constexpr(32)  # elements that share an E8M0 scale
_PTX = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
_TO_E4M3, _TO_E5M2 = tl.constexpr(_PTX.format("e4m3")), tl.constexpr(_PTX.format("e5m2"))


@triton.jit
def transpose_bytes(
    data, transposed, rows, columns, row_stride, column_stride, SIZE: tl.constexpr,
    IN_GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix of bytes. `IN_GROUP` rows, 4 or 1, are packed into an integer, as in
    `_cast_half`; 4 if the rows are a multiple of 16."""
    tile, wide = tl.program_id(0), tl.cdiv(columns, SIZE)
    groups: tl.constexpr = SIZE // IN_GROUP
    word: tl.constexpr = tl.uint32 if IN_GROUP == 4 else tl.uint8
    group = (tile // wide) * groups + tl.arange(0, groups)[:, None]
    column = (tile % wide) * SIZE + tl.arange(0, SIZE)[None, :]
    stride = tl.multiple_of(rows // IN_GROUP, 16 // IN_GROUP) if IN_GROUP == 4 else rows
    inside = (group < stride) & (column < columns)
    packed = tl.zeros([groups, SIZE], word)
    for row_index in tl.range(IN_GROUP):
        row = IN_GROUP * group + row_index
        place = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
        codes = tl.load(data + place, mask=inside, other=0)
        packed = _pushed(packed, codes) if IN_GROUP == 4 else codes
    line = transposed.to(tl.pointer_type(word)) + column.to(tl.int64) * stride
    tl.store(line + group, packed, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def cast_product(
    x, dy, scale, data, transposed, inverse, columnwise_inverse, amaxes, sums, rows, width,
    HOW: tl.constexpr,
):  # fmt: skip
    """Cast a tile of a `fused_casts.FusedInput` of `width` columns; the gradient of SwiGLU's input
    has two halves of `width` columns each, which read the same values."""
    tile = tl.program_id(0)
    halves: tl.constexpr = 2 if HOW.name == "swiglu" and HOW.backward else 1
    half, position = tile % halves, tile // halves
    wide = tl.cdiv(width, HOW.columns)
    down, block = position // wide, position % wide
    times = 1.0
    if HOW.scales == "given":
        times = tl.load(scale)
    if half == 0:
        largest = _cast_half(x, dy, times, data, transposed, inverse, columnwise_inverse, sums,
                             down, block, rows, width, halves * width, 0, HOW)  # fmt: skip
    else:
        largest = _cast_half(x, dy, times, data, transposed, inverse, columnwise_inverse, sums,
                             down, block, rows, width, halves * width, 1, HOW)  # fmt: skip
    if HOW.record:
        tl.store(amaxes + tile, tl.max(largest))


@triton.jit
def cast_weights(
    table, owners, scales, amaxes, HOW: tl.constexpr, ALIGNED: tl.constexpr, SPACING: tl.constexpr
):
    """Cast a tile of one of many matrices. `table` has a row of nine fields for every matrix, and
    `owners` has the row of every tile."""
    tile = tl.program_id(0)
    entry = table + tl.load(owners + tile).to(tl.int64) * 9
    x = tl.load(entry).to(tl.pointer_type(HOW.dtype))
    data = tl.load(entry + 1).to(tl.pointer_type(tl.uint8))
    transposed = tl.load(entry + 2).to(tl.pointer_type(tl.uint8))
    scale_type: tl.constexpr = tl.uint8 if HOW.scales == "mx" else tl.float32
    inverse = tl.load(entry + 3).to(tl.pointer_type(scale_type))
    columnwise_inverse = tl.load(entry + 4).to(tl.pointer_type(scale_type))
    rows = tl.load(entry + 5).to(tl.int32)
    columns = tl.load(entry + 6).to(tl.int32)
    tile -= tl.load(entry + 7).to(tl.int32)
    place = tl.load(entry + 8)
    if ALIGNED:  # loaded pointers and sizes have no alignment for Triton
        x, data = tl.multiple_of(x, 16), tl.multiple_of(data, 16)
        transposed = tl.multiple_of(transposed, 16)
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    wide = tl.cdiv(columns, HOW.columns)
    down, block = tile // wide, tile % wide
    times = 1.0
    if HOW.scales == "given":
        times = tl.load(scales + place)
    if HOW.scales == "current":
        times = _scale_of(tl.load(amaxes + place * SPACING), HOW)
    largest = _cast_half(x, x, times, data, transposed, inverse, columnwise_inverse, x, down, block,
                         rows, columns, columns, 0, HOW)  # fmt: skip
    if HOW.scales == "given" or HOW.scales == "current":
        tl.store(inverse, inverse_of(times), mask=tile == 0)
    if HOW.record:  # as integers, which are in the order of the numbers: none is negative
        cell = (amaxes + place * SPACING).to(tl.pointer_type(tl.int32))
        tl.atomic_max(cell, tl.max(largest).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _cast_half(
    x, dy, times, data, transposed, inverse, columnwise_inverse, sums, down, block, rows, width,
    columns, HALF: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Write the requested results of a tile; `times` is the tensor's scale, if it has one. Returns
    the largest magnitude of each column of a group of rows.

    The tile is computed in four parts: the first rows of all groups of four, the second ones, and
    so on; with float32 scales of rows, whose tiles are large, in eight. So a thread holds one of
    these parts of its elements at a time, and packs the codes of a group of rows into an integer,
    whose transpose costs less than that of bytes. Scales of columns and of squares need all rows:
    then the values are computed again, from a cache.
    """
    size: tl.constexpr = 8 if HOW.scales == "rows" else 4
    word: tl.constexpr = tl.uint64 if HOW.scales == "rows" else tl.uint32
    groups: tl.constexpr = HOW.rows // size
    tile_columns: tl.constexpr = HOW.columns  # Triton 3.6 takes no fields in a shape
    per_tensor: tl.constexpr = HOW.scales == "given" or HOW.scales == "current"
    needs_all_rows: tl.constexpr = HOW.scales == "squares" or (
        HOW.columnwise and (HOW.scales == "rows" or HOW.scales == "mx")
    )
    group = down * groups + tl.arange(0, groups)[:, None]
    column = block * HOW.columns + tl.arange(0, HOW.columns)[None, :]
    in_width, out_column = column < width, column + HALF * width
    largest = tl.zeros([groups, tile_columns], tl.float32)
    total = tl.zeros([groups, tile_columns], tl.float32)
    packed = tl.zeros([groups, tile_columns], word)
    for row_index in tl.range(size):
        row = size * group + row_index
        inside = (row < rows) & in_width
        values = _values(x, dy, row, column, width, inside, HALF, HOW)
        place = data + row.to(tl.int64) * columns + out_column
        if HOW.sums:
            total += values
        if per_tensor:
            codes = _codes(values * times, HOW)
            tl.store(place, codes, mask=inside)
            packed = _with_row(packed, codes, transposed, row, out_column, rows, inside, HOW)
        if HOW.scales == "rows":
            scales = _scale_of(tl.max(sizes_of(values), axis=1)[:, None], HOW)
            tl.store(place, _codes(values * scales, HOW), mask=inside)
            out_block = block + HALF * (width // HOW.columns)
            tl.store(inverse + out_block * rows + row, inverse_of(scales), mask=row < rows)
        if HOW.record or not per_tensor:
            largest = tl.maximum(largest, sizes_of(values))
        if HOW.scales == "mx":
            _put_mx_rows(values, row, out_column, inside, columns, place, inverse, HOW)
    if HOW.sums:
        line = sums + down.to(tl.int64) * columns + out_column
        tl.store(line, tl.sum(total, axis=0)[None, :], mask=in_width)
    if needs_all_rows:
        if HOW.scales == "squares":
            multiplier = _scale_of(tl.max(largest), HOW)
            _put_square_scale(inverse_of(multiplier), inverse, columnwise_inverse, down, block,
                              rows, columns, HOW)  # fmt: skip
        elif HOW.scales == "rows":
            multiplier = _scale_of(tl.max(largest, axis=0)[None, :], HOW)
            line = columnwise_inverse + down * columns + out_column
            tl.store(line, inverse_of(multiplier), mask=in_width)
        else:
            multiplier = _put_mx_columns(largest, group, out_column, in_width, rows,
                                         columnwise_inverse, HOW)  # fmt: skip
        for row_index in tl.range(size):
            row = size * group + row_index
            inside = (row < rows) & in_width
            values = _values(x, dy, row, column, width, inside, HALF, HOW)
            codes = _codes(values * multiplier, HOW)
            if HOW.scales == "squares":
                place = data + row.to(tl.int64) * columns + out_column
                tl.store(place, codes, mask=inside)
            packed = _with_row(packed, codes, transposed, row, out_column, rows, inside, HOW)
    if HOW.columnwise and HOW.packs_rows and HOW.scales != "none":
        stride = tl.multiple_of(rows // size, 16 // size)  # of a column of 16, 32, ... bytes
        line = transposed.to(tl.pointer_type(word)) + out_column.to(tl.int64) * stride
        tl.store(line + group, packed, mask=(group < stride) & in_width)
    return largest


@triton.jit
def _with_row(packed, codes, transposed, row, column, rows, inside, HOW: tl.constexpr):
    """Add the codes of the next row to the integers that hold those of a group; if the columns of
    the transpose are not aligned, write them instead."""
    if HOW.columnwise and HOW.packs_rows:
        packed = _pushed(packed, codes)
    elif HOW.columnwise:
        tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)
    return packed


@triton.jit
def _pushed(packed, code):
    """Integers with `code` as their last byte, and their other bytes moved down by one."""
    return (packed >> 8) | (code.to(packed.dtype) << (packed.dtype.primitive_bitwidth - 8))


@triton.jit
def _values(x, dy, row, column, width, inside, HALF: tl.constexpr, HOW: tl.constexpr):
    """Elements of a `fused_casts.FusedInput`, in a half of the gradient of SwiGLU's input: float32,
    0 outside of the matrix."""
    if HOW.name == "swiglu":
        gate = _load(x, row, column, 2 * width, inside)
        if HOW.backward:
            gradient = _load(dy, row, column, width, inside)
            if HALF == 0:
                value = _load(x + width, row, column, 2 * width, inside)
                values = _of_gate(gate, value, gradient, HOW)
            else:
                values = _of_value(gate, gradient, HOW)
        else:
            value = _load(x + width, row, column, 2 * width, inside)
            activated = _rounded(gate / (1.0 + tl.exp(-gate)), HOW)
            values = _rounded(activated * value, HOW)
    else:
        values = _load(x, row, column, width, inside)
        if HOW.backward:
            values = _of_x(values, _load(dy, row, column, width, inside), HOW)
        elif HOW.name != "cast":
            values = _forward(values, HOW)
    return values


# Elements of a product


@triton.jit
def _load(x, row, column, stride, inside):
    values = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _rounded(values, HOW: tl.constexpr):
    """float32 values, rounded to what the tensors' dtype has."""
    if tl.bfloat16 == HOW.dtype:
        return to_bf16(values, HOW)
    return values.to(HOW.dtype).to(tl.float32)


@triton.jit
def to_bf16(values, HOW: tl.constexpr):
    """float32 values rounded to bfloat16, in float32."""
    if HOW.exact:
        return values.to(tl.bfloat16).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)  # the interpreter does not round to even
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def to_nearest(values, mantissa_bits: tl.constexpr, min_normal: tl.constexpr):
    """float32 values rounded to a format, see `numerics.cast.round_to_format`."""
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic: tl.constexpr = 1.5 * 2.0 ** (23 - mantissa_bits)
    spacing = tl.maximum(power * magic, min_normal * magic)
    return (values + spacing) - spacing


@triton.jit
def _forward(x, HOW: tl.constexpr):
    """`activations.ACTIVATIONS`, but for SwiGLU."""
    if HOW.name == "relu2":
        held = tl.where(x <= 0.0, 0.0, x)  # keeps NaN
        y = held * held
    elif HOW.name == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(HOW.name == "gelu_tanh", "no branch for this activation")
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, and loses nothing where tanh is near -1.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return _rounded(y, HOW)


@triton.jit
def _of_x(x, dy, HOW: tl.constexpr):
    """`activations.GRADIENTS`, but for SwiGLU."""
    if HOW.name == "relu2":
        slope = _rounded(2.0 * tl.where(x <= 0.0, 0.0, x), HOW)
    elif HOW.name == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = below + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)
    else:
        tl.static_assert(HOW.name == "gelu_tanh", "no branch for this activation")
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        share, complement = 1.0 / (1.0 + tl.exp(-twice)), 1.0 / (1.0 + tl.exp(twice))
        slope = share + x * share * complement * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    gradient = _rounded(dy * slope, HOW)
    return tl.where(x <= 0.0, 0.0, gradient) if HOW.name == "relu2" else gradient


@triton.jit
def _of_gate(gate, value, dy, HOW: tl.constexpr):
    """The gradient of SwiGLU's gate."""
    share = 1.0 / (1.0 + tl.exp(-gate))
    slope = share * (1.0 + gate * (1.0 - share))
    return _rounded(_rounded(dy * value, HOW) * slope, HOW)


@triton.jit
def _of_value(gate, dy, HOW: tl.constexpr):
    """The gradient of SwiGLU's value."""
    activated = _rounded(gate / (1.0 + tl.exp(-gate)), HOW)
    return _rounded(dy * activated, HOW)


# Scales of blocks; values are float32, and 0 outside of the matrix


@triton.jit
def _put_square_scale(
    inverse_scale, inverse, columnwise_inverse, down, block, rows, columns, HOW: tl.constexpr
):  # fmt: skip
    """Write the inverse scale of a square, as `scaled_gemm.pack_scales` has them."""
    high, wide = tl.cdiv(rows, HOW.rows), tl.cdiv(columns, HOW.columns)
    tl.store(inverse + down * tl.cdiv(wide, 4) * 4 + block, inverse_scale)
    tl.store(columnwise_inverse + block * tl.cdiv(high, 4) * 4 + down, inverse_scale)


@triton.jit
def _put_mx_rows(values, row, column, inside, columns, place, inverse, HOW: tl.constexpr):
    """Cast rows in blocks of 32 columns, with E8M0 scales."""
    lines: tl.constexpr = values.shape[0]
    shape: tl.constexpr = (lines, HOW.columns // MX_BLOCK, MX_BLOCK)
    scales = _e8m0_code(tl.max(tl.reshape(sizes_of(values), shape), axis=2), HOW)
    scaled = tl.reshape(values, shape) * _times(scales)[:, :, None]
    tl.store(place, _codes(tl.reshape(scaled, [lines, HOW.columns]), HOW), mask=inside)
    first = tl.min(tl.reshape(column, [HOW.columns // MX_BLOCK, MX_BLOCK]), axis=1)[None, :]
    has_elements = tl.max(tl.reshape(inside.to(tl.int32), shape), axis=2) > 0
    packed_place = packed_at(row, first // MX_BLOCK, tl.cdiv(columns, MX_BLOCK))
    tl.store(inverse + packed_place, scales.to(tl.uint8), mask=has_elements)


@triton.jit
def _put_mx_columns(sizes, group, column, in_width, rows, inverse, HOW: tl.constexpr):
    """Write the E8M0 scales of blocks of 32 rows, which are 8 groups of four with these largest
    magnitudes. Returns the multipliers of all groups."""
    shape: tl.constexpr = (HOW.rows // MX_BLOCK, MX_BLOCK // 4, HOW.columns)
    scales = _e8m0_code(tl.max(tl.reshape(sizes, shape), axis=1), HOW)
    first = tl.min(tl.reshape(4 * group, [HOW.rows // MX_BLOCK, MX_BLOCK // 4]), axis=1)[:, None]
    place = packed_at(column, first // MX_BLOCK, tl.cdiv(rows, MX_BLOCK))
    tl.store(inverse + place, scales.to(tl.uint8), mask=(first < rows) & in_width)
    times = tl.broadcast_to(_times(scales)[:, None, :], shape)
    return tl.reshape(times, [HOW.rows // 4, HOW.columns])


@triton.jit
def sizes_of(values):
    """Magnitudes, 0 for NaN."""
    return tl.where(values == values, tl.abs(values), 0.0)


@triton.jit
def amax_of(values):
    """See `numerics.amax`."""
    return tl.max(sizes_of(values))


@triton.jit
def inverse_of(scale):
    """`numerics.cast.inverse`."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _scale_of(amax, HOW: tl.constexpr):
    """See `numerics.tensor_scale`; an amax is never NaN here."""
    amax = tl.where(amax < HOW.quantizer.eps, HOW.quantizer.eps, amax)
    scale = tl.div_rn(tl.zeros_like(amax) + HOW.target.max, amax)
    scale = tl.where(scale == float("inf"), HOW.overflow, scale)
    scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if HOW.quantizer.scale == "power_of_two":
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _codes(scaled, HOW: tl.constexpr):
    """The bytes of float32 values that were multiplied by their scale: `numerics.cast_to_fp8`."""
    held = tl.clamp(scaled, -HOW.target.max, HOW.target.max, propagate_nan=tl.PropagateNan.ALL)
    if not HOW.exact:
        # A value of the format converts exactly on any device; -0 keeps its sign.
        sign = held.to(tl.int32, bitcast=True) & -0x80000000
        rounded = to_nearest(held, HOW.target.mantissa_bits, HOW.target.min_normal)
        held = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if HOW.assembly:
        codes = _converted_by_ptx(held, HOW)
    else:
        codes = held.to(HOW.float8).to(tl.uint8, bitcast=True)
    if not HOW.exact:
        codes = tl.where(scaled == scaled, codes, 0x7F)
    return codes


@triton.jit
def _converted_by_ptx(values, HOW: tl.constexpr):
    """The bytes of float32 values of the format, four to a register: see
    `variants.KernelVariant.assembly`."""
    tl.static_assert(HOW.quantizer.format == "e4m3" or HOW.quantizer.format == "e5m2")
    ptx: tl.constexpr = _TO_E4M3 if HOW.quantizer.format == "e4m3" else _TO_E5M2
    return tl.inline_asm_elementwise(
        ptx, "=r,f,f,f,f", [values], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def _e8m0_code(amax, HOW: tl.constexpr):
    """See `numerics.scales.e8m0_code`; an amax is never NaN here."""
    rounding: tl.constexpr = HOW.quantizer.scale_rounding
    if rounding == "rceil":
        bits = (amax * (1.0 / HOW.target.max)).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        least = tl.where(exponent == 0, 0x400000, 0)
        code = exponent + ((bits & 0x7FFFFF) > least).to(tl.int32)
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if rounding == "even":
            bits += 1 << (22 - HOW.target.mantissa_bits)
        largest: tl.constexpr = (HOW.target.max_code >> HOW.target.mantissa_bits) - HOW.target.bias
        code = tl.maximum(((bits >> 23) & 0xFF) - largest, 0)
    return tl.minimum(code, 254)


@triton.jit
def _times(code):
    """See `numerics.scales.e8m0_multiplier`."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def packed_at(line, block, blocks):
    """The place of the byte-sized scale of a line's block, as `scaled_gemm.pack_scales` lays scales
    out."""
    tile = (line // 128).to(tl.int64) * tl.cdiv(blocks, 4) + block // 4
    return tile * 512 + line % 32 * 16 + line // 32 % 4 * 4 + block % 4
