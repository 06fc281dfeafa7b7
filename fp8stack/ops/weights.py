"""FP8 copies of many weights and of their transposes, made by one kernel for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8stack.formats import Quantizer, fp8_format
from fp8stack.numerics.cast import FLT_MAX
from fp8stack.ops.kernels import (
    MX_TILE,
    NO_E8M0,
    OPTIONS,
    TILE_COLUMNS,
    TILE_ROWS,
    converts_exactly,
    e8m0_constants,
    format_constants,
    launch_weights,
    triton_dtype,
)
from fp8stack.ops.scaled_gemm import Scaled, Scales

FIELDS = 9  # of a row of the kernel's table
_SQUARE = 128


class KeptWeights:
    """The copies of some weights, in memory that stays: `cast` fills it anew. Nothing in that waits
    for the device or allocates, so that a CUDA graph can hold it.

    Args:
        weights: contiguous matrices of one dtype, float32, bfloat16 or float16, on one device.
        quantizer: with one scale per tensor, for blocks of 128 x 128, or E8M0 scales of 1 x 32.
        places: of each weight in the scales and amaxes of delayed scaling.

    Attributes:
        copies: of each weight its bytes [rows, columns] and those of its transpose, each with its
            inverse scales, as `scaled_gemm` takes them.
    """

    def __init__(
        self, weights: Sequence[Tensor], quantizer: Quantizer, places: Sequence[int] = ()
    ) -> None:
        self.quantizer = quantizer
        self.device, dtype = weights[0].device, weights[0].dtype
        self._kind = Scales.PER_TENSOR
        if not quantizer.per_tensor:
            self._kind = Scales.MX if quantizer.scale == "e8m0" else Scales.SQUARES
        # A square has a tile of its own, and so have the scales that are packed together.
        whole = self._kind is Scales.PER_TENSOR
        tile = (TILE_ROWS, TILE_COLUMNS) if whole else (_SQUARE, _SQUARE)
        self.copies = [self._room(weight) for weight in weights]
        places = places or range(len(weights))
        rows: list[list[int]] = []
        owners: list[int] = []
        for weight, (along, across), place in zip(weights, self.copies, places, strict=True):
            tensors = (weight, along.data, across.data, along.inv_scale, across.inv_scale)
            first = len(owners)
            rows.append([*(t.data_ptr() for t in tensors), *weight.shape, first, place])
            high, wide = (-(-size // part) for size, part in zip(weight.shape, tile, strict=True))
            owners += [len(rows) - 1] * (high * wide)
        self._table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._owners = torch.tensor(owners, dtype=torch.int32).to(self.device)
        self._amaxes = torch.zeros(len(rows), dtype=torch.float32, device=self.device)
        self._tiles = len(owners)
        limit = FLT_MAX if whole else min(torch.finfo(dtype).max, FLT_MAX)
        mx = self._kind is Scales.MX
        self._constants: dict[str, Any] = {
            **format_constants(quantizer.format, converts_exactly(self.device)),
            **(e8m0_constants(quantizer.format, quantizer.scale_rounding) if mx else NO_E8M0),
            "SOURCE": triton_dtype(dtype),
            "FIELDS": FIELDS,
            "ALIGNED": all(number % 16 == 0 for row in rows for number in (*row[:3], *row[5:7])),
            "EPS": quantizer.eps,
            "OVERFLOW": limit,
            "POWER_OF_TWO": quantizer.scale == "power_of_two",
            "ROWS": tile[0],
            "COLUMNS": tile[1],
            **OPTIONS,
            "num_warps": 4 if whole else 16 if mx else 8,
        }

    def _room(self, weight: Tensor) -> tuple[Scaled, Scaled]:
        rows, columns = weight.shape
        dtype = fp8_format(self.quantizer.format).dtype
        one = weight.new_zeros((), dtype=torch.float32)
        made = []
        for shape in ((rows, columns), (columns, rows)):
            inverse = one
            high, wide = (-(-size // _SQUARE) for size in shape)
            if self._kind is Scales.SQUARES:
                inverse = one.new_zeros(high, wide + -wide % 4).t()  # as `pack_scales` has them
            elif self._kind is Scales.MX:
                packed = one.new_zeros(high * wide * MX_TILE, dtype=torch.uint8)
                inverse = packed.view(torch.float8_e8m0fnu)
            made.append(Scaled(weight.new_empty(shape, dtype=dtype), inverse, self._kind))
        return made[0], made[1]

    def cast(self, scales: Tensor | None = None, amaxes: Tensor | None = None) -> None:
        """Make the copies of what the weights are now.

        Args:
            scales: of delayed scaling, float32 [places]; multiply into FP8.
            amaxes: of delayed scaling, float32 [places], finite or infinite: each becomes the
                weight's own if that is larger; None records none.
        """
        if scales is not None:
            self._launch("given", scales, amaxes, cast=True)
        elif self._kind is not Scales.PER_TENSOR:
            how = "mx" if self._kind is Scales.MX else "blocks"
            self._launch(how, None, None, cast=True)
        else:
            self._amaxes.zero_()
            self._launch("current", None, self._amaxes, cast=False)
            self._launch("current", None, None, cast=True)

    def _launch(
        self, scale: str, scales: Tensor | None, record: Tensor | None, *, cast: bool
    ) -> None:
        amaxes = self._amaxes if record is None else record
        launch_weights(
            self._tiles,
            (self._table, self._owners, self._amaxes if scales is None else scales, amaxes),
            self._constants
            | {"SCALE": scale, "RECORD": record is not None, "CAST": cast}
            | {"SPACING": amaxes.stride(0)},
        )
