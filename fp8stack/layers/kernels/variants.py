"""Devices that run Triton's kernels, the variants they are compiled in, and the transpose of bytes.

The kernels themselves are in `triton_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8stack.common.formats import Format, Quantizer, fp8_format
from fp8stack.numerics.cast import FLT_MAX
from fp8stack.numerics.operators import assume_constant_result, operator_on_any_device
from fp8stack.precision.toolchain import find_triton_problem

MX_TILE = 128 * 128 // 32  # E8M0 scales of a square of 128, a tile of `pack_scales`
# Fused, the product would not be rounded to float32.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

TRITON_RUNS = not find_triton_problem()  # a constant, since compiled code asks for it


# Fixed strides would make inductor write the bytes twice: for this operator, and for others.
@operator_on_any_device(
    "transpose_bytes",
    lambda data: data.new_empty((data.shape[1], data.shape[0])),
    tags=(torch.Tag.flexible_layout,),
)
def transpose_bytes(data: Tensor) -> Tensor:
    """The contiguous transpose of a uint8 matrix with any strides. A compiler neither fuses it nor
    runs it again in the backward pass: where it computes rows, it would write columns byte by
    byte."""
    if not has_kernel(data.device) or data.numel() == 0:
        return data.t().clone(memory_format=torch.contiguous_format)
    return run_transpose(data)


def run_transpose(data: Tensor) -> Tensor:
    """The operator by Triton."""
    rows, columns = data.shape
    transposed = data.new_empty((columns, rows))
    _transpose(rows, columns, *data.stride())((data, transposed))
    return transposed


@lru_cache(maxsize=4096)  # a model has few shapes, but prompts may have any length
def _transpose(rows: int, columns: int, row_stride: int, column_stride: int) -> Any:
    """The `KernelLaunch` for matrices of this shape and these strides."""
    from fp8stack.layers.kernels import triton_kernels
    from fp8stack.layers.kernels.launch import KernelLaunch

    tiles = -(-rows // 128) * -(-columns // 128)
    kernel, options = triton_kernels.transpose_bytes, OPTIONS | {"num_warps": 8}
    sizes = rows, columns, row_stride, column_stride
    constants = {"SIZE": 128, "IN_GROUP": 4 if rows % 16 == 0 and column_stride == 1 else 1}
    return KernelLaunch(kernel, tiles, sizes, constants, options)


# A compiler would trace what a cached function calls, with a warning, or in vain (torch 2.11).
@assume_constant_result
def has_kernel(device: torch.device) -> bool:
    """Whether the kernels run on `device`: Triton works here, and converts to both formats."""
    return device.type == "cuda" and _has_kernel(device)


@cache
def _has_kernel(device: torch.device) -> bool:
    if torch.version.cuda is None or not TRITON_RUNS:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def converts_exactly(device: torch.device) -> bool:
    """Whether conversions of float32 equal `cast_to_fp8`, see `KernelVariant`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """The constants that a kernel is compiled for; see `variant`.

    Attributes:
        quantizer: the quantizer; `target` is its format, `float8` Triton's type of the format.
        scales: "given"; "current", from a given amax; "rows" or "squares", float32 per block; "mx",
        E8M0 per block; or "none", without a cast.
        dtype: Triton's, of the tensors that are read.
        overflow: see `numerics.tensor_scale`.
        exact: the device's conversion of float32 equals `cast_to_fp8`, as from compute capability
        9.0 on. Older versions of Triton go by float16 on 8.9 and so round twice, and
            Triton's interpreter does not round to even (triton issue 8322): there the kernel rounds
            first.
        assembly: values are converted to FP8 by the kernel's own PTX rather than Triton's cast.
            Under Triton 3.6 alone (torch 2.10 and 2.11): from the code of its cast, its ptxas makes
            machine code that stores registers which nothing wrote. To be deleted when no torch that
            brings Triton 3.6 is supported.
        rows, columns: of a tile.
        packs_rows: whether the rows are a multiple of 16, so that the codes of several rows can be
            written to the transpose together.
        columnwise, record, sums: whether a transpose, an amax and the sums over rows are wanted.
        name, backward: of a `fused_casts.FusedInput`.
    """

    quantizer: Quantizer
    target: Format
    float8: Any
    scales: str
    dtype: Any
    overflow: float
    exact: bool
    assembly: bool = False
    rows: int = 128
    columns: int = 128
    packs_rows: bool = True
    columnwise: bool = True
    record: bool = False
    sums: bool = False
    name: str = "cast"
    backward: bool = False


@cache
def variant(
    quantizer: Quantizer, scales: str, dtype: torch.dtype, exact: bool, **more: Any
) -> KernelVariant:
    """The variant of a kernel that casts tensors of `dtype` by `quantizer`, with `more` fields."""
    import triton
    import triton.language as tl

    largest = FLT_MAX if scales in ("given", "current") else torch.finfo(dtype).max
    return KernelVariant(
        quantizer=quantizer,
        target=fp8_format(quantizer.format),
        float8=tl.float8e4nv if quantizer.format == "e4m3" else tl.float8e5,
        scales=scales,
        dtype=getattr(tl, str(dtype).removeprefix("torch.")),
        overflow=min(largest, FLT_MAX),
        exact=exact,
        # The interpreter runs no PTX.
        assembly=triton.__version__.startswith("3.6.") and not triton.knobs.runtime.interpret,
        **more,
    )
