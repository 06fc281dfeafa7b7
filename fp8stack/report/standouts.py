"""Operands that stand out against their peers or against their own past.

Two rules, both robust (medians, and 1.4826 x the median absolute deviation for a spread), for each
of four figures: log2 of the amax, the saturated share, the underflow share and the SQNR.

1. *It changed and its peers did not*: at a sample, the operand's distance from the median of its
   own last samples before, less the median of that distance over all operands of its kind. What
   differs between layers by nature, and what moves in all of them as training goes on, cancels.
2. *It was different all along*: the median over the samples of its distance from the median of its
   peers, the same linear in other blocks, or all of its kind where there are fewer than four.

A distance counts where it is more than `SPREADS` spreads and more than the figure's own bound.
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
PEERS = 4  # fewer have no median worth the name
PAST, LONG_PAST = 2, 32  # samples: the fewest that are a past, and how far it goes back

# Figure: which sign is bad, least change, least distance from the same linear in other blocks,
# least distance from all other linears (which differ by nature). In bits, shares and dB.
BOUNDS = {
    "amax": (1.0, 3.0, 4.0, 7.0),
    "saturated": (1.0, 0.002, 0.005, 0.02),
    "underflow": (1.0, 0.03, 0.08, 0.3),
    "sqnr_db": (-1.0, 3.0, 5.0, 10.0),
}


@dataclass(frozen=True, kw_only=True)
class StandOut:
    """An operand that stands out. `values` has for each figure that does: its value, the median of
    its peers, and of its own past (None if it was different all along)."""

    operand: Operand
    score: float  # the largest distance in units of its bound
    step: int  # the first at which it stands out
    worst_step: int  # where it does so most
    changed: bool  # it did so in the course of the run
    lasting: bool  # not at a single sample alone that others followed
    values: dict[str, tuple[float, float, float | None]]


def settled(operands: Sequence[Operand], delayed: bool) -> list[Operand]:
    """The operands without samples of delayed scaling whose scale, 1 at first, saw no amax yet."""
    if not delayed:
        return list(operands)
    kept = []
    for operand in operands:
        scale = operand.figures["scale"]
        keep = ~((scale == 1.0) & (operand.steps <= operand.steps[0])) & (operand.steps > 1)
        figures = {key: values[keep] for key, values in operand.figures.items()}
        kept.append(replace(operand, steps=operand.steps[keep], figures=figures))
    return [operand for operand in kept if len(operand.steps)]


def stand_outs(operands: Sequence[Operand]) -> list[StandOut]:
    """The settled `operands` of one run that stand out, the worst first."""
    kinds = dict.fromkeys(operand.kind for operand in operands)
    same = ([operand for operand in operands if operand.kind == kind] for kind in kinds)
    found = [out for one in same for out in _of_one_kind(one)]
    return sorted(found, key=lambda out: (not out.lasting, -out.score))


def role(layer: str) -> str:
    """A layer's name without its numbers: the same linear in other blocks has the same."""
    return re.sub(r"\d+", "*", layer)


def _of_one_kind(operands: list[Operand]) -> list[StandOut]:
    if len(operands) < PEERS:
        return []
    steps, amax = grid(operands, "amax")
    grids = {figure: grid(operands, figure)[1] for figure in BOUNDS}
    with np.errstate(divide="ignore", invalid="ignore"):
        grids["amax"] = np.where(amax > 0, np.log2(amax), np.nan)
    scores: dict[int, dict[str, tuple[float, int, int, bool]]] = defaultdict(dict)
    lasting: dict[int, bool] = defaultdict(bool)
    with warnings.catch_warnings():  # an all-NaN slice is a NaN, as it should be
        warnings.simplefilter("ignore", RuntimeWarning)
        pasts = {figure: _past(values) for figure, values in grids.items()}
        peers = {figure: _peers(operands, values) for figure, values in grids.items()}
        for figure, values in grids.items():
            for at, score, first, worst, lasts in _changed(values, pasts[figure], figure):
                scores[at][figure] = (score, first, worst, True)
                lasting[at] |= lasts
            for at, score, worst in _different(values, peers[figure], figure):
                if score > scores[at].get(figure, (0.0,))[0]:
                    first = int(np.argmax(np.isfinite(values[at])))
                    scores[at][figure] = (score, first, worst, False)
                    lasting[at] = True
    return [
        _stand_out(operands[at], told, steps, at, grids, peers, pasts, lasting[at])
        for at, told in scores.items()
        if told
    ]


def _past(values: Figures) -> Figures:
    """For each sample the median of those before it, NaN where they are fewer than `PAST`."""
    past = np.full_like(values, np.nan)
    for at in range(PAST, values.shape[1]):
        before = values[:, max(0, at - LONG_PAST) : at]
        past[:, at] = np.nanmedian(before, axis=1)
        past[np.isfinite(before).sum(axis=1) < PAST, at] = np.nan
    return past


def _changed(
    values: Figures, past: Figures, figure: str
) -> list[tuple[int, float, int, int, bool]]:
    """Rule 1: operand, score, first and worst sample, and whether it lasts, of each that
    changed."""
    sign, bound, _, _ = BOUNDS[figure]
    change = sign * (values - past)
    distance = change - np.nanmedian(change, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(distance), axis=0)
    # What an operand has done by itself all the time is no news.
    own = np.nan_to_num(1.4826 * _past(np.abs(distance)))
    loud = distance > np.maximum(bound, SPREADS * np.maximum(spread, own))
    found = []
    for at in np.flatnonzero(loud.any(axis=1)):
        worst = int(np.nanargmax(np.where(loud[at], distance[at], np.nan)))
        first = int(np.argmax(loud[at]))
        last = int(np.flatnonzero(np.isfinite(values[at]))[-1])
        lasting = bool(loud[at].sum() > 1 or loud[at, last])
        found.append((int(at), float(distance[at, worst] / bound), first, worst, lasting))
    return found


def _peers(operands: list[Operand], values: Figures) -> list[tuple[Figures, Figures, bool]]:
    """The median and spread of each operand's peers, and whether those are its role in other
    blocks."""
    roles: dict[str, list[int]] = defaultdict(list)
    for at, operand in enumerate(operands):
        roles[role(operand.layer)].append(at)
    cache: dict[str, tuple[Figures, Figures, bool]] = {}
    for name, members in roles.items():
        same = len(members) >= PEERS
        group = values[members] if same else values
        middle = np.nanmedian(group, axis=0)
        cache[name] = (middle, 1.4826 * np.nanmedian(np.abs(group - middle), axis=0), same)
    return [cache[role(operand.layer)] for operand in operands]


def _different(
    values: Figures, peers: list[tuple[Figures, Figures, bool]], figure: str
) -> list[tuple[int, float, int]]:
    """Rule 2: operand, score and worst sample of each that was different all along."""
    sign, _, of_same, of_all = BOUNDS[figure]
    found = []
    for at, (row, (middle, spread, same)) in enumerate(zip(values, peers, strict=True)):
        distance = sign * (row - middle)
        usual = float(np.nanmedian(distance))
        bound = of_same if same else of_all
        if usual > max(bound, SPREADS * float(np.nanmedian(spread))):
            found.append((at, usual / bound, int(np.nanargmax(distance))))
    return found


def _stand_out(
    operand: Operand,
    told: dict[str, tuple[float, int, int, bool]],
    steps: NDArray[np.int64],
    at: int,
    grids: dict[str, Figures],
    peers: dict[str, list[tuple[Figures, Figures, bool]]],
    pasts: dict[str, Figures],
    lasting: bool,
) -> StandOut:
    """The stand-out of one operand, the figure with the largest distance first."""
    figures = sorted(told, key=lambda figure: -told[figure][0])
    score, _, worst, _ = told[figures[0]]
    values = {}
    for figure in figures:
        changed = told[figure][3]
        before = float(pasts[figure][at, worst])
        value, middle = float(grids[figure][at, worst]), float(peers[figure][at][0][worst])
        sign, bound, _, _ = BOUNDS[figure]
        if figure != figures[0] and not sign * (value - middle) > bound / 2:
            continue  # it stood out at another step
        if figure == "amax":
            value, middle, before = (float(np.exp2(bits)) for bits in (value, middle, before))
        values[figure] = (value, middle, before if changed and np.isfinite(before) else None)
    return StandOut(
        operand=operand,
        score=score,
        step=int(steps[min(told[figure][1] for figure in figures)]),
        worst_step=int(steps[worst]),
        lasting=lasting,
        changed=all(told[figure][3] for figure in figures),
        values=values,
    )
