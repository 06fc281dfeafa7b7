"""FP8 operands from what a layer before them gave, in one pass: an activation or its backward pass,
then the cast, the transpose, the amax and the sums over rows, none of whose input is written first.

A `FusedInput` says what is cast. On CUDA GPUs with FP8 a Triton kernel computes its elements in
registers, tile by tile, and writes both copies 16 bytes at a time; elsewhere torch computes them.
Rounded to the dtype of its tensors is whatever eager code would round, so casts and ReLU^2 are the
same to the bit. SwiGLU and GELU differ from eager code as exp, erf and divisions differ: by less
than 2^-20 of a value, or of its largest term, before it is rounded.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer, fp8_format
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
_OPERANDS = (
    *("x", "dy", "scale", "data", "transposed", "inverse", "columnwise_inverse", "amaxes", "sums"),
)
_quantizer = cache(Quantizer)  # constructed once, as its checks take longer than a launch


class FusedInput(NamedTuple):
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
        columnwise_inv_scale: the scales of the blocks of `transposed`.
        sums: the sums over rows, float32 [columns].
    """

    data: Tensor
    transposed: Tensor | None = None
    amax: Tensor | None = None
    inv_scale: Tensor | None = None
    columnwise_inv_scale: Tensor | None = None
    sums: Tensor | None = None


def cast_transpose(
    x: Tensor, scale: Tensor, format: str = "e4m3", *, columnwise: bool = True, record: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`cast_to_fp8(x, scale, format)`, its transpose and `amax(x)`, to the bit; `x` [rows, columns]
    in float32, bfloat16 or float16. For the arguments see `cast_product`."""
    product = FusedInput("cast", x)
    copies = cast_product(product, scale, format, columnwise=columnwise, record=record, sums=False)
    return copies[:3]


def product_amax(product: FusedInput) -> Tensor:
    """The amax of a product, which is not written to memory: float32, 0-dim, NaN ignored."""
    largest: Tensor = _amax_op(*product).max()
    return largest


def cast_product(
    product: FusedInput, scale: Tensor, format: str, *, columnwise: bool, record: bool, sums: bool
) -> Copies:
    """A product cast with one scale. Nothing waits for the device.

    Args:
        product: what is cast.
        scale: float32, 0-dim, on the product's device; multiplies into FP8.
        format: "e4m3" or "e5m2".
        columnwise: whether the transpose is wanted.
        record: whether the amax is wanted.
        sums: whether the sums over rows are wanted.

    Raises:
        ValueError: an unknown format.
    """
    data, transposed, amaxes, partial_sums = _cast_op(
        *product, scale, format, columnwise, record, sums
    )
    return Copies(
        data,
        transposed if columnwise else None,
        amaxes.max() if record else None,  # fused with its reader in compiled code
        sums=partial_sums.sum(0) if sums else None,
    )


def cast_blocks(
    product: FusedInput, quantizer: Quantizer, *, columnwise: bool, sums: bool
) -> Copies:
    """A product cast in blocks of 1 x 128, or of 1 x 32 with E8M0 scales, and if `columnwise` its
    transpose as well, each with scales of its own: `numerics.quantize` and `pack_scales`, to the
    bit. See `cast_product`."""
    fields = quantizer.format, quantizer.scale, quantizer.scale_rounding, quantizer.eps
    data, transposed, inverse, columnwise_inverse, partial_sums = _blocks_op(
        *product, *fields, columnwise, sums
    )
    if quantizer.scale != "e8m0":
        inverse, columnwise_inverse = (
            inverse.t(),
            columnwise_inverse.t() if columnwise else columnwise_inverse,
        )
    return Copies(
        data,
        transposed if columnwise else None,
        None,
        inverse,
        columnwise_inverse if columnwise else None,
        partial_sums.sum(0) if sums else None,
    )


# The operators. Results that were not requested are empty.


@operator_on_any_device(
    "product_amax", lambda *product: _allocate(FusedInput(*product), None, False, True, False)[0]
)
def _amax_op(name: str, x: Tensor, dy: Tensor | None) -> Tensor:
    product = _contiguous(name, x, dy)
    if not _runs(product):
        return numerics.amax(product.values()).view(1)
    return _run(product, None, None, False, True, False)[0]


@operator_on_any_device(
    "cast_product",
    lambda name, x, dy, scale, format, *outputs: _allocate(
        FusedInput(name, x, dy), _quantizer(format=format), *outputs
    ),
)
def _cast_op(
    name: str,
    x: Tensor,
    dy: Tensor | None,
    scale: Tensor,
    format: str,
    columnwise: bool,
    record: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    product = _contiguous(name, x, dy)
    if _runs(product):
        outputs: Any = _run(product, scale, _quantizer(format=format), columnwise, record, sums)
        return outputs  # type: ignore[no-any-return]
    values = product.values()
    data = numerics.cast_to_fp8(values, scale, format)
    transposed = data.new_empty(0)
    if columnwise:
        transposed = data.t().clone(memory_format=torch.contiguous_format)
    amax = numerics.amax(values).view(1) if record else x.new_empty(0, dtype=torch.float32)
    return data, transposed, amax, _sums(values, sums)


@operator_on_any_device(
    "cast_product_blocks",
    lambda name, x, dy, format, scale, scale_rounding, eps, columnwise, sums: _allocate(
        FusedInput(name, x, dy),
        _of_blocks(format, scale, scale_rounding, eps),
        columnwise,
        False,
        sums,
    ),
)
def _blocks_op(
    name: str,
    x: Tensor,
    dy: Tensor | None,
    format: str,
    scale: str,
    scale_rounding: str,
    eps: float,
    columnwise: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    product, quantizer = _contiguous(name, x, dy), _of_blocks(format, scale, scale_rounding, eps)
    if _runs(product):
        outputs: Any = _run(product, None, quantizer, columnwise, False, sums)
        return outputs  # type: ignore[no-any-return]

    def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        data, inverse = numerics.quantize(matrix, quantizer)[:2]
        if quantizer.scale == "e8m0":
            return data, pack_scales(inverse, ScaleLayout.MX)
        return data, inverse.t().clone(memory_format=torch.contiguous_format)

    values = product.values()
    data, inverse = packed(values)
    transposed, columnwise_inverse = data.new_empty(0), inverse.new_empty(0)
    if columnwise:
        transposed, columnwise_inverse = packed(values.t().contiguous())
    return data, transposed, inverse, columnwise_inverse, _sums(values, sums)


def _of_blocks(format: str, scale: str, scale_rounding: str, eps: float) -> Quantizer:
    """The quantizer that `cast_blocks` was given."""
    block = (1, 32) if scale == "e8m0" else (1, BLOCK)
    rules: dict[str, Any] = {"scale": scale, "scale_rounding": scale_rounding}
    return _quantizer(format=format, block=block, eps=eps, **rules)


def _contiguous(name: str, x: Tensor, dy: Tensor | None) -> FusedInput:
    return FusedInput(name, x.contiguous(), None if dy is None else dy.contiguous())


def _runs(product: FusedInput) -> bool:
    return has_kernel(product.x.device) and product.x.numel() > 0


def _sums(values: Tensor, needed: bool) -> Tensor:
    return values.sum(0, dtype=torch.float32)[None] if needed else values.new_empty(0).float()


class _Output(NamedTuple):
    """A tensor that the kernel fills, except for `zeros` where no tile writes."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    zeros: bool = False

    def allocate(self, x: Tensor) -> Tensor:
        """The tensor, on the device of `x`."""
        if self.zeros:  # of a dtype without numbers
            return x.new_zeros(self.shape, dtype=torch.uint8).view(self.dtype)
        return x.new_empty(self.shape, dtype=self.dtype)


def _outputs(
    product: FusedInput, quantizer: Quantizer | None, columnwise: bool, record: bool, sums: bool
) -> dict[str, _Output]:
    """The outputs of an operator, by the names of the kernel's arguments: amaxes by tile, sums by
    rows of tiles, inverse scales in float32 with their blocks first. Without a quantizer, only the
    amaxes."""
    (rows, columns), (high, wide) = product.shape, _tiles(product)
    amaxes = _Output((high * wide,) if record else (0,))
    if quantizer is None:
        return {"amaxes": amaxes}
    dtype = fp8_format(quantizer.format).dtype
    assert dtype is not None
    outputs = {
        "data": _Output((rows, columns), dtype),
        "transposed": _Output((columns, rows) if columnwise else (0,), dtype),
    }
    blocks_wide, blocks_high = -(-columns // BLOCK), -(-rows // BLOCK)
    if quantizer.per_tensor:
        outputs["amaxes"] = amaxes
    elif quantizer.scale == "e8m0":
        size = blocks_wide * blocks_high * MX_TILE
        tiles_fit = rows % BLOCK == 0 and _width(product) % BLOCK == 0
        outputs["inverse"] = _Output((size,), torch.float8_e8m0fnu, not tiles_fit)
        outputs["columnwise_inverse"] = _Output(
            (size * columnwise,), torch.float8_e8m0fnu, not tiles_fit
        )
    else:
        outputs["inverse"] = _Output((blocks_wide, rows))
        outputs["columnwise_inverse"] = _Output((blocks_high, columns) if columnwise else (0,))
    outputs["sums"] = _Output((high, columns) if sums else (0,))
    return outputs


def _allocate(product: FusedInput, *call: Any) -> tuple[Tensor, ...]:
    """Tensors for the `_outputs`."""
    return tuple(output.allocate(product.x) for output in _outputs(product, *call).values())


def _tiles(product: FusedInput) -> tuple[int, int]:
    """The numbers of tiles from top to bottom and from left to right; 1 and 1 without a kernel."""
    if not has_kernel(product.x.device):
        return 1, 1
    high = torch.sym_max(1, -(-product.shape[0] // BLOCK))  # type: ignore[no-untyped-call]
    return high, -(-_width(product) // BLOCK)


def _width(product: FusedInput) -> int:
    """The columns that are divided into tiles; for the gradient of SwiGLU's input, the columns of
    one half."""
    two = product.name == "swiglu" and product.dy is not None
    return product.shape[1] // 2 if two else product.shape[1]


class _Kernel:
    """The kernel for products of one kind: the outputs, and the launch."""

    def __init__(self, product: FusedInput, quantizer: Quantizer | None, *outputs: bool) -> None:
        from fp8stack.layers.kernels import triton_kernels
        from fp8stack.layers.kernels.launch import KernelLaunch

        high, wide = _tiles(product)
        requested = dict(zip(("columnwise", "record", "sums"), outputs, strict=True))
        named = _outputs(product, quantizer, *outputs)
        self._outputs = list(named.values())
        # x stands for the tensors that the kernel does not use.
        indices = {"x": 0, "dy": 1, "scale": 2} | {name: 3 + i for i, name in enumerate(named)}
        self._in_order = itemgetter(*(indices.get(name, 0) for name in _OPERANDS))
        exact = converts_exactly(product.x.device)
        compiled_for = product_variant(product, quantizer, exact, **requested)
        sizes = product.x.shape[0], _width(product)
        kernel, constants = triton_kernels.cast_product, {"HOW": compiled_for}
        self._launch = KernelLaunch(kernel, high * wide, sizes, constants, LAUNCH)

    def run(self, product: FusedInput, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Launch it."""
        _, x, dy = product
        outputs = tuple([output.allocate(x) for output in self._outputs])
        inputs = x, x if dy is None else dy, x if scale is None else scale
        self._launch(self._in_order(inputs + outputs))
        return outputs


_KERNELS: dict[Any, _Kernel] = {}
_MOST_KERNELS = 4096  # a model has few, but prompts may have any length


def _run(product: FusedInput, scale: Tensor | None, *call: Any) -> tuple[Tensor, ...]:
    """The `_outputs` of the kernel for a contiguous product that is not empty. `call` is the
    quantizer, None for the amax alone, and whether columnwise, record and sums are requested."""
    name, x, dy = product
    key = name, x.shape, x.dtype, dy if dy is None else dy.dtype, x.device, call
    kernel = _KERNELS.get(key)
    if kernel is None:
        if len(_KERNELS) >= _MOST_KERNELS:
            _KERNELS.clear()
        kernel = _KERNELS[key] = _Kernel(product, *call)
    return kernel.run(product, scale)


def product_variant(
    product: FusedInput, quantizer: Quantizer | None, exact: bool, **requested: bool
) -> KernelVariant:
    """The variant of the kernel for a product, without a quantizer for its amax alone; see
    `variants.KernelVariant`."""
    scales = "none"
    if quantizer is not None:
        in_blocks = "mx" if quantizer.scale == "e8m0" else "rows"
        scales = "given" if quantizer.per_tensor else in_blocks
    of_product = {"name": product.name, "backward": product.dy is not None}
    quantizer = quantizer or _quantizer()
    return variant(quantizer, scales, product.x.dtype, exact, **of_product, **requested)
