"""Findings, and the text of the figures, shares and steps in them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["alarm", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A sentence with its level."""

    level: Level
    text: str


def with_unit(figure: str, value: float) -> str:
    """A figure with its unit."""
    if not math.isfinite(value):
        return "unknown"
    if figure == "sqnr_db":
        return f"{value:.1f} dB"
    if figure in ("saturated", "underflow", "nonfinite"):
        return percent(value)
    if figure == "headroom_bits":
        return f"{value:.2f} bits"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share as a percentage with three digits."""
    if share == 0:
        return "0 %"
    value = 100 * share
    return f"{value:.1e} %" if value < 0.001 else f"{value:.3g} %"


def in_steps(steps: Iterable[int]) -> str:
    """Steps as text: "step 4", "steps 4, 5 and 9", "12 steps from 4 to 90"."""
    unique = sorted({int(step) for step in steps})
    if len(unique) == 1:
        return f"step {unique[0]}"
    if len(unique) <= 4:
        return f"steps {', '.join(map(str, unique[:-1]))} and {unique[-1]}"
    return f"{len(unique)} steps from {unique[0]} to {unique[-1]}"


def several(names: Sequence[str]) -> str:
    """Up to twenty names, joined for a sentence."""
    items = list(names[:20]) + ["others"] * (len(names) > 20)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
