"""Cast to FP8, transpose and amax of a matrix in one pass over it.

On CUDA GPUs with FP8 a Triton kernel reads the matrix once; elsewhere `fp8stack.numerics` computes
the same bytes. To torch.compile it is one operator. Only this file imports Triton, and only to
launch the kernel: torch's builds for CUDA bring it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.formats import fp8_format

if TYPE_CHECKING:
    import triton.language as tl

# A tile's row is a cache line of bfloat16, 128 bytes, and its column one of FP8.
TILE_ROWS, TILE_COLUMNS = 128, 64
# Fused, the product would not be rounded to float32.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def cast_transpose(
    x: Tensor, scale: Tensor, format: str = "e4m3", *, across: bool = True, record: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`cast_to_fp8(x, scale, format)`, its transpose and `amax(x)`, to the bit.

    Args:
        x: [rows, columns], float32, bfloat16 or float16.
        scale: float32, 0-dim, on the device of `x`; multiplies into FP8.
        format: "e4m3" or "e5m2".
        across: whether the transpose is wanted.
        record: whether the amax is wanted.

    Returns:
        The FP8 data [rows, columns]; its transpose [columns, rows], or None; the amax of `x`,
        float32, 0-dim, NaN ignored, or None. All contiguous. Nothing waits for the device.

    Raises:
        ValueError: an unknown format.
    """
    fp8_format(format)
    data, transposed, amaxes = _cast_transpose(x, scale, format, across, record)
    # Outside of the operator: compiled code fuses it with whatever reads the amax.
    amax = amaxes.max() if record else None
    return data, transposed if across else None, amax


# What is not wanted comes out empty, for an operator cannot leave an output out.
@torch.library.custom_op("fp8stack::cast_transpose", mutates_args=())
def _cast_transpose(
    x: Tensor, scale: Tensor, format: str, across: bool, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    if has_kernel(x.device) and x.numel() > 0:
        return run_kernel(x, scale, format, across, record)
    data = numerics.cast_to_fp8(x, scale, format)
    transposed, amaxes = data.new_empty(0), x.new_empty(0, dtype=torch.float32)
    if across:
        # Not contiguous(), which would give `data` itself where there is one row or column.
        transposed = data.t().clone(memory_format=torch.contiguous_format)
    if record:
        amaxes = numerics.amax(x).view(1)
    return data, transposed, amaxes


@_cast_transpose.register_fake
def _(
    x: Tensor, scale: Tensor, format: str, across: bool, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    # A matrix without elements has an amax too.
    tiles = torch.sym_max(1, _tiles(rows, columns))  # type: ignore[no-untyped-call]
    return _outputs(x, format, across, (tiles if has_kernel(x.device) else 1) if record else 0)


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


def _outputs(x: Tensor, format: str, across: bool, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Data, transpose and the amaxes of `parts` parts of `x`, not filled in."""
    rows, columns = x.shape
    dtype = fp8_format(format).dtype
    data = x.new_empty((rows, columns), dtype=dtype)
    transposed = x.new_empty((columns, rows) if across else (0,), dtype=dtype)
    return data, transposed, x.new_empty(parts, dtype=torch.float32)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on `device`: Triton is there, and converts to both formats."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def run_kernel(
    x: Tensor, scale: Tensor, format: str, across: bool, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator by Triton, for a contiguous `x` that is not empty; one amax per tile.

    A second, tiny reduction makes one amax of them: an atomic maximum would need a cell that is
    cleared first, which is a launch as well, and none that compiled code can fuse.
    """
    rows, columns = x.shape
    tiles = _tiles(rows, columns)
    data, transposed, amaxes = _outputs(x, format, across, tiles if record else 0)
    # As bytes: Triton's support of float8 pointers differs between devices.
    operands = (x, scale, data.view(torch.uint8), transposed.view(torch.uint8), amaxes)
    constants = kernel_constants(format, across, record, converts_exactly(x.device))
    with torch.cuda.device(x.get_device()):
        kernel()[(tiles,)](*operands, rows, columns, **constants, **OPTIONS)
    return data, transposed, amaxes


def converts_exactly(device: torch.device) -> bool:
    """See `kernel_constants`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def kernel_constants(format: str, across: bool, record: bool, exact: bool) -> dict[str, Any]:
    """What one variant of the kernel is compiled with; see `format_constants`."""
    constants = {"ACROSS": across, "RECORD": record, "ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS}
    return constants | format_constants(format, exact)


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


@cache
def kernel() -> Any:
    """The kernel, to be launched as `kernel()[grid](...)`."""
    # A scale is one of many in a tensor, so its alignment says nothing.
    return _device_code()(_cast_tile, do_not_specialize_on_alignment=["scale"])


@cache
def transpose_kernel() -> Any:
    """That of `transpose_bytes`, to be launched as `kernel` is."""
    return _device_code()(_transpose_tile)


@cache
def weights_kernel() -> Any:
    """The kernel for many matrices, to be launched as `kernel` is."""
    return _device_code()(_cast_weights)


def launch_weights(tiles: int, operands: tuple[Tensor, ...], constants: dict[str, Any]) -> None:
    """Launch the kernel for many matrices, see `weights.KeptWeights`, on their device."""
    with torch.cuda.device(operands[0].get_device()):
        weights_kernel()[(tiles,)](*operands, **constants)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype of torch's."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def device_functions() -> tuple[Any, Any, Any]:
    """`_amax`, `_scale_of` and `_codes`, for kernels of other modules to call."""
    _device_code()
    return _amax, _scale_of, _codes


@cache
def _device_code() -> Any:
    """Triton's `jit`, once the kernels find what they call."""
    global tl, _read, _amax, _scale_of, _codes  # Triton looks names up among the module's
    import triton
    import triton.language as tl

    _read, _amax = triton.jit(_read), triton.jit(_amax)
    _scale_of, _codes = triton.jit(_scale_of), triton.jit(_codes)
    return triton.jit


def _cast_tile(
    x: tl.tensor, scale: tl.tensor, data: tl.tensor, transposed: tl.tensor, amaxes: tl.tensor,
    rows: tl.tensor, columns: tl.tensor,
    FLOAT8: tl.constexpr, LARGEST: tl.constexpr, MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr,
    ACROSS: tl.constexpr, RECORD: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of `x` [rows, columns], in Triton's language; tiles follow each other along rows."""
    tile = tl.program_id(0)
    values, row, column, inside = _read(x, tile, rows, columns, ROWS, COLUMNS)
    if RECORD:
        tl.store(amaxes + tile, _amax(values))
    scaled = values * tl.load(scale)
    codes = _codes(scaled, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
    tl.store(data + row.to(tl.int64) * columns + column, codes, mask=inside)
    if ACROSS:
        tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)


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
    MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    values, row, column, inside = _read(x, tile, rows, columns, ROWS, COLUMNS)
    if RECORD or SCALE == "blocks":
        amax = _amax(values)
    if RECORD:  # as integers, which are in the order of the numbers: none is negative
        cell = (amaxes + place * SPACING).to(tl.pointer_type(tl.int32))
        tl.atomic_max(cell, amax.to(tl.int32, bitcast=True), sem="relaxed")
    if CAST:
        if SCALE == "given":
            scale = tl.load(scales + place)
        else:
            if SCALE == "current":
                amax = tl.load(amaxes + place * SPACING)
            scale = _scale_of(amax, LARGEST, EPS, OVERFLOW, POWER_OF_TWO)
        out = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        if SCALE == "blocks":  # as `scaled_gemm.pack_scales` has them
            wide, high = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
            across, down = tile % wide, tile // wide
            tl.store(inverse + down * tl.cdiv(wide, 4) * 4 + across, out)
            tl.store(inverse_across + across * tl.cdiv(high, 4) * 4 + down, out)
        else:
            tl.store(inverse, out, mask=tile == 0)
        codes = _codes(values * scale, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
        tl.store(data + row.to(tl.int64) * columns + column, codes, mask=inside)
        tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)


def _read(
    x: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The values of a tile in float32, its rows and columns, and which of them there are."""
    wide = tl.cdiv(columns, COLUMNS)
    row = (tile // wide) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % wide) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    return values.to(tl.float32), row, column, inside


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
