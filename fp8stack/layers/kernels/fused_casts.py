"""Casts fused with the computation of their input: an activation or its backward pass, the cast,
the transpose, the amax and the sums over rows, in one pass.

A `FusedInput` describes the input, which is not written to memory. On CUDA GPUs with FP8, a Triton
kernel computes its elements in registers, tile by tile, and writes both copies 16 bytes at a time;
elsewhere torch computes them. The kernel rounds where eager code rounds, so casts and ReLU^2 equal
eager code to the bit. SwiGLU and GELU differ from eager code as exp, erf and divisions differ: by
less than 2^-20 of a value, or of its largest term, before it is rounded.
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

BLOCK = 128  # elements of a row or column that share a float32 scale


class Tile(NamedTuple):
    """The elements that one program of the kernel casts, and its number of warps."""

    rows: int
    columns: int
    warps: int


TILES = {
    "none": Tile(64, 64, 4),
    "given": Tile(64, 64, 4),
    "mx": Tile(64, 64, 4),
    "rows": Tile(BLOCK, BLOCK, 8),
}
"""The tile for each kind of scales, see `KernelVariant.scales`: by the registers that ptxas gives a
thread, not measured on a GPU. With float32 scales of blocks a tile is a block, high and wide."""
_ARGUMENTS = (
    *("x", "dy", "scale", "data", "transposed", "inverse", "columnwise_inverse", "amaxes", "sums"),
)
_quantizer = cache(Quantizer)  # constructed once, as its checks take longer than a launch


class FusedInput(NamedTuple):
    """A matrix that is computed as it is cast.

    Without `dy`, it is the activation `name` of `x` [rows, columns]; SwiGLU halves the columns.
    With `dy`, the gradient of the activation's output, it is the gradient of `x`. The activation
    "cast" is the identity.
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
        """The matrix, computed by torch."""
        if self.name == "cast":
            return self.x
        if self.dy is None:
            return ACTIVATIONS[self.name](self.x)
        return GRADIENTS[self.name](self.x, self.dy)


class Copies(NamedTuple):
    """The results of a cast; None for results that were not requested. All are contiguous, except
    scales of blocks.

    Attributes:
        data: float8 [rows, columns].
        transposed: float8 [columns, rows]; not the transpose of `data` if blocks have scales.
        amax: float32, 0-dim, NaN ignored.
        inv_scale: the inverse scales of blocks: float32 [rows, columns / 128], or E8M0 in the
            layout of `scaled_gemm.pack_scales`.
        columnwise_inv_scale: the inverse scales of the blocks of `transposed`.
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
    source = FusedInput("cast", x)
    copies = cast_product(source, scale, format, columnwise=columnwise, record=record, sums=False)
    return copies[:3]


def product_amax(source: FusedInput) -> Tensor:
    """The amax of a fused input: float32, 0-dim, NaN ignored."""
    largest: Tensor = _amax_op(*source).max()
    return largest


def cast_product(
    source: FusedInput,
    scale: Tensor,
    format: str,
    *,
    columnwise: bool,
    record: bool,
    sums: bool,
) -> Copies:
    """Cast a fused input with one scale, without synchronizing with the device.

    Args:
        source: the matrix to cast.
        scale: float32, 0-dim, on the input's device; multiplies into FP8.
        format: "e4m3" or "e5m2".
        columnwise: whether the transpose is needed.
        record: whether the amax is needed.
        sums: whether the sums over rows are needed.

    Raises:
        ValueError: an unknown format.
    """
    data, transposed, amaxes, partial_sums = _cast_op(
        *source, scale, format, columnwise, record, sums
    )
    return Copies(
        data,
        transposed if columnwise else None,
        amaxes.max() if record else None,  # fused with its reader in compiled code
        sums=partial_sums.sum(0) if sums else None,
    )


def cast_blocks(
    source: FusedInput, quantizer: Quantizer, *, columnwise: bool, sums: bool
) -> Copies:
    """Cast a fused input in blocks of 1 x 128, or of 1 x 32 with E8M0 scales, and if `columnwise`
    its transpose as well, with separate scales. The results equal `numerics.quantize` and
    `pack_scales` to the bit. See `cast_product`."""
    fields = quantizer.format, quantizer.scale, quantizer.scale_rounding, quantizer.eps
    data, transposed, inverse, columnwise_inverse, partial_sums = _blocks_op(
        *source, *fields, columnwise, sums
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
    "product_amax",
    lambda *source: _allocate(FusedInput(*source), None, False, True, False)[0],
)
def _amax_op(name: str, x: Tensor, dy: Tensor | None) -> Tensor:
    source = _contiguous(name, x, dy)
    if not _has_kernel_for(source):
        return numerics.amax(source.values()).view(1)
    return _run(source, None, None, False, True, False)[0]


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
    source = _contiguous(name, x, dy)
    if _has_kernel_for(source):
        outputs: Any = _run(source, scale, _quantizer(format=format), columnwise, record, sums)
        return outputs  # type: ignore[no-any-return]
    values = source.values()
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
        _block_quantizer(format, scale, scale_rounding, eps),
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
    source = _contiguous(name, x, dy)
    quantizer = _block_quantizer(format, scale, scale_rounding, eps)
    if _has_kernel_for(source):
        outputs: Any = _run(source, None, quantizer, columnwise, False, sums)
        return outputs  # type: ignore[no-any-return]

    def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        data, inverse = numerics.quantize(matrix, quantizer)[:2]
        if quantizer.scale == "e8m0":
            return data, pack_scales(inverse, ScaleLayout.MX)
        return data, inverse.t().clone(memory_format=torch.contiguous_format)

    values = source.values()
    data, inverse = packed(values)
    transposed, columnwise_inverse = data.new_empty(0), inverse.new_empty(0)
    if columnwise:
        transposed, columnwise_inverse = packed(values.t().contiguous())
    return data, transposed, inverse, columnwise_inverse, _sums(values, sums)


def _block_quantizer(format: str, scale: str, scale_rounding: str, eps: float) -> Quantizer:
    """The quantizer of `cast_blocks` with these fields."""
    block = (1, 32) if scale == "e8m0" else (1, BLOCK)
    scale_options: dict[str, Any] = {"scale": scale, "scale_rounding": scale_rounding}
    return _quantizer(format=format, block=block, eps=eps, **scale_options)


def _contiguous(name: str, x: Tensor, dy: Tensor | None) -> FusedInput:
    return FusedInput(name, x.contiguous(), None if dy is None else dy.contiguous())


def _has_kernel_for(source: FusedInput) -> bool:
    return has_kernel(source.x.device) and source.x.numel() > 0


def _sums(values: Tensor, needed: bool) -> Tensor:
    return values.sum(0, dtype=torch.float32)[None] if needed else values.new_empty(0).float()


class _Output(NamedTuple):
    """A tensor that the kernel fills. `zeros`: it begins with zeros, as tiles do not cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    zeros: bool = False

    def allocate(self, x: Tensor) -> Tensor:
        """The tensor, on the device of `x`."""
        if self.zeros:  # bytes, as E8M0 has no zero
            return x.new_zeros(self.shape, dtype=torch.uint8).view(self.dtype)
        return x.new_empty(self.shape, dtype=self.dtype)


def _outputs(
    source: FusedInput, quantizer: Quantizer | None, columnwise: bool, record: bool, sums: bool
) -> dict[str, _Output]:
    """The outputs of an operator, by the names of the kernel's arguments: amaxes of tiles, sums of
    rows of tiles, float32 inverse scales [blocks, rows or columns]. Without a quantizer, only the
    amaxes."""
    (rows, columns), (tiles_high, tiles_wide) = source.shape, _tiles(source, quantizer)
    amaxes = _Output((tiles_high * tiles_wide,) if record else (0,))
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
        tiles_fit = rows % BLOCK == 0 and _width(source) % BLOCK == 0
        outputs["inverse"] = _Output((size,), torch.float8_e8m0fnu, not tiles_fit)
        outputs["columnwise_inverse"] = _Output(
            (size * columnwise,), torch.float8_e8m0fnu, not tiles_fit
        )
    else:
        outputs["inverse"] = _Output((blocks_wide, rows))
        outputs["columnwise_inverse"] = _Output((blocks_high, columns) if columnwise else (0,))
    outputs["sums"] = _Output((tiles_high, columns) if sums else (0,))
    return outputs


def _allocate(source: FusedInput, *call: Any) -> tuple[Tensor, ...]:
    """Allocate the `_outputs`."""
    return tuple(output.allocate(source.x) for output in _outputs(source, *call).values())


def _tiles(source: FusedInput, quantizer: Quantizer | None) -> tuple[int, int]:
    """The numbers of tiles in a column and in a row of the matrix; 1 and 1 without a kernel."""
    if not has_kernel(source.x.device):
        return 1, 1
    tile = TILES[_scales(quantizer)]
    tiles_high = torch.sym_max(1, -(-source.shape[0] // tile.rows))  # type: ignore[no-untyped-call]
    return tiles_high, -(-_width(source) // tile.columns) * _halves(source)


def _scales(quantizer: Quantizer | None) -> str:
    """The kind of scales, see `KernelVariant.scales`; without a quantizer, "none"."""
    if quantizer is None:
        return "none"
    if quantizer.per_tensor:
        return "given"
    return "mx" if quantizer.scale == "e8m0" else "rows"


def _width(source: FusedInput) -> int:
    """The columns that are divided into tiles; for the gradient of SwiGLU's input, the columns of
    one half."""
    return source.shape[1] // _halves(source)


def _halves(source: FusedInput) -> int:
    return 2 if source.name == "swiglu" and source.dy is not None else 1


class _Kernel:
    """The kernel for fused inputs of one shape, dtype and operation: its outputs and its launch."""

    def __init__(self, source: FusedInput, quantizer: Quantizer | None, *outputs: bool) -> None:
        from fp8stack.layers.kernels import triton_kernels
        from fp8stack.layers.kernels.launch import KernelLaunch

        tiles_high, tiles_wide = _tiles(source, quantizer)
        requested = dict(zip(("columnwise", "record", "sums"), outputs, strict=True))
        kernel_outputs = _outputs(source, quantizer, *outputs)
        self._outputs = list(kernel_outputs.values())
        # Unused arguments of the kernel get x.
        indices = {"x": 0, "dy": 1, "scale": 2} | {
            name: 3 + i for i, name in enumerate(kernel_outputs)
        }
        self._in_order = itemgetter(*(indices.get(name, 0) for name in _ARGUMENTS))
        exact = converts_exactly(source.x.device)
        kernel_variant = product_variant(source, quantizer, exact, **requested)
        sizes = source.x.shape[0], _width(source)
        kernel, constants = triton_kernels.cast_product, {"HOW": kernel_variant}
        options = launch_options(quantizer)
        self._launch = KernelLaunch(kernel, tiles_high * tiles_wide, sizes, constants, options)

    def run(self, source: FusedInput, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Launch the kernel and return its outputs."""
        _, x, dy = source
        outputs = tuple([output.allocate(x) for output in self._outputs])
        inputs = x, x if dy is None else dy, x if scale is None else scale
        self._launch(self._in_order(inputs + outputs))
        return outputs


_KERNELS: dict[Any, _Kernel] = {}
_MAX_KERNELS = 4096  # a model has few, but prompts may have any length


def _run(source: FusedInput, scale: Tensor | None, *call: Any) -> tuple[Tensor, ...]:
    """Run the kernel on a contiguous input that is not empty. `call` is the quantizer, None for the
    amax alone, and whether columnwise, record and sums are requested."""
    name, x, dy = source
    key = name, x.shape, x.dtype, dy if dy is None else dy.dtype, x.device, call
    kernel = _KERNELS.get(key)
    if kernel is None:
        if len(_KERNELS) >= _MAX_KERNELS:
            _KERNELS.clear()
        kernel = _KERNELS[key] = _Kernel(source, *call)
    return kernel.run(source, scale)


def product_variant(
    source: FusedInput, quantizer: Quantizer | None, exact: bool, **requested: bool
) -> KernelVariant:
    """The variant of the kernel for a fused input; without a quantizer, for its amax alone. See
    `variants.KernelVariant`."""
    scales = _scales(quantizer)
    fields: dict[str, Any] = {"name": source.name, "backward": source.dy is not None}
    fields |= {"rows": TILES[scales].rows, "columns": TILES[scales].columns}
    fields["packs_rows"] = source.shape[0] % 16 == 0
    return variant(quantizer or _quantizer(), scales, source.x.dtype, exact, **fields, **requested)


def launch_options(quantizer: Quantizer | None) -> dict[str, Any]:
    """Triton's options for the launch of a variant."""
    return OPTIONS | {"num_warps": TILES[_scales(quantizer)].warps}
