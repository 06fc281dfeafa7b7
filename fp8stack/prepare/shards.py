"""Writes shards of tokens, each with a file of the ends of its documents."""

import hashlib
import os
import re
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.prepared import Shard
from fp8stack.io import storage_errors

OWN_FILE = re.compile(r"(train|val)-\d{5,}\.(bin|ends)")


class SplitWriter:
    """Writes the files of one split ("train" or "val") into `folder`. A shard ends with the
    document that reaches `shard_tokens`. Every method raises a StorageError if the disk is full or
    cannot be written."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self._folder, self._split = folder, split
        self._shard_tokens = shard_tokens
        self.shards: list[Shard] = []  # the finished ones
        self.text_bytes = 0  # of all shards
        self._files: list[tuple[IO[bytes], Any]] = []  # of the open shard, with their hashes
        self._tokens = self._documents = 0  # of the open shard

    def add(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], size: int) -> None:
        """Write documents: their concatenated tokens [tokens], and the length of each [documents].
        Tokens after them belong to a document that continues in the next call. `size` is the size
        of their text in UTF-8."""
        self.text_bytes += size
        ends = np.cumsum(lengths)
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
        hashes = []
        with storage_errors(self._folder):
            for file, digest in self._files:
                file.flush()
                os.fsync(file.fileno())
                file.close()
                hashes.append(digest.hexdigest())
        if self._files and self._tokens:
            shard = Shard(
                file=self._path().name,
                tokens=self._tokens,
                documents=self._documents,
                sha256=hashes[0],
                ends_sha256=hashes[1],
            )
            self.shards.append(shard)
        self._files, self._tokens, self._documents = [], 0, 0

    def _path(self) -> Path:
        return self._folder / f"{self._split}-{len(self.shards):05d}.bin"

    def _append(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """Write tokens, and the ends of documents among them."""
        path = self._path()
        with storage_errors(path):
            if not self._files:
                paths = path, path.with_suffix(".ends")
                self._files = [(file.open("wb"), hashlib.sha256()) for file in paths]
            ends_here = (ends + self._tokens).astype("<u8")
            for (file, digest), array in zip(self._files, (tokens, ends_here), strict=True):
                content = np.ascontiguousarray(array).data
                file.write(content)
                digest.update(content)
        self._tokens += len(tokens)
        self._documents += len(ends)
