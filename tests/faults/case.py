"""A row of the reliability matrix: injected faults of one kind, and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How many faults happened, how many of them passed by the row's rule, and a line for each
    that did not, with the fault and the problem. Outcomes can be added."""

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
    """A row: the faults in a few words, when one counts as survived, and how many to inject in a
    short run (at least one of each kind) and in the whole table. `run` gets an empty folder and
    how many faults to inject."""

    description: str
    passes: str
    run: Callable[[Path, int], Outcome]
    short: int
    long: int
    needs_cuda: bool = False
