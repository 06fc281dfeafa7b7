"""Writes documents to shards of tokens, each with a file of the ends of its documents."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from fp8stack.common.io import sha256_of_file, storage_errors
from fp8stack.data.order import GOLDEN, mixed
from fp8stack.data.prepare.readers import Text
from fp8stack.data.prepared import ENDS, Shard
from fp8stack.data.tokenizer import Tokenizer

SHARD_FILE = re.compile(r"(train|val)-(\d{5,})\.(bin|ends)")
REPLACEMENT = "\ufffd"


class SplitState(BaseModel):
    """The progress of writing the files of a split."""

    shards: list[Shard] = []  # finished
    bytes: int = 0  # of text, of all shards
    tokens: int = 0  # of the open shard
    documents: int = 0


class SplitWriter:
    """Writes the files of one split ("train" or "val") into `folder`, with `width` bytes for each
    token. A shard ends with the document that reaches `shard_tokens`."""

    def __init__(self, folder: Path, split: str, width: int, shard_tokens: int) -> None:
        self._folder, self._split = folder, split
        self._width, self._shard_tokens = width, shard_tokens
        self.state = SplitState()

    def files(self) -> Iterator[tuple[Path, int]]:
        """The files of this state, with their sizes in bytes."""
        sizes = [(shard.tokens, shard.documents) for shard in self.state.shards]
        sizes.append((self.state.tokens, self.state.documents))
        for number, (tokens, documents) in enumerate(sizes):
            path, ends = self._paths(number)
            if tokens or documents:
                yield path, tokens * self._width
                yield ends, documents * 8

    def flush(self) -> None:
        """Flush the open shard, if there is one, to the disk."""
        for path in self._paths(len(self.state.shards)):
            if path.exists():
                with path.open("ab") as file:
                    os.fsync(file.fileno())

    def add(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Write documents: their concatenated tokens [tokens], and the place where each document
        ends among them [documents]. Tokens after them belong to a document that continues in the
        next call."""
        self.state.bytes += text_bytes
        while len(ends):
            # The shard ends with the first document that fills it.
            room = self._shard_tokens - self.state.tokens
            count = min(int(np.searchsorted(ends, room)) + 1, len(ends))
            end = int(ends[count - 1])
            self._append(tokens[:end], ends[:count])
            tokens, ends = tokens[end:], ends[count:] - end
            if self.state.tokens >= self._shard_tokens:
                self.finish()
        if len(tokens):
            self._append(tokens, ends)

    def finish(self) -> None:
        """Finish the open shard, if there is one."""
        state, (path, ends) = self.state, self._paths(len(self.state.shards))
        if state.tokens:
            self.flush()
            shard = Shard(
                file=path.name,
                tokens=state.tokens,
                documents=state.documents,
                sha256=sha256_of_file(path),
                ends_sha256=sha256_of_file(ends),
            )
            state.shards.append(shard)
        elif state.documents:  # empty, of a tokenizer without an end-of-text token
            path.unlink()
            ends.unlink()
        state.tokens = state.documents = 0

    def _paths(self, number: int) -> tuple[Path, Path]:
        path = self._folder / f"{self._split}-{number:05d}.bin"
        return path, path.with_suffix(ENDS)

    def _append(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """Write tokens, and the ends of documents among them."""
        arrays = (tokens, (ends + self.state.tokens).astype("<u8"))
        for path, array in zip(self._paths(len(self.state.shards)), arrays, strict=True):
            with path.open("ab") as file:
                file.write(np.ascontiguousarray(array).data)
        self.state.tokens += len(tokens)
        self.state.documents += len(ends)


class Writer:
    """Tokenizes documents, writes each to the shards of its split, and counts them."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int, held_out: float
    ) -> None:
        self._folder, self._tokenizer, self._held_out = folder, tokenizer, held_out
        width = tokenizer.dtype.itemsize
        self.splits = {
            name: SplitWriter(folder, name, width, shard_tokens) for name in ("train", "val")
        }
        self.counts = dict.fromkeys(("documents", "empty", "replaced"), 0)

    @property
    def states(self) -> dict[str, SplitState]:
        """The progress of each split."""
        return {name: split.state for name, split in self.splits.items()}

    @property
    def shards(self) -> int:
        """The number of finished shards."""
        return sum(len(state.shards) for state in self.states.values())

    def place(self) -> dict[str, Any]:
        """The end of what was written, as JSON data, once it is on the disk."""
        for split in self.splits.values():
            split.flush()
        states = {name: state.model_dump() for name, state in self.states.items()}
        return {"counts": dict(self.counts), "splits": states}

    def go_to(self, place: Mapping[str, Any]) -> bool:
        """Continue at a `place`; what was written after it is removed. Returns False, having
        changed no file, if files up to the place are missing or too short."""
        self.counts = dict(place["counts"])
        for name, split in self.splits.items():
            split.state = SplitState.model_validate(place["splits"][name])
        sizes = dict(pair for split in self.splits.values() for pair in split.files())
        if not all(path.is_file() and path.stat().st_size >= sizes[path] for path in sizes):
            return False
        with storage_errors(self._folder):
            for path in self._folder.iterdir():
                if path in sizes:
                    os.truncate(path, sizes[path])
                elif SHARD_FILE.fullmatch(path.name):
                    path.unlink()
        return True

    def add(self, texts: Sequence[Text]) -> int:
        """Write texts, with the end-of-text token after each document. Returns the number of
        tokens."""
        end = self._tokenizer.end_of_text
        end_tokens = np.array([] if end is None else [end], dtype=np.uint32)
        finished = np.array([not text.is_unfinished for text in texts])
        documents = self.counts["documents"] + np.cumsum(finished) - finished
        held = held_out(documents, self._held_out)
        text_bytes = np.array([bytes_of(text.text) for text in texts])
        ids = self._tokenizer.encode_batch([text.text for text in texts])
        ids = [
            np.concatenate([tokens, end_tokens]) if is_last else tokens
            for tokens, is_last in zip(ids, finished, strict=True)
        ]
        with storage_errors(self._folder):
            for split, selected in ((self.splits["train"], ~held), (self.splits["val"], held)):
                if selected.any():
                    split_ids = [ids[index] for index in np.flatnonzero(selected)]
                    ends = np.cumsum([len(tokens) for tokens in split_ids])[finished[selected]]
                    tokens = np.concatenate(split_ids).astype(self._tokenizer.dtype)
                    split.add(tokens, ends, int(text_bytes[selected].sum()))
        self.counts["documents"] += int(finished.sum())
        self.counts["empty"] += int((finished & (text_bytes == 0)).sum())
        self.counts["replaced"] += sum(text.text.count(REPLACEMENT) for text in texts)
        return sum(map(len, ids))

    def finish(self) -> None:
        """Finish the open shards."""
        with storage_errors(self._folder):
            for split in self.splits.values():
                split.finish()


def bytes_of(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def held_out(documents: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """A mask of the documents to hold out, by their indices among the inputs: a share by SplitMix64
    hashes of the indices. Document 0 never is."""
    x = mixed(documents.astype(np.uint64) * np.uint64(GOLDEN))
    below: npt.NDArray[np.bool_] = (x >> np.uint64(11)).astype(np.float64) < share * 2.0**53
    return below & (documents > 0)
