"""Finds operands that differ from their peers or from their own past.

Two rules are applied to log2 of the amax, the saturated share, the underflow share and the SQNR.
Both use robust statistics: the median, and as spread 1.4826 x the median absolute deviation.

1. *Changed*: the operand's distance from the median of its own previous samples, minus the median
   of this distance over all operands of its kind. Constant differences between layers and trends
   that all layers share cancel out. Samples before a switch to another recipe do not count.
2. *Always different*: the median over samples of its distance from the median of its peers. Peers
   are the same linear in other blocks, or all operands of its kind if there are fewer than four. In
   recipes with several formats, peers must have the same format, except for the amax, which does
   not depend on it.

A distance counts if it exceeds `SPREADS` spreads and the figure's bound.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fp8stack.analysis.report.telemetry import Figures, Operand, grid

SPREADS = 8.0
PEERS = 4  # minimum number of operands for a median
PAST, LONG_PAST = 2, 32  # minimum and maximum number of previous samples

# Per figure: 1 if large values are bad, -1 if small ones are; bounds for a change, for the distance
# from the same linear in other blocks, and for the distance from all linears. In bits, shares, dB.
BOUNDS = {
    "amax": (1.0, 3.0, 4.0, 7.0),
    "saturated": (1.0, 0.002, 0.005, 0.02),
    "underflow": (1.0, 0.03, 0.08, 0.3),
    "sqnr_db": (-1.0, 3.0, 5.0, 10.0),
}


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """An operand with unusual figures. `values` maps such a figure to its value, the median of the
    operand's peers, and the median of its previous samples (None if it was always different)."""

    operand: Operand
    score: float  # the largest distance, in units of its bound
    step: int  # the first unusual step
    worst_step: int  # the step with the largest distance
    changed: bool  # found by rule 1, not rule 2
    lasting: bool  # unusual at several samples, or at the last one
    values: dict[str, tuple[float, float, float | None]]


def settled(operands: Sequence[Operand], delayed: bool) -> list[Operand]:
    """`operands` without the first samples of delayed scaling, where scales are still 1."""
    if not delayed:
        return list(operands)
    trimmed = []
    for operand in operands:
        scale = operand.figures["scale"]
        keep = ~((scale == 1.0) & (operand.steps <= operand.steps[0])) & (operand.steps > 1)
        figures = {key: values[keep] for key, values in operand.figures.items()}
        trimmed.append(replace(operand, steps=operand.steps[keep], figures=figures))
    return [operand for operand in trimmed if len(operand.steps)]


def find_outliers(operands: Sequence[Operand], switches: Sequence[int] = ()) -> list[Outlier]:
    """The outliers among the settled `operands` of a run, the worst first. `switches` are the first
    steps in another recipe."""
    kinds = dict.fromkeys(operand.kind for operand in operands)
    groups = ([operand for operand in operands if operand.kind == kind] for kind in kinds)
    outliers = [out for group in groups for out in _of_one_kind(group, switches)]
    return sorted(outliers, key=lambda out: (not out.lasting, -out.score))


def role(layer: str) -> str:
    """A layer's name with its numbers as `*`: the same for all blocks."""
    return re.sub(r"\d+", "*", layer)


def _of_one_kind(operands: list[Operand], switches: Sequence[int]) -> list[Outlier]:
    if len(operands) < PEERS:
        return []
    hits: dict[int, dict[str, _Hit]] = defaultdict(dict)
    with warnings.catch_warnings():  # the median of no values is NaN
        warnings.simplefilter("ignore", RuntimeWarning)
        grids = {figure: _Grid(operands, figure, switches) for figure in BOUNDS}
        for figure, figure_grid in grids.items():
            for hit in sorted(figure_grid.hits(), key=lambda hit: hit.score):
                hits[hit.row][figure] = hit  # the last one, which is the most unusual
    return [_outlier(operands[row], of_row, grids) for row, of_row in sorted(hits.items())]


@dataclass(frozen=True, kw_only=True)
class _Hit:
    """A figure of an operand that is unusual by one of the rules."""

    row: int
    score: float  # the distance, in units of its bound
    first: int  # sample
    worst: int  # sample
    changed: bool
    lasting: bool


class _Grid:
    """A figure of operands of one kind, [operands, samples], and the medians and spreads that it is
    compared with. Amaxes are log2."""

    def __init__(self, operands: list[Operand], figure: str, switches: Sequence[int]) -> None:
        self.steps, self.values = grid(operands, figure)
        if figure == "amax":
            with np.errstate(divide="ignore", invalid="ignore"):
                self.values = np.where(self.values > 0, np.log2(self.values), np.nan)
        self.sign, self.bound, of_same, of_all = BOUNDS[figure]
        begins = np.searchsorted(self.steps, [0, *switches]).tolist()
        # For each sample, the first sample of the recipe that was in use.
        self.since = [
            max(begin for begin in begins if begin <= sample) for sample in range(len(self.steps))
        ]
        self.past = _past(self.values, self.since)
        # The median and the spread of each operand's peers, and the bound of its distance from
        # them. With fewer than `PEERS` peers the spread is infinite.
        self.peers, self.spread = np.empty_like(self.values), np.empty_like(self.values)
        self.peer_bound = np.empty(len(operands))
        formats: dict[str, list[int]] = defaultdict(list)
        roles: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row, operand in enumerate(operands):
            format = "" if figure == "amax" else operand.format  # an amax does not depend on it
            formats[format].append(row)
            roles[format, role(operand.layer)].append(row)
        for (format, _), members in roles.items():
            same = len(members) >= PEERS
            group = self.values[members if same else formats[format]]
            self.peers[members] = np.nanmedian(group, axis=0)
            self.spread[members] = _spread(group - self.peers[members[0]])
            if len(group) < PEERS:
                self.spread[members] = np.inf
            self.peer_bound[members] = of_same if same else of_all

    def hits(self) -> Iterator[_Hit]:
        """Yield the operands that are unusual, by either rule."""
        for is_change, (distance, score, unusual) in enumerate((self._differs(), self._changed())):
            for row in np.flatnonzero(unusual.any(axis=1)).tolist():
                worst = int(np.argmax(np.where(unusual[row], distance[row], -np.inf)))
                last = np.flatnonzero(np.isfinite(self.values[row]))[-1]
                yield _Hit(
                    row=row,
                    score=float(score[row, worst]),
                    first=int(np.argmax(unusual[row])),
                    worst=worst,
                    changed=bool(is_change),
                    lasting=bool(unusual[row].sum() > 1 or unusual[row, last]),
                )

    def _changed(self) -> tuple[Figures, Figures, NDArray[np.bool_]]:
        """Rule 1: the distances, their scores, and which are unusual, [operands, samples]."""
        change = self.sign * (self.values - self.past)
        distance = change - np.nanmedian(change, axis=0)
        usual_variation = np.nan_to_num(1.4826 * _past(np.abs(distance), self.since))
        spread = np.maximum(_spread(distance), usual_variation)
        is_unusual = distance > np.maximum(self.bound, SPREADS * spread)
        return distance, distance / self.bound, is_unusual

    def _differs(self) -> tuple[Figures, Figures, NDArray[np.bool_]]:
        """Rule 2, see `_changed`."""
        distance = self.sign * (self.values - self.peers)
        usual, spread = np.nanmedian(distance, axis=1), np.nanmedian(self.spread, axis=1)
        is_unusual = usual > np.fmax(self.peer_bound, SPREADS * spread)
        score = np.broadcast_to((usual / self.peer_bound)[:, None], distance.shape)
        return distance, score, is_unusual[:, None] & np.isfinite(self.values)


def _spread(distances: Figures) -> Figures:
    """The median absolute deviation of each sample, as a standard deviation, [samples]."""
    spread: Figures = 1.4826 * np.nanmedian(np.abs(distances), axis=0)
    return spread


def _past(values: Figures, since: Sequence[int]) -> Figures:
    """For each sample, the median of at most `LONG_PAST` previous samples in the same recipe, whose
    first sample is `since`. NaN if there are fewer than `PAST`."""
    past = np.full_like(values, np.nan)
    for sample in range(PAST, values.shape[1]):
        before = values[:, max(since[sample], sample - LONG_PAST) : sample]
        past[:, sample] = np.nanmedian(before, axis=1)
        past[np.isfinite(before).sum(axis=1) < PAST, sample] = np.nan
    return past


def _outlier(operand: Operand, hits: dict[str, _Hit], grids: dict[str, _Grid]) -> Outlier:
    """The outlier for a row of the grids; its figure with the largest distance comes first."""
    figures = sorted(hits, key=lambda figure: -hits[figure].score)
    top = hits[figures[0]]
    values = {}
    for figure in figures:
        figure_grid = grids[figure]
        arrays = (figure_grid.values, figure_grid.peers, figure_grid.past)
        value, middle, before = (float(array[top.row, top.worst]) for array in arrays)
        distance = figure_grid.sign * (value - middle)
        if figure != figures[0] and not distance > figure_grid.bound / 2:
            continue  # unusual at another step
        if figure == "amax":
            value, middle, before = (float(np.exp2(bits)) for bits in (value, middle, before))
        has_past = hits[figure].changed and np.isfinite(before)
        values[figure] = (value, middle, before if has_past else None)
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
