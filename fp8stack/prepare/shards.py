"""Shards of tokens on the disk. A saved state records the lengths of the files; whatever lies
beyond them was written by a process that died, and is removed."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, NonNegativeInt

from fp8stack.data.prepared import Shard
from fp8stack.errors import UserError, quoted
from fp8stack.io import sha256_of_file, storage_errors, sync_folder

OWN_FILE = re.compile(r"(train|val)-\d{5,}\.(bin|ends)")


class SplitState(BaseModel, frozen=True, extra="forbid"):
    """The state of a split."""

    shards: tuple[Shard, ...] = ()  # the finished ones
    tokens: NonNegativeInt = 0  # in the shard that is open
    documents: NonNegativeInt = 0  # in the shard that is open, whole ones
    bytes: NonNegativeInt = 0  # of text, in all shards


class SplitWriter:
    """Writes the files of one split ("train" or "val") into `folder`, from `state` on. A shard ends
    with the document that reaches `shard_tokens`. Raises a UserError if the files do not match the
    state, and in every method a StorageError if the disk is full or cannot be written."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[np.unsignedinteger],
        shard_tokens: int,
        state: SplitState,
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_tokens, self.state = shard_tokens, state
        self._files: tuple[IO[bytes], IO[bytes]] | None = None
        for shard in state.shards:
            _require_bytes(folder / shard.file, shard.tokens * dtype.itemsize)
        self._take_back()

    def add(
        self,
        tokens: npt.NDArray[np.unsignedinteger],
        lengths: npt.NDArray[np.int64],
        text_bytes: int,
    ) -> None:
        """Write documents: their concatenated tokens [tokens], and the length of each, at least 1:
        [documents]. Tokens after them belong to a document that continues in the next call.
        `text_bytes` is the size of their text in UTF-8."""
        ends = np.cumsum(lengths)
        begin = first = 0
        while first < len(ends):
            # The shard ends with the first document that fills it.
            room = self._shard_tokens - self.state.tokens
            past = int(np.searchsorted(ends, begin + room, side="left")) + 1
            past = min(max(past, first + 1), len(ends))
            self._append(tokens[begin : ends[past - 1]], ends[first:past] - begin)
            begin, first = int(ends[past - 1]), past
            if self.state.tokens >= self._shard_tokens:
                self._close_shard()
        if begin < len(tokens):
            self._append(tokens[begin:], ends[:0])
        self.state = self.state.model_copy(update={"bytes": self.state.bytes + text_bytes})

    def sync(self) -> None:
        """Ensure that everything in `state` is on the disk."""
        with storage_errors(self._folder):
            for file in self._files or ():
                file.flush()
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Finish the open shard."""
        if self.state.documents:
            self._close_shard()

    def close(self) -> None:
        """Close the files; errors are ignored."""
        for file in self._files or ():
            with suppress(OSError):
                file.close()
        self._files = None

    def _sizes(self) -> dict[Path, int]:
        """The two files of the open shard, with their sizes in bytes."""
        path = self._folder / f"{self._split}-{len(self.state.shards):05d}.bin"
        return {
            path: self.state.tokens * self._dtype.itemsize,
            path.with_suffix(".ends"): self.state.documents * 8,
        }

    def _take_back(self) -> None:
        """Truncate the open files to the state, and remove later ones."""
        known = {Path(shard.file).stem for shard in self.state.shards}
        with storage_errors(self._folder):
            if self.state.tokens:
                for path, size in self._sizes().items():
                    _require_bytes(path, size)
                    os.truncate(path, size)
                    known.add(path.stem)
            for path in sorted(self._folder.iterdir()):
                name = OWN_FILE.fullmatch(path.name)
                if name and name[1] == self._split and path.stem not in known:
                    path.unlink()

    def _append(self, tokens: npt.NDArray[np.unsignedinteger], ends: npt.NDArray[np.int64]) -> None:
        """Write tokens, and the ends of documents among them."""
        tokens_path, ends_path = self._sizes()
        with storage_errors(tokens_path):
            if self._files is None:
                self._files = tokens_path.open("ab"), ends_path.open("ab")
            self._files[0].write(np.ascontiguousarray(tokens).data)
            self._files[1].write((ends + self.state.tokens).astype("<u8").tobytes())
        more = {"tokens": len(tokens), "documents": len(ends)}
        update = {key: getattr(self.state, key) + count for key, count in more.items()}
        self.state = self.state.model_copy(update=update)

    def _close_shard(self) -> None:
        self.sync()
        sums = list[str]()
        with storage_errors(self._folder):
            for file in self._files or ():
                file.close()
            self._files = None
            sync_folder(self._folder)
            for path, size in self._sizes().items():
                _require_bytes(path, size)
                sums.append(sha256_of_file(path))
        shard = Shard(
            file=next(iter(self._sizes())).name,
            tokens=self.state.tokens,
            documents=self.state.documents,
            sha256=sums[0],
            ends_sha256=sums[1],
        )
        self.state = SplitState(shards=(*self.state.shards, shard), bytes=self.state.bytes)


def _require_bytes(path: Path, size: int) -> None:
    """Raise a UserError unless the file exists and is at least that large."""
    if not path.is_file() or path.stat().st_size < size:
        raise UserError(
            f"{quoted(str(path))} is missing or shorter than it was. Start over with --overwrite."
        )
