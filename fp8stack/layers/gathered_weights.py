"""The weights of scaled GEMMs as FSDP2 gathers them: in FP8, with the bytes and scales of the full
weight.

Operands are `TorchOperand`s. A scale per tensor, or squares of 128 x 128, serve both GEMMs of a
weight: one byte per element. In other layouts the copies differ, and both are gathered: two bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.layers.fsdp import WeightTensors
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales, scaled_pair
from fp8stack.layers.kernels.variants import transpose_bytes
from fp8stack.numerics.cast import magnitude

# The rows of a block in either copy: a block must not span the shards of two ranks. NVFP4 is
# missing: its upper scale is one of the full weight.
_BLOCK_ROWS = {
    ScaleLayout.PER_TENSOR: 1,
    ScaleLayout.PER_ROW: 1,
    ScaleLayout.MX: 32,
    ScaleLayout.ROWS: 128,
    ScaleLayout.SQUARES: 128,
}


def is_gathered_in_fp8(operand: Any, rows: int, ranks: int) -> bool:
    """Whether a weight of `rows` rows, sharded over ranks, is gathered in FP8."""
    cast = operand.joint_cast
    if cast is None or operand.stochastic or cast.columnwise != cast.quantizer:
        return False
    block_rows = None if cast.quantizer.hadamard else _BLOCK_ROWS.get(cast.kind)
    return block_rows is not None and -(-rows // ranks) % block_rows == 0


def share_amaxes(operands: Sequence[Any], shards: Sequence[Tensor]) -> None:
    """Reduce the amaxes of sharded weights over ranks, by one all-reduce for all of them: in
    current scaling the amax of the weight, and in scales per row the amaxes of its columns."""
    shared = []
    for operand, shard in zip(operands, shards, strict=True):
        quantizer, kind, *_ = operand.joint_cast
        by_row = kind is ScaleLayout.PER_ROW
        if by_row or (kind is ScaleLayout.PER_TENSOR and not quantizer.delayed):
            amaxes = _column_amaxes(shard) if by_row else numerics.amax(shard)[None]
            shared.append((operand, by_row, amaxes.detach()))
    if not shared:
        return
    largest = torch.cat([amaxes for _, _, amaxes in shared])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    sizes = [len(amaxes) for _, _, amaxes in shared]
    for (operand, by_row, _), amaxes in zip(shared, torch.split(largest, sizes), strict=True):
        quantizer = operand.joint_cast.quantizer
        operand.shared = amaxes if by_row else numerics.current_scale(amaxes[0], quantizer)


def _column_amaxes(rows: Tensor) -> Tensor:
    """The amaxes of the columns, NaN ignored: float32 [columns]; zeros without rows."""
    return magnitude(rows).amax(0) if len(rows) else rows.new_zeros(rows.shape[1])


def cast_per_tensor(operand: Any, rows: Tensor, record: bool) -> WeightTensors:
    """Cast a shard, float32 [rows, in], with the scale of the full weight: from the amax history,
    in which `record` says whether to record, or in current scaling from `share_amaxes`. The tensors
    are float8 [rows, in] and the scale."""
    slot, quantizer = operand.slot, operand.joint_cast.quantizer
    scale = operand.shared if slot is None else slot.scale()
    data, _, amax = cast_transpose(rows, scale, quantizer.format, columnwise=False, record=record)
    if slot is not None and amax is not None:
        slot.record(amax)  # of this shard: updates take the maximum over ranks
    return WeightTensors([data], [scale], quantizer)


def cast_in_blocks(
    rows: Tensor, quantizer: Quantizer, kind: ScaleLayout, column_amaxes: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Cast a shard, float32 [rows, in], with scales per row or block. Returns `gathered` and
    `shared` of its `WeightTensors`: the rowwise copy and its scales and, except in squares, the
    columnwise copy, not transposed, and its scales. These are shared if they are scales per row."""
    data, scales = numerics.quantize(rows, quantizer)[:2]
    if kind is ScaleLayout.SQUARES:
        return [data, scales], []
    if kind is ScaleLayout.PER_ROW:
        # One more row has the amaxes of the full weight's columns.
        rows = torch.cat([rows, column_amaxes[None]])
        columnwise, columnwise_scales = numerics.quantize(rows, quantizer, 0)[:2]
        return [data, scales, columnwise[:-1]], [columnwise_scales]
    columnwise, columnwise_scales = numerics.quantize(rows, quantizer, 0)[:2]
    return [data, scales, columnwise, columnwise_scales], []


def copies_of_gathered(
    tensors: list[Tensor], operand: Any, with_columnwise: bool
) -> tuple[Scaled, Scaled | None]:
    """The rowwise and, if needed, the columnwise copy of a weight, from its gathered tensors."""
    kind, columnwise = operand.joint_cast.kind, tensors[2:]
    if kind is ScaleLayout.PER_TENSOR:
        data, scale = tensors
        return scaled_pair(data, data.t().contiguous() if with_columnwise else None, scale, None)
    rows = Scaled(tensors[0], pack_scales(tensors[1], kind), kind)
    if not with_columnwise:
        return rows, None
    data, scales = columnwise or tensors
    transposed: Tensor = transpose_bytes(data.view(torch.uint8)).view(data.dtype)
    scales = scales.view(-1, 1) if kind is ScaleLayout.PER_ROW else scales.t()
    return rows, Scaled(transposed, pack_scales(scales, kind), kind)
