"""The law of the loss gap of training in a recipe, at any size of model. `python -m bench law` fits
it to published gaps and to the runs of `python -m bench study`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from fp8stack.analysis.forecast.result import MOST_EXTRA, Gap

RATIO = 20.0
"""The number of training tokens per parameter at which severities are multiplied by `level`."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """gap = severity x level x (min(D / N, cap) / 20)^exponent, in percent of the loss, for N
    parameters and D training tokens. NVFP4 in all linears of the blocks has severity 1.

    The logarithm of a gap is uncertain by three independent terms: by training setup, by the
    distance of D / N from 20, and by the distance of the severity from NVFP4's.

    Attributes:
        level: NVFP4's gap at 20 tokens per parameter, in percent.
        exponent, cap: the growth with D / N.
        deviation: the standard deviation of the logarithm of a new training setup's level.
        exponent_deviation: the standard deviation of the exponent between sizes of models.
        severity_deviation: the standard deviation of the logarithm of a severity, as a share of
            that logarithm.
        quantile: half-width of a 90 % interval in standard deviations.
        forward: the severity of NVFP4 in the forward pass alone; the rest is of the backward pass.
        head: the severity of a quantized head, for the same work, relative to the blocks'.
        severities: the severity of each shipped recipe whose training was measured.
        sources: the training setups that give each recipe's severity.
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
    forward: float
    head: float
    severities: dict[str, float]
    sources: dict[str, tuple[str, ...]]
    parameters: tuple[float, float]
    ratio: tuple[float, float]
    slope: float
    decline: float

    def growth(self, ratio: float) -> float:
        """The gap at `ratio` tokens per parameter, relative to the gap at 20."""
        return float((min(ratio, self.cap) / RATIO) ** self.exponent)

    def gap(self, ratio: float, severity: float) -> Gap:
        """The expected gap in percent of the loss, with a 90 % interval.

        Args:
            ratio: training tokens per parameter, above 0.
            severity: 0 for a recipe that quantizes nothing.
        """
        mean = severity * self.level * self.growth(ratio)
        distance = math.log(severity) if severity else 0.0
        deviation = math.hypot(
            self.deviation,
            self.exponent_deviation * math.log(ratio / RATIO),
            self.severity_deviation * distance,
        )
        factor = math.exp(self.quantile * deviation)
        return Gap(mean=mean, low=mean / factor, high=mean * factor)

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
    law = Law(**json.loads(file.read_text(encoding="utf-8")))
    sources = {recipe: tuple(names) for recipe, names in law.sources.items()}
    return replace(
        law,
        sources=sources,
        parameters=(law.parameters[0], law.parameters[1]),
        ratio=(law.ratio[0], law.ratio[1]),
    )
