"""Transformer Engine 2.20's quantizers without our backend.

Written for the source of TE 2.20.2. Results have fp8stack's layouts: padding is trimmed, columnwise
data is transposed back. Each function needs an importable TE.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer


class TeQuantized(NamedTuple):
    """Bytes (uint8, in the input's shape; FP4 half as many) and inverse scales, both directions.

    `columnwise` and its scales belong to the copy that reduces over rows; None if TE made none.
    """

    rowwise: Tensor
    scales: Tensor
    columnwise: Tensor | None
    columnwise_scales: Tensor | None


def dtype_of(format: str) -> Any:
    """TE's name of "e4m3" or "e5m2"."""
    import transformer_engine.pytorch as te

    return te.DType.kFloat8E4M3 if format == "e4m3" else te.DType.kFloat8E5M2


@torch.no_grad()
def cast(x: Tensor, scale: Tensor, format: str, transpose: bool) -> tuple[TeQuantized, Tensor]:
    """`Float8Quantizer`: cast `x` with a given scale, as in delayed scaling; also returns the
    amax."""
    import transformer_engine.pytorch as te

    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    quantizer = te.Float8Quantizer(
        scale.reshape(()).to(x.device), amax, dtype_of(format), rowwise=True, columnwise=transpose
    )
    return _per_tensor(quantizer(x)), amax[0]


@torch.no_grad()
def quantize(x: Tensor, quantizer: Quantizer) -> TeQuantized:
    """Both copies of a matrix, by TE's quantizer of this kind: `Float8CurrentScalingQuantizer`,
    `Float8BlockQuantizer`, `MXFP8Quantizer` or `NVFP4Quantizer`."""
    import transformer_engine.pytorch as te

    format, square = dtype_of(quantizer.format), quantizer.turns
    directions: dict[str, Any] = {"rowwise": True, "columnwise": True}
    power_of_two = quantizer.scale == "power_of_two"
    rules = {"force_pow_2_scales": power_of_two, "amax_epsilon": quantizer.eps}
    if quantizer.blocks is None:
        cast = te.Float8CurrentScalingQuantizer(format, device=x.device, **directions, **rules)
        return _per_tensor(cast(x))
    tensor: Any
    if quantizer.scale == "e8m0":
        tensor = te.MXFP8Quantizer(format, **directions)(x)
    elif quantizer.scale == "e4m3":
        tensor = te.NVFP4Quantizer(**directions, with_2d_quantization=square)(x)
    else:
        dims = 2 if square else 1
        tensor = te.Float8BlockQuantizer(format, **directions, **rules, block_scaling_dim=dims)(x)
    data, turned = tensor._rowwise_data, tensor._columnwise_data
    rowwise, columnwise = tensor._rowwise_scale_inv, tensor._columnwise_scale_inv
    (rows, columns), (tall, wide) = x.shape, quantizer.blocks
    if quantizer.scale == "e4m3":  # TE repeats the scales of squares
        codes = (scales[::tall].contiguous() for scales in (rowwise, columnwise))
        rowwise, columnwise = (scales.view(torch.float8_e4m3fn).float() for scales in codes)
    if quantizer.scale != "e8m0":
        turned = turned.t()
        if wide == 128 and not square:
            rowwise = rowwise.t()
        else:
            columnwise = columnwise.t()
    rowwise = rowwise[: -(-rows // tall), : -(-columns // wide)]
    columnwise = columnwise[: -(-rows // wide), : -(-columns // tall)]
    return TeQuantized(data, rowwise, turned, columnwise)


def _per_tensor(tensor: Any) -> TeQuantized:
    transposed = tensor._transpose  # None if GEMMs need none (10.x), or none was requested
    columnwise = None if transposed is None else transposed.t()
    return TeQuantized(tensor._data, tensor._scale_inv.reshape(()), columnwise, None)


def serves(scaling: str) -> str:
    """The reason why TE has no GEMM for this scaling on this machine; "" if it has one."""
    import transformer_engine.pytorch as te

    asks = {"block": te.is_fp8_block_scaling_available, "mxfp8": te.is_mxfp8_available}
    asks["nvfp4"] = te.is_nvfp4_available
    able, reason = asks.get(scaling, te.is_fp8_available)(return_reason=True)
    return "" if able else str(reason)
