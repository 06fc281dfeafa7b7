"""Where documents begin: a token that separates them, or a file of their ends. No torch here."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.corpus import Begins, Corpus, Part
from fp8stack.errors import UserError

CHECKED_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True)
class Separator:
    """A token between documents: the first of each with `leads`, else the last of each."""

    token: int
    leads: bool = False

    @property
    def index(self) -> None:
        """No file: the tokens themselves say it."""
        return None

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """Which of `window[first : first + count]` begin a document: bool [count].

        Where the separator ends documents, the window's own first token begins none.
        """
        found = np.asarray(window[first : first + count] == self.token)
        if self.leads:
            return found
        before = first > 0 and window[first - 1] == self.token
        return np.concatenate(([before], found[:-1]))


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A file of uint64, ascending: where each document of a file of tokens ends, exclusive."""

    index: Part

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """Which of the tokens from `at` to `at + count` of the file begin a document. Raises a
        DataError if the file of ends is gone or has shrunk."""
        ends = self.index.read(0, len(self.index))
        # As uint64: numpy would make float64 of a map and an int, and read all of it.
        low, high = np.searchsorted(ends, np.array([at, at + count], dtype=np.uint64))
        return begun(ends[low:high].astype(np.int64), count, at)


def begun(starts: npt.NDArray[np.int64], count: int, at: int) -> Begins:
    """Which tokens from `at` to `at + count` of a file are among `starts`, or its first one."""
    begins = np.zeros(count, dtype=np.bool_)
    # An index that is written over while in use may say anything.
    begins[starts[(starts >= at) & (starts < at + count)] - at] = True
    if at == 0:
        begins[0] = True
    return begins


def ascends(table: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether no number of a table, which may be a large map, is below the one before it."""
    return all(
        bool((some[1:] >= some[:-1]).all())
        for some in (
            table[at : at + CHECKED_AT_ONCE + 1] for at in range(0, len(table), CHECKED_AT_ONCE)
        )
    )


def require_documents(corpus: Corpus) -> None:
    """Raise a UserError unless all of `corpus` says where its documents end."""
    for part in corpus.parts:
        if part.documents is None:
            raise UserError(
                f"{part.path} does not say where its documents end, which document_mask needs. "
                "Make tokens of the text with `fp8stack prepare`, or, where a .bin file has "
                "end-of-text tokens, name its tokenizer with --tokenizer."
            )
