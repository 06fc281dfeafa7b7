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
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


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
    exact = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (9, 0)
    constants = kernel_constants(format, across, record, exact)
    with torch.cuda.device(x.get_device()):
        kernel()[(tiles,)](*operands, rows, columns, **constants, **OPTIONS)
    return data, transposed, amaxes


def kernel_constants(format: str, across: bool, record: bool, exact: bool) -> dict[str, Any]:
    """What one variant of the kernel is compiled with.

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
        "ACROSS": across,
        "RECORD": record,
        "EXACT": exact,
        "ROWS": TILE_ROWS,
        "COLUMNS": TILE_COLUMNS,
    }


@cache
def kernel() -> Any:
    """The kernel, to be launched as `kernel()[grid](...)`."""
    global tl  # Triton looks the kernel's names up among the module's
    import triton
    import triton.language as tl

    # A scale is one of many in a tensor, so its alignment says nothing.
    return triton.jit(_cast_tile, do_not_specialize_on_alignment=["scale"])


def _cast_tile(
    x: tl.tensor,
    scale: tl.tensor,
    data: tl.tensor,
    transposed: tl.tensor,
    amaxes: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    FLOAT8: tl.constexpr,
    LARGEST: tl.constexpr,
    MAGIC: tl.constexpr,
    LEAST_SPACING: tl.constexpr,
    ACROSS: tl.constexpr,
    RECORD: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of `x` [rows, columns], in Triton's language; tiles follow each other along rows."""
    tile = tl.program_id(0)
    wide = tl.cdiv(columns, COLUMNS)
    row = (tile // wide) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % wide) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    along = row.to(tl.int64) * columns + column
    values = tl.load(x + along, mask=inside, other=0.0).to(tl.float32)
    if RECORD:
        tl.store(amaxes + tile, tl.max(tl.where(values == values, tl.abs(values), 0.0)))
    scaled = values * tl.load(scale)
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
    tl.store(data + along, codes, mask=inside)
    if ACROSS:
        tl.store(transposed + column.to(tl.int64) * rows + row, codes, mask=inside)
