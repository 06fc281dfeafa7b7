"""FP8 and FP4 GEMMs that read their scales as cuBLAS documents them, on a CPU."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp8stack.layers.kernels.scaled_gemm import ScaleLayout


def blocked_values(data: Tensor, scales: Tensor, kind: ScaleLayout) -> Tensor:
    """The values of an operand [rows, K] in float64, element by element."""
    rows, columns = data.shape
    if kind is ScaleLayout.NV:
        steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        value_of = torch.tensor([*steps, *(-value for value in steps)], dtype=torch.float64)
        values = torch.empty(rows, columns := 2 * columns, dtype=torch.float64)
        for odd in (0, 1):  # the even element is in the low half
            codes = data.contiguous().view(torch.uint8) // 16**odd % 16
            values[:, odd::2] = value_of[codes.int()]
    else:
        values = data.double()
    if kind in (ScaleLayout.PER_TENSOR, ScaleLayout.PER_ROW):
        return values * scales.double()
    if kind in (ScaleLayout.MX, ScaleLayout.NV):
        size = 32 if kind is ScaleLayout.MX else 16
        codes = scales.flatten().view(torch.uint8)
        if kind is ScaleLayout.MX:
            factors = [2.0 ** (code - 127) for code in range(256)]
        else:
            factors = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).tolist()
        column_tiles = math.ceil(math.ceil(columns / size) / 4)
        for r in range(rows):
            for c in range(columns // size):
                tile = (r // 128) * column_tiles + c // 4
                at = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
                values[r, size * c : size * c + size] *= factors[codes[at]]
        return values
    for r in range(0, rows, 1 if kind is ScaleLayout.ROWS else 128):
        for c in range(columns // 128):
            if kind is ScaleLayout.ROWS:
                values[r, 128 * c : 128 * c + 128] *= scales[r, c].double()
            else:
                values[r : r + 128, 128 * c : 128 * c + 128] *= scales[c, r // 128].double()
    return values


KINDS = {
    ScalingType.BlockWise1x32: ScaleLayout.MX,
    ScalingType.BlockWise1x16: ScaleLayout.NV,
    ScalingType.BlockWise1x128: ScaleLayout.ROWS,
    ScalingType.BlockWise128x128: ScaleLayout.SQUARES,
}


def cuda_gemms(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of torch's FP8 GEMMs, replaced by torch's checks for CUDA and a float64 product."""
    calls: list[dict[str, Any]] = []
    per_tensor, blocked = torch._scaled_mm, F.scaled_mm

    def on_meta(tensors):
        moved = [None if tensor is None else tensor.to("meta") for tensor in tensors]
        for tensor, copy in zip(tensors, moved, strict=True):
            assert tensor is None or tensor.stride() == copy.stride()
        return moved

    def as_list(argument):
        return argument if isinstance(argument, list) else [argument]

    def product(a, b, scales, kinds, dtype, checked, bias=None, alpha=1.0):
        y = blocked_values(a, scales[0], kinds[0]) @ blocked_values(b.t(), scales[1], kinds[1]).t()
        y = alpha * y
        y = (y if bias is None else y + bias.double()).to(dtype)
        assert (y.shape, y.dtype) == (checked.shape, checked.dtype)
        return y

    def fake_scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        calls.append({"formats": (a.dtype, b.dtype), "fast": use_fast_accum})
        a_meta, b_meta, scale_a_meta, scale_b_meta, bias_meta = on_meta(
            [a, b, scale_a, scale_b, bias]
        )
        checked = per_tensor(
            a_meta,
            b_meta,
            scale_a=scale_a_meta,
            scale_b=scale_b_meta,
            bias=bias_meta,
            out_dtype=out_dtype,
        )
        kinds = (ScaleLayout.PER_ROW if scale_a.ndim else ScaleLayout.PER_TENSOR,) * 2
        return product(a, b, (scale_a, scale_b.t()), kinds, out_dtype, checked, bias)

    def fake_blocked(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype, **swizzles):
        first = {name: as_list(swizzle)[0] for name, swizzle in swizzles.items()}
        calls.append({"formats": (a.dtype, b.dtype), "fast": False, **first})
        levels = [as_list(scale) for scale in (scale_a, scale_b)]
        a_meta, b_meta = on_meta([a, b])
        options = {"output_dtype": output_dtype, **swizzles}
        checked = blocked(
            a_meta, b_meta, on_meta(levels[0]), kind_a, on_meta(levels[1]), kind_b, **options
        )
        kinds = (KINDS[as_list(kind_a)[0]], KINDS[as_list(kind_b)[0]])
        alpha = 1.0
        if kinds[0] is ScaleLayout.NV:  # what torch asks in C++ (ATen/native/cuda/ScaledBlas.cpp)
            assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
            assert kind_a == kind_b == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
            swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
            assert swizzles == {"swizzle_a": swizzle, "swizzle_b": swizzle}
            assert all(scales[0].is_contiguous() for scales in levels)
            assert output_dtype in (torch.bfloat16, torch.float32)  # cuBLAS has no more
            alpha = (levels[0][1] * levels[1][1]).double()
        scales = (levels[0][0], levels[1][0])
        return product(a, b, scales, kinds, output_dtype, checked, alpha=alpha)

    monkeypatch.setattr(torch, "_scaled_mm", fake_scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", fake_blocked)
    return calls
