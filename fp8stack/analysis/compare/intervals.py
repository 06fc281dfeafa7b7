"""Confidence intervals of a mean gap, and the number of pairs that makes one narrow."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# The variance of the prior of mean / standard deviation is 1 / MIXTURE. Intervals are valid for any
# value; this one makes them narrow for 4 to 30 pairs.
MIXTURE = 0.1


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`mean` +- `half_width`, at a confidence of 95 %. `half_width` is None if there are too few
    samples; `deviation` is their standard deviation."""

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


def mean_interval(samples: Sequence[float], *, always_valid: bool = False) -> Interval:
    """The mean of `samples` with its confidence interval.

    Args:
        samples: one or more; independent and normally distributed.
        always_valid: whether the interval must stay valid if it is computed repeatedly while
            samples are added, and its width decides when to stop. Otherwise it is valid for a
            number of samples that was chosen beforehand.
    """
    factor = always_valid_factor if always_valid else student_factor
    mean, n = statistics.fmean(samples), len(samples)
    if n < 2:
        return Interval(mean=mean, half_width=None, samples=n)
    deviation = statistics.stdev(samples)
    width = factor(n) * deviation
    return Interval(
        mean=mean,
        half_width=width if math.isfinite(width) else None,
        samples=n,
        deviation=deviation,
    )


def student_factor(n: int) -> float:
    """half-width / s of Student's interval: t / sqrt(n), with t at n - 1 degrees of freedom. For
    the differences of pairs this is the interval of the paired t-test (NIST/SEMATECH e-Handbook of
    Statistical Methods, 7.3.1.1, "Analysis of paired observations")."""
    from scipy import stats  # takes a second to import

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) / math.sqrt(n)


def always_valid_factor(n: int) -> float:
    """half-width / s of an interval that is valid at all numbers of samples together; infinite for
    n <= 2.

    With a normal prior of mean / standard deviation and the right Haar prior of the standard
    deviation, the likelihood ratio against mean m is a test martingale under m:

        G = sqrt(c / (n + c)) ((n + c) V / ((n + c) V - n^2 d^2))^(n/2)
        V = (n - 1) s^2 + n d^2,  d = |m - mean of the samples|,  c = `MIXTURE`

    By Ville's inequality the probability that G ever exceeds 1 / 0.05 is at most 0.05. The interval
    contains the m where G does not exceed it, solved for d (H. Wang and A. Ramdas, Anytime-valid
    t-tests and confidence sequences for Gaussian means with unknown variance, arXiv 2310.03722,
    section 4; the idea is T. L. Lai's, Annals of Statistics 4, 1976).
    """
    c = MIXTURE
    k = ((n + c) / (c * (1 - CONFIDENCE) ** 2)) ** (1 / n)
    denominator = n + c - k * c
    return (
        math.sqrt((n + c) * (n - 1) * (k - 1) / (n * denominator))
        if n > 2 and denominator > 0
        else math.inf
    )


def pairs_needed(deviation: float, half_width: float, *, always_valid: bool = False) -> int:
    """The smallest number of samples with this standard deviation whose interval has at most this
    half-width. Both are in the same unit; `half_width` > 0."""
    factor = always_valid_factor if always_valid else student_factor
    upper = 4
    while factor(upper) * deviation > half_width:
        upper *= 2
    return bisect_left(
        range(upper + 1), True, lo=2, key=lambda n: factor(n) * deviation <= half_width
    )
