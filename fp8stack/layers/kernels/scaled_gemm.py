"""FP8 GEMMs by torch: layouts and limits.

Every operand is row-major with the reduction last, and the second one is transposed on the way in:
that is the one layout that Hopper's FP8 tensor cores take. What CUDA would refuse is refused here,
on every device, since torch's CPU implementation is laxer.

Sources: torch._scaled_mm, torch.nn.functional.scaled_mm; cuBLAS, "Block scaling factors layouts".
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp8stack import numerics
from fp8stack.numerics.operators import operator_on_any_device


class ScaleLayout(Enum):
    """Layouts of an operand's scales (torch 2.11 does not compile its names for them)."""

    PER_TENSOR = "one"
    PER_ROW = "row"
    MX = "1x32"
    NV = "1x16"
    ROWS = "1x128"
    SQUARES = "128x128"


# Divisors of a GEMM's reduction and output dimensions, per kind of scale.
MULTIPLES = {
    ScaleLayout.PER_TENSOR: 16,
    ScaleLayout.PER_ROW: 16,
    ScaleLayout.MX: 32,
    ScaleLayout.NV: 32,  # 16 bytes of K, which cuBLAS wants; torch's check in C++ is 16 elements
    ScaleLayout.ROWS: 128,
    ScaleLayout.SQUARES: 128,
}
BLOCK_KERNELS = {ScaleLayout.ROWS, ScaleLayout.MX}
"""The layouts whose two copies one Triton kernel makes."""
_TORCHS_NAMES = {
    ScaleLayout.MX: ScalingType.BlockWise1x32,
    ScaleLayout.NV: ScalingType.BlockWise1x16,
    ScaleLayout.ROWS: ScalingType.BlockWise1x128,
    ScaleLayout.SQUARES: ScalingType.BlockWise128x128,
}
_SWIZZLED = (ScaleLayout.MX, ScaleLayout.NV)
# Before, inductor hands the scales of scaled_mm to _scaled_mm, which wants another layout. To be
# deleted when no older torch is supported.
_COMPILES_SCALED_MM = torch.__version__ >= "2.15"


class Scaled(NamedTuple):
    """An FP8 matrix with its inverse scales in the layout that its GEMM wants.

    `data` is float8 [rows, K], row-major, of NV uint8 [rows, K / 2]: two FP4 codes to a byte, the
    even element in the low half. `inv_scale` is float32 and 0-dim, or as `pack_scales` gives it.
    `upper_scale`, for NV alone, multiplies all of its block scales: float32, 0-dim. `sums` over the
    rows, float32 [K], are the gradient of a bias where the matrix is dy.

    Groups of rows are one matrix with `offs`, int32 [groups], the ends of the groups, and weights
    are [groups, rows, K]; `inv_scale` is [groups], or [rows] and [groups, rows] for PER_ROW.
    """

    data: Tensor
    inv_scale: Tensor
    kind: ScaleLayout
    upper_scale: Tensor | None = None
    sums: Tensor | None = None
    offs: Tensor | None = None


def pack_scales(inv_scales: Tensor, kind: ScaleLayout) -> Tensor:
    """Scales in the order of their blocks -> scales as the hardware reads them.

    Args:
        inv_scales: float8_e8m0fnu [rows, K / 32] for MX, float8_e4m3fn [rows, K / 16] for NV,
            float32 [rows, K / 128] for ROWS, float32 [rows / 128, K / 128] for SQUARES, float32
            [rows, 1] for PER_ROW.
        kind: how the operand is scaled.
    """
    if kind is ScaleLayout.PER_ROW:
        return inv_scales
    if kind in (ScaleLayout.MX, ScaleLayout.NV):
        return _swizzled(inv_scales)
    if kind is ScaleLayout.ROWS:
        return inv_scales.t().contiguous().t()  # the rows of a column lie together
    assert kind is ScaleLayout.SQUARES
    # [K / 128 rounded up to 4, rows / 128], where K lies together
    return F.pad(inv_scales, (0, -inv_scales.shape[1] % 4)).contiguous().t()


def _swizzled(codes: Tensor) -> Tensor:
    """Scales of a byte [rows, columns] in tiles of 128 x 4: 32 lines of four rows' four each."""
    rows, columns = codes.shape
    # as bytes: not every operation knows float8_e8m0fnu
    padded = F.pad(codes.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = rearrange(padded, "(R q r) (C c) -> (R C r q c)", q=4, r=32, c=4)
    return tiles.contiguous().view(codes.dtype)


def scaled_pair(
    data: Tensor, transposed: Tensor | None, scale: Tensor, sums: Tensor | None
) -> tuple[Scaled, Scaled | None]:
    """The rowwise and the columnwise copy of an operand that was cast with one scale."""
    rows = Scaled(data, numerics.inverse(scale), ScaleLayout.PER_TENSOR, None, sums)
    columns = None if transposed is None else rows._replace(data=transposed, sums=None)
    return rows, columns


def scaled_gemm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    in_float32: bool = False,
) -> Tensor:
    """`a` [M, K] times the transpose of `b` [N, K], scaled, plus `bias` [N]: [M, N].

    Args:
        a: the first operand.
        b: the second; one of the two at most is E5M2. Beside scales per row, one with a scale per
            tensor has it for each of its rows.
        out_dtype: bfloat16, float16 or float32; of NV bfloat16 or float32.
        bias: added before the one rounding where scales are per tensor or per row, after it else.
        fast_accumulation: let Hopper and Ada add in fewer bits; for the forward pass.
        in_float32: multiply operands of one format with a scale per tensor by a float32 GEMM, as
            oneDNN's reference code does, which torch calls for them on CPUs with AMX: sums in
            float32, then the scale of `a`, the scale of `b`, the bias and the one rounding.

    Raises:
        ValueError: formats, sizes or a layout that the hardware does not take.
    """
    _check(a, b)
    if {a.kind, b.kind} == {ScaleLayout.PER_TENSOR, ScaleLayout.PER_ROW}:
        a, b = _by_row(a), _by_row(b)
    if (
        a.kind is ScaleLayout.PER_ROW
        and out_dtype == torch.float32
        and not _rows_in_float32(a.data)
    ):
        y = torch.mm(a.data.bfloat16(), b.data.bfloat16().t(), out_dtype=out_dtype)
        y = y * a.inv_scale * b.inv_scale.t()
        return y if bias is None else y + bias.to(out_dtype)
    if in_float32 and a.kind is ScaleLayout.PER_TENSOR and a.data.dtype == b.data.dtype:
        y = torch.mm(a.data.float(), b.data.float().t()) * a.inv_scale * b.inv_scale
        return (y if bias is None else y + bias.to(out_dtype)).to(out_dtype)
    if a.kind in (ScaleLayout.PER_TENSOR, ScaleLayout.PER_ROW):
        # Not scaled_mm: torch 2.11 has that neither for CPUs nor for torch.compile.
        y = torch._scaled_mm(
            a.data,
            b.data.t(),
            scale_a=a.inv_scale,
            scale_b=b.inv_scale.t() if b.kind is ScaleLayout.PER_ROW else b.inv_scale,
            bias=None if bias is None else bias.to(out_dtype),
            out_dtype=out_dtype,
            use_fast_accum=fast_accumulation,
        )
        return y
    if a.kind in _SWIZZLED or not _COMPILES_SCALED_MM:
        kinds = a.kind.value, b.kind.value
        upper_scales = a.upper_scale, b.upper_scale
        y = _mx_gemm(a.data, b.data, a.inv_scale, b.inv_scale, out_dtype, *upper_scales, *kinds)
    else:
        y = _by_blocks(a, b, out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def scaled_grouped_gemm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
) -> Tensor:
    """`scaled_gemm` of each group of the rows of `a` by its matrix in `b`, E4M3 with scales per
    tensor or row, in bfloat16. The bias, [groups, N], is added after the rounding."""
    rows, weight, offs = a.data, b.data, a.offs
    assert offs is not None
    if not len(rows):
        return rows.new_zeros((0, weight.shape[1]), dtype=out_dtype)
    row_indices = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    group_of_row = torch.searchsorted(offs, row_indices, right=True)
    # Each row has the scale of its group.
    row_scales = a.inv_scale if a.kind is ScaleLayout.PER_ROW else a.inv_scale[group_of_row]
    scales = b.inv_scale
    if b.kind is ScaleLayout.PER_TENSOR:
        scales = scales[:, None].expand(-1, weight.shape[1])
    y = torch._scaled_grouped_mm(
        rows,
        weight.transpose(-2, -1),
        row_scales.contiguous(),
        scales.contiguous(),
        offs=offs,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return y if bias is None else y + bias.to(out_dtype)[group_of_row]


def _by_row(operand: Scaled) -> Scaled:
    """The operand with a scale for each row."""
    if operand.kind is ScaleLayout.PER_ROW:
        return operand
    scales = operand.inv_scale.expand(len(operand.data), 1).contiguous()
    return operand._replace(inv_scale=scales, kind=ScaleLayout.PER_ROW)


def _rows_in_float32(data: Tensor) -> bool:
    """Whether torch's GEMM with a scale per row gives float32: cuBLAS's does, which torch calls on
    9.0 from CUDA 12.9 on, and CUTLASS's elsewhere does not (ATen/native/cuda/ScaledBlas.cpp)."""
    if not data.is_cuda:
        return True
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return cuda >= (12, 9) and torch.cuda.get_device_capability(data.device) == (9, 0)


def _by_blocks(a: Scaled, b: Scaled, out_dtype: torch.dtype) -> Tensor:
    """`scaled_gemm` of operands with scales by block, without a bias."""
    x, w = a.data, b.data
    scales = [a.inv_scale], [b.inv_scale]
    kinds = [[_TORCHS_NAMES[operand.kind]] for operand in (a, b)]
    swizzles = [SwizzleType.SWIZZLE_32_4_4 if a.kind in _SWIZZLED else SwizzleType.NO_SWIZZLE]
    if a.upper_scale is not None and b.upper_scale is not None:
        # torch multiplies the two in float32 and hands them to cuBLAS as alpha: the product is
        # multiplied by it before the one rounding to `out_dtype`.
        x, w = x.view(torch.float4_e2m1fn_x2), w.view(torch.float4_e2m1fn_x2)
        scales = [a.inv_scale, a.upper_scale], [b.inv_scale, b.upper_scale]
        kinds = [[*kind, ScalingType.TensorWise] for kind in kinds]
        swizzles.append(SwizzleType.NO_SWIZZLE)  # torch counts one for each level
    return F.scaled_mm(
        x,
        w.t(),
        scales[0],
        kinds[0],
        scales[1],
        kinds[1],
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=out_dtype,
    )


# Delete when inductor takes scaled_mm with every layout of scales: up to torch 2.13 it refuses
# swizzled ones ("does not yet support non-trivial swizzles"), up to 2.14 all.
@operator_on_any_device(
    "mx_gemm",
    lambda a, b, scale_a, scale_b, out_dtype, *_: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=out_dtype
    ),
)
def _mx_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    upper_scale_a: Tensor | None = None,
    upper_scale_b: Tensor | None = None,
    kind_a: str = "1x32",
    kind_b: str = "1x32",
) -> Tensor:
    """`_by_blocks`; `kind_a` and `kind_b` are the values of `ScaleLayout`."""
    first = Scaled(a, scale_a, ScaleLayout(kind_a), upper_scale_a)
    return _by_blocks(first, Scaled(b, scale_b, ScaleLayout(kind_b), upper_scale_b), out_dtype)


def _check(a: Scaled, b: Scaled) -> None:
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        raise ValueError("Two E5M2 operands: FP8 tensor cores take one at most. Use E4M3 for one.")
    for name, operand in (("first", a), ("second", b)):
        if not operand.data.is_contiguous():
            raise ValueError(f"The {name} operand of an FP8 GEMM is not row-major.")
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(
            f"An FP8 GEMM over {a.data.shape[1]} and {b.data.shape[1]}: reductions differ."
        )
    multiple = MULTIPLES[b.kind]
    packed = 2 if b.kind is ScaleLayout.NV else 1
    for dimension, size in (("reduction", a.data.shape[1] * packed), ("output", b.data.shape[0])):
        if size % multiple:
            raise ValueError(
                f"An FP8 GEMM whose {dimension} has {size} elements: not divisible by {multiple}."
            )
