"""The result of a forecast: as data, and its table."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from fp8stack.common.tables import aligned

GAP = ("gap to expect", "90 % interval")
"""The column titles of `shares`."""
MOST_EXTRA = 900.0
"""The most extra tokens that are told, in percent."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Gap(_Record):
    """A loss gap with its 90 % interval, in percent of the loss if nothing else is said."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Gap:
        """The gap in another unit."""
        return Gap(mean=self.mean * factor, low=self.low * factor, high=self.high * factor)


class Expected(_Record):
    """The forecast for a recipe.

    Attributes:
        recipe: its name.
        severity: the gap relative to that of NVFP4 in all linears of the blocks; None if no source
            says anything of the recipe, and `reason` says why.
        percent: the gap in percent of the loss.
        nats: the gap in nats per token; None if the loss is not known.
        extra_tokens: the training tokens, in percent, that would make up for the gap, at most
            `MOST_EXTRA`; None far from the tokens that baselines are known for.
        sources: the training setups that give the severity.
        notes: assumptions.
    """

    recipe: str
    severity: float | None
    percent: Gap | None
    nats: Gap | None
    extra_tokens: Gap | None
    sources: tuple[str, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()


class ForecastResult(_Record):
    """The forecast for a model.

    Attributes:
        model: a run, or the name of a model.
        parameters, active_parameters: all parameters, and those that a token meets.
        tokens: the number of training tokens.
        loss: of the baseline, in nats per token; None if it is not known.
        loss_source: the source of `loss`.
        recipes: the forecast for each recipe.
        remarks: sentences about the model and the sources.
    """

    model: str
    parameters: int
    active_parameters: int
    tokens: int
    loss: float | None
    loss_source: str
    recipes: tuple[Expected, ...]
    remarks: tuple[str, ...]

    @property
    def about(self) -> list[str]:
        """Lines on the model and its loss."""
        active = ""
        if self.active_parameters != self.parameters:
            active = f" ({quantity(self.active_parameters)} active)"
        ratio = self.tokens / self.active_parameters
        lines = [
            f"{self.model}: {quantity(self.parameters)} parameters{active}, "
            f"{quantity(self.tokens)} training tokens, {ratio:.3g} per parameter"
        ]
        if self.loss is not None:
            lines.append(f"loss without low precision: {self.loss:.4f}, {self.loss_source}")
        return lines

    @property
    def header(self) -> list[str]:
        """Column titles of `rows`."""
        return ["recipe", *GAP, "nats per token", "extra tokens", "sources"]

    def rows(self) -> Iterator[list[str]]:
        """Yield a table row for each recipe."""
        for expected in self.recipes:
            nats = ""
            if expected.nats is not None:
                gap = expected.nats
                nats = f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
            sources = ", ".join(expected.sources)
            yield [expected.recipe, *shares(expected.percent), nats, _extra(expected), sources]

    def as_text(self) -> list[str]:
        """The table, then the notes."""
        return [*self.about, "", *aligned([self.header, *self.rows()]), "", *self.notes()]

    def notes(self) -> Iterator[str]:
        """Yield notes on the table."""
        notes: dict[str, list[str]] = {}
        for expected in self.recipes:
            for note in filter(None, (expected.reason, *expected.notes)):
                notes.setdefault(note, []).append(expected.recipe)
        for note, names in notes.items():
            yield f"{', '.join(names)}: {note}"
        yield from self.remarks
        yield (
            "gap: what training in the recipe from the first step adds to the loss, in percent of "
            "it; extra tokens make up for it (docs/what_does_it_cost.md)"
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
    extra = expected.extra_tokens
    if extra is None:
        return ""
    low, mean, high = (
        "over 900 %"
        if value >= MOST_EXTRA
        else f"{value:.2g} %"
        if value < 10
        else f"{value:.0f} %"
        for value in (extra.low, extra.mean, extra.high)
    )
    return f"{mean} ({low} to {high})"
