"""Parts of a model whose gradient is dead, vanishes or explodes at `SEVERAL` samples in a row.

A gradient is dead if it is exactly zero. It vanishes or explodes if its norm is `SAME` powers of
ten from the median of its peers, the same part of other blocks; if fewer than `PEERS` of those have
a gradient, `ANY` powers of ten from the median of all parts. If the peers form two groups that far
apart, the reference is the group with the last layers, where backpropagation begins.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp8stack.report.formatting import Finding
from fp8stack.report.outliers import PEERS, role
from fp8stack.report.read import Figures, Gradient, grid
from fp8stack.tables import counted

SEVERAL = 3
SAME, ANY = 3.0, 5.0  # powers of ten
MOST = 6  # faults that have a sentence each

What = Literal["dead", "vanishing", "exploding"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A part whose gradient is wrong."""

    part: str
    what: What
    steps: tuple[int, int]  # first and last of the longest run of faulty samples
    samples: int  # their number
    lasts: bool  # they include the run's last sample
    norm: float  # where it is furthest from its peers'
    peers: float  # the median of its peers there
    worst: int  # the step of `norm`


def leaves(gradients: Sequence[Gradient]) -> list[Gradient]:
    """The parts that contain no other part."""
    parts = sorted(one.part for one in gradients)
    blocks = {one for one, after in pairwise(parts) if after.startswith(f"{one}.")}
    return [one for one in gradients if one.part not in blocks]


def faults(gradients: Sequence[Gradient], delayed: bool) -> list[Fault]:
    """The faults of a run's gradients. With delayed scaling the first step is left out: its scales
    are still 1."""
    parts = leaves(gradients)
    if not parts:
        return []
    steps, values = grid(parts, "norm")
    keep = steps > 1 if delayed else steps > 0
    steps, values = steps[keep], values[:, keep]
    if len(steps) < SEVERAL:
        return []
    with np.errstate(divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an all-NaN slice is a NaN
        alive = np.where(values > 0, np.log10(values), np.nan)
        middle, bound = _peers([one.part for one in parts], alive)
    distance = alive - middle
    found = []
    checks: tuple[tuple[What, NDArray[np.bool_]], ...] = (
        ("dead", values == 0),
        ("vanishing", distance < -bound[:, None]),
        ("exploding", distance > bound[:, None]),
    )
    for what, flags in checks:
        for at, one in enumerate(parts):
            first, last = _longest(flags[at])
            if last - first < SEVERAL:
                continue
            far = np.abs(distance[at, first:last])
            worst = first + (0 if what == "dead" else int(np.argmax(far)))
            fault = Fault(
                part=one.part,
                what=what,
                steps=(int(steps[first]), int(steps[last - 1])),
                samples=last - first,
                lasts=last == len(steps),
                norm=float(values[at, worst]),
                peers=float(10 ** middle[at, worst]),
                worst=int(steps[worst]),
            )
            found.append(fault)
    return found


def gradient_findings(gradients: Sequence[Gradient], delayed: bool) -> Iterator[Finding]:
    """Yield the findings about the gradients of a run."""
    found, parts = faults(gradients, delayed), [one.part for one in leaves(gradients)]
    dead: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for fault in found:
        if fault.what == "dead":
            dead[_when(fault), fault.lasts].append(fault.part)
    for (when, lasts), which in dead.items():
        end = "What has no gradient is not trained." if lasts else "Later it had one."
        what = f"Dead: no gradient reaches {_list(_merged(which, parts))}"
        text = f"{what}; it was exactly zero at {when}. {end}"
        yield Finding("alarm" if lasts else "warning", text)
    for what, word in (("vanishing", "Vanishing"), ("exploding", "Exploding")):
        same = [fault for fault in found if fault.what == what]
        same.sort(key=lambda one: -abs(np.log10(one.norm / one.peers)))
        for fault in same[:MOST]:
            text = (
                f"{word}: the gradient of {fault.part} has a norm of {fault.norm:.3g} at step "
                f"{fault.worst}, its peers {fault.peers:.3g}; so at {_when(fault)}."
            )
            yield Finding("warning", text)
        if len(same) > MOST:
            rest = _list(_merged([one.part for one in same[MOST:]], parts))
            yield Finding("warning", f"{word} as well: the gradient of {rest}.")


def _peers(parts: Sequence[str], alive: Figures) -> tuple[Figures, Figures]:
    """The reference for each part, log10 [parts, samples], and the largest distance from it,
    [parts]."""
    roles: dict[str, list[int]] = defaultdict(list)
    for at, part in enumerate(parts):
        roles[role(part)].append(at)
    # The part nearest to the loss that has a gradient at the sample.
    end = _last(alive)
    middle, bounds = np.empty_like(alive), np.empty(len(parts))
    for members in roles.values():
        living = [at for at in members if np.isfinite(alive[at]).any()]
        bound = SAME if len(living) >= PEERS else ANY
        group = alive[living] if len(living) >= PEERS else alive
        usual, last = np.nanmedian(group, axis=0), _last(group)
        other = (np.abs(last - usual) > bound) & (np.abs(last - end) < np.abs(usual - end))
        middle[members], bounds[members] = np.where(other, last, usual), bound
    return middle, bounds


def _last(values: Figures) -> Figures:
    """The last finite value of each column, NaN if there is none."""
    there = np.isfinite(values)
    at = len(values) - 1 - np.argmax(there[::-1], axis=0)
    return np.where(there.any(axis=0), values[at, np.arange(values.shape[1])], np.nan)


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Begin and end of the longest run of true flags, the last one of equal length."""
    best = end = at = 0
    for flag, alike in groupby(flags):
        begin, at = at, at + len(list(alike))
        if flag and at - begin >= end - best:
            best, end = begin, at
    return best, end


def _merged(which: Sequence[str], parts: Sequence[str]) -> list[str]:
    """The names of parts; all parts of a block become the block."""
    chosen = set(which)
    names: dict[str, None] = {}
    for part in which:
        block = part
        for size in range(1, part.count(".") + 1):
            prefix = ".".join(part.split(".")[:size])
            within = [one for one in parts if one.startswith(f"{prefix}.")]
            if prefix.split(".")[-1].isdigit() and chosen.issuperset(within):
                block = prefix
                break
        names[block] = None
    return list(names)


def _list(names: Sequence[str]) -> str:
    """Names as a list in a sentence, at most twenty."""
    shown = list(names[:20]) + ["others"] * (len(names) > 20)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _when(fault: Fault) -> str:
    samples, (first, last) = counted(fault.samples, "sample"), fault.steps
    return f"{samples} in a row, steps {first} to {last}"
