"""Modules whose gradient is dead, vanishes or explodes at `SEVERAL` samples in a row.

A gradient is dead if it is exactly zero. It vanishes or explodes if its norm differs by more than
`SAME` powers of ten from the median of its peers, which are the same module in other blocks. If
fewer than `PEERS` of them have a gradient, it is compared with the median of all modules, and the
bound is `ANY` powers of ten. If the peers form two groups that differ by more than the bound, the
reference is the group with the last layers, where backpropagation begins.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp8stack.analysis.report.findings import Finding, several
from fp8stack.analysis.report.outliers import PEERS, role
from fp8stack.analysis.report.telemetry import Figures, Gradient, grid
from fp8stack.common.tables import counted

SEVERAL = 3
SAME, ANY = 3.0, 5.0  # powers of ten
MOST = 6  # the worst faults get a sentence each, the others only their name

FaultKind = Literal["dead", "vanishing", "exploding"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A module whose gradient is wrong."""

    module: str  # path
    kind: FaultKind
    when: str  # the longest run of faulty samples, as a phrase
    lasts: bool  # it includes the run's last sample
    worst: int  # the step of the sample that is furthest from the peers
    norm: float  # at that step
    peers: float  # the median of its peers at that step


def leaves(gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients of modules that contain no other module with a gradient."""
    modules = sorted(gradient.module for gradient in gradients)
    blocks = {module for module, after in pairwise(modules) if after.startswith(f"{module}.")}
    return [gradient for gradient in gradients if gradient.module not in blocks]


def faults(gradients: Sequence[Gradient], delayed: bool) -> list[Fault]:
    """The faults of a run's gradients. The first step of delayed scaling does not count, because
    its scales are still 1."""
    candidates = leaves(gradients)
    if not candidates:
        return []
    steps, values = grid(candidates, "norm")
    keep = steps > 1 if delayed else steps > 0
    steps, values = steps[keep], values[:, keep]
    if len(steps) < SEVERAL:
        return []
    with np.errstate(divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an all-NaN slice is a NaN
        alive = np.where(values > 0, np.log10(values), np.nan)
        middle, bound = _peers([gradient.module for gradient in candidates], alive)
    distance = alive - middle
    all_faults = []
    flags_by_kind: dict[FaultKind, NDArray[np.bool_]] = {
        "dead": values == 0,
        "vanishing": distance < -bound[:, None],
        "exploding": distance > bound[:, None],
    }
    for kind, flags in flags_by_kind.items():
        for row, gradient in enumerate(candidates):
            first, last = _longest(flags[row])
            if last - first < SEVERAL:
                continue
            distances = np.abs(distance[row, first:last])
            worst = first + (0 if kind == "dead" else int(np.argmax(distances)))
            samples = counted(last - first, "sample")
            fault = Fault(
                module=gradient.module,
                kind=kind,
                when=f"{samples} in a row, steps {steps[first]} to {steps[last - 1]}",
                lasts=last == len(steps),
                worst=int(steps[worst]),
                norm=float(values[row, worst]),
                peers=float(10 ** middle[row, worst]),
            )
            all_faults.append(fault)
    return all_faults


def gradient_findings(gradients: Sequence[Gradient], delayed: bool) -> Iterator[Finding]:
    """Yield the findings about the gradients of a run."""
    all_faults = faults(gradients, delayed)
    modules = [gradient.module for gradient in leaves(gradients)]
    dead: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for fault in all_faults:
        if fault.kind == "dead":
            dead[fault.when, fault.lasts].append(fault.module)
    for (when, lasts), faulty in dead.items():
        end = "What has no gradient is not trained." if lasts else "Later it had one."
        names = several(_merged(faulty, modules))
        text = f"Dead: no gradient reaches {names}; it was exactly zero at {when}. {end}"
        yield Finding("alarm" if lasts else "warning", text)
    for kind in ("vanishing", "exploding"):
        of_kind = [fault for fault in all_faults if fault.kind == kind]
        of_kind.sort(key=lambda fault: -abs(np.log10(fault.norm / fault.peers)))
        for fault in of_kind[:MOST]:
            text = (
                f"{kind.title()}: the gradient of {fault.module} has a norm of {fault.norm:.3g} at "
                f"step {fault.worst}, its peers {fault.peers:.3g}; so at {fault.when}."
            )
            yield Finding("warning", text)
        if more := [fault.module for fault in of_kind[MOST:]]:
            names = several(_merged(more, modules))
            yield Finding("warning", f"{kind.title()} as well: the gradient of {names}.")


def _peers(modules: Sequence[str], alive: Figures) -> tuple[Figures, Figures]:
    """The reference of each module, log10 [modules, samples], and the largest distance from it that
    is no fault, [modules]."""
    roles: dict[str, list[int]] = defaultdict(list)
    for row, module in enumerate(modules):
        roles[role(module)].append(row)
    # The last module with a gradient, which is nearest to the loss, at each sample.
    nearest_loss = _last(alive)
    middle, bounds = np.empty_like(alive), np.empty(len(modules))
    for members in roles.values():
        living = [row for row in members if np.isfinite(alive[row]).any()]
        bound = SAME if len(living) >= PEERS else ANY
        group = alive[living] if len(living) >= PEERS else alive
        usual, last = np.nanmedian(group, axis=0), _last(group)
        prefers_last = (np.abs(last - usual) > bound) & (
            np.abs(last - nearest_loss) < np.abs(usual - nearest_loss)
        )
        middle[members], bounds[members] = np.where(prefers_last, last, usual), bound
    return middle, bounds


def _last(values: Figures) -> Figures:
    """The last finite value of each column; NaN if it has none."""
    is_finite = np.isfinite(values)
    rows = len(values) - 1 - np.argmax(is_finite[::-1], axis=0)
    return np.where(is_finite.any(axis=0), values[rows, np.arange(values.shape[1])], np.nan)


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Begin and end of the longest run of true flags; of runs of equal length, the last one."""
    best = end = position = 0
    for flag, stretch in groupby(flags):
        begin, position = position, position + len(list(stretch))
        if flag and position - begin >= end - best:
            best, end = begin, position
    return best, end


def _merged(faulty: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Replace the modules of a block by the block if all of them are in `faulty`."""
    faulty_set = set(faulty)
    names: dict[str, None] = {}
    for module in faulty:
        block = module
        for size in range(1, module.count(".") + 1):
            prefix = ".".join(module.split(".")[:size])
            members = [name for name in modules if name.startswith(f"{prefix}.")]
            if prefix.split(".")[-1].isdigit() and faulty_set.issuperset(members):
                block = prefix
                break
        names[block] = None
    return list(names)
