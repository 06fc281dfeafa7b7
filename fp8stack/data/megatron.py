"""Megatron-LM's `.bin` of tokens with its `.idx` of sequences and documents. No torch here.

The index is little-endian and without padding: `MMIDIDX`, two zero bytes, uint64 version 1, uint8
code of the tokens' type, uint64 number of sequences, uint64 number of document indices, int32
length of each sequence, int64 position of each in the `.bin` in bytes, int64 document indices: 0,
and after each document the number of the sequence that follows it.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

import os
import struct
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import UserError
from fp8stack.data.corpus import (
    CHECKED_AT_ONCE,
    Begins,
    Segment,
    ascends,
    map_tokens,
    mask_of_starts,
)
from fp8stack.data.files import head_and_size

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}


def index_of(path: Path) -> Path:
    """The index of a `.bin` file. Its suffix may be in capitals."""
    return _existing(path, ".idx")


def _existing(path: Path, suffix: str) -> Path:
    capitals = path.with_suffix(suffix.upper())
    usual = path.with_suffix(suffix)
    return capitals if os.path.exists(capitals) and not os.path.exists(usual) else usual


def bin_of(data: str) -> Path | None:
    """The `.bin` file that `data` names: by its `.idx` file, or by the two files' common stem. None
    if `data` names no files of Megatron's. Raises a UserError if one of the two files is missing.
    """
    is_index = data.lower().endswith(".idx")
    if is_index:
        tokens, index = _existing(Path(data), ".bin"), Path(data)
    else:
        tokens, index = Path(data + ".bin"), Path(data + ".idx")
    if not is_index and (os.path.exists(data) or not os.path.exists(index)):
        return None
    if not os.path.exists(tokens):
        raise UserError(f"{tokens} is missing, and {index} is its index. Put both in one folder.")
    return tokens


@dataclass(frozen=True, kw_only=True)
class Index:
    """An `.idx` file, memory-mapped: where the documents of its `.bin` begin."""

    index: Segment
    sequences: int
    documents: int
    width: int  # bytes of a token

    def lengths(self) -> npt.NDArray[np.integer[Any]]:
        """The number of tokens of each sequence: int32 [sequences]."""
        return self._table(HEADER.size, "<i4", self.sequences)

    def positions(self) -> npt.NDArray[np.integer[Any]]:
        """The position of each sequence in the `.bin`, in bytes: int64 [sequences]."""
        return self._table(HEADER.size + 4 * self.sequences, "<i8", self.sequences)

    def first_sequences(self) -> npt.NDArray[np.integer[Any]]:
        """0, and the number of the sequence after each document: int64 [documents]."""
        return self._table(HEADER.size + 12 * self.sequences, "<i8", self.documents)

    def _table(self, start: int, dtype: str, count: int) -> npt.NDArray[np.integer[Any]]:
        stop = start + count * np.dtype(dtype).itemsize
        table: npt.NDArray[np.integer[Any]] = self.index.read(start, stop).view(dtype)
        return table

    def begins(self, window: npt.NDArray[np.int64], first: int, count: int, at: int) -> Begins:
        """A mask of the tokens from `at` to `at + count` of the `.bin` that begin a document.
        Raises a DataError if the index is gone or has shrunk."""
        positions, first_sequences = self.positions(), self.first_sequences()

        def start(document: int) -> int:
            sequence = int(first_sequences[document])
            inside = 0 <= sequence < self.sequences  # after the last document no sequence follows
            return int(positions[sequence]) // self.width if inside else 2**62

        documents = range(self.documents)
        # numpy's search would copy a table that is not aligned, and these are not.
        low = bisect_left(documents, at, key=start)
        high = bisect_left(documents, at + count, lo=low, key=start)
        return mask_of_starts(
            np.array([start(document) for document in range(low, high)], np.int64), count, at
        )


def segment(path: Path) -> Segment:
    """The tokens of a `.bin` file that has an index, memory-mapped. Raises a UserError if the index
    is of another format or version, or damaged, or if the files disagree."""
    index, dtype = _read_index(index_of(path))
    _, size = head_and_size(path)
    tokens = _require_sequence_after_sequence(index)
    first_sequences = index.first_sequences()
    covers_all = (
        index.documents > 0
        and int(first_sequences[0]) == 0
        and int(first_sequences[-1]) == index.sequences
    )
    if not (covers_all and ascends(first_sequences)):
        raise UserError(
            f"{index.index.path}: its documents do not go from the first to the last of its "
            f"{index.sequences} sequences. Make the index again."
        )
    if size != tokens * index.width:
        raise UserError(
            f"{path} should hold {tokens} tokens of {index.width} bytes by its index, and has "
            f"{size} bytes. Copy both files again."
        )
    return Segment(path=path, tokens=map_tokens(path, dtype), documents=index)


def _read_index(path: Path) -> tuple[Index, str]:
    """The index in `path` and the type of the tokens; only sizes are checked."""
    head, size = head_and_size(path)
    if not head.startswith(MAGIC):
        raise UserError(
            f"{path} is not an index of Megatron-LM: it does not begin with MMIDIDX. Make both "
            "files again with a Megatron-LM of 2019 or later, or remove it."
        )
    if size < HEADER.size:
        raise UserError(f"{path} ends within its header. Copy it again.")
    _, version, code, sequences, documents = HEADER.unpack(head[: HEADER.size])
    if version != 1:
        raise UserError(f"{path} is of version {version}, and only 1 is known. Make it again.")
    if code not in DTYPES:
        kind = FLOATS.get(code, "an unknown type")
        raise UserError(f"{path} says that its tokens are {kind} (code {code}). Use whole numbers.")
    needed = HEADER.size + 12 * sequences + 8 * documents
    if size == needed + sequences:
        raise UserError(f"{path} is of multimodal data, which only Megatron reads. Give text.")
    if not sequences:
        raise UserError(f"{path} has no sequences. Give data with tokens in it.")
    if size != needed:
        raise UserError(
            f"{path} should have {needed} bytes for its {sequences} sequences and {documents} "
            f"document indices, and has {size}. Copy it again, or make it again."
        )
    content, width = map_tokens(path, "|u1"), np.dtype(DTYPES[code]).itemsize
    file = Segment(path=path, tokens=content)
    index = Index(index=file, sequences=sequences, documents=documents, width=width)
    return index, DTYPES[code]


def _require_sequence_after_sequence(index: Index) -> int:
    """The number of tokens of all sequences. Raises a UserError if there are gaps between
    sequences."""
    lengths, positions = index.lengths(), index.positions()
    end = 0
    for at in range(0, index.sequences, CHECKED_AT_ONCE):
        chunk = lengths[at : at + CHECKED_AT_ONCE].astype(np.int64)
        ends = end + np.cumsum(chunk) * index.width
        wrong = (chunk < 0) | (positions[at : at + CHECKED_AT_ONCE] != ends - chunk * index.width)
        if wrong.any():
            raise UserError(
                f"{index.index.path}: sequence {at + int(wrong.argmax())} does not begin where "
                "the one before it ends. Make the index again."
            )
        end = int(ends[-1])
    return end // index.width
