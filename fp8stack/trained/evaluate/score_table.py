"""Scores as a table for people, and as JSON data for programs."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fp8stack.common import tables
from fp8stack.common.tables import counted
from fp8stack.trained.evaluate.scores import Score

HEADINGS = (
    *("run", "recipe", "ran", "FP8 layers", "FP8 GEMMs"),
    *("loss", "perplexity", "bits per byte", "difference"),
)


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """The scores as JSON data: `{"scores": [...]}`; unknown and non-finite numbers are null."""

    def finite(score: Score, name: str) -> float | None:
        value: float | None = getattr(score, name)
        return value if value is not None and math.isfinite(value) else None

    figures = ("loss", "perplexity", "bits_per_byte", "difference", "standard_error")
    rows = [
        {
            "run": score.run,
            "checkpoint": str(score.checkpoint),
            "recipe": score.recipe,
            "ran": score.plan.precision,
            "backend": score.plan.backend,
            "plan": score.plan.summary(forward=True),
            "fp8_layers": sum(layer.fp8 for layer in score.plan.layers),
            "layers": len(score.plan.layers),
            "fp8_gemms": score.fp8_gemms,
            "data": score.data,
            "windows": len(score.losses_N),
            "context": score.tokens // len(score.losses_N),
            **{name: finite(score, name) for name in figures},
            "baseline": None if score.baseline is None else score.baseline.recipe,
            "tokens_per_s": score.tokens / score.seconds,
        }
        for score in scores
    ]
    return {"scores": rows}


def text_lines(scores: Sequence[Score]) -> list[str]:
    """The table in plain text, one line per score, and the plans."""
    return [*tables.aligned([HEADINGS, *map(_cells, scores)]), "", *notes(scores)]


def rich_table(scores: Sequence[Score]) -> Table:
    """The table for a terminal; `notes` belong below it."""
    return tables.rich_table(None, HEADINGS, map(_cells, scores))


def _cells(score: Score) -> tuple[str, ...]:
    layers = score.plan.layers
    bits = "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    difference = "baseline" if score.difference is None else f"{score.difference:+.5f}"
    error = "" if score.standard_error is None else f" ± {score.standard_error:.5f}"
    return (
        score.run,
        score.recipe,
        f"{score.plan.precision} ({score.plan.backend})",
        f"{sum(layer.fp8 for layer in layers)}/{len(layers)}",
        f"{score.fp8_gemms:,}",
        f"{score.loss:.4f}",
        f"{score.perplexity:#.4g}".rstrip("."),
        bits,
        difference + error,
    )


def notes(scores: Sequence[Score]) -> list[str]:
    """Lines below the table: the data, and how and why each recipe ran, without repetitions."""
    lines = []
    for score in scores:
        windows, tokens = len(score.losses_N), score.tokens
        about = f"{score.data}: {counted(windows, 'window')}, {counted(tokens, 'token')}"
        lines += [about, *score.plan.summary(forward=True)]
    lines.append(
        "loss in nats per token; difference to the run's first recipe on the same windows, with "
        "its standard error"
    )
    return list(dict.fromkeys(lines))
