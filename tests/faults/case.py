"""What a row of the reliability matrix is: faults of one kind, put in, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the faults of one row.

    Attributes:
        injected: how many faults really happened.
        survived: how many of those passed, by the row's own rule.
        lost: one line for each that did not: which fault, and what was seen.
    """

    injected: int
    survived: int
    lost: tuple[str, ...] = ()


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
