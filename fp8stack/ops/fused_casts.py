"""FP8 operands from what a layer before them gave, in one pass: an activation or its backward pass,
then the cast, the transpose, the amax and the sums over rows, none of whose input is written first.

A `Product` says what is cast. On CUDA GPUs with FP8 a Triton kernel computes its elements in
registers, tile by tile, and writes both copies 16 bytes at a time; elsewhere torch computes them.
Rounded to the dtype of its tensors is whatever eager code would round, so casts and ReLU^2 are the
same to the bit. SwiGLU and GELU differ from eager code as exp, erf and divisions differ: by less
than 2^-20 of a value, or of its largest term, before it is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.formats import Quantizer, ScaleRounding, fp8_format
from fp8stack.numerics.cast import FLT_MAX
from fp8stack.ops.activations import ACTIVATIONS, GRADIENTS
from fp8stack.ops.kernels import (
    MX_BLOCK,
    MX_TILE,
    NO_E8M0,
    OPTIONS,
    converts_exactly,
    device_functions,
    e8m0_constants,
    format_constants,
    has_kernel,
    triton_dtype,
)
from fp8stack.ops.scaled_gemm import Scales, pack_scales

if TYPE_CHECKING:
    import triton.language as tl

    from fp8stack.ops.kernels import _amax, _codes, _put_mx, _scale_of
BLOCK = 128  # elements of a row, or of a column, that share a float32 scale; a tile has as many


class Product(NamedTuple):
    """A matrix that is not in memory.

    `name` is that of an activation of `x` [rows, columns]; with `dy`, the gradient of what it gave,
    it is the gradient of `x`. "cast" is `x` itself. SwiGLU halves the columns.
    """

    name: str
    x: Tensor
    dy: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.x.shape
        halved = self.name == "swiglu" and self.dy is None
        return rows, columns // 2 if halved else columns

    def values(self) -> Tensor:
        """The matrix, by torch."""
        if self.name == "cast":
            return self.x
        if self.dy is None:
            return ACTIVATIONS[self.name](self.x)
        return GRADIENTS[self.name](self.x, self.dy)


class Copies(NamedTuple):
    """What a cast gives; None is what was not wanted. All but the scales of blocks are contiguous.

    Attributes:
        data: float8 [rows, columns].
        transposed: float8 [columns, rows]; of blocks not the transpose of `data`.
        amax: float32, 0-dim, NaN ignored.
        inv_scale: of blocks, float32 [rows, columns / 128] or E8M0, as `scaled_gemm.pack_scales`
            has it.
        inv_scale_across: of the blocks of `transposed`.
        sums: over rows, float32 [columns].
    """

    data: Tensor
    transposed: Tensor | None = None
    amax: Tensor | None = None
    inv_scale: Tensor | None = None
    inv_scale_across: Tensor | None = None
    sums: Tensor | None = None


def cast_transpose(
    x: Tensor, scale: Tensor, format: str = "e4m3", *, across: bool = True, record: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`cast_to_fp8(x, scale, format)`, its transpose and `amax(x)`, to the bit; `x` [rows, columns]
    in float32, bfloat16 or float16. For the arguments see `cast_product`."""
    whole = Product("cast", x)
    made = cast_product(whole, scale, format, across=across, record=record, sums=False)
    return made[:3]


def product_amax(product: Product) -> Tensor:
    """The amax of a product, of which nothing is written: float32, 0-dim, NaN ignored."""
    found: Tensor = _amax_op(*product).max()
    return found


def cast_product(
    product: Product, scale: Tensor, format: str, *, across: bool, record: bool, sums: bool
) -> Copies:
    """A product cast with one scale. Nothing waits for the device.

    Args:
        product: what is cast.
        scale: float32, 0-dim, on the product's device; multiplies into FP8.
        format: "e4m3" or "e5m2".
        across: whether the transpose is wanted.
        record: whether the amax is wanted.
        sums: whether the sums over rows are wanted.

    Raises:
        ValueError: an unknown format.
    """
    data, transposed, amaxes, parts = _cast_op(*product, scale, format, across, record, sums)
    return Copies(
        data,
        transposed if across else None,
        amaxes.max() if record else None,  # here compiled code fuses it with whatever reads it
        sums=parts.sum(0) if sums else None,
    )


def cast_blocks(product: Product, quantizer: Quantizer, *, across: bool, sums: bool) -> Copies:
    """A product cast in blocks of 1 x 128, or of 1 x 32 with E8M0 scales, and if `across` its
    transpose as well, each with scales of its own: `numerics.quantize` and `pack_scales`, to the
    bit. See `cast_product`."""
    mx = quantizer.scale == "e8m0"
    kind = quantizer.scale_rounding if mx else quantizer.scale
    data, transposed, inverse, inverse_across, parts = _blocks_op(
        *product, quantizer.format, quantizer.eps, kind, across, sums
    )
    return Copies(
        data,
        transposed if across else None,
        None,
        inverse if mx else inverse.t(),
        (inverse_across if mx else inverse_across.t()) if across else None,
        parts.sum(0) if sums else None,
    )


# The operators. What is not wanted comes out empty.


@torch.library.custom_op("fp8stack::product_amax", mutates_args=())
def _amax_op(name: str, x: Tensor, dy: Tensor | None) -> Tensor:
    product = _contiguous(name, x, dy)
    if not _runs(product):
        return numerics.amax(product.values()).view(1)
    amaxes = x.new_empty(_parts(product), dtype=torch.float32)
    _launch(product, "none", operands={"amaxes": amaxes})
    return amaxes


_amax_op.register_fake(
    lambda name, x, dy: x.new_empty(_parts(Product(name, x, dy)), dtype=torch.float32)
)


@torch.library.custom_op("fp8stack::cast_product", mutates_args=())
def _cast_op(
    name: str,
    x: Tensor,
    dy: Tensor | None,
    scale: Tensor,
    format: str,
    across: bool,
    record: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    product = _contiguous(name, x, dy)
    if _runs(product):
        made = _room(product, format, across, record, sums)
        data, transposed, amaxes, parts = made
        given = {"scale": scale, "data": data, "transposed": transposed}
        _launch(product, "given", format, given | {"amaxes": amaxes, "sums": parts})
        return made
    values = product.values()
    data = numerics.cast_to_fp8(values, scale, format)
    none = x.new_empty(0, dtype=torch.float32)
    return (
        data,
        data.t().clone(memory_format=torch.contiguous_format) if across else data.new_empty(0),
        numerics.amax(values).view(1) if record else none,
        values.sum(0, dtype=torch.float32)[None] if sums else none.clone(),
    )


_cast_op.register_fake(
    lambda name, x, dy, scale, format, across, record, sums: _room(
        Product(name, x, dy), format, across, record, sums
    )
)


@torch.library.custom_op("fp8stack::cast_product_blocks", mutates_args=())
def _blocks_op(
    name: str,
    x: Tensor,
    dy: Tensor | None,
    format: str,
    eps: float,
    kind: str,  # of scales: "float32", "power_of_two", or how E8M0 is rounded
    across: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    product, mx = _contiguous(name, x, dy), kind in get_args(ScaleRounding)
    if _runs(product):
        made = _block_room(product, format, mx, across, sums)
        names = ("data", "transposed", "inverse", "inverse_across", "sums")
        operands = dict(zip(names, made, strict=True))
        if mx:
            options = e8m0_constants(format, kind)
        else:
            options = {"EPS": eps, "POWER_OF_TWO": kind == "power_of_two"}
        _launch(product, "mx" if mx else "blocks", format, operands, **options)
        return made
    values = product.values()
    scales: Any = {"scale": "e8m0", "scale_rounding": kind} if mx else {"scale": kind, "eps": eps}
    size = MX_BLOCK if mx else BLOCK
    quantizer = Quantizer(format=format, block=(1, size), **scales)  # type: ignore[arg-type]

    def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        data, inverse = numerics.quantize(matrix, quantizer)[:2]
        if mx:
            return data, pack_scales(inverse, Scales.MX)
        return data, inverse.t().clone(memory_format=torch.contiguous_format)

    data, inverse = packed(values)
    turned, inverse_across = data.new_empty(0), inverse.new_empty(0)
    if across:
        turned, inverse_across = packed(values.t().contiguous())
    none = x.new_empty(0, dtype=torch.float32)
    total = values.sum(0, dtype=torch.float32)[None] if sums else none
    return data, turned, inverse, inverse_across, total


_blocks_op.register_fake(
    lambda name, x, dy, format, eps, kind, across, sums: _block_room(
        Product(name, x, dy), format, kind in get_args(ScaleRounding), across, sums
    )
)


def _contiguous(name: str, x: Tensor, dy: Tensor | None) -> Product:
    return Product(name, x.contiguous(), None if dy is None else dy.contiguous())


def _runs(product: Product) -> bool:
    return has_kernel(product.x.device) and product.x.numel() > 0


def _room(
    product: Product, format: str, across: bool, record: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data, transpose, amaxes by tile and sums by rows of tiles, not filled in."""
    (rows, columns), x = product.shape, product.x
    dtype = fp8_format(format).dtype
    return (
        x.new_empty((rows, columns), dtype=dtype),
        x.new_empty((columns, rows) if across else (0,), dtype=dtype),
        x.new_empty(_parts(product) if record else 0, dtype=torch.float32),
        x.new_empty((_height(product), columns) if sums else (0,), dtype=torch.float32),
    )


def _block_room(
    product: Product, format: str, mx: bool, across: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Data, transpose, the inverse scales of both (float32 with their blocks first), and sums by
    rows of tiles, not filled in but for E8M0 scales that no tile writes."""
    data, transposed, none, parts = _room(product, format, across, False, sums)
    rows, columns = product.shape
    wide, high = -(-columns // BLOCK), -(-rows // BLOCK)
    if not mx:
        inverse_across = none.new_empty((high, columns) if across else (0,))
        return data, transposed, none.new_empty((wide, rows)), inverse_across, parts
    whole = rows % BLOCK == 0 and _width(product) % BLOCK == 0
    make = torch.empty if whole else torch.zeros
    inverse, inverse_across = (
        make(size, dtype=torch.uint8, device=none.device).view(torch.float8_e8m0fnu)
        for size in (wide * high * MX_TILE, wide * high * MX_TILE if across else 0)
    )
    return data, transposed, inverse, inverse_across, parts


def _height(product: Product) -> int:
    """How many tiles there are from top to bottom, for each of which there are sums."""
    if not has_kernel(product.x.device):
        return 1
    tiles: int = torch.sym_max(1, -(-product.shape[0] // BLOCK))  # type: ignore[no-untyped-call]
    return tiles


def _parts(product: Product) -> int:
    """How many amaxes there are of the parts of a product."""
    if not has_kernel(product.x.device):
        return 1
    return _height(product) * -(-_width(product) // BLOCK)


def _width(product: Product) -> int:
    """The columns that tiles are cut of: of the gradient of SwiGLU's input, those of one side."""
    two = product.name == "swiglu" and product.dy is not None
    return product.shape[1] // 2 if two else product.shape[1]


# The kernel


def _launch(
    product: Product,
    scaled: str,
    format: str = "e4m3",
    operands: Mapping[str, Tensor] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Run the kernel for a contiguous product that is not empty; `operands` are by the names of its
    arguments."""
    x = product.x
    constants = product_constants(product, scaled, format, converts_exactly(x.device))
    constants |= options
    for name, key in (("transposed", "ACROSS"), ("amaxes", "RECORD"), ("sums", "SUMS")):
        constants[key] = name in operands and operands[name].numel() > 0
    # An argument that is not used is there all the same; float8 goes as bytes, see `kernels`.
    given = [operands.get(name, x) for name in _OPERANDS]
    given = [one.view(torch.uint8) if one.dtype.itemsize == 1 else one for one in given]
    rows, width = x.shape[0], _width(product)
    tiles = -(-rows // constants["ROWS"]) * -(-width // constants["COLUMNS"])
    dy = x if product.dy is None else product.dy
    with torch.cuda.device(x.get_device()):
        kernel()[(tiles,)](x, dy, *given, rows, width, **constants, **LAUNCH)


LAUNCH = OPTIONS | {"num_warps": 16}
_OPERANDS = ("scale", "data", "transposed", "inverse", "inverse_across", "amaxes", "sums")


def product_constants(product: Product, scaled: str, format: str, exact: bool) -> dict[str, Any]:
    """What one variant of the kernel is compiled with; see `kernels.format_constants`.

    `scaled`: "given", by one scale; "blocks" or "mx", by each block's own; "none", not cast at all.
    """
    dtype = product.x.dtype
    return {
        **format_constants(format, exact),
        **NO_E8M0,
        "NAME": product.name,
        "BACKWARD": product.dy is not None,
        "DTYPE": triton_dtype(dtype),
        "SCALED": scaled,
        "ACROSS": True,
        "RECORD": True,
        "SUMS": False,
        "EPS": 0.0,
        "OVERFLOW": min(torch.finfo(dtype).max, FLT_MAX),
        "POWER_OF_TWO": False,
        "ROWS": BLOCK,
        "COLUMNS": BLOCK,
    }


@cache
def kernel() -> Any:
    """The kernel, to be launched as `kernel()[grid](...)`."""
    global tl, _amax, _scale_of, _codes, _load, _rounded, _forward, _of_gate, _of_value, _of_x, _put
    global _put_mx
    import triton
    import triton.language as tl

    _amax, _scale_of, _codes, _put_mx, _ = device_functions()
    _load, _rounded = triton.jit(_load), triton.jit(_rounded)
    _forward, _of_x = triton.jit(_forward), triton.jit(_of_x)
    _of_gate, _of_value = triton.jit(_of_gate), triton.jit(_of_value)
    _put = triton.jit(_put)
    return triton.jit(_cast_product, do_not_specialize_on_alignment=["scale"])


def _cast_product(
    x: tl.tensor, dy: tl.tensor, scale: tl.tensor, data: tl.tensor, transposed: tl.tensor,
    inverse: tl.tensor, inverse_across: tl.tensor, amaxes: tl.tensor, sums: tl.tensor,
    rows: tl.tensor, width: tl.tensor,
    NAME: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
    ACROSS: tl.constexpr, RECORD: tl.constexpr, SUMS: tl.constexpr, EPS: tl.constexpr,
    OVERFLOW: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
    MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    EXPONENTS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of a product of `width` columns, in Triton's language; of the gradient of SwiGLU's
    input both sides, which read the same."""
    tile = tl.program_id(0)
    wide = tl.cdiv(width, COLUMNS)
    down, block = tile // wide, tile % wide
    row = down * ROWS + tl.arange(0, ROWS)[:, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = column < width
    inside = (row < rows) & there
    if NAME == "swiglu":
        gate = _load(x, row, column, 2 * width, inside)
        value = _load(x + width, row, column, 2 * width, inside)
        if BACKWARD:
            gradient = _load(dy, row, column, width, inside)
            first = _of_gate(gate, value, gradient, DTYPE, EXACT)
        else:
            activated = _rounded(gate / (1.0 + tl.exp(-gate)), DTYPE, EXACT)
            first = _rounded(activated * value, DTYPE, EXACT)
    else:
        first = _load(x, row, column, width, inside)
        if BACKWARD:
            gradient = _load(dy, row, column, width, inside)
            first = _of_x(first, gradient, NAME, DTYPE, EXACT)
        elif NAME != "cast":
            first = _forward(first, NAME, DTYPE, EXACT)
    columns = width
    if NAME == "swiglu" and BACKWARD:
        columns = 2 * width
    # fmt: off
    _put(first, down, block, row, column, there, rows, columns, scale, data, transposed, inverse,
         inverse_across, sums, SCALED, ACROSS, SUMS, EPS, OVERFLOW, POWER_OF_TWO, FLOAT8, LARGEST,
         MAGIC, LEAST_SPACING, EXACT, HALF, EXPONENTS, INVERSE, ROWS, COLUMNS, PART)
    if RECORD:
        largest = _amax(first)
    if NAME == "swiglu" and BACKWARD:
        second = _of_value(gate, gradient, DTYPE, EXACT)
        _put(second, down, block + width // COLUMNS, row, column + width, there, rows, columns,
             scale, data, transposed, inverse, inverse_across, sums, SCALED, ACROSS, SUMS, EPS,
             OVERFLOW, POWER_OF_TWO, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT, HALF, EXPONENTS,
             INVERSE, ROWS, COLUMNS, PART)
        if RECORD:
            largest = tl.maximum(largest, _amax(second))
    # fmt: on
    if RECORD:
        tl.store(amaxes + tile, largest)


def _load(
    x: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    values = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    return values.to(tl.float32)


def _rounded(values: tl.tensor, DTYPE: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """float32 values, rounded to what `DTYPE` has."""
    if tl.bfloat16 == DTYPE and not EXACT:  # the interpreter does not round to even
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(DTYPE).to(tl.float32)


def _forward(
    x: tl.tensor, NAME: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """`ACTIVATIONS[NAME]`, but for SwiGLU."""
    if NAME == "relu2":
        held = tl.where(x <= 0.0, 0.0, x)  # keeps NaN
        y = held * held
    elif NAME == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, and loses nothing where tanh is near -1.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return _rounded(y, DTYPE, EXACT)


def _of_x(
    x: tl.tensor, dy: tl.tensor, NAME: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """`GRADIENTS[NAME]`, but for SwiGLU."""
    if NAME == "relu2":
        slope = _rounded(2.0 * tl.where(x <= 0.0, 0.0, x), DTYPE, EXACT)
    elif NAME == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = below + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)
    else:
        tl.static_assert(NAME == "gelu_tanh")
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        share, rest = 1.0 / (1.0 + tl.exp(-twice)), 1.0 / (1.0 + tl.exp(twice))
        slope = share + x * share * rest * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    gradient = _rounded(dy * slope, DTYPE, EXACT)
    return tl.where(x <= 0.0, 0.0, gradient) if NAME == "relu2" else gradient


def _of_gate(
    gate: tl.tensor, value: tl.tensor, dy: tl.tensor, DTYPE: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """The gradient of SwiGLU's gate."""
    share = 1.0 / (1.0 + tl.exp(-gate))
    slope = share * (1.0 + gate * (1.0 - share))
    return _rounded(_rounded(dy * value, DTYPE, EXACT) * slope, DTYPE, EXACT)


def _of_value(
    gate: tl.tensor, dy: tl.tensor, DTYPE: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """The gradient of SwiGLU's value."""
    activated = _rounded(gate / (1.0 + tl.exp(-gate)), DTYPE, EXACT)
    return _rounded(dy * activated, DTYPE, EXACT)


def _put(
    values: tl.tensor, down: tl.tensor, block: tl.tensor, row: tl.tensor, column: tl.tensor,
    there: tl.tensor, rows: tl.tensor, columns: tl.tensor, scale: tl.tensor, data: tl.tensor,
    transposed: tl.tensor, inverse: tl.tensor, inverse_across: tl.tensor, sums: tl.tensor,
    SCALED: tl.constexpr, ACROSS: tl.constexpr, SUMS: tl.constexpr, EPS: tl.constexpr,
    OVERFLOW: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOAT8: tl.constexpr, LARGEST: tl.constexpr,
    MAGIC: tl.constexpr, LEAST_SPACING: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    EXPONENTS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """Write what is wanted of a tile's values in float32, which are 0 outside."""
    if SUMS:
        total = tl.sum(values, axis=0)[None, :]
        tl.store(sums + down.to(tl.int64) * columns + column, total, mask=there)
    inside = (row < rows) & there
    along = row.to(tl.int64) * columns + column
    across = column.to(tl.int64) * rows + row
    if SCALED == "given":
        codes = _codes(values * tl.load(scale), FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
        tl.store(data + along, codes, mask=inside)
        if ACROSS:
            tl.store(transposed + across, codes, mask=inside)
    if SCALED == "blocks":
        sizes = tl.where(values == values, tl.abs(values), 0.0)
        largest = tl.max(sizes, axis=1)[:, None]
        scales = _scale_of(largest, LARGEST, EPS, OVERFLOW, POWER_OF_TWO)
        codes = _codes(values * scales, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
        tl.store(data + along, codes, mask=inside)
        out = tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
        tl.store(inverse + block * rows + row, out, mask=row < rows)
        if ACROSS:
            largest = tl.max(sizes, axis=0)[None, :]
            scales = _scale_of(largest, LARGEST, EPS, OVERFLOW, POWER_OF_TWO)
            codes = _codes(values * scales, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT)
            tl.store(transposed + across, codes, mask=inside)
            out = tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
            tl.store(inverse_across + down * columns + column, out, mask=there)
    if SCALED == "mx":
        # fmt: off
        _put_mx(values, row, column, inside, rows, columns, data + along, transposed + across,
                inverse, inverse_across, ACROSS, FLOAT8, LARGEST, MAGIC, LEAST_SPACING, EXACT, HALF,
                EXPONENTS, INVERSE, ROWS, COLUMNS, PART)
        # fmt: on
