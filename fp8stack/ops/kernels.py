"""Triton kernels that transpose bytes and that cast many weights, and what they share with those of
`fused_casts`: where they run, how a value becomes a code.

Triton is imported to launch a kernel alone: torch's builds for CUDA bring it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8stack.formats import fp8_format

if TYPE_CHECKING:
    import triton.language as tl

# A tile's row is a cache line of bfloat16, 128 bytes, and its column one of FP8.
TILE_ROWS, TILE_COLUMNS = 128, 64
MX_BLOCK = 32  # elements that share an E8M0 scale
MX_TILE = 128 * 128 // MX_BLOCK  # scales of a square of 128, a tile of `pack_scales`
# Fused, the product would not be rounded to float32.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


# With fixed strides, inductor would write the bytes twice: for this operator, and for others.
@torch.library.custom_op(
    "fp8stack::transpose_bytes", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def transpose_bytes(data: Tensor) -> Tensor:
    """The transpose of a contiguous uint8 matrix, contiguous. A compiler neither fuses it nor runs
    it again in the backward pass: where it computes rows, it would write columns byte by byte."""
    if not has_kernel(data.device) or data.numel() == 0:
        return data.t().clone(memory_format=torch.contiguous_format)
    return run_transpose(data)


transpose_bytes.register_fake(lambda data: data.new_empty((data.shape[1], data.shape[0])))


def run_transpose(data: Tensor) -> Tensor:
    """The operator by Triton."""
    rows, columns = data.shape
    made = data.new_empty((columns, rows))
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_ROWS)
    operands = (data.contiguous(), made, rows, columns)
    with torch.cuda.device(data.get_device()):
        transpose_kernel()[(tiles,)](*operands, SIZE=TILE_ROWS, num_warps=8)
    return made


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernels run on `device`: Triton is there, and converts to both formats."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def converts_exactly(device: torch.device) -> bool:
    """Whether conversions of float32 are those of `cast_to_fp8`, see `format_constants`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def format_constants(format: str, exact: bool) -> dict[str, Any]:
    """What the kernels are compiled with for a format.

    `exact`: the device's conversion of float32 is that of `cast_to_fp8`, as it is from compute
    capability 9.0 on. Older versions of Triton go by float16 on 8.9 and so round twice, and
    Triton's interpreter does not round to even (triton issue 8322): there the kernel rounds first.
    """
    import triton.language as tl

    target = fp8_format(format)
    magic = 1.5 * 2.0 ** (23 - target.mantissa_bits)
    return {
        "FLOAT8": tl.float8e4nv if format == "e4m3" else tl.float8e5,
        "LARGEST": target.max,
        "MAGIC": magic,
        "LEAST_SPACING": target.min_normal * magic,
        "EXACT": exact,
    }


def e8m0_constants(format: str, rounding: str) -> dict[str, Any]:
    """By what the kernel finds an E8M0 code, see `numerics.blocks.e8m0_code`."""
    target = fp8_format(format)
    half = {"rceil": -1, "floor": 0, "even": 1 << (22 - target.mantissa_bits)}[rounding]
    exponents = (target.max_code >> target.mantissa_bits) - target.bias
    inverse = torch.tensor(1 / target.max, dtype=torch.float32).item()
    return {"HALF": half, "EXPONENTS": exponents, "INVERSE": inverse, "PART": MX_BLOCK}


NO_E8M0 = {"HALF": 0, "EXPONENTS": 0, "INVERSE": 0.0, "PART": MX_BLOCK}
"""In place of `e8m0_constants` where scales are float32."""


@cache
def transpose_kernel() -> Any:
    """That of `transpose_bytes`, to be launched as `transpose_kernel()[grid](...)`."""
    return _device_code()(_transpose_tile)


@cache
def weights_kernel() -> Any:
    """That of many matrices, to be launched in the same way."""
    return _device_code()(_cast_weights)


def launch_weights(tiles: int, operands: tuple[Tensor, ...], constants: dict[str, Any]) -> None:
    """Launch the kernel for many matrices, see `weights.KeptWeights`, on their device."""
    with torch.cuda.device(operands[0].get_device()):
        weights_kernel()[(tiles,)](*operands, **constants)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype of torch's."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def device_functions() -> tuple[Any, Any, Any, Any, Any]:
    """`_amax`, `_scale_of`, `_codes`, `_put_mx` and `_packed_at`, for kernels of other modules to
    call."""
    _device_code()
    return _amax, _scale_of, _codes, _put_mx, _packed_at


@cache
def _device_code() -> Any:
    """Triton's `jit`, once the kernels find what they call."""
    # Triton looks names up among the module's.
    global tl, _amax, _scale_of, _codes, _put_mx, _e8m0_code, _times, _packed_at
    import triton
    import triton.language as tl

    _amax, _scale_of, _codes = map(triton.jit, (_amax, _scale_of, _codes))
    _e8m0_code, _times, _packed_at = map(triton.jit, (_e8m0_code, _times, _packed_at))
    _put_mx = triton.jit(_put_mx)
    return triton.jit


def _transpose_tile(
    data: tl.tensor, transposed: tl.tensor, rows: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr
) -> None:
    """One tile of a matrix of bytes."""
    tile, wide = tl.program_id(0), tl.cdiv(columns, SIZE)
    row = (tile // wide) * SIZE + tl.arange(0, SIZE)[:, None]
    column = (tile % wide) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column < columns)
    codes = tl.load(data + row.to(tl.int64) * columns + column, mask=inside, other=0)
    tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)


def _cast_weights(
    table: tl.tensor, owners: tl.tensor, scales: tl.tensor, amaxes: tl.tensor,
    SOURCE: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr, SCALE: tl.constexpr,
    RECORD: tl.constexpr, CAST: tl.constexpr, SPACING: tl.constexpr, EPS: tl.constexpr,
    OVERFLOW: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
    MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    EXPONENTS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of one of many matrices, of which `table` has a row for each, and `owners` the row
    of each tile."""
    tile = tl.program_id(0)
    entry = table + tl.load(owners + tile).to(tl.int64) * FIELDS
    x = tl.load(entry).to(tl.pointer_type(SOURCE))
    data = tl.load(entry + 1).to(tl.pointer_type(tl.uint8))
    transposed = tl.load(entry + 2).to(tl.pointer_type(tl.uint8))
    inverse = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    inverse_across = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
    rows = tl.load(entry + 5).to(tl.int32)
    columns = tl.load(entry + 6).to(tl.int32)
    tile -= tl.load(entry + 7).to(tl.int32)
    place = tl.load(entry + 8)
    if ALIGNED:  # what was loaded says nothing about that
        x, data = tl.multiple_of(x, 16), tl.multiple_of(data, 16)
        transposed = tl.multiple_of(transposed, 16)
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    wide, high = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    down, block = tile // wide, tile % wide
    row = down * ROWS + tl.arange(0, ROWS)[:, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    values = values.to(tl.float32)
    if RECORD or SCALE == "blocks":
        amax = _amax(values)
    if RECORD:  # as integers, which are in the order of the numbers: none is negative
        cell = (amaxes + place * SPACING).to(tl.pointer_type(tl.int32))
        tl.atomic_max(cell, amax.to(tl.int32, bitcast=True), sem="relaxed")
    if SCALE == "mx":
        # fmt: off
        _put_mx(values, row, column, inside, rows, columns,
                data + row.to(tl.int64) * columns + column,
                transposed + column.to(tl.int64) * rows + row,
                inverse.to(tl.pointer_type(tl.uint8)), inverse_across.to(tl.pointer_type(tl.uint8)),
                True, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT, HALF, EXPONENTS, INVERSE, ROWS,
                COLUMNS, PART)
        # fmt: on
    elif CAST:
        if SCALE == "given":
            scale = tl.load(scales + place)
        else:
            if SCALE == "current":
                amax = tl.load(amaxes + place * SPACING)
            scale = _scale_of(amax, LARGEST, EPS, OVERFLOW, POWER_OF_TWO)
        out = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        if SCALE == "blocks":  # as `scaled_gemm.pack_scales` has them
            tl.store(inverse + down * tl.cdiv(wide, 4) * 4 + block, out)
            tl.store(inverse_across + block * tl.cdiv(high, 4) * 4 + down, out)
        else:
            tl.store(inverse, out, mask=tile == 0)
        codes = _codes(values * scale, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
        tl.store(data + row.to(tl.int64) * columns + column, codes, mask=inside)
        tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)


def _amax(values: tl.tensor) -> tl.tensor:
    """See `numerics.amax`."""
    return tl.max(tl.where(values == values, tl.abs(values), 0.0))


def _scale_of(
    amax: tl.tensor,
    LARGEST: tl.constexpr,
    EPS: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> tl.tensor:
    """See `numerics.tensor_scale`; an amax is never NaN here."""
    amax = tl.where(amax < EPS, EPS, amax)
    scale = tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)
    scale = tl.where(scale == float("inf"), OVERFLOW, scale)
    scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


def _codes(
    scaled: tl.tensor,
    FLOAT8: tl.constexpr,
    LARGEST: tl.constexpr,
    MAGIC: tl.constexpr,
    LEAST_SPACING: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """The bytes of float32 values that were multiplied by their scale: `numerics.cast_to_fp8`."""
    held = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if not EXACT:
        # As numerics/rounding.py does, but -0 keeps its sign. A value of the format converts
        # exactly, whatever the conversion is worth.
        bits = held.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        spacing = tl.maximum(power * MAGIC, LEAST_SPACING)
        rounded = ((held + spacing) - spacing).to(tl.int32, bitcast=True)
        held = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    codes = held.to(FLOAT8).to(tl.uint8, bitcast=True)
    if not EXACT:
        codes = tl.where(scaled == scaled, codes, 0x7F)
    return codes


def _put_mx(
    values: tl.tensor, row: tl.tensor, column: tl.tensor, inside: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, data: tl.tensor, transposed: tl.tensor, inverse: tl.tensor,
    inverse_across: tl.tensor, ACROSS: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
    MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    EXPONENTS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """Write a tile's values, in parts of a row and, if `ACROSS`, of a column that share an E8M0
    scale."""
    sizes = tl.where(values == values, tl.abs(values), 0.0)
    whole = inside.to(tl.int32)
    parts = tl.reshape(sizes, [ROWS, COLUMNS // PART, PART])
    scales = _e8m0_code(tl.max(parts, axis=2), HALF, EXPONENTS, INVERSE)
    scaled = tl.reshape(values, [ROWS, COLUMNS // PART, PART]) * _times(scales)[:, :, None]
    scaled = tl.reshape(scaled, [ROWS, COLUMNS])
    codes = _codes(scaled, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
    tl.store(data, codes, mask=inside)
    part = tl.min(tl.reshape(column, [COLUMNS // PART, PART]), axis=1)[None, :] // PART
    there = tl.max(tl.reshape(whole, [ROWS, COLUMNS // PART, PART]), axis=2) > 0
    place = _packed_at(row, part, tl.cdiv(columns, PART))
    tl.store(inverse + place, scales.to(tl.uint8), mask=there)
    if ACROSS:
        parts = tl.reshape(sizes, [ROWS // PART, PART, COLUMNS])
        scales = _e8m0_code(tl.max(parts, axis=1), HALF, EXPONENTS, INVERSE)
        scaled = tl.reshape(values, [ROWS // PART, PART, COLUMNS]) * _times(scales)[:, None, :]
        scaled = tl.reshape(scaled, [ROWS, COLUMNS])
        codes = _codes(scaled, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
        tl.store(transposed, codes, mask=inside)
        part = tl.min(tl.reshape(row, [ROWS // PART, PART]), axis=1)[:, None] // PART
        there = tl.max(tl.reshape(whole, [ROWS // PART, PART, COLUMNS]), axis=1) > 0
        place = _packed_at(column, part, tl.cdiv(rows, PART))
        tl.store(inverse_across + place, scales.to(tl.uint8), mask=there)


def _e8m0_code(
    amax: tl.tensor, HALF: tl.constexpr, EXPONENTS: tl.constexpr, INVERSE: tl.constexpr
) -> tl.tensor:
    """See `numerics.blocks.e8m0_code`; an amax is never NaN here."""
    if HALF < 0:  # rounded up
        bits = (amax * INVERSE).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        least = tl.where(exponent == 0, 0x400000, 0)
        code = exponent + ((bits & 0x7FFFFF) > least).to(tl.int32)
    else:
        bits = amax.to(tl.int32, bitcast=True)
        code = tl.maximum((((bits + HALF) >> 23) & 0xFF) - EXPONENTS, 0)
    return tl.minimum(code, 254)


def _times(code: tl.tensor) -> tl.tensor:
    """See `numerics.blocks.e8m0_multiplier`."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    return bits.to(tl.float32, bitcast=True)


def _packed_at(line: tl.tensor, part: tl.tensor, parts: tl.tensor) -> tl.tensor:
    """Where `scaled_gemm.pack_scales` puts the E8M0 scale of a part of a line."""
    tile = (line // 128).to(tl.int64) * tl.cdiv(parts, 4) + part // 4
    return tile * 512 + line % 32 * 16 + line // 32 % 4 * 4 + part % 4
