"""Intervals of mean gaps, held to tables, to a mixture of likelihoods and to simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8stack.analysis.compare.intervals import (
    CONFIDENCE,
    MIXTURE,
    Interval,
    always_valid_factor,
    mean_interval,
    pairs_needed,
    standard_error,
    student_factor,
)
from tests.support.cases import case

# Two-sided 95 %: NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2, column 0.975.
TABLE = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 20: 2.086, 30: 2.042, 60: 2.000, 100: 1.984,
}  # fmt: skip


@pytest.mark.parametrize("freedom", TABLE)
def test_a_mean_has_the_interval_that_the_tables_of_t_say(freedom):
    samples = np.random.default_rng(0).normal(size=freedom + 1).tolist()
    error = np.std(samples, ddof=1) / np.sqrt(freedom + 1)
    assert standard_error(samples) == pytest.approx(error)
    interval = mean_interval(samples)
    assert interval.mean == pytest.approx(np.mean(samples))
    assert interval.half_width is not None
    assert interval.half_width == pytest.approx(TABLE[freedom] * error, rel=5e-4)
    assert interval.contains_zero == (abs(interval.mean) <= interval.half_width)
    assert mean_interval([2.0]) == Interval(mean=2.0, half_width=None, samples=1)
    assert standard_error([2.0]) is None


def martingale(samples: np.ndarray, mean: float) -> float:
    """The likelihood ratio against `mean`, from its definition: data of mean theta and deviation
    sigma, theta / sigma normal with variance 1 / c, sigma by its right Haar prior, over sigma so
    alone. Both integrals over sigma are gamma integrals; the one over theta / sigma is summed."""
    x, n = samples - mean, len(samples)
    effects, step = np.linspace(-60, 60, 240_001, retstep=True)
    total, squares = x.sum(), (x**2).sum()
    # Integrate over u = 1 / sigma: u^(n-1) exp(-(u^2 squares - 2 u d total + n d^2) / 2).
    grid = np.linspace(1e-9, 40 / math.sqrt(squares), 4001)

    def density(effect: np.ndarray) -> np.ndarray:
        u = grid[:, None]
        power = -(u**2 * squares - 2 * u * effect * total + n * effect**2) / 2
        return np.trapezoid(u ** (n - 1) * np.exp(power), grid, axis=0)

    near = np.abs(effects) < 8
    prior = math.sqrt(MIXTURE / (2 * math.pi)) * np.exp(-MIXTURE * effects**2 / 2)
    weighted = sum(
        float((density(chunk) * weight).sum() * step)
        for chunk, weight in zip(
            np.array_split(effects[near], 200), np.array_split(prior[near], 200), strict=True
        )
    )
    return weighted / float(density(np.zeros(1))[0])


@pytest.mark.parametrize("n", [case(4, quick=True), case(9, quick=False)])
def test_an_always_valid_interval_ends_where_the_mixture_of_likelihoods_says(n):
    samples = np.random.default_rng(n).normal(3.0, 2.0, n)
    interval = mean_interval(samples.tolist(), always_valid=True)
    assert interval.half_width is not None
    edge = interval.mean + interval.half_width
    level = 1 / (1 - CONFIDENCE)
    assert martingale(samples, edge) == pytest.approx(level, rel=0.01)


def test_two_samples_are_too_few_for_an_always_valid_interval():
    assert always_valid_factor(2) == math.inf
    interval = mean_interval([1.0, 2.0], always_valid=True)
    assert (interval.half_width, interval.deviation) == (None, pytest.approx(math.sqrt(0.5)))
    assert interval.contains_zero


def test_looking_after_every_pair_keeps_the_error_rate_of_always_valid_intervals_alone():
    """400 comparisons of a recipe with itself, looked at after each of 40 pairs."""
    gaps = np.random.default_rng(0).normal(size=(400, 40))
    sizes = np.arange(1, 41)
    means = gaps.cumsum(axis=1) / sizes
    deviations = np.array([[g[:n].std(ddof=1) for n in sizes[2:]] for g in gaps])
    alarms = {}
    for factor in (always_valid_factor, student_factor):
        widths = np.array([factor(n) for n in sizes[2:]]) * deviations
        alarms[factor] = (np.abs(means[:, 2:]) > widths).any(axis=1).mean()
    assert alarms[always_valid_factor] <= 0.05
    assert alarms[student_factor] > 0.15  # so the test can fail


@pytest.mark.parametrize("always_valid", [False, True])
def test_as_many_pairs_are_needed_as_first_make_the_interval_narrow(always_valid):
    factor = always_valid_factor if always_valid else student_factor
    for width in (3.0, 0.5, 0.01):
        n = pairs_needed(2.0, width, always_valid=always_valid)
        assert factor(n) * 2.0 <= width < factor(n - 1) * 2.0
    assert pairs_needed(0.0, 0.1) == 2
