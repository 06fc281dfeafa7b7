"""The result of a forecast: its JSON file and its table."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from fp8stack.common.tables import aligned

NAME = "forecast.json"
"""The name of the file in a run's folder."""
WORST = 5
"""Number of layers that `without_worst` leaves in bf16."""
GAP = ("gap to expect", "90 % interval")
"""The column titles of `shares`."""
FIRST_QUARTER = "the first quarter of training is in fp32 in such a gap"
"""A property of the runs that the law is fitted to; texts that show gaps mention it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Gap(_Record):
    """A loss gap in nats per token, with its 90 % interval."""

    mean: float
    low: float
    high: float


class Expected(_Record):
    """The forecast for a recipe. `gap` is None if the law does not apply, and `reason` says why;
    `without_worst` is the gap with the worst layers in bf16. For `forward` and `backward` see
    `Sensitivity`."""

    recipe: str
    gap: Gap | None
    reason: str
    worst: tuple[str, ...]
    without_worst: Gap | None
    forward: float
    forward_layers: dict[str, float]
    backward: float
    backward_layers: dict[str, float]


class ForecastResult(_Record):
    """The forecast for a model. `tokens` is the number of training tokens, None if unknown; `loss`
    is in nats per token, in float32."""

    model: str
    checkpoint: str
    parameters: int
    tokens: int | None
    data: str
    windows: int
    loss: float
    law_runs: int
    recipes: tuple[Expected, ...]

    @property
    def about(self) -> list[str]:
        """Two lines on the model and its data."""
        text = f"{self.model}, {self.checkpoint}: {self.parameters / 1e6:.3g} million parameters"
        if self.tokens is not None:
            text += f", trained on {self.tokens / self.parameters:.3g} tokens per parameter"
        return [text, f"{self.windows} windows of {self.data}: loss {self.loss:.4f} in fp32"]

    @property
    def header(self) -> list[str]:
        """Column titles of `rows`."""
        return ["recipe", *GAP, f"without the worst {WORST}", "divergence", "worst layers"]

    def rows(self) -> Iterator[list[str]]:
        """Yield a table row for each recipe."""
        for expected in self.recipes:
            yield [
                expected.recipe,
                *shares(expected.gap, self.loss),
                share(expected.without_worst, self.loss),
                f"{expected.forward:.1e}",
                _layers(expected),
            ]

    def as_text(self) -> list[str]:
        """The table, then the notes."""
        return [*self.about, "", *aligned([self.header, *self.rows()]), "", *self.notes()]

    def notes(self) -> Iterator[str]:
        """Yield notes on the table."""
        reasons: dict[str, list[str]] = {}
        for expected in self.recipes:
            if expected.reason:
                reasons.setdefault(expected.reason, []).append(expected.recipe)
        for reason, names in reasons.items():
            yield f"cannot tell the gap of {', '.join(names)}: {reason}"
        yield (
            "gap: what training a model like this in the recipe adds to its loss, in percent of "
            f"it; {FIRST_QUARTER}; from a law fitted to {self.law_runs} pairs of runs "
            "(docs/what_does_it_cost.md)"
        )
        yield (
            f"without the worst {WORST}: the gap with those layers in bf16; divergence: of the "
            "quantized model's predictions from its own, nats per token; worst layers: their share "
            "of it"
        )


def shares(gap: Gap | None, loss: float) -> tuple[str, str]:
    """A gap and its interval as text, in percent of the loss."""
    if gap is None:
        return "cannot tell", ""
    return share(gap, loss), f"{100 * gap.low / loss:+.2f} to {100 * gap.high / loss:+.2f} %"


def share(gap: Gap | None, loss: float) -> str:
    """A gap as text, in percent of the loss."""
    return "" if gap is None else f"{100 * gap.mean / loss:+.2f} %"


def _layers(expected: Expected) -> str:
    total = sum(expected.forward_layers.values())
    if not total:
        return "none: the forward pass is exact"
    names = (
        f"{path} {expected.forward_layers.get(path, 0.0) / total:.0%}" for path in expected.worst
    )
    return ", ".join(names)
