"""The law of the loss gap of training in a recipe. `python -m bench law` fits it to published gaps
and to the runs of `python -m bench study`."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources

from fp8stack.analysis.forecast.result import MOST_EXTRA, Gap, Record

RATIO = 20.0
"""The number of training tokens per parameter at which severities are multiplied by `level`."""
SMALL, LARGE = 2e8, 1e9
"""Beyond `RATIO`, gaps of models of up to `SMALL` parameters grow with tokens, and from `LARGE` on
they do not. Between, the exponent falls linearly in log N."""


class Law(Record):
    """gap = severity x level x (min(D / N, cap) / 20)^exponent, in percent of the loss, for N
    parameters and D training tokens. NVFP4 in all linears of the blocks has severity 1.

    The logarithm of a gap is uncertain by three independent terms: by training setup, by the
    distance of D / N from 20, and by the distance of the severity from NVFP4's.

    Attributes:
        level: NVFP4's gap at 20 tokens per parameter, in percent.
        exponent, cap: the growth with D / N; beyond 20 see `SMALL`.
        deviation: the standard deviation of the logarithm of a new training setup's level.
        exponent_deviation: the standard deviation of the exponent between sizes of models.
        severity_deviation: the standard deviation of the logarithm of a severity, as a share of
            that logarithm.
        quantile: half-width of a 90 % interval in standard deviations.
        severities: the severity of each shipped recipe whose training was measured.
        sources: the training setups that give each recipe's severity.
        addresses: where each training setup is published.
        parameters, ratio: the ranges of the fit, of N and of D / N.
        slope, decline: with more training tokens the loss L of a baseline falls by
            dlog L / dlog D = -slope x (D / N / 20)^-decline.
    """

    level: float
    exponent: float
    cap: float
    deviation: float
    exponent_deviation: float
    severity_deviation: float
    quantile: float
    severities: dict[str, float]
    sources: dict[str, tuple[str, ...]]
    addresses: dict[str, str]
    parameters: tuple[float, float]
    ratio: tuple[float, float]
    slope: float
    decline: float

    def growth(self, parameters: float, ratio: float) -> float:
        """The gap at `ratio` tokens per parameter, relative to the gap at 20."""
        exponent = self.exponent
        if ratio > RATIO:
            remaining = math.log(LARGE / parameters) / math.log(LARGE / SMALL)
            exponent *= min(1.0, max(0.0, remaining))
        return float((min(ratio, self.cap) / RATIO) ** exponent)

    def gap(self, parameters: float, ratio: float, severity: float) -> Gap:
        """The expected gap in percent of the loss, with a 90 % interval.

        Args:
            parameters: the number of (active) parameters.
            ratio: training tokens per parameter, above 0.
            severity: 0 for a recipe that quantizes nothing.
        """
        mean = severity * self.level * self.growth(parameters, ratio)
        factor = math.exp(self.quantile * self.spread(ratio, severity))
        return Gap(mean=mean, low=mean / factor, high=mean * factor)

    def spread(self, ratio: float, severity: float) -> float:
        """The standard deviation of the logarithm of a gap."""
        return math.hypot(
            self.deviation,
            self.exponent_deviation * math.log(ratio / RATIO),
            self.severity_deviation * (math.log(severity) if severity else 0.0),
        )

    def extra_tokens(self, ratio: float, percent: float) -> float:
        """The training tokens to add, in percent of `ratio`, until the loss is as low as without a
        gap of `percent`; at most `MOST_EXTRA`."""
        # The integral of the slope over log D is a difference of these powers of D / N / 20.
        start = (ratio / RATIO) ** -self.decline
        end = start - self.decline * math.log1p(percent / 100) / self.slope
        if end <= 0:
            return MOST_EXTRA
        return float(min(MOST_EXTRA, 100 * ((start / end) ** (1 / self.decline) - 1)))


@cache
def fitted() -> Law:
    """The fitted law that ships with fp8stack."""
    file = resources.files("fp8stack.analysis.forecast").joinpath("law.json")
    return Law.model_validate_json(file.read_text(encoding="utf-8"))
