"""FP8 copies of many weights and of their transposes, made by one kernel for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer, fp8_format
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales
from fp8stack.layers.kernels.variants import OPTIONS, KernelVariant, converts_exactly, variant

_SQUARE = 128


class BatchedCast:
    """FP8 copies of some weights in fixed memory, which `cast` overwrites without waiting for the
    device or allocating, so that a CUDA graph can hold it.

    Args:
        weights: contiguous matrices of one dtype, float64, which is rounded to float32 first,
            float32, bfloat16 or float16, on one device.
        quantizer: one with a scale per tensor, per block of 128 x 128, or E8M0 scales of 1 x 32.
        places: the index of each weight in the scales and amaxes of delayed scaling.

    Attributes:
        copies: for each weight the bytes [rows, columns] and the bytes of its transpose, with their
        inverse scales, as `scaled_gemm` takes them.
    """

    def __init__(
        self, weights: Sequence[Tensor], quantizer: Quantizer, places: Sequence[int] = ()
    ) -> None:
        self.quantizer = quantizer
        self.device, dtype = weights[0].device, weights[0].dtype
        # The source of the scales, unless they are given: "current", the tensor's amax, or blocks.
        self._kind, self._scales = ScaleLayout.PER_TENSOR, "current"
        if not quantizer.per_tensor:
            mx = quantizer.scale == "e8m0"
            self._kind, self._scales = (
                (ScaleLayout.MX, "mx") if mx else (ScaleLayout.SQUARES, "squares")
            )
        tile = (_SQUARE, _SQUARE) if self._kind is ScaleLayout.SQUARES else (64, 64)
        self.copies = [self._room(weight) for weight in weights]
        places = places or range(len(weights))
        rows: list[list[int]] = []
        owners: list[int] = []
        for weight, (rowwise, columnwise), place in zip(weights, self.copies, places, strict=True):
            tensors = (
                weight,
                rowwise.data,
                columnwise.data,
                rowwise.inv_scale,
                columnwise.inv_scale,
            )
            first = len(owners)
            rows.append([*(t.data_ptr() for t in tensors), *weight.shape, first, place])
            high, wide = (
                -(-size // tile_size) for size, tile_size in zip(weight.shape, tile, strict=True)
            )
            owners += [len(rows) - 1] * (high * wide)
        self._table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._owners = torch.tensor(owners, dtype=torch.int32).to(self.device)
        self._amaxes = torch.zeros(len(rows), dtype=torch.float32, device=self.device)
        self._tiles = len(owners)
        self._variant: dict[str, Any] = {
            "quantizer": quantizer,
            "dtype": dtype,
            "exact": converts_exactly(self.device),
            "rows": tile[0],
            "columns": tile[1],
            "packs_rows": all(row[5] % 16 == 0 for row in rows),
        }
        self._options = OPTIONS | {
            "ALIGNED": all(number % 16 == 0 for row in rows for number in (*row[:3], *row[5:7])),
            "num_warps": 8 if self._scales == "squares" else 4,
        }

    def _room(self, weight: Tensor) -> tuple[Scaled, Scaled]:
        rows, columns = weight.shape
        dtype = fp8_format(self.quantizer.format).dtype
        inverse = weight.new_zeros((), dtype=torch.float32)  # shared by both copies
        copies = []
        for shape in ((rows, columns), (columns, rows)):
            if self._kind is ScaleLayout.SQUARES:
                high, wide = (-(-size // _SQUARE) for size in shape)
                zeros = weight.new_zeros((high, wide), dtype=torch.float32)
                inverse = pack_scales(zeros, self._kind)
            elif self._kind is ScaleLayout.MX:
                codes = weight.new_zeros(shape[0], -(-shape[1] // 32), dtype=torch.uint8)
                inverse = pack_scales(codes.view(torch.float8_e8m0fnu), self._kind)
            copies.append(Scaled(weight.new_empty(shape, dtype=dtype), inverse, self._kind))
        return copies[0], copies[1]

    def cast(self, scales: Tensor | None = None, amaxes: Tensor | None = None) -> None:
        """Cast the weights as they are now.

        Args:
            scales: the scales of delayed scaling, float32 [places]; multiply into FP8.
            amaxes: the amaxes of delayed scaling, float32 [places], finite or infinite: an element
            is raised to the weight's amax if that is larger; None records none.
        """
        if scales is not None:
            self._launch("given", scales, amaxes)
            return
        if self._kind is ScaleLayout.PER_TENSOR:
            self._amaxes.zero_()
            self._launch("none", None, self._amaxes)
        self._launch(self._scales, None, None)

    def _launch(self, scale_kind: str, scales: Tensor | None, record: Tensor | None) -> None:
        amaxes = self._amaxes if record is None else record
        compiled_for = variant(scales=scale_kind, record=record is not None, **self._variant)
        operands = (self._table, self._owners, self._amaxes if scales is None else scales, amaxes)
        launch_weights(
            self._tiles, operands, compiled_for, self._options | {"SPACING": amaxes.stride(0)}
        )


def launch_weights(
    tiles: int, operands: tuple[Tensor, ...], variant: KernelVariant, options: dict[str, Any]
) -> None:
    """Launch the kernel for many matrices, on their device."""
    from fp8stack.layers.kernels import triton_kernels

    with torch.cuda.device(operands[0].get_device()):
        triton_kernels.cast_weights[(tiles,)](*operands, HOW=variant, **options)
