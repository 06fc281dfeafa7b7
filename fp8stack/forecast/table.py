"""A forecast, and what was tuned, as text and as JSON."""

from __future__ import annotations

from typing import Any

from fp8stack.forecast.told import GAP, Told, shares
from fp8stack.forecast.tune import Assignment
from fp8stack.tables import aligned


def as_text(forecast: Told) -> list[str]:
    """The table, then what is to be known."""
    lines = aligned([forecast.header, *forecast.rows()])
    return [*forecast.about, "", *lines, "", *forecast.notes()]


def assignment_text(found: Assignment, beside: dict[str, Assignment], loss: float) -> list[str]:
    """The tuned recipe beside one recipe everywhere, then which layers have which."""
    rows = {"tuned": found, **beside}
    lines = [[n, f"{one.bits:.2f}", *shares(one.gap, loss)] for n, one in rows.items()]
    of: dict[str, list[str]] = {}
    for path, (forward, backward) in found.layers.items():
        named = forward if forward == backward else f"{forward}, backward {backward}"
        of.setdefault(named, []).append(path)
    header = ["recipe", "bits of a GEMM", *GAP]
    return [*aligned([header, *lines]), "", *(f"{n}: {', '.join(p)}" for n, p in of.items())]


def assignment_json(found: Assignment) -> dict[str, Any]:
    """All figures of a tuned recipe."""
    return {**vars(found), "gap": vars(found.gap)}
