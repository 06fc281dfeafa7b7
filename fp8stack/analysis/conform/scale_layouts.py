"""Checks scales in the layouts that GEMMs read, element by element as cuBLAS documents them.

Source: cuBLAS, "Block scaling factors layouts".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.analysis.conform.checks import Check, Context, Facts, same_bits
from fp8stack.layers.kernels.scaled_gemm import ScaleLayout, pack_scales

SIZES = ((128, 4), (256, 8), (130, 5), (1, 1), (384, 3))  # whole and partial tiles

# The dtypes of scales that lie in tiles; others are float32.
STORED = {ScaleLayout.MX: torch.float8_e8m0fnu, ScaleLayout.NV: torch.float8_e4m3fn}


def layouts(context: Context) -> Iterator[Check]:
    """Check `pack_scales`: tiles of 128 x 4 for MX and NVFP4, contiguous columns for 1x128, rows
    for 128x128."""
    for kind in (ScaleLayout.MX, ScaleLayout.NV, ScaleLayout.ROWS, ScaleLayout.SQUARES):
        yield Check(f"scales {kind.value}", partial(layout, context, kind))


def layout(context: Context, kind: ScaleLayout) -> Facts:
    """Check a layout with scales that differ as far as there are codes."""
    pairs = {}
    for rows, columns in SIZES:
        scales = torch.arange(rows * columns).view(rows, columns)
        if kind in STORED:
            scales = (scales * 37 % 251 + 1).to(torch.uint8)
            packed = pack_scales(scales.view(STORED[kind]).to(context.device), kind)
            actual, expected = packed.view(torch.uint8).reshape(-1), tiles(scales)
        else:
            scales = scales.float()
            packed, padded = pack_scales(scales.to(context.device), kind), -(-columns // 4) * 4
            if kind is ScaleLayout.ROWS:
                expected, lies = scales.t().reshape(-1), packed.stride(0) == 1 or rows == 1
                actual = packed.t().reshape(-1) if lies else packed
            else:
                expected = F.pad(scales, (0, padded - columns))
                lies = packed.stride() == (1, padded) and packed.shape == (padded, rows)
                actual = packed.t() if lies else packed
        pairs[f"{rows} x {columns}"] = actual, expected
    return same_bits(pairs)


def tiles(codes: Tensor) -> Tensor:
    """Consecutive tiles of 128 rows and 4 columns, zeros where there are no scales: within a tile
    the scale of row r and column c is at 16 (r % 32) + 4 (r // 32) + c."""
    rows, columns = codes.shape
    columnwise = -(-columns // 4)
    packed = torch.zeros(-(-rows // 128) * columnwise * 512, dtype=torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = r // 128 * columnwise + c // 4
    packed[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = codes
    return packed
