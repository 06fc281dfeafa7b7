"""The bound of what tensor cores lose, against a model of tensor cores in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform import gemms, oracles
from fp8stack.analysis.conform.accumulation import accumulation_error
from fp8stack.analysis.conform.checks import Context, Facts
from fp8stack.precision import Hardware

SIZE, K = 8, 1024
CPU = Context(Hardware("cpu", name="a CPU"), seed=3)

pytestmark = pytest.mark.usefixtures("one_thread")


def exponents(x: np.ndarray) -> np.ndarray:
    """The exponent of each number, far below all others for 0."""
    return np.where(x == 0, -(10**6), np.frexp(x)[1] - 1)


def by_tensor_cores(
    a: np.ndarray, b: np.ndarray, steps: int | None = None, *, splits: int = 1, bits: int = 13
) -> np.ndarray:
    """`a @ b.T` as a Hopper tensor core adds it: in each step 32 products and the sum, truncated to
    `bits` bits behind the largest exponent, then the sum. After `steps` steps, and at the ends of
    `splits` equal parts, a sum is added up in float64."""
    result = np.zeros((len(a), len(b)))
    for columns_of_part in np.split(np.arange(a.shape[1]), splits):
        total = np.zeros_like(result)
        for place, columns in enumerate(np.split(columns_of_part, len(columns_of_part) // 32)):
            if steps and place % steps == 0:
                result, total = result + total, np.zeros_like(result)
            terms = a[:, None, columns] * b[None, :, columns]
            terms = np.concatenate([terms, total[..., None]], axis=2)
            unit = np.ldexp(1.0, np.maximum(exponents(terms).max(2), -900) - bits)
            total = np.trunc(terms / unit[..., None]).sum(2) * unit
            unit = np.ldexp(1.0, np.maximum(exponents(total), -900) - bits)
            total = np.trunc(total / unit) * unit
        result = result + total
    return result


def operands(kind: str, format: str = "e4m3") -> list[np.ndarray]:
    """Two matrices of FP8 values: "positive" ones of a few binades, "signed" ones, or "wide" ones,
    whose magnitudes differ by the format's whole range."""
    generator = np.random.default_rng(4)
    matrices = []
    for name in (format, "e4m3"):
        grid = oracles.grid(name)
        first, last = (0, len(grid)) if kind == "wide" else np.searchsorted(grid, (0.125, 4.0))
        x = grid[generator.integers(first, last, (SIZE, K))]
        matrices.append(x if kind == "positive" else x * generator.choice([-1.0, 1.0], x.shape))
    return matrices


@pytest.mark.parametrize("steps", [None, 4], ids=["fast", "slow"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["positive", "signed", "wide"])
def test_tensor_cores_lose_no_more_than_the_bound(
    kind: str, format: str, splits: int, steps: int | None
) -> None:
    a, b = operands(kind, format)
    lost = np.abs(by_tensor_cores(a, b, steps, splits=splits) - a @ b.T)
    assert lost.max() > 0
    tensors = torch.from_numpy(a), torch.from_numpy(b)
    for exact in (False, True):
        bound = accumulation_error(*tensors, steps, exact=exact).numpy()
        assert (lost <= bound).all()
    scaled = accumulation_error(tensors[0] * 0.3, tensors[1], steps).numpy()
    np.testing.assert_allclose(scaled, 0.3 * accumulation_error(*tensors, steps).numpy())


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_long_sums_of_positive_products_come_near_the_bound(format: str) -> None:
    a, b = operands("positive", format)
    lost = np.abs(by_tensor_cores(a, b) - a @ b.T)
    bound = accumulation_error(torch.from_numpy(a), torch.from_numpy(b), exact=True).numpy()
    assert (lost / bound).min() > 0.4
    # More than one rounding to 13 bits for each step, the bound of earlier versions.
    assert (lost > 2.0**-13 * K / 32 * (a @ b.T)).all()


def checked(monkeypatch: pytest.MonkeyPatch, fast: bool, **fault: Any) -> Facts:
    """The verdict on products of a model of tensor cores with a `fault`."""
    bits, lost_columns = fault.get("bits", 13), fault.get("lost_columns", 0)

    def product(a: Any, b: Any, dtype: torch.dtype, *, fast_accumulation: bool) -> torch.Tensor:
        values = [
            oracles.decode(x.data.view(torch.uint8).numpy(), "e4m3") * x.inv_scale.numpy()
            for x in (a, b)
        ]
        a_values, b_values = (x[:, : x.shape[1] - lost_columns].astype(np.float64) for x in values)
        steps = None if fast_accumulation else 4
        y = by_tensor_cores(a_values, b_values, steps, bits=bits) * fault.get("factor", 1.0)
        return torch.from_numpy(y).to(dtype)

    monkeypatch.setattr(gemms, "scaled_gemm", product)
    monkeypatch.setattr(
        gemms,
        "_core_error",
        lambda context, a, b, fast, powers: accumulation_error(
            a, b, None if fast else 4, exact=powers
        ),
    )
    quick = Context(CPU.hardware, quick=True, seed=CPU.seed)
    return gemms.long_rows(quick, "current", "e4m3", fast)


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_products_of_tensor_cores_hold_and_broken_ones_do_not(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(monkeypatch, fast)["holds"]
    faults: list[dict[str, Any]] = [{"lost_columns": 32}, {"factor": 1.01}, {"bits": 8}]
    for fault in faults:
        with monkeypatch.context() as patch:
            assert not checked(patch, fast, **fault)["holds"], fault
