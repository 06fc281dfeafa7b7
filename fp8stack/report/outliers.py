"""Finds operands that differ from their peers or from their own past.

Two rules are applied to log2 of the amax, the saturated share, the underflow share and the SQNR.
Both use robust statistics: medians, and 1.4826 x the median absolute deviation as spread.

1. *Changed*: the operand's distance from the median of its own previous samples, minus the median
   of that distance over all operands of its kind. Constant differences between layers, and trends
   that all layers share, cancel. Samples before a switch to another recipe do not count.
2. *Always different*: the median over samples of the distance from the median of its peers: the
   same linear in other blocks, or all operands of its kind if there are fewer than four. In recipes
   with several formats, only operands in the same format are peers in what the cast does to them.

A distance counts if it exceeds `SPREADS` spreads and the figure's bound.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fp8stack.report.read import Figures, Operand, grid

SPREADS = 8.0
PEERS = 4  # the fewest that a median is taken of
PAST, LONG_PAST = 2, 32  # samples: the fewest and the most that a past has

# Figure: the bad sign; bounds for a change, for the distance from the same linear in other blocks,
# and for the distance from all linears. In bits, shares and dB.
BOUNDS = {
    "amax": (1.0, 3.0, 4.0, 7.0),
    "saturated": (1.0, 0.002, 0.005, 0.02),
    "underflow": (1.0, 0.03, 0.08, 0.3),
    "sqnr_db": (-1.0, 3.0, 5.0, 10.0),
}


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """An operand with unusual figures. `values` maps each such figure to its value, the median of
    its peers, and the median of its own past (None if it was always different)."""

    operand: Operand
    score: float  # the largest distance, in units of its bound
    step: int  # the first unusual one
    worst_step: int  # with the largest distance
    changed: bool  # by rule 1, not rule 2
    lasting: bool  # at more than one sample, or at the last
    values: dict[str, tuple[float, float, float | None]]


def settled(operands: Sequence[Operand], delayed: bool) -> list[Operand]:
    """The operands without the first samples of delayed scaling, whose scale is still 1."""
    if not delayed:
        return list(operands)
    kept = []
    for operand in operands:
        scale = operand.figures["scale"]
        keep = ~((scale == 1.0) & (operand.steps <= operand.steps[0])) & (operand.steps > 1)
        figures = {key: values[keep] for key, values in operand.figures.items()}
        kept.append(replace(operand, steps=operand.steps[keep], figures=figures))
    return [operand for operand in kept if len(operand.steps)]


def find_outliers(operands: Sequence[Operand], switches: Sequence[int] = ()) -> list[Outlier]:
    """The outliers among the settled `operands` of a run, the worst first. `switches` are the steps
    that began in another recipe."""
    kinds = dict.fromkeys(operand.kind for operand in operands)
    same = ([operand for operand in operands if operand.kind == kind] for kind in kinds)
    found = [out for one in same for out in _of_one_kind(one, switches)]
    return sorted(found, key=lambda out: (not out.lasting, -out.score))


def role(layer: str) -> str:
    """A layer's name without its numbers, which is the same in every block."""
    return re.sub(r"\d+", "*", layer)


def _of_one_kind(operands: list[Operand], switches: Sequence[int]) -> list[Outlier]:
    if len(operands) < PEERS:
        return []
    steps, amax = grid(operands, "amax")
    begins = np.searchsorted(steps, [0, *switches]).tolist()
    since = [max(begin for begin in begins if begin <= at) for at in range(len(steps))]
    grids = {figure: grid(operands, figure)[1] for figure in BOUNDS}
    with np.errstate(divide="ignore", invalid="ignore"):
        grids["amax"] = np.where(amax > 0, np.log2(amax), np.nan)
    scores: dict[int, dict[str, tuple[float, int, int, bool]]] = defaultdict(dict)
    lasting: dict[int, bool] = defaultdict(bool)
    with warnings.catch_warnings():  # the median of no values is NaN
        warnings.simplefilter("ignore", RuntimeWarning)
        pasts = {figure: _past(values, since) for figure, values in grids.items()}
        peers = {figure: _peers(operands, grids[figure], figure) for figure in grids}
        for figure, values in grids.items():
            for at, score, first, worst, lasts in _changed(values, pasts[figure], figure, since):
                scores[at][figure] = (score, first, worst, True)
                lasting[at] |= lasts
            for at, score, worst in _different(values, peers[figure], figure):
                if score > scores[at].get(figure, (0.0,))[0]:
                    first = int(np.argmax(np.isfinite(values[at])))
                    scores[at][figure] = (score, first, worst, False)
                    lasting[at] = True
    return [
        _outlier(operands[at], scored, steps, at, grids, peers, pasts, lasting[at])
        for at, scored in scores.items()
        if scored
    ]


def _past(values: Figures, since: Sequence[int]) -> Figures:
    """For each sample the median of those before it, from the sample `since` that its recipe began
    with; NaN if they are fewer than `PAST`."""
    past = np.full_like(values, np.nan)
    for at in range(PAST, values.shape[1]):
        before = values[:, max(since[at], at - LONG_PAST) : at]
        past[:, at] = np.nanmedian(before, axis=1)
        past[np.isfinite(before).sum(axis=1) < PAST, at] = np.nan
    return past


def _changed(
    values: Figures, past: Figures, figure: str, since: Sequence[int]
) -> list[tuple[int, float, int, int, bool]]:
    """Rule 1: operand, score, first and worst sample, and whether it lasts."""
    sign, bound, _, _ = BOUNDS[figure]
    change = sign * (values - past)
    distance = change - np.nanmedian(change, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(distance), axis=0)
    # Compare with the operand's own usual variation as well.
    own = np.nan_to_num(1.4826 * _past(np.abs(distance), since))
    loud = distance > np.maximum(bound, SPREADS * np.maximum(spread, own))
    found = []
    for at in np.flatnonzero(loud.any(axis=1)):
        worst = int(np.nanargmax(np.where(loud[at], distance[at], np.nan)))
        first = int(np.argmax(loud[at]))
        last = int(np.flatnonzero(np.isfinite(values[at]))[-1])
        lasting = bool(loud[at].sum() > 1 or loud[at, last])
        found.append((int(at), float(distance[at, worst] / bound), first, worst, lasting))
    return found


def _peers(
    operands: list[Operand], values: Figures, figure: str
) -> list[tuple[Figures, Figures, bool]]:
    """The median and spread of each operand's peers, and whether these are the same linear in
    other blocks. The spread is infinite where they are fewer than `PEERS`."""
    formats: dict[str, list[int]] = defaultdict(list)
    roles: dict[tuple[str, str], list[int]] = defaultdict(list)
    keys = []
    for at, operand in enumerate(operands):
        format = "" if figure == "amax" else operand.format  # which a cast does not change
        keys.append((format, role(operand.layer)))
        formats[format].append(at)
        roles[keys[-1]].append(at)
    cache: dict[tuple[str, str], tuple[Figures, Figures, bool]] = {}
    for key, members in roles.items():
        same = len(members) >= PEERS
        group = values[members if same else formats[key[0]]]
        middle = np.nanmedian(group, axis=0)
        spread = 1.4826 * np.nanmedian(np.abs(group - middle), axis=0)
        cache[key] = (middle, spread if len(group) >= PEERS else np.full_like(spread, np.inf), same)
    return [cache[key] for key in keys]


def _different(
    values: Figures, peers: list[tuple[Figures, Figures, bool]], figure: str
) -> list[tuple[int, float, int]]:
    """Rule 2: operand, score and worst sample."""
    sign, _, of_same, of_all = BOUNDS[figure]
    found = []
    for at, (row, (middle, spread, same)) in enumerate(zip(values, peers, strict=True)):
        distance = sign * (row - middle)
        usual = float(np.nanmedian(distance))
        bound = of_same if same else of_all
        if usual > max(bound, SPREADS * float(np.nanmedian(spread))):
            found.append((at, usual / bound, int(np.nanargmax(distance))))
    return found


def _outlier(
    operand: Operand,
    scored: dict[str, tuple[float, int, int, bool]],
    steps: NDArray[np.int64],
    at: int,
    grids: dict[str, Figures],
    peers: dict[str, list[tuple[Figures, Figures, bool]]],
    pasts: dict[str, Figures],
    lasting: bool,
) -> Outlier:
    """The outlier of one operand, the figure with the largest distance first."""
    figures = sorted(scored, key=lambda figure: -scored[figure][0])
    score, _, worst, _ = scored[figures[0]]
    values = {}
    for figure in figures:
        changed = scored[figure][3]
        before = float(pasts[figure][at, worst])
        value, middle = float(grids[figure][at, worst]), float(peers[figure][at][0][worst])
        sign, bound, _, _ = BOUNDS[figure]
        if figure != figures[0] and not sign * (value - middle) > bound / 2:
            continue  # unusual at another step
        if figure == "amax":
            value, middle, before = (float(np.exp2(bits)) for bits in (value, middle, before))
        values[figure] = (value, middle, before if changed and np.isfinite(before) else None)
    return Outlier(
        operand=operand,
        score=score,
        step=int(steps[min(scored[figure][1] for figure in figures)]),
        worst_step=int(steps[worst]),
        lasting=lasting,
        changed=all(scored[figure][3] for figure in figures),
        values=values,
    )
