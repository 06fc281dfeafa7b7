"""Several corpora as one, each with its share of the rows. No torch here."""

import hashlib
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fp8stack.common.errors import UserError
from fp8stack.common.io import absolute_path
from fp8stack.data.corpus import Corpus
from fp8stack.data.order import BLOCK, shares

_WEIGHT = r"\s*[-+0-9.]+(?:[eE][-+]?[0-9]+)?\s*:"


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture(Corpus):
    """Several corpora and their shares: `counts` is how many of every 4096 rows of a run are from
    each of the `sources`."""

    sources: tuple[Corpus, ...]
    counts: tuple[int, ...]

    def fingerprint(self) -> str:
        """A SHA-256 in hexadecimal of the contents and shares of the sources. Raises a DataError if
        a file is gone or has shrunk."""
        digest = hashlib.sha256()
        for source, count in zip(self.sources, self.counts, strict=True):
            digest.update(f"{count} {source.fingerprint()}\n".encode())
        return digest.hexdigest()


def mixture_of(name: str, weights: Sequence[float], corpora: Sequence[Corpus]) -> Corpus:
    """The mixture of corpora with these weights; a single corpus is returned as it is. Raises a
    UserError if a weight is less than one row in 4096."""
    if len(corpora) == 1:
        return corpora[0]
    counts = shares(tuple(weights), BLOCK)
    for weight, corpus, count in zip(weights, corpora, counts, strict=True):
        if not count:
            raise UserError(
                f"The weight {weight:g} of {corpus.name} is less than one row in {BLOCK}. "
                "Give it more weight, or leave it out."
            )
    segments = tuple(segment for corpus in corpora for segment in corpus.segments)
    return Mixture(name=name, segments=segments, sources=tuple(corpora), counts=counts)


def sources_and_counts(corpus: Corpus) -> tuple[tuple[Corpus, ...], tuple[int, ...]]:
    """The sources of a corpus, with their counts of every 4096 rows. A plain corpus is its own
    source."""
    if isinstance(corpus, Mixture):
        return corpus.sources, corpus.counts
    return (corpus,), (BLOCK,)


def weighted(data: str) -> list[tuple[float, str]] | None:
    """Parse `WEIGHT:PATH,WEIGHT:PATH`; None if `data` names one file or folder. Raises a UserError
    if a weight is missing or not above 0."""
    if not re.match(_WEIGHT, data) or os.path.exists(data):
        return None
    weighted_paths: list[tuple[float, str]] = []
    for piece in re.split(f",(?={_WEIGHT})", data):
        number, _, path = piece.partition(":")
        weight = 0.0
        with suppress(ValueError):
            weight = float(number)
        if not 0 < weight < math.inf or not path.strip():
            raise UserError(
                f"{piece!r} in --data {data!r} is not a path with a weight above 0. Write a "
                "mixture like 0.7:tokens/web,0.3:tokens/code."
            )
        weighted_paths.append((weight, path.strip()))
    return weighted_paths


def absolute(data: str) -> str:
    """`data` with absolute paths, also in a mixture. Raises what `weighted` raises."""
    pieces = weighted(data)
    if pieces is None:
        return absolute_path(data)
    return ",".join(f"{weight!r}:{absolute_path(path)}" for weight, path in pieces)
