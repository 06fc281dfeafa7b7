"""Memory that less precise phases save, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Memory over the phases of a run, as shares of a reference (fp32): 1.0 saves nothing.

    `average` is over the steps; `peak` is the worst phase, which is what has to fit.
    """

    average: float
    peak: float


def savings(phases: Sequence[tuple[float, float]], reference: float) -> Savings:
    """The memory of a run whose phases differ, relative to one that does not save.

    Args:
        phases: for each phase its share of the steps, above 0, in any unit, and its bytes (of a
            step, or of one element, where only that differs).
        reference: the bytes without savings, above 0.

    Raises:
        ValueError: no phases, a share or a reference that is not above 0.
    """
    if not phases or reference <= 0 or any(share <= 0 for share, _ in phases):
        raise ValueError("Savings need phases with shares above 0, and a reference above 0.")
    total = sum(share for share, _ in phases)
    average = sum(share * size for share, size in phases) / total
    return Savings(average=average / reference, peak=max(size for _, size in phases) / reference)


def largest_batch(peak_of: Callable[[int], int], memory: int, turn: int) -> int:
    """The largest number of sequences whose peak fits into `memory` bytes; 0 if not even one.

    A peak grows with its sequences, except for one step down where the loss begins to take its
    logits in chunks. The search is exact on either side of that step.

    Args:
        peak_of: the bytes of the peak for some sequences, at least 1.
        memory: in bytes.
        turn: the most sequences whose loss takes all logits at once; 0 if none.
    """
    above = _largest(peak_of, memory, turn + 1, None)
    if above or not turn:
        return above
    return _largest(peak_of, memory, 1, turn)


def _largest(peak_of: Callable[[int], int], memory: int, least: int, most: int | None) -> int:
    """The largest of `least` to `most` that fits, where the peak only grows; 0 if none. It grows
    nearly in a straight line: the next one to try is where that line meets the memory."""
    fits, peak = least, peak_of(least)
    if peak > memory:
        return 0
    fails = None if most is None else most + 1
    count = fits + 1
    while fails is None or fails - fits > 1:
        count = max(count, fits + 1) if fails is None else min(max(count, fits + 1), fails - 1)
        count_peak = peak_of(count)
        slope = (count_peak - peak) / (count - fits)
        if count_peak <= memory:
            fits, peak = count, count_peak
        else:
            fails = count
        count = fits + int((memory - peak) / slope) if slope > 0 else 2 * count
    return fits
