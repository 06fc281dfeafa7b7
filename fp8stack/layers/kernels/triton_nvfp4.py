"""The Triton kernels of NVFP4, see `nvfp4`: the amaxes of a matrix, and both its copies.

Imported to launch one alone, as `triton_kernels`. What a kernel is compiled for is an
`nvfp4.Nvfp4Variant`, `HOW`; a matrix is treated in squares of `HOW.tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8stack.layers.kernels.triton_kernels import (
    amax_of,
    inverse_of,
    packed_at,
    sizes_of,
    to_bf16,
    to_nearest,
)

BLOCK = tl.constexpr(16)  # elements that share an E4M3 scale, and that a Hadamard transform mixes
FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def find_amaxes(x, figures, rows, columns, HOW: tl.constexpr):
    """Store the four numbers of the operator `nvfp4_amaxes` for one tile."""
    tile = tl.program_id(0)
    values, _, _ = _load(x, tile, rows, columns, HOW)
    amax, has_nan = amax_of(values), tl.max((values != values).to(tl.float32))
    tl.store(figures + tile * 4, amax)
    tl.store(figures + tile * 4 + 1, has_nan)
    if HOW.hadamard:
        turned = _transformed(tl.trans(values), HOW)
        amax, has_nan = amax_of(turned), tl.max((turned != turned).to(tl.float32))
    tl.store(figures + tile * 4 + 2, amax)
    tl.store(figures + tile * 4 + 3, has_nan)


@triton.jit(do_not_specialize=["seed", "first_row"])  # a 1 would not be a tensor
def cast(
    x, amaxes, data, scales, transposed, columnwise_scales, counter, streams, seed, first_row, rows,
    columns, half_rows, half_columns, HOW: tl.constexpr,
):  # fmt: skip
    """Cast one tile to both copies, whose lines have half as many bytes as elements."""
    values, row, column = _load(x, tl.program_id(0), rows, columns, HOW)
    bits = values  # not used
    if HOW.stochastic:
        bits = _bits(counter, streams, seed, first_row, row, column, HOW)
    tensor_amax = tl.load(amaxes)
    _put(values, bits, row, column, tensor_amax, rows, half_columns, data, scales, HOW)
    if HOW.columnwise:
        values = tl.trans(values)
        if HOW.hadamard:
            values = _transformed(values, HOW)
        if HOW.stochastic:
            bits = _bits(counter, streams + 1, seed, first_row, row, column, HOW)
            bits = tl.trans(bits)
        tensor_amax = tl.load(amaxes + 2)
        _put(values, bits, column, row, tensor_amax, columns, half_rows, transposed,
             columnwise_scales, HOW)  # fmt: skip


@triton.jit
def _load(x, tile, rows, columns, HOW: tl.constexpr):
    """A tile's values in float32, 0 outside, and its first row and column."""
    wide = tl.cdiv(columns, HOW.tile)
    first_row, first_column = tile // wide * HOW.tile, tile % wide * HOW.tile
    row = (first_row + tl.arange(0, HOW.tile))[:, None]
    column = (first_column + tl.arange(0, HOW.tile))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    return values.to(tl.float32), first_row, first_column


@triton.jit
def _transformed(values, HOW: tl.constexpr):
    """`numerics.hadamard` of a tile's lines, by 16."""
    if not HOW.bf16:
        values = to_bf16(values, HOW)
    sign = (HOW.minus >> (tl.arange(0, HOW.tile) % BLOCK)) & 1
    values = tl.where((sign != 0)[None, :], -values, values)
    values = tl.reshape(values, [HOW.tile * HOW.tile // BLOCK, 2, 2, 2, 2])
    for _ in tl.static_range(4):  # the last bit of a place comes first: strides 1, 2, 4, 8
        even, odd = tl.split(values)
        values = tl.permute(tl.join(even + odd, even - odd), [0, 4, 1, 2, 3])
    return to_bf16(tl.reshape(values, [HOW.tile, HOW.tile]) * 0.25, HOW)


@triton.jit
def _bits(counter, stream, seed, first_row, row, column, HOW: tl.constexpr):
    """`RandomBits.bits` of the tile that begins at `row` and `column`: uint32."""
    count = tl.load(counter)
    key = (tl.load(stream) << 32) | seed.to(tl.int64)
    size: tl.constexpr = HOW.tile
    zero = tl.zeros([size, size // 4], dtype=tl.uint32)
    lane = zero + (column // 4 + tl.arange(0, size // 4)).to(tl.uint32)[None, :]
    line = zero + (first_row.to(tl.int64) + row + tl.arange(0, size)).to(tl.uint32)[:, None]
    low, high = zero + count.to(tl.uint32), zero + (count >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, lane, line, low, high)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [size, size])


@triton.jit
def _put(values, bits, line, place, tensor_amax, lines, half, data, scales, HOW: tl.constexpr):
    """Write one copy of the tile that begins at `line` and `place`, and its scales: `lines` of
    `half` as many bytes as elements. `tensor_amax` is the amax of the matrix. See
    `numerics.scales` for the scales."""
    blocks: tl.constexpr = HOW.tile // BLOCK
    largest = tl.max(tl.reshape(sizes_of(values), [HOW.tile, blocks, BLOCK]), axis=2)
    if HOW.height > 1:
        square = tl.max(tl.reshape(largest, [HOW.tile // HOW.height, HOW.height, blocks]), axis=1)
        shape: tl.constexpr = (HOW.tile // HOW.height, HOW.height, blocks)
        largest = tl.reshape(tl.broadcast_to(square[:, None, :], shape), [HOW.tile, blocks])
    into_e4m3 = tl.minimum(tl.div_rn(tl.zeros_like(tensor_amax) + 2688.0, tensor_amax), FLT_MAX)
    into_e4m3 = tl.where((tensor_amax == 0.0) | (into_e4m3 == 0.0), 1.0, into_e4m3)
    stored = to_nearest(tl.minimum(largest * (into_e4m3 * (1.0 / 6.0)), 448.0), 3, 2.0**-6)
    into = tl.minimum(inverse_of(stored * inverse_of(into_e4m3)), FLT_MAX)
    scaled = tl.reshape(values, [HOW.tile, blocks, BLOCK]) * into[:, :, None]
    codes = _e2m1(tl.reshape(scaled, [HOW.tile, HOW.tile]), bits, HOW)
    even, odd = tl.split(tl.reshape(codes, [HOW.tile, HOW.tile // 2, 2]))
    lines_of_tile = (line + tl.arange(0, HOW.tile))[:, None]
    byte = (place // 2 + tl.arange(0, HOW.tile // 2))[None, :]
    is_inside = (lines_of_tile < lines) & (byte < half)
    codes = (even | (odd << 4)).to(tl.uint8)
    tl.store(data + lines_of_tile.to(tl.int64) * half + byte, codes, mask=is_inside)
    block = (place // BLOCK + tl.arange(0, blocks))[None, :]
    is_inside = (lines_of_tile < lines) & (block < half * 2 // BLOCK)
    at = packed_at(lines_of_tile, block, half * 2 // BLOCK)
    tl.store(scales + at, stored.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=is_inside)


@triton.jit
def _e2m1(scaled, bits, HOW: tl.constexpr):
    """See `numerics.cast.encode`: int32."""
    size = tl.minimum(tl.abs(scaled), 6.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 126, 1)
    steps = size * ((129 - exponent) << 23).to(tl.float32, bitcast=True)
    if HOW.stochastic:
        below = tl.floor(steps)
        above = tl.ceil((steps - below) * 4294967296.0).to(tl.int64)
        rounded = below.to(tl.int32) + (bits.to(tl.int64) < above).to(tl.int32)
    else:
        rounded = ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: to even
    negative = (scaled.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    codes = ((exponent - 1) << 1) + rounded + (negative << 3)
    return tl.where(scaled == scaled, codes, 7)
