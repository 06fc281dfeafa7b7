"""A forecast, and what was tuned, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8stack.forecast.forecast import WORST, Expected, Forecast
from fp8stack.forecast.law import Gap
from fp8stack.forecast.tune import Assignment
from fp8stack.tables import aligned

GAP = ("gap to expect", "90 % interval")


def as_text(found: Forecast) -> list[str]:
    """The table, then what is to be known."""
    loss = found.trained.loss
    header = [
        "recipe",
        "gap to expect",
        "90 % interval",
        f"without the worst {WORST}",
        "worst layers",
    ]
    lines = [
        [one.recipe, *_shares(one.gap, loss), _share(one.without_worst, loss), _layers(one)]
        for one in found.recipes
    ]
    return [*_about(found), "", *aligned([header, *lines]), "", *_notes(found)]


def _about(found: Forecast) -> Iterator[str]:
    trained = found.trained
    count = trained.model.config.parameters()
    told = f"{trained.name}: {count / 1e6:.3g} million parameters"
    if trained.tokens is not None:
        told += f", trained on {trained.tokens / count:.3g} tokens per parameter"
    yield told
    windows = trained.windows
    yield f"{len(windows.tokens)} windows of {windows.name}: loss {trained.loss:.4f} in fp32"


def _notes(found: Forecast) -> Iterator[str]:
    for reason, names in _reasons(found).items():
        yield f"cannot tell the gap of {', '.join(names)}: {reason}"
    yield (
        "gap: what training a model like this in the recipe adds to its loss, in percent of it; "
        f"from a law fitted to {found.law.runs} pairs of runs (docs/what_does_it_cost.md)"
    )
    yield f"without the worst {WORST}: the gap with those layers in bf16; worst layers: their share"


def _reasons(found: Forecast) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for one in found.recipes:
        if one.reason:
            reasons.setdefault(one.reason, []).append(one.recipe)
    return reasons


def _shares(gap: Gap | None, loss: float) -> tuple[str, str]:
    if gap is None:
        return "cannot tell", ""
    return _share(gap, loss), f"{100 * gap.low / loss:+.2f} to {100 * gap.high / loss:+.2f} %"


def _share(gap: Gap | None, loss: float) -> str:
    return "" if gap is None else f"{100 * gap.mean / loss:+.2f} %"


def _layers(one: Expected) -> str:
    alone = sum(one.sensitivity.layers.values())
    if not alone:
        return "none: the forward pass is exact"
    told = (f"{path} {one.sensitivity.layers[path] / alone:.0%}" for path in one.worst)
    return ", ".join(told)


def as_json(found: Forecast) -> dict[str, Any]:
    """All figures, in nats per token; null where the law cannot tell."""
    trained = found.trained
    return {
        "model": trained.name,
        "parameters": trained.model.config.parameters(),
        "tokens": trained.tokens,
        "data": trained.windows.name,
        "windows": len(trained.windows.tokens),
        "loss": trained.loss,
        "recipes": [
            {
                "recipe": one.recipe,
                "gap": None if one.gap is None else vars(one.gap),
                "reason": one.reason,
                "without_worst": None if one.without_worst is None else vars(one.without_worst),
                "worst": list(one.worst),
                "forward": one.sensitivity.forward,
                "forward_layers": one.sensitivity.layers,
                "backward": one.sensitivity.backward,
                "backward_layers": one.sensitivity.backward_layers,
            }
            for one in found.recipes
        ],
    }


def assignment_text(found: Assignment, beside: dict[str, Assignment], loss: float) -> list[str]:
    """The tuned recipe beside one recipe everywhere, then which layers have which."""
    header = ["recipe", "bits of a GEMM", *GAP]
    rows = {"tuned": found, **beside}
    lines = [[name, f"{one.bits:.2f}", *_shares(one.gap, loss)] for name, one in rows.items()]
    of: dict[str, list[str]] = {}
    for path, (forward, backward) in found.layers.items():
        told = forward if forward == backward else f"{forward}, backward {backward}"
        of.setdefault(told, []).append(path)
    return [*aligned([header, *lines]), "", *(f"{n}: {', '.join(p)}" for n, p in of.items())]


def assignment_json(found: Assignment) -> dict[str, Any]:
    """All figures of a tuned recipe."""
    return {**vars(found), "gap": vars(found.gap)}
