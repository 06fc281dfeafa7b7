"""Resolves the user's inputs to sources. Of each file, only the beginning is read, to detect its
kind."""

import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn

from fp8stack.data.files import SNIFFED_BYTES, status_of, walk
from fp8stack.errors import UserError, quoted
from fp8stack.prepare.streams import ByteStream
from fp8stack.tables import counted
from fp8stack.terminal import say

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a preparation. In input folders, files are skipped if they match no pattern
    of `include`, unless that is empty, or one of `exclude`. Patterns match names, or paths within
    the folder."""

    inputs: tuple[str, ...]  # files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order
    tokenizer: str  # "bytes", "gpt2" or a `tokenizer.json`; ignored with `train_bpe`
    train_bpe: int | None  # vocabulary size of a tokenizer to train on the inputs
    text_key: str  # the field of JSON lines and the column of parquet files that holds the text
    held_out: float  # the share of documents that is held out
    shard_tokens: int  # a shard ends with the document that reaches so many tokens
    workers: int  # processes
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_binary: bool = False  # skip files that look binary, instead of raising an error

    def check(self) -> None:
        """Raise a UserError unless the numbers are valid."""
        if not 0 <= self.held_out < 1:
            raise UserError(f"Cannot hold out {self.held_out} of the documents. Use 0 to 0.99.")
        if self.shard_tokens < 1:
            raise UserError(f"Shards of {self.shard_tokens} tokens hold nothing. Use 1 or more.")
        if self.workers < 1:
            raise UserError(f"{self.workers} workers do nothing. Use 1 or more.")
        if self.train_bpe is not None and not LEAST_BPE <= self.train_bpe <= MOST_BPE:
            raise UserError(
                f"Cannot train a tokenizer of {self.train_bpe} tokens. Use {LEAST_BPE} (every byte "
                f"and the end of a document) to {MOST_BPE:,}."
            )

    def of_output(self) -> dict[str, Any]:
        """The settings that determine the output, as JSON data."""
        found = {key: value for key, value in vars(self).items() if key not in ("workers", "out")}
        found |= {"inputs": list(self.inputs)}
        if self.train_bpe is not None:
            found["tokenizer"] = None
        # None, as in folders written before these settings existed.
        found |= {key: list(found[key]) or None for key in ("include", "exclude")}
        return found | {"skip_binary": self.skip_binary or None}


Kind = Literal["text", "lines", "parquet", "hf"]
PACKED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or a stream of `datasets`."""

    path: str  # of the file, or the name with `hf:`
    kind: Kind
    size: int  # bytes on the disk; 0 for a stream
    given: int  # index of its input


def find_sources(settings: Settings) -> list[Source]:
    """All sources, in order: for a folder, the files below it that the settings select, sorted by
    path, without hidden and empty files and those in the output folder. Raises a UserError if an
    input is missing, empty or no file, holds no documents, or cannot be read."""
    found: list[Source] = []
    for number, name in enumerate(settings.inputs):
        if name.startswith("hf:"):
            found.append(Source(path=name, kind="hf", size=0, given=number))
            continue
        path = Path(name)
        status = _status(name)
        if stat.S_ISDIR(status.st_mode):
            found += _folder(path, name, settings, number)
        elif status.st_size == 0 and stat.S_ISREG(status.st_mode):
            raise UserError(f"{quoted(name)} is empty. Give a file with text in it.")
        else:
            found.append(_source(path, status, number))
    counts = Counter(os.path.abspath(source.path) for source in found)
    if again := [path for path, count in counts.items() if count > 1]:
        say(
            f"note: inputs that are given more than once are read as often, so a document "
            f"may be both held out and trained on: {_named(again)}"
        )
    return found


def _status(name: str) -> os.stat_result:
    status = status_of(name, _unreadable)
    if status is None:
        raise UserError(
            f"No input {quoted(name)!r}. Give files, folders, or hf:NAME for a dataset."
        )
    return status


def _unreadable(name: str, error: OSError) -> NoReturn:
    raise UserError(
        f"Cannot read {quoted(name)}: {error.strerror}. Check its permissions, or leave it out."
    ) from error


def _folder(folder: Path, name: str, settings: Settings, given: int) -> list[Source]:
    out = settings.out.resolve()
    files = walk(folder, lambda inside: inside.resolve() == out, _unreadable)
    paths = sorted((path.relative_to(folder).as_posix(), path) for path in files)
    selected = [path for inside, path in paths if _is_selected(inside, settings)]
    if paths and not selected:
        raise UserError(
            f"--include and --exclude leave nothing of the folder {quoted(name)}: the first of its "
            f"{len(paths)} files is {quoted(paths[0][0])}. Give other patterns."
        )
    binary, found = list[Path](), list[Source]()
    for path in selected:
        status = _status(str(path))
        if status.st_size > 0 or not stat.S_ISREG(status.st_mode):
            source = _source(path, status, given)
            if source.kind == "text" and b"\0" in _head(path):
                binary.append(path)
            else:
                found.append(source)
    if binary:
        count, named = len(binary), _named(binary)
        if not settings.skip_binary:
            raise UserError(
                f"{count} of {counted(len(selected), 'file')} {'looks' if count == 1 else 'look'} "
                f"binary: {named}. Leave them out by "
                "--skip-binary, or by --include and --exclude, such as --exclude '*.png'."
            )
        left = counted(count, "file that looks binary is", "files that look binary are")
        say(f"note: {left} left out: {named}")
    if not found:
        raise UserError(
            f"The folder {quoted(name)} holds no data. Put text, .jsonl or .parquet files into it."
        )
    return found


def _named(paths: Sequence[object]) -> str:
    """The first of some paths, in words."""
    hidden = len(paths) - MOST_NAMED
    named = quoted(", ".join(map(str, paths[:MOST_NAMED])))
    return f"{named} and {hidden} more" if hidden > 0 else named


def _is_selected(inside: str, settings: Settings) -> bool:
    """Whether the settings select a file, by its path within an input folder."""

    def matches(patterns: tuple[str, ...]) -> bool:
        name = inside.rpartition("/")[2]
        return any(fnmatchcase(inside, one) or fnmatchcase(name, one) for one in patterns)

    return (not settings.include or matches(settings.include)) and not matches(settings.exclude)


def _head(path: Path) -> bytes:
    with closing(ByteStream(path)) as stream:
        return stream.read(SNIFFED_BYTES)


def _source(path: Path, status: os.stat_result, given: int) -> Source:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{quoted(str(path))} is not a regular file. Leave it out.")
    return Source(path=str(path), kind=_kind(path), size=status.st_size, given=given)


def _kind(path: Path) -> Kind:
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    name = name.removesuffix(packed)
    if name.endswith(LINES):
        return "lines"
    if name.endswith(".parquet") and not packed:
        return "parquet"
    if name.endswith(TABLES):
        raise UserError(
            f"{quoted(str(path))} is a {name.rpartition('.')[2].upper()} table, which is not "
            "supported. Convert it to JSON lines or parquet, rename it to .txt to read it as one "
            f"text, or leave it out by --exclude '*{Path(name).suffix + packed}'."
        )
    if name.endswith(".json"):
        head = _head(path)
        if b"".join(head.split()).startswith(b"[{"):
            raise UserError(
                f"{quoted(str(path))} is an array of JSON objects, which is not supported. "
                "Convert it to JSON lines, as by `jq -c '.[]'`, rename it to .txt to read it as "
                "one text, or leave it out by --exclude."
            )
        # It holds JSON lines if the first line, as far as it was read, is an object.
        first, newline, _ = head.lstrip().partition(b"\n")
        if first.startswith(b"{"):
            with suppress(ValueError, RecursionError):
                if newline or len(head) < SNIFFED_BYTES:
                    json.loads(first)
                return "lines"
    return "text"
