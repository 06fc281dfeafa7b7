"""The law that predicts the loss gap of training in a recipe from the recipe's sensitivity.
`python -m bench law` fits it to the runs of `python -m bench study`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from scipy import stats

from fp8stack.analysis.forecast.result import Gap

CONFIDENCE = 0.90
QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
"""Half-width of an interval, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """gap = forward x KL^power + backward x error, in nats per token.

    Attributes:
        forward, power: factor and exponent of the forward pass's divergence.
        backward: factor of the backward pass's relative squared error.
        deviation: the standard deviation of gaps around the law, as a share of the prediction.
        parameters, ratio: the ranges that the fit covers, of the number of parameters and of
            training tokens per parameter.
        largest: the largest divergence in the fit, in nats per token.
        runs: the number of pairs of runs in the fit.
    """

    forward: float
    power: float
    backward: float
    deviation: float
    parameters: tuple[float, float]
    ratio: tuple[float, float]
    largest: float
    runs: int

    def mean(self, forward: float, backward: float) -> float:
        """The predicted gap, in nats per token. For the arguments see `Sensitivity`."""
        return float(self.forward * forward**self.power + self.backward * backward)

    def gap(self, forward: float, backward: float) -> Gap:
        """The predicted gap with its interval. For the arguments see `Sensitivity`."""
        mean = self.mean(forward, backward)
        width = QUANTILE * self.deviation * mean
        return Gap(mean=mean, low=mean - width, high=mean + width)

    def beyond(self, parameters: int, tokens: int | None, forward: float = 0.0) -> str:
        """Explain in a few words why the law does not apply; "" if it does.

        Args:
            parameters: the model's number of parameters.
            tokens: the number of its training tokens; None if unknown.
            forward: the divergence of a recipe, in nats per token.
        """
        low, high = self.parameters
        if not low / 2 <= parameters <= high * 2:
            return (
                f"the law is of models of {low / 1e6:.2g} to {high / 1e6:.2g} million parameters, "
                f"and this has {parameters / 1e6:.3g} million"
            )
        if tokens is None:
            return "how many tokens the model was trained on is not known (--tokens)"
        low, high = self.ratio
        if not low / 2 <= tokens / parameters <= high * 2:
            return (
                f"the law is of {low:.2g} to {high:.2g} training tokens per parameter, and this "
                f"model has {tokens / parameters:.3g}"
            )
        if forward > 2 * self.largest:
            return (
                f"its divergence of {forward:.3g} nats per token is above the {self.largest:.2g} "
                "that the law covers"
            )
        return ""


@cache
def fitted() -> Law:
    """The fitted law that ships with fp8stack."""
    values = json.loads(
        resources.files("fp8stack.analysis.forecast").joinpath("law.json").read_text()
    )
    ranges = {key: tuple(values[key]) for key in ("parameters", "ratio")}
    return Law(**{**values, **ranges})
