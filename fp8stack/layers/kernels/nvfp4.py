"""Both NVFP4 copies of a matrix, by two kernels: one finds the amaxes behind the upper scales, the
other casts, transforms, draws, packs and transposes.

On CUDA GPUs the kernels are Triton's, and read the matrix once each; elsewhere torch computes the
same with `numerics.quantize`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales
from fp8stack.layers.kernels.variants import OPTIONS, converts_exactly, has_kernel, transpose_bytes
from fp8stack.numerics import RandomBits
from fp8stack.numerics.hadamard import MINUS
from fp8stack.numerics.hadamard import hadamard as transform
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.numerics.scales import OUT_OF_TWO_LEVELS

# The size of a kernel's squares, and the warps that treat one. No variant lacks registers, and an
# SM runs two squares or more, so that one loads while another computes. A square of a cast writes
# lines of 32 bytes in both directions, a sector of memory.
SQUARES = {"find_amaxes": (128, 16), "cast": (64, 8)}


@dataclass(frozen=True, kw_only=True)
class Nvfp4Variant:
    """The constants that the kernels are compiled for.

    Attributes:
        height: rows of a block that shares a scale, 1 or 16.
        tile: the rows and the columns of a tile, see `SQUARES`.
        hadamard: the size of the second copy's transform, 16 or 0; `minus` are its signs.
        columnwise: whether there is a second copy.
        stochastic: whether rounding is stochastic.
        bf16: whether the matrix is bfloat16.
        exact: see `variants.KernelVariant`.
    """

    tile: int
    hadamard: int
    bf16: bool
    exact: bool
    height: int = 1
    columnwise: bool = True
    stochastic: bool = False
    minus: int = MINUS[16]


def cast_nvfp4(
    x: Tensor,
    rowwise: Quantizer,
    columnwise: Quantizer | None,
    bits: tuple[RandomBits | None, RandomBits | None] = (None, None),
) -> tuple[Scaled, Scaled | None]:
    """A matrix for the GEMM over its columns and, if `columnwise` is given, the one over its rows.

    Args:
        x: [rows, columns], both divisible by 16; float32, bfloat16 or float16.
        rowwise: of the first copy, without a Hadamard transform.
        columnwise: of the second, with one of 16 or without; else like the first.
        bits: of each copy, where rounding is stochastic; of one seed, counter and first row.

    Returns:
        The copies as `scaled_gemm` takes them, the second one [columns, rows]: what
        `numerics.quantize` and `pack_scales` give, to the bit.
    """
    x = x.contiguous()
    hadamard = 0 if columnwise is None else columnwise.hadamard
    amaxes = _amaxes_op(x, hadamard)
    counter, streams, seed, first_row = None, None, 0, 0
    if drawn := [copy_bits for copy_bits in bits if copy_bits is not None]:
        counter, seed, first_row = drawn[0].counter, drawn[0].seed, int(drawn[0].first_row)
        streams = torch.stack([_tensor(copy_bits.stream, x.device) for copy_bits in drawn])
    height = (rowwise.blocks or (1, 1))[0]
    data, scales, turned, columnwise_scales = _cast_op(
        x, amaxes, height, hadamard, columnwise is not None, counter, streams, seed, first_row
    )
    upper_scales = torch.where(amaxes[1::2] > 0, torch.nan, amaxes[::2] * OUT_OF_TWO_LEVELS)
    first = Scaled(data, scales, ScaleLayout.NV, upper_scales[0])
    if columnwise is None:
        return first, None
    return first, Scaled(turned, columnwise_scales, ScaleLayout.NV, upper_scales[1])


def _tensor(stream: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(stream, Tensor):
        return stream
    return torch.full((), stream, dtype=torch.int64, device=device)  # waits for nothing


# The operators


@operator_on_any_device("nvfp4_amaxes", lambda x, hadamard: x.new_empty(4, dtype=torch.float32))
def _amaxes_op(x: Tensor, hadamard: int) -> Tensor:
    """The amax of a matrix and whether there is a NaN, 1 or 0; both for its first copy and its
    second one: float32 [4]."""
    if not _runs(x):
        copies = [x, transform(x, hadamard, 0)] if hadamard else [x]
        figures = [f for copy in copies for f in (numerics.amax(copy), copy.isnan().any())]
        stacked = torch.stack([figure.to(torch.float32) for figure in figures])
        return stacked.repeat(2 // len(copies))
    tile_amaxes = x.new_empty((_tiles("find_amaxes", x.shape), 4), dtype=torch.float32)
    launch = _launch("find_amaxes", x.dtype, x.device, tuple(x.shape), hadamard=hadamard)
    launch((x, tile_amaxes))
    return tile_amaxes.amax(0)


@operator_on_any_device(
    "cast_nvfp4", lambda x, amaxes, height, hadamard, columnwise, *_: _room(x, columnwise)
)
def _cast_op(
    x: Tensor,
    amaxes: Tensor,
    height: int,
    hadamard: int,
    columnwise: bool,
    counter: Tensor | None,
    streams: Tensor | None,
    seed: int,
    first_row: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and packed scales of both copies, empty for a copy that was not requested."""
    if not _runs(x):
        rounding: Any = "nearest" if counter is None else "stochastic"
        copies: list[Tensor] = []
        for place, turned in enumerate((False, True)[: 1 + columnwise]):
            quantizer = Quantizer(
                format="e2m1",
                block=(height, 16),
                scale="e4m3",
                rounding=rounding,
                hadamard=hadamard if turned else 0,  # type: ignore[arg-type]
            )
            bits = None
            if counter is not None and streams is not None:
                bits = RandomBits(seed, streams[place], counter, first_row)
            copies += _by_torch(x, quantizer, turned, bits)
        empty = [tensor.new_empty(0) for tensor in copies]
        data, scales, transposed, columnwise_scales = copies if columnwise else copies + empty
        return data, scales, transposed, columnwise_scales
    outputs = _room(x, columnwise)
    rows, columns = x.shape
    launch = _launch(
        "cast",
        x.dtype,
        x.device,
        (rows, columns),
        (seed & 0xFFFFFFFF, first_row),
        (rows // 2, columns // 2),
        hadamard=hadamard,
        height=height,
        columnwise=columnwise,
        stochastic=counter is not None,
    )
    # An argument that the kernel does not use needs a tensor as well.
    drawn = [amaxes if tensor is None else tensor for tensor in (counter, streams)]
    launch((x, amaxes, *outputs, *drawn))
    return outputs


@lru_cache(maxsize=4096)  # a model has few shapes, but prompts may have any length
def _launch(
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    **variant: Any,
) -> Any:
    """The `KernelLaunch` of a kernel of `triton_nvfp4` for matrices of one shape, whose numbers are
    the shape and those before and after it; `variant` has fields of `Nvfp4Variant`."""
    from fp8stack.layers.kernels import triton_nvfp4
    from fp8stack.layers.kernels.launch import KernelLaunch

    options = compiled_for(
        kernel, bf16=dtype == torch.bfloat16, exact=converts_exactly(device), **variant
    )
    numbers, constants = (*before, *shape, *after), {"HOW": options.pop("HOW")}
    tiles = _tiles(kernel, shape)
    return KernelLaunch(getattr(triton_nvfp4, kernel), tiles, numbers, constants, options)


def compiled_for(kernel: str, **variant: Any) -> dict[str, Any]:
    """The options of a kernel's launch, and as `HOW` its `Nvfp4Variant` with these fields."""
    tile, warps = SQUARES[kernel]
    return OPTIONS | {"num_warps": warps, "HOW": Nvfp4Variant(tile=tile, **variant)}


def _by_torch(
    x: Tensor, quantizer: Quantizer, turned: bool, bits: RandomBits | None
) -> tuple[Tensor, Tensor]:
    """Data and packed scales of one copy. The bits of stochastic rounding follow from the place in
    the matrix, so the second copy is transposed after the cast."""
    data, scales = numerics.quantize(x, quantizer, 0 if turned else 1, bits)[:2]
    codes = scales.view(torch.uint8)
    if turned:
        data, codes = transpose_bytes(data), codes.t()
    if (height := (quantizer.blocks or (1, 1))[0]) > 1:  # GEMMs take scales by row
        codes = codes.repeat_interleave(height, 0)
    return data, pack_scales(codes.contiguous().view(scales.dtype), ScaleLayout.NV)


def _runs(x: Tensor) -> bool:
    return has_kernel(x.device) and x.numel() > 0


def _tiles(kernel: str, shape: Sequence[int]) -> int:
    tile, _ = SQUARES[kernel]
    return -(-shape[0] // tile) * -(-shape[1] // tile)


def _room(x: Tensor, columnwise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors that the kernel fills; scales without elements are 0."""
    rows, columns = x.shape
    outputs = []
    for lines, width in ((rows, columns), (columns, rows) if columnwise else (0, 0)):
        outputs.append(x.new_empty((lines, width // 2) if width else (0,), dtype=torch.uint8))
        packed = -(-lines // 128) * 128 * (-(-width // 64) * 4)
        tiles_fit = lines % 128 == 0 and width % 64 == 0
        scales = (x.new_empty if tiles_fit else x.new_zeros)((packed,), dtype=torch.uint8)
        outputs.append(scales.view(torch.float8_e4m3fn))
    return outputs[0], outputs[1], outputs[2], outputs[3]
