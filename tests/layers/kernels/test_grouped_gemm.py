"""GEMMs of groups against products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp8stack.layers.kernels.grouped_gemm import (
    by_grouped_mm,
    grouped_gemm,
    sum_groups,
)
from tests.support.backend_models import normal

ENDS = torch.tensor([5, 5, 21, 24], dtype=torch.int32)
PLACES = [(0, 5), (5, 5), (5, 21), (21, 24)]


@pytest.mark.parametrize("multiply", [grouped_gemm, by_grouped_mm], ids=["loop", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_group_is_multiplied_by_its_own_matrix(multiply, dtype) -> None:
    x, dy = normal(24, 72, seed=1).to(dtype), normal(24, 40, seed=2).to(dtype)
    weight = normal(4, 40, 72, seed=3).to(dtype)
    y = multiply(x, weight, ENDS, "b")
    dx = multiply(dy, weight, ENDS, "neither")
    dw = multiply(dy, x, ENDS, "a")
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, dtype)
    close: Any = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    for group, (start, stop) in enumerate(PLACES):
        rows, gradient, matrix = x[start:stop], dy[start:stop], weight[group].double()
        expected = (rows.double() @ matrix.t(), gradient.double() @ matrix)
        for product, expected_product in zip(
            (y[start:stop], dx[start:stop]), expected, strict=True
        ):
            torch.testing.assert_close(product.double(), expected_product, **close)
        expected_product = gradient.double().t() @ rows.double()
        torch.testing.assert_close(dw[group].double(), expected_product, **close)


def test_a_bias_is_that_of_the_group_and_sums_are_over_its_rows() -> None:
    x, weight, bias = normal(24, 72), torch.zeros(4, 40, 72), normal(4, 40)
    y = grouped_gemm(x, weight, ENDS, "b", bias)
    sums = sum_groups(x, ENDS, torch.float64)
    for group, (start, stop) in enumerate(PLACES):
        assert torch.equal(y[start:stop], bias[group].expand(stop - start, 40))
        assert torch.equal(sums[group], x[start:stop].sum(0, dtype=torch.float64))


def test_a_group_without_rows_has_a_product_of_zeros_whatever_the_kernel_leaves(monkeypatch):
    def leaves_memory(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.full((4, a.shape[0], b.shape[1]), torch.nan)

    monkeypatch.setattr(F, "grouped_mm", leaves_memory)
    dw = by_grouped_mm(normal(24, 40), normal(24, 72), ENDS, "a")
    assert not dw[1].any()
    assert dw[[0, 2, 3]].isnan().all()
