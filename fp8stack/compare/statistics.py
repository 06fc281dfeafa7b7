"""Means, their errors, and intervals for paired differences. Plain Python; nothing of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`mean` +- `half_width`, at a confidence of 95 %; of one sample there is no width."""

    mean: float
    half_width: float | None
    samples: int

    @property
    def contains_zero(self) -> bool:
        """Whether 0 lies within; of one sample nothing is known, so it does."""
        return self.half_width is None or abs(self.mean) <= self.half_width


def standard_error(samples: Sequence[float]) -> float | None:
    """The standard error of the mean, s / sqrt(n); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    return statistics.stdev(samples) / math.sqrt(len(samples))


def mean_interval(samples: Sequence[float]) -> Interval:
    """The mean with its interval by Student's t: t s / sqrt(n), t of n - 1 degrees of freedom.

    For differences of pairs this is the paired t-test (NIST/SEMATECH e-Handbook of Statistical
    Methods, 7.3.1.1, "Analysis of paired observations").
    """
    error = standard_error(samples)
    width = None if error is None else t_quantile(CONFIDENCE, len(samples) - 1) * error
    return Interval(mean=statistics.fmean(samples), half_width=width, samples=len(samples))


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = `confidence` for Student's distribution of `freedom` degrees.

    >>> round(t_quantile(0.95, 2), 3)
    4.303
    """
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(freedom)), in which it is monotonic
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        below = _within(middle, freedom) < confidence
        low, high = (middle, high) if below else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= t), t = sqrt(freedom) tan(angle): a finite sum, by M. Abramowitz and I. A. Stegun,
    Handbook of Mathematical Functions, 26.7.3 (odd degrees) and 26.7.4 (even ones)."""
    odd = freedom % 2
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
