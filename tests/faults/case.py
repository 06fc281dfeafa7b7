"""A row of the reliability matrix: injected faults of one kind, and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of faults; outcomes can be added.

    Attributes:
        injected: the number of faults that happened.
        survived: the number of these that passed by the row's rule.
        lost: a line for each fault that did not pass, with the fault and the problem.
    """

    injected: int = 0
    survived: int = 0
    lost: tuple[str, ...] = ()

    def __add__(self, added: Outcome) -> Outcome:
        return Outcome(
            injected=self.injected + added.injected,
            survived=self.survived + added.survived,
            lost=self.lost + added.lost,
        )


def judged(faults: Sequence[str], wrong: str) -> Outcome:
    """The outcome of the faults of one run; `wrong` says what is wrong with it, "" if nothing."""
    lost = tuple(f"{fault}: {wrong}" for fault in faults) if wrong else ()
    return Outcome(injected=len(faults), survived=len(faults) - len(lost), lost=lost)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row.

    Attributes:
        description: the injected faults, in a few words.
        passes: when a fault counts as survived, in a sentence.
        run: gets an empty folder and how many faults to inject.
        short: how many in a short run; at least one of each kind.
        long: how many in the whole table.
        needs_cuda: whether it can run on a GPU alone.
    """

    description: str
    passes: str
    run: Callable[[Path, int], Outcome]
    short: int
    long: int
    needs_cuda: bool = False
