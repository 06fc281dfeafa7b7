"""The bound of what tensor cores lose, against a model of tensor cores in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform import gemms, oracles
from fp8stack.analysis.conform.accumulation import accumulation_error
from fp8stack.analysis.conform.checks import Context, Facts
from fp8stack.precision import Hardware, load_recipe

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


def matrices(kind: str, format: str = "e4m3") -> list[np.ndarray]:
    """Two matrices of FP8 values: "positive" ones of a few binades, "signed" ones, or "wide" ones,
    whose magnitudes differ by the format's whole range."""
    generator = np.random.default_rng(4)
    operands = []
    for name in (format, "e4m3"):
        grid = oracles.grid(name)
        first, last = (0, len(grid)) if kind == "wide" else np.searchsorted(grid, (0.125, 4.0))
        x = grid[generator.integers(first, last, (SIZE, K))]
        operands.append(x if kind == "positive" else x * generator.choice([-1.0, 1.0], x.shape))
    return operands


@pytest.mark.parametrize("steps", [None, 4], ids=["fast", "slow"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["positive", "signed", "wide"])
def test_tensor_cores_lose_no_more_than_the_bound(
    kind: str, format: str, splits: int, steps: int | None
) -> None:
    a, b = matrices(kind, format)
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
    a, b = matrices("positive", format)
    lost = np.abs(by_tensor_cores(a, b) - a @ b.T)
    bound = accumulation_error(torch.from_numpy(a), torch.from_numpy(b), exact=True).numpy()
    assert (lost / bound).min() > 0.4
    # More than one rounding to 13 bits for each step, the bound of earlier versions.
    assert (lost > 2.0**-13 * K / 32 * (a @ b.T)).all()


def checked(monkeypatch: pytest.MonkeyPatch, operands: str, **fault: Any) -> Facts:
    """The verdict on linears whose operands a model of tensor cores with a `fault` multiplies."""
    bits, lost_columns = fault.get("bits", 13), fault.get("lost_columns", 0)

    def product(
        a: Any, b: Any, *, use_fast_accum: bool, scale_a: Any, scale_b: Any, **options: Any
    ) -> torch.Tensor:
        values = [x.double().numpy() for x in (a, b.t())]
        a_values, b_values = (x[:, : x.shape[1] - lost_columns] for x in values)
        steps = None if use_fast_accum else 4
        y = torch.from_numpy(by_tensor_cores(a_values, b_values, steps, bits=bits))
        y = y * fault.get("factor", 1.0) * (scale_a * scale_b)
        assert options.pop("bias") is None
        return y.to(options.pop("out_dtype"))

    def core_error(context: Context, a: Any, b: Any, fast: bool, powers: bool) -> torch.Tensor:
        return accumulation_error(a, b, None if fast else 4, exact=powers)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(gemms, "_core_error", core_error)
    shape = gemms.Shape(64, 1024, 64, False, operands=operands)  # type: ignore[arg-type]
    return gemms.linear(CPU, load_recipe("current"), "torch", shape).compare()


@pytest.mark.parametrize("operands", ["wide", "positive", "ones"])
@pytest.mark.full
def test_products_of_tensor_cores_hold_and_broken_ones_do_not(
    operands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(monkeypatch, operands)["holds"]
    faults: list[dict[str, Any]] = [{"lost_columns": 32}, {"factor": 1.01}, {"bits": 8}]
    for fault in faults:
        if operands != "wide" or "factor" in fault:
            with monkeypatch.context() as patch:
                assert not checked(patch, operands, **fault)["holds"], fault
