"""FP8 operands from what a layer before them gave, in one pass: an activation or its backward pass,
then the cast, the transpose, the amax and the sums over rows, none of whose input is written first.

A `Product` says what is cast. On CUDA GPUs with FP8 a Triton kernel computes its elements in
registers, tile by tile, and writes both copies 16 bytes at a time; elsewhere torch computes them.
Rounded to the dtype of its tensors is whatever eager code would round, so casts and ReLU^2 are the
same to the bit. SwiGLU and GELU differ from eager code as exp, erf and divisions differ: by less
than 2^-20 of a value, or of its largest term, before it is rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer, ScaleRounding, fp8_format
from fp8stack.layers.kernels.activations import ACTIVATIONS, GRADIENTS
from fp8stack.layers.kernels.scaled_gemm import ScaleLayout, pack_scales
from fp8stack.layers.kernels.variants import (
    MX_TILE,
    OPTIONS,
    KernelVariant,
    converts_exactly,
    has_kernel,
    variant,
)
from fp8stack.numerics.operators import operator_on_any_device

BLOCK = 128  # elements of a row, or of a column, that share a float32 scale; a tile has as many
LAUNCH = OPTIONS | {"num_warps": 16}
_OPERANDS = ("scale", "data", "transposed", "inverse", "inverse_across", "amaxes", "sums")


class Product(NamedTuple):
    """A matrix that is not in memory.

    The activation `name` of `x` [rows, columns], or with `dy`, the gradient of the activation's
    output, the gradient of `x`. "cast" is `x` itself. SwiGLU halves the columns.
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
    """The results of a cast; None for results that were not requested. All but the scales of blocks
    are contiguous.

    Attributes:
        data: float8 [rows, columns].
        transposed: float8 [columns, rows]; with scales of blocks, not the transpose of `data`.
        amax: float32, 0-dim, NaN ignored.
        inv_scale: the scales of blocks, float32 [rows, columns / 128] or E8M0, laid out by
        `scaled_gemm.pack_scales`.
        inv_scale_across: the scales of the blocks of `transposed`.
        sums: the sums over rows, float32 [columns].
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
    product = Product("cast", x)
    copies = cast_product(product, scale, format, across=across, record=record, sums=False)
    return copies[:3]


def product_amax(product: Product) -> Tensor:
    """The amax of a product, which is not written to memory: float32, 0-dim, NaN ignored."""
    largest: Tensor = _amax_op(*product).max()
    return largest


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
    data, transposed, amaxes, partial_sums = _cast_op(*product, scale, format, across, record, sums)
    return Copies(
        data,
        transposed if across else None,
        amaxes.max() if record else None,  # fused with its reader in compiled code
        sums=partial_sums.sum(0) if sums else None,
    )


def cast_blocks(product: Product, quantizer: Quantizer, *, across: bool, sums: bool) -> Copies:
    """A product cast in blocks of 1 x 128, or of 1 x 32 with E8M0 scales, and if `across` its
    transpose as well, each with scales of its own: `numerics.quantize` and `pack_scales`, to the
    bit. See `cast_product`."""
    mx = quantizer.scale == "e8m0"
    kind = quantizer.scale_rounding if mx else quantizer.scale
    data, transposed, inverse, inverse_across, partial_sums = _blocks_op(
        *product, quantizer.format, quantizer.eps, kind, across, sums
    )
    return Copies(
        data,
        transposed if across else None,
        None,
        inverse if mx else inverse.t(),
        (inverse_across if mx else inverse_across.t()) if across else None,
        partial_sums.sum(0) if sums else None,
    )


# The operators. Results that were not requested are empty.


@operator_on_any_device("product_amax", lambda *product: _amaxes(Product(*product)))
def _amax_op(name: str, x: Tensor, dy: Tensor | None) -> Tensor:
    product = _contiguous(name, x, dy)
    if not _runs(product):
        return numerics.amax(product.values()).view(1)
    amaxes = _amaxes(product)
    _launch(product, Quantizer(), "none", amaxes=amaxes)
    return amaxes


@operator_on_any_device(
    "cast_product",
    lambda name, x, dy, scale, format, *outputs: tuple(
        _room(Product(name, x, dy), format, "given", *outputs).values()
    ),
)
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
        outputs = _room(product, format, "given", across, record, sums)
        quantizer = Quantizer(format=format)
        _launch(product, quantizer, "given", scale=scale, **outputs)
        return tuple(outputs.values())  # type: ignore[return-value]
    values = product.values()
    data = numerics.cast_to_fp8(values, scale, format)
    turned = data.t().clone(memory_format=torch.contiguous_format) if across else data.new_empty(0)
    amax = numerics.amax(values).view(1) if record else x.new_empty(0, dtype=torch.float32)
    return data, turned, amax, _sums(values, sums)


@operator_on_any_device(
    "cast_product_blocks",
    lambda name, x, dy, format, eps, kind, across, sums: tuple(
        _room(Product(name, x, dy), format, _scales(kind), across, False, sums).values()
    ),
)
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
    product, scales = _contiguous(name, x, dy), _scales(kind)
    rules: Any = {"block": (1, BLOCK), "scale": kind, "eps": eps}
    if scales == "mx":
        rules = {"block": (1, 32), "scale": "e8m0", "scale_rounding": kind}
    quantizer = Quantizer(format=format, **rules)
    if _runs(product):
        outputs = _room(product, format, scales, across, False, sums)
        _launch(product, quantizer, scales, **outputs)
        return tuple(outputs.values())  # type: ignore[return-value]

    def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        data, inverse = numerics.quantize(matrix, quantizer)[:2]
        if scales == "mx":
            return data, pack_scales(inverse, ScaleLayout.MX)
        return data, inverse.t().clone(memory_format=torch.contiguous_format)

    values = product.values()
    data, inverse = packed(values)
    turned = data.new_empty(0), inverse.new_empty(0)
    if across:
        turned = packed(values.t().contiguous())
    return data, turned[0], inverse, turned[1], _sums(values, sums)


def _contiguous(name: str, x: Tensor, dy: Tensor | None) -> Product:
    return Product(name, x.contiguous(), None if dy is None else dy.contiguous())


def _runs(product: Product) -> bool:
    return has_kernel(product.x.device) and product.x.numel() > 0


def _scales(kind: str) -> str:
    """The `Variant.scales` of a kind of block scales."""
    return "mx" if kind in get_args(ScaleRounding) else "rows"


def _sums(values: Tensor, needed: bool) -> Tensor:
    return values.sum(0, dtype=torch.float32)[None] if needed else values.new_empty(0).float()


def _amaxes(product: Product) -> Tensor:
    high, wide = _tiles(product)
    return product.x.new_empty(high * wide, dtype=torch.float32)


def _room(
    product: Product, format: str, scales: str, across: bool, record: bool, sums: bool
) -> dict[str, Tensor]:
    """Empty tensors that the kernel fills, by the names of its arguments: amaxes by tile, sums by
    rows of tiles, inverse scales in float32 with their blocks first."""
    (rows, columns), x, dtype = product.shape, product.x, fp8_format(format).dtype
    outputs = {
        "data": x.new_empty((rows, columns), dtype=dtype),
        "transposed": x.new_empty((columns, rows) if across else (0,), dtype=dtype),
    }
    none = x.new_empty(0, dtype=torch.float32)
    wide, high = -(-columns // BLOCK), -(-rows // BLOCK)
    if scales == "given":
        outputs["amaxes"] = _amaxes(product) if record else none
    elif scales == "rows":
        outputs["inverse"] = none.new_empty((wide, rows))
        outputs["inverse_across"] = none.new_empty((high, columns) if across else (0,))
    else:  # zeros where no tile writes
        tiles_fit = rows % BLOCK == 0 and _width(product) % BLOCK == 0
        make = torch.empty if tiles_fit else torch.zeros
        for name, size in (("inverse", wide * high), ("inverse_across", wide * high * across)):
            codes = make(size * MX_TILE, dtype=torch.uint8, device=x.device)
            outputs[name] = codes.view(torch.float8_e8m0fnu)
    outputs["sums"] = none.new_empty((_tiles(product)[0], columns) if sums else (0,))
    return outputs


def _tiles(product: Product) -> tuple[int, int]:
    """The numbers of tiles from top to bottom and from left to right; 1 and 1 without a kernel."""
    if not has_kernel(product.x.device):
        return 1, 1
    high = torch.sym_max(1, -(-product.shape[0] // BLOCK))  # type: ignore[no-untyped-call]
    return high, -(-_width(product) // BLOCK)


def _width(product: Product) -> int:
    """The columns that are divided into tiles; for the gradient of SwiGLU's input, the columns of
    one half."""
    two = product.name == "swiglu" and product.dy is not None
    return product.shape[1] // 2 if two else product.shape[1]


def _launch(product: Product, quantizer: Quantizer, scales: str, **operands: Tensor) -> None:
    """Run the kernel for a contiguous product that is not empty; `operands` are by the names of its
    arguments."""
    from fp8stack.layers.kernels import triton_kernels

    x, (high, wide) = product.x, _tiles(product)
    requested = {
        key: name in operands and operands[name].numel() > 0
        for key, name in (("across", "transposed"), ("record", "amaxes"), ("sums", "sums"))
    }
    exact = converts_exactly(x.device)
    compiled_for = product_variant(product, quantizer, scales, exact, **requested)
    # Unused arguments need a tensor as well. Float8 is passed as bytes.
    tensors = [operands.get(name, x) for name in _OPERANDS]
    tensors = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]
    dy = x if product.dy is None else product.dy
    sizes = x.shape[0], _width(product)
    with torch.cuda.device(x.get_device()):
        triton_kernels.cast_product[(high * wide,)](
            x, dy, *tensors, *sizes, HOW=compiled_for, **LAUNCH
        )


def product_variant(
    product: Product, quantizer: Quantizer, scales: str, exact: bool, **requested: bool
) -> KernelVariant:
    """The variant of the kernel for a product; see `variants.KernelVariant`."""
    name, backward = product.name, product.dy is not None
    return variant(
        quantizer, scales, product.x.dtype, exact, name=name, backward=backward, **requested
    )
