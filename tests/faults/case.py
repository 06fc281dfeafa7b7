"""What a row of the reliability matrix is: faults of one kind, put in, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of faults; outcomes add up.

    Attributes:
        injected: how many faults really happened.
        survived: how many of those passed, by the row's own rule.
        lost: one line for each that did not: which fault, and what was seen.
    """

    injected: int = 0
    survived: int = 0
    lost: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            injected=self.injected + other.injected,
            survived=self.survived + other.survived,
            lost=self.lost + other.lost,
        )


def judged(faults: Sequence[str], wrong: str) -> Outcome:
    """The outcome of the faults of one run; `wrong` says what is wrong with it, "" if nothing."""
    lost = tuple(f"{fault}: {wrong}" for fault in faults) if wrong else ()
    return Outcome(injected=len(faults), survived=len(faults) - len(lost), lost=lost)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row.

    Attributes:
        what: is injected, in a few words.
        passes: when a fault counts as survived, in a sentence.
        run: gets an empty folder and how many faults to inject.
        short: how many in a short run; at least one of each kind.
        long: how many in the whole table.
        needs_cuda: whether it can run on a GPU alone.
    """

    what: str
    passes: str
    run: Callable[[Path, int], Outcome]
    short: int
    long: int
    needs_cuda: bool = False
