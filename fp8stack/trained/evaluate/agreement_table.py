"""Agreements of recipes as tables for people, and as JSON data for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fp8stack.common import tables
from fp8stack.common.tables import counted
from fp8stack.trained.evaluate.agreement import Agreement

HEADINGS = (
    *("run", "p", "q", "KL(p||q)", "|log p - log q| median", "99 %", "maximum", "mean exp"),
    *("top-1", "loss difference"),
)
SHOWN = 10
"""The layers that the text lists; JSON has all."""


def agreements_as_json(agreements: Sequence[Agreement]) -> dict[str, Any]:
    """The agreements as JSON data: `{"agreements": [...]}`; unknown and non-finite numbers are
    null."""
    figures = (
        *("kl", "median", "percentile_99", "maximum", "token_mult_prob_error", "top1"),
        *("loss_difference", "standard_error", "kl_of_layers"),
    )
    rows = [
        {
            "run": agreement.run,
            "checkpoint": str(agreement.checkpoint),
            "p": _side(agreement, 0),
            "q": _side(agreement, 1),
            "data": agreement.data,
            "windows": agreement.windows,
            "context": agreement.tokens // agreement.windows,
            **{name: _finite(getattr(agreement, name)) for name in figures},
            "layers": [{"layer": path, "kl": _finite(kl)} for path, kl in agreement.layers.items()],
        }
        for agreement in agreements
    ]
    return {"agreements": rows}


def _side(agreement: Agreement, index: int) -> dict[str, Any]:
    plan = agreement.plans[index]
    return {
        "recipe": agreement.recipes[index],
        "ran": plan.precision,
        "backend": plan.backend,
        "plan": plan.summary(forward=True),
        "loss": _finite(agreement.losses[index]),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def agreement_lines(agreements: Sequence[Agreement]) -> list[str]:
    """The table in plain text, one line per pair of recipes, then `agreement_notes`."""
    rows = [HEADINGS, *map(_cells, agreements)]
    return [*tables.aligned(rows), "", *agreement_notes(agreements)]


def agreement_rich_table(agreements: Sequence[Agreement]) -> Table:
    """The table for a terminal; `agreement_notes` belong below it."""
    return tables.rich_table(None, HEADINGS, map(_cells, agreements))


def _cells(agreement: Agreement) -> tuple[str, ...]:
    error = "" if agreement.standard_error is None else f" ± {agreement.standard_error:.5f}"
    return (
        agreement.run,
        *agreement.recipes,
        f"{agreement.kl:.3g}",
        *(f"{x:.3g}" for x in (agreement.median, agreement.percentile_99, agreement.maximum)),
        f"{agreement.token_mult_prob_error:.4f}",
        f"{100 * agreement.top1:.2f} %",
        f"{agreement.loss_difference:+.5f}{error}",
    )


def agreement_notes(agreements: Sequence[Agreement]) -> list[str]:
    """Lines below the table: the layers at fault of each pair of recipes, then the data, and how
    and why each recipe ran, without repetitions."""
    layers = [line for agreement in agreements for line in _layer_lines(agreement)]
    facts: list[str] = []
    for agreement in agreements:
        windows = counted(agreement.windows, "window")
        facts.append(f"{agreement.data}: {windows}, {counted(agreement.tokens, 'token')}")
        facts += [line for plan in agreement.plans for line in plan.summary(forward=True)]
    facts.append(
        "KL and losses in nats per token; log p and log q of the token that came; mean exp: the "
        "mean of exp |log p - log q|; top-1: tokens with the same likeliest token"
    )
    return [*layers, *dict.fromkeys(facts)]


def _layer_lines(agreement: Agreement) -> list[str]:
    p, q = agreement.recipes
    layers = list(agreement.layers.items())
    if not layers:
        return [f"{p} and {q} multiply all layers alike", ""]
    rows = [("layer", "KL"), *((path, f"{kl:.3g}") for path, kl in layers[:SHOWN])]
    more = f"and {counted(len(layers) - SHOWN, 'more layer')}"
    return [
        f"one layer in {q}, all else in {p} (all {counted(len(layers), 'layer')}: "
        f"{agreement.kl_of_layers:.3g}):",
        *(f"  {line}" for line in tables.aligned(rows)),
        *([f"  {more}"] if len(layers) > SHOWN else []),
        "",
    ]
