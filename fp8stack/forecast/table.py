"""A forecast, and what was tuned, as text and as JSON."""

from __future__ import annotations

from typing import Any

from fp8stack.forecast.forecast import Forecast
from fp8stack.forecast.law import Gap
from fp8stack.forecast.told import GAP, Told, ToldGap, ToldRecipe, shares
from fp8stack.forecast.tune import Assignment
from fp8stack.tables import aligned


def told(found: Forecast) -> Told:
    """A forecast as a file keeps it."""
    trained = found.trained
    return Told(
        model=trained.name,
        checkpoint=trained.checkpoint,
        parameters=trained.model.config.parameters(),
        tokens=trained.tokens,
        data=trained.windows.name,
        windows=len(trained.windows.tokens),
        loss=trained.loss,
        law_runs=found.law.runs,
        recipes=tuple(
            ToldRecipe(
                recipe=one.recipe,
                gap=_gap(one.gap),
                reason=one.reason,
                without_worst=_gap(one.without_worst),
                worst=one.worst,
                forward=one.sensitivity.forward,
                forward_layers=one.sensitivity.layers,
                backward=one.sensitivity.backward,
                backward_layers=one.sensitivity.backward_layers,
            )
            for one in found.recipes
        ),
    )


def _gap(gap: Gap | None) -> ToldGap | None:
    return None if gap is None else ToldGap(**vars(gap))


def as_text(forecast: Told) -> list[str]:
    """The table, then what is to be known."""
    lines = aligned([forecast.header, *forecast.rows()])
    return [*forecast.about, "", *lines, "", *forecast.notes()]


def assignment_text(found: Assignment, beside: dict[str, Assignment], loss: float) -> list[str]:
    """The tuned recipe beside one recipe everywhere, then which layers have which."""
    rows = {"tuned": found, **beside}
    lines = [[n, f"{one.bits:.2f}", *shares(_gap(one.gap), loss)] for n, one in rows.items()]
    of: dict[str, list[str]] = {}
    for path, (forward, backward) in found.layers.items():
        named = forward if forward == backward else f"{forward}, backward {backward}"
        of.setdefault(named, []).append(path)
    header = ["recipe", "bits of a GEMM", *GAP]
    return [*aligned([header, *lines]), "", *(f"{n}: {', '.join(p)}" for n, p in of.items())]


def assignment_json(found: Assignment) -> dict[str, Any]:
    """All figures of a tuned recipe."""
    return {**vars(found), "gap": vars(found.gap)}
