"""Linears on no row, one row, or a prime number of rows, with parameters of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8stack.layers import fp8_state
from tests.support.backend_models import raw
from tests.support.gemm_oracle import normal, run


def odd_shapes(make: Callable[[], Any], dtype: torch.dtype) -> list[str]:
    """List the ways in which a layer whose parameters are of `dtype` differs from the same layer in
    float32 or in the shapes of its results, or in which an input without rows changes its state."""
    layer, reference = make().to(dtype), make().to(dtype).to(torch.float32)
    wrong = []
    for rows in (0, 1, 7):
        x, dy = (normal(rows, size, seed=rows).to(dtype) for size in layer.weight.shape[::-1])
        dy = dy.to(layer.compute_dtype)
        before = _amaxes(layer)
        results, expected = run(layer, x, dy), run(reference, x.float(), dy)
        shapes = [(rows, layer.out_features), x.shape, layer.weight.shape, layer.bias.shape]
        dtypes = [layer.compute_dtype, dtype, dtype, dtype]
        for name, result, exact, shape, result_dtype in zip(
            ("y", "dx", "dw", "db"), results, expected, shapes, dtypes, strict=True
        ):
            if (result.shape, result.dtype) != (shape, result_dtype):
                wrong.append(f"{name} of {rows} rows: {result.shape} {result.dtype}")
            elif name == "db":  # summed in float64, if it is that
                if not torch.allclose(result, dy.sum(0, dtype=result_dtype), rtol=1e-2, atol=1e-2):
                    wrong.append(f"db of {rows} rows: not the sum")
            elif not torch.equal(result, exact.to(result_dtype)):
                wrong.append(f"{name} of {rows} rows: other numbers than in float32")
        if rows == 0 and (results[2].any() or results[3].any()):
            wrong.append("gradients of no rows")
        after = _amaxes(layer)
        if rows == 0 and not all(torch.equal(before[key], after[key]) for key in before):
            wrong.append("amaxes of no rows")
    return wrong


def _amaxes(layer: Any) -> dict[str, Tensor]:
    """The state of delayed scaling of the operands that have rows of the input."""
    names = [name for name in raw(layer) if ".weight." not in name]
    state = fp8_state(layer)
    return {name: state[name].clone() for name in names}
