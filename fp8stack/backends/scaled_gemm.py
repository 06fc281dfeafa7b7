"""FP8 GEMMs by torch's `scaled_mm`: layouts and limits. It must not know where scales come from.

Every operand is row-major with the reduction last, and the second one is transposed on the way in:
that is the one layout that Hopper's FP8 tensor cores take. What CUDA would refuse is refused here,
on every device, since torch's CPU implementation is laxer.

Sources: torch.nn.functional.scaled_mm; cuBLAS, "Block scaling factors layouts".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

# What a GEMM's reduction and its other dimensions must be divisible by, per kind of scale.
MULTIPLES = {
    ScalingType.TensorWise: 16,
    ScalingType.BlockWise1x32: 32,
    ScalingType.BlockWise1x128: 128,
    ScalingType.BlockWise128x128: 128,
}


class Scaled(NamedTuple):
    """An FP8 matrix with its inverse scales in the layout that its GEMM wants.

    `data` is float8 [rows, K], row-major. `inv_scale` is float32 and 0-dim, or as `pack_scales`
    gives it.
    """

    data: Tensor
    inv_scale: Tensor
    kind: ScalingType


def pack_scales(inv_scales: Tensor, kind: ScalingType) -> Tensor:
    """Scales in the order of their blocks -> scales as the hardware reads them.

    Args:
        inv_scales: float8_e8m0fnu [rows, K / 32] for BlockWise1x32, float32 [rows, K / 128] for
            BlockWise1x128, float32 [rows / 128, K / 128] for BlockWise128x128.
        kind: how the operand is scaled.
    """
    if kind == ScalingType.BlockWise1x32:
        return _swizzled(inv_scales)
    if kind == ScalingType.BlockWise1x128:
        return inv_scales.t().contiguous().t()  # the rows of a column lie together
    assert kind == ScalingType.BlockWise128x128
    # [K / 128 rounded up to 4, rows / 128], where K lies together
    return F.pad(inv_scales, (0, -inv_scales.shape[1] % 4)).contiguous().t()


def _swizzled(codes: Tensor) -> Tensor:
    """E8M0 scales [rows, columns] in tiles of 128 x 4: 32 lines of four rows' four scales each."""
    rows, columns = codes.shape
    # as bytes: not every operation knows float8_e8m0fnu
    padded = F.pad(codes.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = rearrange(padded, "(R q r) (C c) -> (R C r q c)", q=4, r=32, c=4)
    return tiles.contiguous().view(torch.float8_e8m0fnu)


def scaled_gemm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
) -> Tensor:
    """`a` [M, K] times the transpose of `b` [N, K], scaled, plus `bias` [N]: [M, N].

    Args:
        a: the first operand.
        b: the second; one of the two at most is E5M2.
        out_dtype: bfloat16, float16 or float32.
        bias: added before the one rounding where scales are per tensor, after it else.
        fast_accumulation: let Hopper and Ada add in fewer bits; for the forward pass.

    Raises:
        ValueError: formats, sizes or a layout that the hardware does not take.
    """
    _check(a, b)
    per_tensor = a.kind == ScalingType.TensorWise
    swizzle = (
        SwizzleType.SWIZZLE_32_4_4
        if a.kind == ScalingType.BlockWise1x32
        else SwizzleType.NO_SWIZZLE
    )
    y = F.scaled_mm(
        a.data,
        b.data.t(),
        a.inv_scale,
        a.kind,
        b.inv_scale,
        b.kind,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        bias=None if bias is None or not per_tensor else bias.to(out_dtype),
        output_dtype=out_dtype,
        use_fast_accum=fast_accumulation and per_tensor,
    )
    return y if bias is None or per_tensor else y + bias.to(out_dtype)


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
    for what, size in (("reduction", a.data.shape[1]), ("output", b.data.shape[0])):
        if size % multiple:
            raise ValueError(
                f"An FP8 GEMM whose {what} has {size} elements: not divisible by {multiple}."
            )
