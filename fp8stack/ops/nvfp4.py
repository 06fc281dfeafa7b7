"""Both NVFP4 copies of a matrix, by two kernels: one finds what the upper scales follow from, the
other casts, transforms, draws, packs and transposes.

On CUDA GPUs the kernels are Triton's, and read the matrix once each; elsewhere torch computes the
same with `numerics.quantize`, to the bit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.formats import Quantizer
from fp8stack.numerics import RandomBits
from fp8stack.numerics.hadamard import MINUS
from fp8stack.numerics.hadamard import hadamard as transform
from fp8stack.numerics.quantized import OUT_OF_TWO_LEVELS, SIXTH
from fp8stack.ops.kernels import (
    OPTIONS,
    converts_exactly,
    device_functions,
    has_kernel,
    transpose_bytes,
)
from fp8stack.ops.scaled_gemm import Scaled, Scales, pack_scales

if TYPE_CHECKING:
    import triton.language as tl

    from fp8stack.ops.kernels import _amax, _packed_at

BLOCK = 16  # elements that share an E4M3 scale, and that a Hadamard transform mixes
# Packed, scales of 128 lines and of 64 elements lie together: a tile has whole ones of both copies.
ROWS, COLUMNS = 128, 128
SCALES = ROWS * COLUMNS // BLOCK  # of a tile


def cast_nvfp4(
    x: Tensor,
    along: Quantizer,
    across: Quantizer | None,
    bits: tuple[RandomBits | None, RandomBits | None] = (None, None),
) -> tuple[Scaled, Scaled | None]:
    """A matrix for the GEMM over its columns and, if there is an `across`, the one over its rows.

    Args:
        x: [rows, columns], both divisible by 16; float32, bfloat16 or float16.
        along: of the first copy, without a Hadamard transform.
        across: of the second, with one of 16 or without; else like the first.
        bits: of each copy, where rounding is stochastic; of one seed, counter and first row.

    Returns:
        The copies as `scaled_gemm` takes them, the second one [columns, rows]: what
        `numerics.quantize` and `pack_scales` give, to the bit.
    """
    x = x.contiguous()
    hadamard = 0 if across is None else across.hadamard
    amaxes = _amaxes_op(x, hadamard)
    counter, streams, seed, first_row = None, None, 0, 0
    if drawn := [one for one in bits if one is not None]:
        counter, seed, first_row = drawn[0].counter, drawn[0].seed, int(drawn[0].first_row)
        streams = torch.stack([_tensor(one.stream, x.device) for one in drawn])
    height = (along.blocks or (1, 1))[0]
    data, scales, turned, scales_across = _cast_op(
        x, amaxes, height, hadamard, across is not None, counter, streams, seed, first_row
    )
    whole = torch.where(amaxes[1::2] > 0, torch.nan, amaxes[::2] * OUT_OF_TWO_LEVELS)
    first = Scaled(data, scales, Scales.NV, whole[0])
    if across is None:
        return first, None
    return first, Scaled(turned, scales_across, Scales.NV, whole[1])


def _tensor(stream: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(stream, Tensor):
        return stream
    return torch.full((), stream, dtype=torch.int64, device=device)  # waits for nothing


# The operators


@torch.library.custom_op("fp8stack::nvfp4_amaxes", mutates_args=())
def _amaxes_op(x: Tensor, hadamard: int) -> Tensor:
    """The amax of a matrix and whether there is a NaN, 1 or 0; both for its first copy and its
    second one: float32 [4]."""
    if not _runs(x):
        copies = x, transform(x, hadamard, 0) if hadamard else x
        each = [part for copy in copies for part in (numerics.amax(copy), copy.isnan().any())]
        return torch.stack([part.to(torch.float32) for part in each])
    tiles = _tiles(x)
    found = x.new_empty((tiles, 4), dtype=torch.float32)
    constants = {"HADAMARD": hadamard, "MINUS": MINUS[16], **_constants(x)}
    with torch.cuda.device(x.get_device()):
        amaxes_kernel()[(tiles,)](x, found, *x.shape, **constants, **LAUNCH)
    return found.amax(0)


_amaxes_op.register_fake(lambda x, hadamard: x.new_empty(4, dtype=torch.float32))


@torch.library.custom_op("fp8stack::cast_nvfp4", mutates_args=())
def _cast_op(
    x: Tensor,
    amaxes: Tensor,
    height: int,
    hadamard: int,
    across: bool,
    counter: Tensor | None,
    streams: Tensor | None,
    seed: int,
    first_row: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and packed scales of both copies; empty are those that are not wanted."""
    if not _runs(x):
        rounding: Any = "nearest" if counter is None else "stochastic"
        copies: list[Tensor] = []
        for place, turned in enumerate((False, True)[: 1 + across]):
            quantizer = Quantizer(
                format="e2m1",
                block=(height, BLOCK),
                scale="e4m3",
                rounding=rounding,
                hadamard=hadamard if turned else 0,  # type: ignore[arg-type]
            )
            bits = None
            if counter is not None and streams is not None:
                bits = RandomBits(seed, streams[place], counter, first_row)
            copies += _by_torch(x, quantizer, turned, bits)
        empty = [one.new_empty(0) for one in copies]
        data, scales, transposed, scales_across = copies if across else copies + empty
        return data, scales, transposed, scales_across
    made = _room(x, across)
    stochastic = counter is not None
    options = {
        "HEIGHT": height,
        "HADAMARD": hadamard,
        "MINUS": MINUS[16],
        "ACROSS": across,
        "STOCHASTIC": stochastic,
        "SIXTH": SIXTH,
    }
    data, scales, transposed, scales_across = (one.view(torch.uint8) for one in made)
    operands = (x, amaxes, data, scales, transposed, scales_across)
    operands += (counter, streams) if stochastic else (amaxes, amaxes)  # type: ignore[assignment]
    with torch.cuda.device(x.get_device()):
        cast_kernel()[(_tiles(x),)](
            *operands,
            seed & 0xFFFFFFFF,
            first_row,
            *x.shape,
            x.shape[0] // 2,
            x.shape[1] // 2,
            **options,
            **_constants(x),
            **LAUNCH,
        )
    return made


_cast_op.register_fake(lambda x, amaxes, height, hadamard, across, *others: _room(x, across))


def _by_torch(
    x: Tensor, quantizer: Quantizer, turned: bool, bits: RandomBits | None
) -> tuple[Tensor, Tensor]:
    """Data and packed scales of one copy. The bits of stochastic rounding go by the place in the
    matrix, so that the second copy is turned after it is made."""
    data, scales = numerics.quantize(x, quantizer, 0 if turned else 1, bits)[:2]
    codes = scales.view(torch.uint8)
    if turned:
        data, codes = transpose_bytes(data), codes.t()
    if (height := (quantizer.blocks or (1, 1))[0]) > 1:  # GEMMs know rows alone
        codes = codes.repeat_interleave(height, 0)
    return data, pack_scales(codes.contiguous().view(scales.dtype), Scales.NV)


def _runs(x: Tensor) -> bool:
    return has_kernel(x.device) and x.numel() > 0


def _tiles(x: Tensor) -> int:
    return -(-x.shape[0] // ROWS) * -(-x.shape[1] // COLUMNS)


def _room(x: Tensor, across: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel fills; scales that no element has stay 0."""
    rows, columns = x.shape
    made = []
    for lines, width in ((rows, columns), (columns, rows) if across else (0, 0)):
        made.append(x.new_empty((lines, width // 2) if width else (0,), dtype=torch.uint8))
        packed = -(-lines // 128) * 128 * (-(-width // 64) * 4)
        whole = lines % 128 == 0 and width % 64 == 0
        scales = (x.new_empty if whole else x.new_zeros)((packed,), dtype=torch.uint8)
        made.append(scales.view(torch.float8_e4m3fn))
    return made[0], made[1], made[2], made[3]


def _constants(x: Tensor) -> dict[str, Any]:
    return {
        "BF16": x.dtype == torch.bfloat16,
        "EXACT": converts_exactly(x.device),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "PART": BLOCK,
    }


# The kernels, in Triton's language

LAUNCH = OPTIONS | {"num_warps": 16}


@cache
def amaxes_kernel() -> Any:
    """That of the amaxes, to be launched as `amaxes_kernel()[grid](...)`."""
    return _device_code()(_find_amaxes)


@cache
def cast_kernel() -> Any:
    """That of the copies, to be launched in the same way."""
    return _device_code()(_cast)


@cache
def _device_code() -> Any:
    """Triton's `jit`, once the kernels find what they call."""
    global tl, _amax, _packed_at, _load, _transformed, _bf16, _bits, _put, _e4m3, _e2m1
    import triton
    import triton.language as tl

    _amax, _packed_at = device_functions()[0], device_functions()[4]
    _load, _transformed, _bf16 = map(triton.jit, (_load, _transformed, _bf16))
    _bits, _put, _e4m3, _e2m1 = map(triton.jit, (_bits, _put, _e4m3, _e2m1))
    return triton.jit


def _find_amaxes(
    x: tl.tensor, found: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    HADAMARD: tl.constexpr, MINUS: tl.constexpr, BF16: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Of one tile the four numbers of `nvfp4_amaxes`."""
    tile = tl.program_id(0)
    values, _, _ = _load(x, tile, rows, columns, ROWS, COLUMNS)
    amax, has_nan = _amax(values), tl.max((values != values).to(tl.float32))
    tl.store(found + tile * 4, amax)
    tl.store(found + tile * 4 + 1, has_nan)
    if HADAMARD:
        turned = _transformed(tl.trans(values), MINUS, BF16, EXACT, COLUMNS, ROWS, PART)
        amax, has_nan = _amax(turned), tl.max((turned != turned).to(tl.float32))
    tl.store(found + tile * 4 + 2, amax)
    tl.store(found + tile * 4 + 3, has_nan)


def _cast(
    x: tl.tensor, amaxes: tl.tensor, data: tl.tensor, scales: tl.tensor, transposed: tl.tensor,
    scales_across: tl.tensor, counter: tl.tensor, streams: tl.tensor, seed: tl.tensor,
    first_row: tl.tensor, rows: tl.tensor, columns: tl.tensor, half_rows: tl.tensor,
    half_columns: tl.tensor,
    HEIGHT: tl.constexpr, HADAMARD: tl.constexpr, MINUS: tl.constexpr, ACROSS: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIXTH: tl.constexpr, BF16: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of both copies, of which half as many bytes lie along a line."""
    values, row, column = _load(x, tl.program_id(0), rows, columns, ROWS, COLUMNS)
    bits = values  # not used
    if STOCHASTIC:
        bits = _bits(counter, streams, seed, first_row, row, column, ROWS, COLUMNS)
    # fmt: off
    _put(values, bits, row, column, tl.load(amaxes), rows, half_columns, data, scales, HEIGHT,
         STOCHASTIC, SIXTH, ROWS, COLUMNS, PART)
    # fmt: on
    if ACROSS:
        values = tl.trans(values)
        if HADAMARD:
            values = _transformed(values, MINUS, BF16, EXACT, COLUMNS, ROWS, PART)
        if STOCHASTIC:
            bits = _bits(counter, streams + 1, seed, first_row, row, column, ROWS, COLUMNS)
            bits = tl.trans(bits)
        # fmt: off
        _put(values, bits, column, row, tl.load(amaxes + 2), columns, half_rows, transposed,
             scales_across, HEIGHT, STOCHASTIC, SIXTH, COLUMNS, ROWS, PART)
        # fmt: on


def _load(
    x: tl.tensor, tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """A tile's values in float32, 0 outside, and its first row and column."""
    wide = tl.cdiv(columns, COLUMNS)
    first_row, first_column = tile // wide * ROWS, tile % wide * COLUMNS
    row = (first_row + tl.arange(0, ROWS))[:, None]
    column = (first_column + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    return values.to(tl.float32), first_row, first_column


def _transformed(
    values: tl.tensor, MINUS: tl.constexpr, BF16: tl.constexpr, EXACT: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`numerics.hadamard` of a tile's lines, by 16."""
    if not BF16:
        values = _bf16(values, EXACT)
    sign = (MINUS >> (tl.arange(0, WIDTH) % PART)) & 1
    values = tl.where((sign != 0)[None, :], -values, values)
    values = tl.reshape(values, [LINES * WIDTH // PART, 2, 2, 2, 2])
    for _ in tl.static_range(4):  # the last bit of a place comes first: strides 1, 2, 4, 8
        one, other = tl.split(values)
        values = tl.permute(tl.join(one + other, one - other), [0, 4, 1, 2, 3])
    return _bf16(tl.reshape(values, [LINES, WIDTH]) * 0.25, EXACT)


def _bf16(values: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """float32 values, rounded to what bfloat16 has."""
    if EXACT:
        return values.to(tl.bfloat16).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)  # the interpreter does not round to even
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


def _bits(
    counter: tl.tensor, stream: tl.tensor, seed: tl.tensor, first_row: tl.tensor, row: tl.tensor,
    column: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`RandomBits.bits` of the tile that begins at `row` and `column`: uint32."""
    count = tl.load(counter)
    key = (tl.load(stream) << 32) | seed.to(tl.int64)
    zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
    lane = zero + (column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)[None, :]
    line = zero + (first_row.to(tl.int64) + row + tl.arange(0, ROWS)).to(tl.uint32)[:, None]
    low, high = zero + count.to(tl.uint32), zero + (count >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, lane, line, low, high)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS])


def _put(
    values: tl.tensor, bits: tl.tensor, line: tl.tensor, place: tl.tensor, whole: tl.tensor,
    lines: tl.tensor, half: tl.tensor, data: tl.tensor, scales: tl.tensor, HEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIXTH: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """Write one copy, of `lines` with `half` as many bytes as elements, of the tile that begins at
    `line` and `place`, and their scales; `whole` is the amax of the matrix. See
    `numerics.quantized` for the scales."""
    sizes = tl.where(values == values, tl.abs(values), 0.0)
    largest = tl.max(tl.reshape(sizes, [LINES, WIDTH // PART, PART]), axis=2)
    if HEIGHT > 1:
        square = tl.max(tl.reshape(largest, [LINES // HEIGHT, HEIGHT, WIDTH // PART]), axis=1)
        spread = tl.zeros([LINES // HEIGHT, HEIGHT, WIDTH // PART], tl.float32) + square[:, None, :]
        largest = tl.reshape(spread, [LINES, WIDTH // PART])
    one = tl.zeros_like(whole) + 1.0
    into_e4m3 = tl.minimum(tl.div_rn(one * 2688.0, whole), 3.4028234663852886e38)
    into_e4m3 = tl.where((whole == 0.0) | (into_e4m3 == 0.0), one, into_e4m3)
    stored = _e4m3(tl.minimum(largest * (into_e4m3 * SIXTH), 448.0))
    out = stored * tl.div_rn(one, into_e4m3)
    into = tl.minimum(tl.div_rn(tl.zeros_like(out) + 1.0, out), 3.4028234663852886e38)
    scaled = tl.reshape(values, [LINES, WIDTH // PART, PART]) * into[:, :, None]
    codes = _e2m1(tl.reshape(scaled, [LINES, WIDTH]), bits, STOCHASTIC)
    even, odd = tl.split(tl.reshape(codes, [LINES, WIDTH // 2, 2]))
    each = (line + tl.arange(0, LINES))[:, None]
    byte = (place // 2 + tl.arange(0, WIDTH // 2))[None, :]
    there = (each < lines) & (byte < half)
    codes = (even | (odd << 4)).to(tl.uint8)
    tl.store(data + each.to(tl.int64) * half + byte, codes, mask=there)
    part = (place // PART + tl.arange(0, WIDTH // PART))[None, :]
    there = (each < lines) & (part < half * 2 // PART)
    at = _packed_at(each, part, half * 2 // PART)
    tl.store(scales + at, stored.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=there)


def _e4m3(values: tl.tensor) -> tl.tensor:
    """Values of 0 to 448, rounded to what E4M3 has."""
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    spacing = tl.maximum(power * 1572864.0, 24576.0)  # 1.5 * 2^20 spacings: its last bits round
    return (values + spacing) - spacing


def _e2m1(scaled: tl.tensor, bits: tl.tensor, STOCHASTIC: tl.constexpr) -> tl.tensor:
    """See `numerics.quantized.encode`: int32."""
    size = tl.minimum(tl.abs(scaled), 6.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 126, 1)
    steps = size * ((129 - exponent) << 23).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        below = tl.floor(steps)
        above = tl.ceil((steps - below) * 4294967296.0).to(tl.int64)
        whole = below.to(tl.int32) + (bits.to(tl.int64) < above).to(tl.int32)
    else:
        whole = ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: to even
    negative = (scaled.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    codes = ((exponent - 1) << 1) + whole + (negative << 3)
    return tl.where(scaled == scaled, codes, 7)
