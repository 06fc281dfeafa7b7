"""`Corpus`: the tokens of several files as one array, and where documents begin. No torch here.

Small texts are in memory, all other files memory-mapped, read-only. Reading a mapped page beyond
the end of a file kills the process (SIGBUS), so every read checks the file's size first.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import UserError, raised_in_worker

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
Begins: TypeAlias = npt.NDArray[np.bool_]

HASHED_WHOLE_BYTES = 64 * 2**20  # most mapped bytes of a corpus that is hashed in full
SAMPLED_PAGES = 64  # of each mapped file of a larger corpus
PAGE_BYTES = 4096
CHECKED_AT_ONCE = 2**20


class DataError(UserError):
    """Data that became invalid after loading: a token outside the vocabulary, or a file that
    shrank."""

    def __init__(self, message: str) -> None:
        super().__init__(raised_in_worker(message))


def map_tokens(path: Path, dtype: str, start: int = 0, count: int | None = None) -> Tokens:
    """Map `count` tokens of a file, from token `start` on, read-only: 1-D of `dtype`. Raises a
    DataError if the file cannot be opened or has fewer tokens."""
    offset = start * np.dtype(dtype).itemsize
    shape = None if count is None else (count,)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
    except OSError as error:
        if error.errno == errno.EMFILE and _raise_limit_of_files():
            return map_tokens(path, dtype, start, count)
        remedy = "Check the file, and `ulimit -n` where there are many."
        raise DataError(f"Cannot map {path}: {error.strerror}. {remedy}") from error
    except ValueError as error:  # numpy's error for an impossible length
        raise DataError(
            f"{path} changed its size while it was opened. Try again when it is complete."
        ) from error


def _raise_limit_of_files() -> bool:
    """Raise this process's limit of open files to the hard limit. Returns whether it was raised."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except ValueError:  # macOS: its hard limit is none, which it refuses as a soft one
        return False
    return True


class Documents(Protocol):
    """The beginnings of the documents of a file."""

    @property
    def index(self) -> Segment | None:
        """The file that records the beginnings; None if the tokens themselves do."""

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """A mask of the tokens that begin a document: bool [count]. The tokens are `window[first :
        first + count]`, from token `at` of the file on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A range of tokens of one file. A mapped range is pickled as its path, and mapped again when
    unpickled."""

    path: Path
    tokens: Tokens  # 1-D, of any integer type, an array or a memory map
    start: int = 0  # of the first token, in tokens from the beginning of the file
    documents: Documents | None = None  # None if the file does not record where documents begin

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def mapped(self) -> bool:
        """Whether the tokens are memory-mapped."""
        return isinstance(self.tokens, np.memmap)

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` to `stop` of this segment, a view; `stop` may lie beyond the end.
        Raises a DataError if the file is gone or has shrunk below the end of this segment."""
        if not self.mapped:
            return self.tokens[start:stop]
        end = self.start + len(self)
        try:
            present = self.path.stat().st_size // self.tokens.itemsize
        except OSError as error:
            raise DataError(
                f"Cannot read {self.path} any more: {error.strerror}. "
                "Put the file back and resume the run."
            ) from error
        if present < end:
            raise DataError(
                f"{self.path} shrank while in use: it held {end} tokens or more and ends at "
                f"offset {present} now. Restore the file and resume the run."
            )
        return self.tokens[start:stop]

    def slice(self, start: int, stop: int) -> Segment:
        """The segment with the tokens from `start` to `stop` of this segment."""
        return replace(self, tokens=self.tokens[start:stop], start=self.start + start)

    def __getstate__(self) -> dict[str, Any]:
        # A memmap pickles as a copy of all its bytes: a worker would receive the whole file.
        mapped = {"tokens": (self.tokens.dtype.str, self.start, len(self))} if self.mapped else {}
        return self.__dict__ | mapped

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], tuple):
            state["tokens"] = map_tokens(state["path"], *state["tokens"])
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """One split: the tokens of its segments, concatenated. `name` is for messages."""

    name: str
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self._ends[-1]) if self.segments else 0

    @property
    def has_documents(self) -> bool:
        """Whether all segments record where their documents begin."""
        return all(segment.documents is not None for segment in self.segments)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([len(segment) for segment in self.segments], dtype=np.int64)

    def _pieces(self, start: int, length: int) -> Iterator[tuple[Segment, int, slice]]:
        """Yield the segments that contain the `length` tokens from `start` on, with the offset in
        the segment and the slice of the result that its tokens fill."""
        filled = 0
        while filled < length:
            index = int(np.searchsorted(self._ends, start + filled, side="right"))
            segment, remaining = self.segments[index], int(self._ends[index]) - start - filled
            count = min(remaining, length - filled)
            yield segment, len(segment) - remaining, slice(filled, filled + count)
            filled += count

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds token `position` of the corpus, and the token's offset in it. Raises
        an IndexError if there is no such token."""
        if not 0 <= position < len(self):
            raise IndexError(f"Token {position} of {self.name}, which has {len(self)}.")
        segment, offset, _ = next(self._pieces(position, 1))
        return segment.path, segment.start + offset

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """The `length` tokens from `start` on, across segments: int64 [length]. Raises an
        IndexError if they exceed the corpus, a DataError if a file is gone or has shrunk."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(
                f"Tokens {start} to {start + length} of {self.name}, which has {len(self)}."
            )
        window = np.empty(length, dtype=np.int64)
        for segment, offset, where in self._pieces(start, length):
            window[where] = segment.read(offset, offset + where.stop - where.start)
        return window

    def documents(self, start: int, window: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The document of each token of a `window` that was read at `start`: int64 [length].

        Documents are numbered from 0 in each window. A segment that does not record where documents
        begin continues the document before it. Raises a DataError if a file that records it is gone
        or has shrunk.
        """
        begins = np.zeros(len(window), dtype=np.bool_)
        for segment, offset, where in self._pieces(start, len(window)):
            if segment.documents is not None:
                count = where.stop - where.start
                at = segment.start + offset
                begins[where] = segment.documents.begins(window, where.start, count, at)
        begins[:1] = False
        return np.cumsum(begins, dtype=np.int64)

    def split(self, position: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """The segments before, and from, token `position`; a segment across it is split."""
        before, after = list[Segment](), list[Segment]()
        for segment, end in zip(self.segments, self._ends.tolist(), strict=True):
            cut = min(max(position - (end - len(segment)), 0), len(segment))
            before += [segment.slice(0, cut)] if cut > 0 else []
            after += [segment.slice(cut, len(segment))] if cut < len(segment) else []
        return tuple(before), tuple(after)

    def fingerprint(self) -> str:
        """A SHA-256 in hexadecimal of the contents, independent of the names of the files.

        It covers the width and the number of tokens of each segment, all bytes in memory, and all
        mapped bytes of a corpus with up to 64 MiB of them. In a larger corpus it covers 64 pages of
        4 KiB of each mapped segment, evenly spaced, the first and the last included: a change
        elsewhere that keeps the sizes is not detected. A file that records where documents begin is
        covered like a segment. Raises a DataError if a file is gone or has shrunk.
        """
        mapped_bytes = sum(segment.tokens.nbytes for segment in self.segments if segment.mapped)
        digest = hashlib.sha256()
        documents = [segment.documents for segment in self.segments]
        indices = [None if record is None else record.index for record in documents]
        for segment in (*self.segments, *(index for index in indices if index is not None)):
            digest.update(f"{segment.tokens.itemsize} {len(segment)}\n".encode())
            content = segment.read(0, len(segment)).view(np.uint8)
            covers_all = not segment.mapped or mapped_bytes <= HASHED_WHOLE_BYTES
            if covers_all or len(content) <= SAMPLED_PAGES * PAGE_BYTES:
                digest.update(np.ascontiguousarray(content).data)
                continue
            for page in range(SAMPLED_PAGES):
                start = page * (len(content) - PAGE_BYTES) // (SAMPLED_PAGES - 1)
                digest.update(np.ascontiguousarray(content[start : start + PAGE_BYTES]).data)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Separator:
    """A token that separates documents: the first token of each document with `leads`, else the
    last."""

    token: int
    leads: bool = False
    index: ClassVar[None] = None  # the tokens themselves record it

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """A mask of the tokens of `window[first : first + count]` that begin a document: bool
        [count]. If the separator ends documents, the window's first token begins none."""
        is_separator = np.asarray(window[first : first + count] == self.token)
        if self.leads:
            return is_separator
        before = first > 0 and window[first - 1] == self.token
        return np.concatenate(([before], is_separator[:-1]))


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A file with the end (exclusive) of each document in a file of tokens: uint64, ascending."""

    index: Segment

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """A mask of the tokens from `at` to `at + count` of the file that begin a document. Raises
        a DataError if the file of ends is gone or has shrunk."""
        ends = self.index.read(0, len(self.index))
        # uint64 bounds: with an int, numpy would convert the map to float64 and read all of it.
        low, high = np.searchsorted(ends, np.array([at, at + count], dtype=np.uint64))
        return mask_of_starts(ends[low:high].astype(np.int64), count, at)


def mask_of_starts(starts: npt.NDArray[np.int64], count: int, at: int) -> Begins:
    """A mask of the tokens from `at` to `at + count` of a file that are among `starts`, or the
    first token of the file."""
    begins = np.zeros(count, dtype=np.bool_)
    # An index that is overwritten while in use may hold any values.
    begins[starts[(starts >= at) & (starts < at + count)] - at] = True
    if at == 0:
        begins[0] = True
    return begins


def ascends(table: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether a table, which may be a large map, is in ascending order."""
    return all(
        bool((chunk[1:] >= chunk[:-1]).all())
        for chunk in (
            table[at : at + CHECKED_AT_ONCE + 1] for at in range(0, len(table), CHECKED_AT_ONCE)
        )
    )


def require_documents(corpus: Corpus) -> None:
    """Raise a UserError unless all segments of `corpus` record where documents end."""
    for segment in corpus.segments:
        if segment.documents is None:
            raise UserError(
                f"{segment.path} does not say where its documents end, which document_mask needs. "
                "Make tokens of the text with `fp8stack prepare`, or, where a .bin file has "
                "end-of-text tokens, name its tokenizer with --tokenizer."
            )
