"""Intervals of a mean gap, and how many pairs it takes to make one narrow."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# The variance of the prior of mean / standard deviation is 1 / MIXTURE. Intervals hold for any;
# this one gives narrow ones from 4 pairs to 30.
MIXTURE = 0.1


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`mean` +- `half_width`, at a confidence of 95 %; of too few samples there is no width.
    `deviation` is the samples' standard deviation."""

    mean: float
    half_width: float | None
    samples: int
    deviation: float | None = None

    @property
    def contains_zero(self) -> bool:
        """Whether 0 lies within; without a width nothing is known, so it does."""
        return self.half_width is None or abs(self.mean) <= self.half_width


def standard_error(samples: Sequence[float]) -> float | None:
    """The standard error of the mean, s / sqrt(n); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    return statistics.stdev(samples) / math.sqrt(len(samples))


def mean_interval(samples: Sequence[float], *, always_valid: bool = False) -> Interval:
    """The mean with its interval.

    Args:
        samples: one at least; independent and normal.
        always_valid: whether the interval is to hold however often it is looked at while samples
            are added, and whatever look ends that. Otherwise it holds for a number of samples that
            was chosen beforehand.
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
    """t / sqrt(n), t of n - 1 degrees of freedom: half-width / s of Student's interval. Of the
    differences of pairs it is the paired t-test's (NIST/SEMATECH e-Handbook of Statistical Methods,
    7.3.1.1, "Analysis of paired observations")."""
    from scipy import stats  # takes a second to import

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) / math.sqrt(n)


def always_valid_factor(n: int) -> float:
    """Half-width / s of an interval that holds at all numbers of samples together; infinite for
    two or less.

    With a normal prior of mean / standard deviation and the right Haar prior of the standard
    deviation, the likelihood ratio against mean m is a test martingale under m, G = sqrt(c / (n +
    c)) ((n + c) V / ((n + c) V - n^2 d^2))^(n/2), V = (n - 1) s^2 + n d^2, d the distance of m from
    the samples' mean, c = `MIXTURE`. By Ville's inequality it ever exceeds 1 / 0.05 with
    probability 0.05 at most; the interval is where it does not, solved for d (H. Wang and A.
    Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance,
    arXiv 2310.03722, section 4; the idea is T. L. Lai's, Annals of Statistics 4, 1976).
    """
    c = MIXTURE
    k = ((n + c) / (c * (1 - CONFIDENCE) ** 2)) ** (1 / n)
    room = n + c - k * c
    return math.sqrt((n + c) * (n - 1) * (k - 1) / (n * room)) if n > 2 and room > 0 else math.inf


def pairs_needed(deviation: float, half_width: float, *, always_valid: bool = False) -> int:
    """How many samples of this standard deviation have an interval that narrow; both in the same
    unit, `half_width` above 0."""
    factor = always_valid_factor if always_valid else student_factor
    most = 4
    while factor(most) * deviation > half_width:
        most *= 2
    return bisect_left(
        range(most + 1), True, lo=2, key=lambda n: factor(n) * deviation <= half_width
    )
