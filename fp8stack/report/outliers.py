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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    hits: dict[int, dict[str, _Hit]] = defaultdict(dict)
    with warnings.catch_warnings():  # the median of no values is NaN
        warnings.simplefilter("ignore", RuntimeWarning)
        grids = {figure: _Grid(operands, figure, switches) for figure in BOUNDS}
        for figure, one in grids.items():
            for at, hit in [*one.changed(), *one.different()]:
                if figure not in hits[at] or hit.score > hits[at][figure].score:
                    hits[at][figure] = hit
    return [_outlier(operands[at], at, found, grids) for at, found in hits.items()]


@dataclass(frozen=True, kw_only=True)
class _Hit:
    """A figure of an operand that counts by one of the rules."""

    score: float  # the distance, in units of its bound
    first: int  # sample
    worst: int  # sample
    changed: bool
    lasting: bool


class _Grid:
    """A figure of operands of one kind, [operands, samples], and what it is compared with. Amaxes
    are in powers of two."""

    def __init__(self, operands: list[Operand], figure: str, switches: Sequence[int]) -> None:
        self.steps, self.values = grid(operands, figure)
        if figure == "amax":
            with np.errstate(divide="ignore", invalid="ignore"):
                self.values = np.where(self.values > 0, np.log2(self.values), np.nan)
        self.sign, self.bound, of_same, of_all = BOUNDS[figure]
        begins = np.searchsorted(self.steps, [0, *switches]).tolist()
        # By sample the first one of its recipe.
        self.since = [max(one for one in begins if one <= at) for at in range(len(self.steps))]
        self.past = _past(self.values, self.since)
        # The median and the spread of each operand's peers, and its bound among them. The spread is
        # infinite where they are fewer than `PEERS`.
        self.peers, self.spread = np.empty_like(self.values), np.empty_like(self.values)
        self.peer_bound = np.empty(len(operands))
        formats: dict[str, list[int]] = defaultdict(list)
        roles: dict[tuple[str, str], list[int]] = defaultdict(list)
        for at, operand in enumerate(operands):
            format = "" if figure == "amax" else operand.format  # which a cast does not change
            formats[format].append(at)
            roles[format, role(operand.layer)].append(at)
        for (format, _), members in roles.items():
            same = len(members) >= PEERS
            group = self.values[members if same else formats[format]]
            middle = np.nanmedian(group, axis=0)
            self.peers[members] = middle
            spread = 1.4826 * np.nanmedian(np.abs(group - middle), axis=0)
            self.spread[members] = spread if len(group) >= PEERS else np.inf
            self.peer_bound[members] = of_same if same else of_all

    def changed(self) -> Iterator[tuple[int, _Hit]]:
        """The operands that count by rule 1."""
        change = self.sign * (self.values - self.past)
        distance = change - np.nanmedian(change, axis=0)
        spread = 1.4826 * np.nanmedian(np.abs(distance), axis=0)
        # Compare with the operand's own usual variation as well.
        own = np.nan_to_num(1.4826 * _past(np.abs(distance), self.since))
        loud = distance > np.maximum(self.bound, SPREADS * np.maximum(spread, own))
        for at in np.flatnonzero(loud.any(axis=1)).tolist():
            worst = int(np.nanargmax(np.where(loud[at], distance[at], np.nan)))
            last = int(np.flatnonzero(np.isfinite(self.values[at]))[-1])
            yield (
                at,
                _Hit(
                    score=float(distance[at, worst] / self.bound),
                    first=int(np.argmax(loud[at])),
                    worst=worst,
                    changed=True,
                    lasting=bool(loud[at].sum() > 1 or loud[at, last]),
                ),
            )

    def different(self) -> Iterator[tuple[int, _Hit]]:
        """The operands that count by rule 2."""
        distance = self.sign * (self.values - self.peers)
        usual, spread = np.nanmedian(distance, axis=1), np.nanmedian(self.spread, axis=1)
        loud = usual > np.fmax(self.peer_bound, SPREADS * spread)
        for at in np.flatnonzero(loud).tolist():
            yield (
                at,
                _Hit(
                    score=float(usual[at] / self.peer_bound[at]),
                    first=int(np.argmax(np.isfinite(self.values[at]))),
                    worst=int(np.nanargmax(distance[at])),
                    changed=False,
                    lasting=True,
                ),
            )


def _past(values: Figures, since: Sequence[int]) -> Figures:
    """For each sample the median of those before it, from the sample `since` that its recipe began
    with; NaN if they are fewer than `PAST`."""
    past = np.full_like(values, np.nan)
    for at in range(PAST, values.shape[1]):
        before = values[:, max(since[at], at - LONG_PAST) : at]
        past[:, at] = np.nanmedian(before, axis=1)
        past[np.isfinite(before).sum(axis=1) < PAST, at] = np.nan
    return past


def _outlier(operand: Operand, at: int, hits: dict[str, _Hit], grids: dict[str, _Grid]) -> Outlier:
    """The outlier of one operand, the figure with the largest distance first."""
    figures = sorted(hits, key=lambda figure: -hits[figure].score)
    top = hits[figures[0]]
    values = {}
    for figure in figures:
        of = grids[figure]
        numbers = (of.values, of.peers, of.past)
        value, middle, before = (float(each[at, top.worst]) for each in numbers)
        if figure != figures[0] and not of.sign * (value - middle) > of.bound / 2:
            continue  # unusual at another step
        if figure == "amax":
            value, middle, before = (float(np.exp2(bits)) for bits in (value, middle, before))
        known = hits[figure].changed and np.isfinite(before)
        values[figure] = (value, middle, before if known else None)
    steps = grids[figures[0]].steps
    return Outlier(
        operand=operand,
        score=top.score,
        step=int(steps[min(hit.first for hit in hits.values())]),
        worst_step=int(steps[top.worst]),
        lasting=any(hit.lasting for hit in hits.values()),
        changed=all(hit.changed for hit in hits.values()),
        values=values,
    )
