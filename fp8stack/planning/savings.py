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


def largest_batch(peak_of: Callable[[int], int], memory: int) -> int:
    """The largest number of sequences whose peak fits into `memory` bytes; 0 if not even one.

    A peak grows nearly in a straight line: the next number to try is where that line meets the
    memory. `peak_of` gives the bytes of the peak for some sequences, at least 1.
    """
    fits, peak = 1, peak_of(1)
    if peak > memory:
        return 0
    fails: int | None = None
    count = 2
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
