"""The law from a recipe's sensitivity to the loss gap that training in it leaves, and how far it
is to be trusted. `python -m bench law` fits it to the runs of `python -m bench study`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from scipy import stats

from fp8stack.forecast.told import Gap

CONFIDENCE = 0.90
QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
"""How many standard deviations its interval is to either side."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """gap = forward x KL^power + backward x error, in nats per token.

    Attributes:
        forward, power: of the divergence that the forward pass has.
        backward: of the backward pass's relative squared error.
        deviation: the standard deviation of gaps around the law, as a share of what it says.
        parameters, ratio: the least and the most that the fit covers, of the model's parameters
            and of its training tokens per parameter.
        largest: the largest divergence that it covers, in nats per token.
        runs: how many pairs of runs it was fitted to.
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
        """The gap to expect, in nats per token."""
        return float(self.forward * forward**self.power + self.backward * backward)

    def gap(self, forward: float, backward: float) -> Gap:
        """The gap to expect with its interval, of a recipe whose sensitivity is this."""
        mean = self.mean(forward, backward)
        width = QUANTILE * self.deviation * mean
        return Gap(mean=mean, low=mean - width, high=mean + width)

    def beyond(self, parameters: int, tokens: int | None, forward: float = 0.0) -> str:
        """Why the law does not apply, in a few words; "" if it does.

        Args:
            parameters: of the model.
            tokens: that it was trained on; None if nobody knows.
            forward: the divergence of a recipe.
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
    """The law that comes with fp8stack."""
    told = json.loads(resources.files("fp8stack.forecast").joinpath("law.json").read_text())
    ranges = {key: tuple(told[key]) for key in ("parameters", "ratio")}
    return Law(**{**told, **ranges})
