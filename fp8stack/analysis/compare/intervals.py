"""Confidence intervals of a mean gap, and the number of pairs that makes one narrow."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
CONFIDENCE_ADDING, FEWEST_ADDING = 0.98, 4
"""The confidence and the smallest number of samples of an interval to which samples are added until
it is narrow. With normal noise the last interval contains the mean in 96 to 98 % of all cases."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`mean` +- `half_width`. `half_width` is None if there are too few samples; `deviation` is
    their standard deviation."""

    mean: float
    half_width: float | None
    samples: int
    deviation: float | None = None

    @property
    def contains_zero(self) -> bool:
        """Whether the interval contains 0; True without a width."""
        return self.half_width is None or abs(self.mean) <= self.half_width


def standard_error(samples: Sequence[float]) -> float | None:
    """The standard error of the mean, s / sqrt(n); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    return statistics.stdev(samples) / math.sqrt(len(samples))


def mean_interval(samples: Sequence[float], *, adding: bool = False) -> Interval:
    """The mean of `samples` with its confidence interval.

    Args:
        samples: one or more; independent and normally distributed.
        adding: whether samples are added until the interval is narrow. Otherwise their number was
            chosen beforehand.
    """
    mean, n = statistics.fmean(samples), len(samples)
    if n < 2:
        return Interval(mean=mean, half_width=None, samples=n)
    deviation = statistics.stdev(samples)
    width = student_factor(n, adding=adding) * deviation
    return Interval(
        mean=mean,
        half_width=width if math.isfinite(width) else None,
        samples=n,
        deviation=deviation,
    )


def student_factor(n: int, *, adding: bool = False) -> float:
    """half-width / s of Student's interval: t / sqrt(n), with t at n - 1 degrees of freedom. For
    the differences of pairs this is the interval of the paired t-test (NIST/SEMATECH e-Handbook of
    Statistical Methods, 7.3.1.1, "Analysis of paired observations").

    With `adding` (see `mean_interval`) at a higher confidence, and infinite for fewer than
    `FEWEST_ADDING` samples, whose deviation is often much too small.
    """
    from scipy import stats  # takes a second to import

    if adding and n < FEWEST_ADDING:
        return math.inf
    confidence = CONFIDENCE_ADDING if adding else CONFIDENCE
    return float(stats.t.ppf((1 + confidence) / 2, n - 1)) / math.sqrt(n)


def pairs_needed(deviation: float, half_width: float) -> int:
    """The smallest number of samples with this standard deviation whose interval has at most this
    half-width if samples are added until it has. Both are in the same unit; `half_width` > 0."""

    def is_narrow(n: int) -> bool:
        return student_factor(n, adding=True) * deviation <= half_width

    upper = FEWEST_ADDING
    while not is_narrow(upper):
        upper *= 2
    return bisect_left(range(upper + 1), True, lo=FEWEST_ADDING, key=is_narrow)
