"""Writes documents to shards of tokens, each with a file of the ends of its documents."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fp8stack.common.io import sha256_of_file, storage_errors
from fp8stack.data.order import GOLDEN, mixed
from fp8stack.data.prepare.encode import Encoded
from fp8stack.data.prepare.readers import Text
from fp8stack.data.prepared import ENDS, Shard

SHARD_FILE = re.compile(r"(train|val)-(\d{5,})\.(bin|ends)")


class SplitWriter:
    """Writes the files of one split ("train" or "val") into `folder`, with `width` bytes for each
    token. A shard ends with the document that reaches `shard_tokens`. Methods that write raise a
    StorageError if the disk is full or cannot be written."""

    def __init__(self, folder: Path, split: str, width: int, shard_tokens: int) -> None:
        self._folder, self._split = folder, split
        self._width, self._shard_tokens = width, shard_tokens
        self.shards: list[Shard] = []  # finished
        self.text_bytes = 0  # of all shards
        self._files: list[IO[bytes]] = []  # of the open shard: tokens, and ends of documents
        self._tokens = self._documents = 0  # of the open shard

    def place(self) -> dict[str, int]:
        """The place up to which the disk holds all tokens."""
        with storage_errors(self._folder):
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        return {
            "shards": len(self.shards),
            "tokens": self._tokens,
            "documents": self._documents,
            "bytes": self.text_bytes,
        }

    def has(self, place: Mapping[str, int]) -> bool:
        """Whether all files up to a `place` are there."""
        finished = [path for number in range(place["shards"]) for path in self._paths(number)]
        sizes = self._sizes(place)
        return all(path.is_file() for path in [*finished, *sizes]) and all(
            path.stat().st_size >= size for path, size in sizes.items()
        )

    def go_to(self, place: Mapping[str, int]) -> None:
        """Continue at a `place`; what was written after it is removed."""
        number, self.text_bytes = place["shards"], place["bytes"]
        self._tokens, self._documents = place["tokens"], place["documents"]
        with storage_errors(self._folder):
            sizes = self._sizes(place)
            for path in self._folder.iterdir():
                match = SHARD_FILE.fullmatch(path.name)
                if match and match[1] == self._split and int(match[2]) >= number:
                    if path in sizes:
                        os.truncate(path, sizes[path])
                    else:
                        path.unlink()
            self.shards = [self._shard(earlier) for earlier in range(number)]
            self._files = [path.open("ab") for path in sizes]

    def add(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Write documents: their concatenated tokens [tokens], and the place where each document
        ends among them [documents]. Tokens after them belong to a document that continues in the
        next call."""
        self.text_bytes += text_bytes
        begin = first = 0
        while first < len(ends):
            # The shard ends with the first document that fills it.
            room = self._shard_tokens - self._tokens
            past = int(np.searchsorted(ends, begin + room, side="left")) + 1
            past = min(max(past, first + 1), len(ends))
            self._append(tokens[begin : ends[past - 1]], ends[first:past] - begin)
            begin, first = int(ends[past - 1]), past
            if self._tokens >= self._shard_tokens:
                self.finish()
        if begin < len(tokens):
            self._append(tokens[begin:], ends[:0])

    def finish(self) -> None:
        """Finish the open shard, if there is one."""
        self.place()
        for file in self._files:
            file.close()
        if self._tokens:
            self.shards.append(self._shard(len(self.shards)))
        elif self._files:  # empty documents of a tokenizer without an end-of-text token
            for path in self._paths(len(self.shards)):
                path.unlink()
        self._files, self._tokens, self._documents = [], 0, 0

    def _paths(self, number: int) -> tuple[Path, Path]:
        path = self._folder / f"{self._split}-{number:05d}.bin"
        return path, path.with_suffix(ENDS)

    def _sizes(self, place: Mapping[str, int]) -> dict[Path, int]:
        """The files of the open shard at a place, if there is one, with their sizes in bytes."""
        if not (place["tokens"] or place["documents"]):
            return {}
        path, ends = self._paths(place["shards"])
        return {path: place["tokens"] * self._width, ends: place["documents"] * 8}

    def _shard(self, number: int) -> Shard:
        """A shard that is finished."""
        path, ends = self._paths(number)
        return Shard(
            file=path.name,
            tokens=path.stat().st_size // self._width,
            documents=ends.stat().st_size // 8,
            sha256=sha256_of_file(path),
            ends_sha256=sha256_of_file(ends),
        )

    def _append(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """Write tokens, and the ends of documents among them."""
        with storage_errors(self._folder):
            if not self._files:
                self._files = [path.open("wb") for path in self._paths(len(self.shards))]
            for file, array in zip(
                self._files, (tokens, (ends + self._tokens).astype("<u8")), strict=True
            ):
                file.write(np.ascontiguousarray(array).data)
        self._tokens += len(tokens)
        self._documents += len(ends)


class Writer:
    """Writes each document to the shards of its split, and counts them."""

    def __init__(self, folder: Path, width: int, shard_tokens: int, held_out: float) -> None:
        self._held_out = held_out
        self.splits = {
            name: SplitWriter(folder, name, width, shard_tokens) for name in ("train", "val")
        }
        self.counts = dict.fromkeys(("documents", "empty", "replaced", "cut_words"), 0)
        self.begin = self.place()

    def place(self) -> dict[str, Any]:
        """The place up to which the disk holds all documents, as JSON data."""
        places = {name: split.place() for name, split in self.splits.items()}
        return {"counts": dict(self.counts), "splits": places}

    def has(self, place: Mapping[str, Any]) -> bool:
        """Whether all files up to a `place` are there."""
        return all(split.has(place["splits"][name]) for name, split in self.splits.items())

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue at a `place`; what was written after it is removed."""
        self.counts = dict(place["counts"])
        for name, split in self.splits.items():
            split.go_to(place["splits"][name])

    def add(self, texts: Sequence[Text], encoded: Encoded) -> None:
        """Write the tokens of texts."""
        finished = np.array([not text.unfinished for text in texts], dtype=np.bool_)
        documents = self.counts["documents"] + np.cumsum(finished) - finished
        held = held_out(documents, self._held_out)
        for split, selected in ((self.splits["train"], ~held), (self.splits["val"], held)):
            if selected.any():
                tokens = encoded.tokens
                if not selected.all():
                    tokens = tokens[selected.repeat(encoded.lengths)]
                ends = np.cumsum(encoded.lengths[selected])[finished[selected]]
                split.add(tokens, ends, int(encoded.text_bytes[selected].sum()))
        self.counts["documents"] += int(finished.sum())
        self.counts["empty"] += int((finished & (encoded.text_bytes == 0)).sum())
        self.counts["replaced"] += sum(text.replaced for text in texts)
        self.counts["cut_words"] += sum(text.inside_a_word for text in texts)

    def finish(self) -> None:
        """Finish the open shards."""
        for split in self.splits.values():
            split.finish()


def held_out(documents: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """A mask of the documents to hold out, by their indices among the inputs: a share by SplitMix64
    hashes of the indices. Document 0 never is."""
    x = mixed(documents.astype(np.uint64) * np.uint64(GOLDEN))
    below: npt.NDArray[np.bool_] = (x >> np.uint64(11)).astype(np.float64) < share * 2.0**53
    return below & (documents > 0)
