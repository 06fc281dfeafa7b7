"""Intervals of mean gaps, held to tables and to simulations."""

from __future__ import annotations

import numpy as np
import pytest

from fp8stack.analysis.compare import intervals
from fp8stack.analysis.compare.intervals import (
    FEWEST_ADDING,
    Interval,
    mean_interval,
    pairs_needed,
    standard_error,
    student_factor,
)

# Two-sided 95 %, and 98 % for intervals to which pairs are added: NIST/SEMATECH e-Handbook of
# Statistical Methods, table 1.3.6.7.2, columns 0.975 and 0.99.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 20: 2.086, 60: 2.000, 100: 1.984}


TABLE_ADDING = {3: 4.541, 4: 3.747, 9: 2.821, 30: 2.457}


@pytest.mark.parametrize("adding", [False, True])
def test_a_mean_has_the_interval_that_the_tables_of_t_say(adding):
    for freedom, factor in (TABLE_ADDING if adding else TABLE).items():
        samples = np.random.default_rng(0).normal(size=freedom + 1).tolist()
        error = np.std(samples, ddof=1) / np.sqrt(freedom + 1)
        assert standard_error(samples) == pytest.approx(error)
        interval = mean_interval(samples, adding=adding)
        assert interval.mean == pytest.approx(np.mean(samples))
        assert interval.half_width is not None
        assert interval.half_width == pytest.approx(factor * error, rel=5e-4)
        assert interval.contains_zero == (abs(interval.mean) <= interval.half_width)
    assert mean_interval([2.0]) == Interval(mean=2.0, half_width=None, samples=1)
    assert standard_error([2.0]) is None
    if adding:  # from the fourth pair on
        three = mean_interval(samples[:3], adding=True)
        deviation = pytest.approx(np.std(samples[:3], ddof=1))
        assert (three.half_width, three.deviation) == (None, deviation)
        assert three.contains_zero


def covered(gaps: np.ndarray, until: float) -> float:
    """The share of comparisons [comparisons, pairs] whose interval contains 0, the mean, after the
    first pair that makes its half-width at most `until`."""
    numbers = np.arange(FEWEST_ADDING, gaps.shape[1] + 1)
    means = gaps.cumsum(axis=1)[:, FEWEST_ADDING - 1 :] / numbers
    squares = (gaps**2).cumsum(axis=1)[:, FEWEST_ADDING - 1 :] - numbers * means**2
    deviations = np.sqrt(squares.clip(0) / (numbers - 1))
    half_widths = deviations * [student_factor(n, adding=True) for n in numbers]
    is_narrow = half_widths <= until
    is_narrow[:, -1] = True  # no more pairs
    last = np.arange(len(gaps)), is_narrow.argmax(axis=1)
    return float((np.abs(means[last]) <= half_widths[last]).mean())


@pytest.mark.capability("D11")
@pytest.mark.parametrize("until", [2.0, 1.0, 0.5])  # standard deviations of a gap
def test_intervals_that_pairs_were_added_to_contain_the_mean_as_often_as_they_say(
    until, monkeypatch
):
    gaps = np.random.default_rng(0).normal(size=(4000, 100))
    assert 0.955 <= covered(gaps, until) <= 0.985
    if until == 0.5:
        monkeypatch.setattr(intervals, "CONFIDENCE_ADDING", 0.95)
        assert covered(gaps, until) < 0.93


def test_as_many_pairs_are_needed_as_first_make_the_interval_narrow():
    for width in (3.0, 0.5, 0.01):
        n = pairs_needed(2.0, width)
        assert student_factor(n, adding=True) * 2.0 <= width
        assert student_factor(n - 1, adding=True) * 2.0 > width
    assert pairs_needed(0.0, 0.1) == 4
