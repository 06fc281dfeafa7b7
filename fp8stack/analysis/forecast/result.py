"""The result of a forecast: as data, its table, and a sentence on one recipe."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from fp8stack.common.tables import aligned

MOST_EXTRA = 900.0
"""The most extra tokens that are told, in percent."""


class Record(BaseModel):
    """Immutable data."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Gap(Record):
    """A loss gap with its 90 % interval, in percent of the loss if nothing else is said."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Gap:
        """The gap in another unit."""
        return Gap(mean=self.mean * factor, low=self.low * factor, high=self.high * factor)


class Expected(Record):
    """The forecast for a recipe.

    Attributes:
        recipe: its name.
        severity: the gap relative to that of NVFP4 in all linears of the blocks; None if no source
            says anything of the recipe, and `note` says why.
        percent: the gap in percent of the loss.
        nats: the gap in nats per token; None if the loss is not known.
        extra_tokens: the training tokens, in percent, that would make up for the gap, at most
            `MOST_EXTRA`; None far from the tokens that baselines are known for.
        sources: the training setups that give the severity.
        note: what the forecast assumes or leaves out.
    """

    recipe: str
    severity: float | None = None
    percent: Gap | None = None
    nats: Gap | None = None
    extra_tokens: Gap | None = None
    sources: tuple[str, ...] = ()
    note: str = ""


class ForecastResult(Record):
    """The forecast for a model.

    Attributes:
        model: its name.
        parameters, active_parameters: all parameters, and those that a token meets.
        tokens: the number of training tokens.
        loss: of the baseline, in nats per token; None if it is not known.
        recipes: the forecast for each recipe.
        remarks: sentences about the model and the sources.
    """

    model: str
    parameters: int
    active_parameters: int
    tokens: int
    loss: float | None
    recipes: tuple[Expected, ...]
    remarks: tuple[str, ...]

    def as_text(self) -> list[str]:
        """The model, the table and notes on it."""
        active = ""
        if self.active_parameters != self.parameters:
            active = f" ({quantity(self.active_parameters)} active)"
        ratio = self.tokens / self.active_parameters
        lines = [
            f"{self.model}: {quantity(self.parameters)} parameters{active}, "
            f"{quantity(self.tokens)} training tokens, {ratio:.3g} per parameter"
        ]
        if self.loss is not None:
            lines.append(f"loss without low precision: {self.loss:.4f}, by Chinchilla's law")
        titles = ["recipe", "gap to expect", "90 % interval", "nats per token", "extra tokens"]
        table = aligned([[*titles, "rests on"], *self.rows()])
        notes: dict[str, list[str]] = {}
        for expected in self.recipes:
            if expected.note:
                notes.setdefault(expected.note, []).append(expected.recipe)
        return [
            *[*lines, "", *table, ""],
            *(f"{', '.join(names)}: {note}" for note, names in notes.items()),
            *self.remarks,
            "gap: what training in the recipe from the first step adds to the loss, in percent of "
            "it; extra tokens make up for it (docs/what_does_it_cost.md)",
        ]

    def rows(self) -> Iterator[list[str]]:
        """Yield a table row for each recipe."""
        for expected in self.recipes:
            nats = ""
            if (gap := expected.nats) is not None:
                nats = f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
            sources = ", ".join(expected.sources)
            yield [expected.recipe, *shares(expected.percent), nats, _extra(expected), sources]

    def sentence(self) -> str:
        """The gap of the first recipe and what it rests on."""
        expected = self.recipes[0]
        gap, interval = shares(expected.percent)
        if not interval:
            return f"loss gap of {expected.recipe}: {gap}, {expected.note}"
        return (
            f"loss gap to expect of {expected.recipe}: {gap} in the mean of many runs (90 % "
            f"interval {interval}) at {self.tokens / self.active_parameters:.3g} tokens per "
            f"parameter; rests on {', '.join(expected.sources)} (fp8stack forecast)"
        )


def quantity(count: float) -> str:
    """A large number in short: 8.03B."""
    for power, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= power:
            return f"{count / power:.3g}{unit}"
    return f"{count:g}"


def shares(gap: Gap | None) -> tuple[str, str]:
    """A gap in percent and its interval as text."""
    if gap is None:
        return "cannot tell", ""
    digits = 2 if gap.high >= 0.1 else 3
    return f"{gap.mean:+.{digits}f} %", f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f} %"


def _extra(expected: Expected) -> str:
    if (extra := expected.extra_tokens) is None:
        return ""
    low, mean, high = (
        f"over {MOST_EXTRA:.0f} %"
        if value >= MOST_EXTRA
        else f"{value:.{1 if value < 10 else 0}f} %"
        for value in (extra.low, extra.mean, extra.high)
    )
    return f"{mean} ({low} to {high})"
