"""From the inputs that a user names to sources, one after the other. Of files it reads the
beginning alone, to see what kind they are.
"""

import json
import os
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn

from fp8stack.data.files import SNIFFED_BYTES, status_of, walk
from fp8stack.errors import UserError, quoted
from fp8stack.prepare.streams import ByteStream
from fp8stack.terminal import say

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One preparation. Files of folders that are inputs are left out if they match none of the
    patterns `include`, where there are some, or one of `exclude`; patterns are of names, or of
    paths in the folder."""

    inputs: tuple[str, ...]  # files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order
    tokenizer: str  # "bytes", "gpt2" or a `tokenizer.json`; without effect with `train_bpe`
    train_bpe: int | None  # tokens of a tokenizer that is trained on the inputs
    text_key: str  # the field of JSON lines and the column of parquet files that holds the text
    held_out: float  # the share of documents that is held out
    shard_tokens: int  # a shard ends with the document that brings it to so many
    workers: int  # how many processes tokenize
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_binary: bool = False  # whether files of folders that look binary are not refused

    def check(self) -> None:
        """Raise a UserError unless the numbers make sense."""
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
        """What decides the output, beside the inputs' contents; as JSON has it."""
        told = {key: value for key, value in vars(self).items() if key not in ("workers", "out")}
        told |= {"inputs": list(self.inputs)}
        if self.train_bpe is not None:
            told["tokenizer"] = None
        # None, as in folders that are older than these settings.
        told |= {key: list(told[key]) or None for key in ("include", "exclude")}
        return told | {"skip_binary": self.skip_binary or None}


Kind = Literal["text", "lines", "parquet", "hf"]
PACKED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
NAMED_BINARIES = 3


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or a stream of `datasets`."""

    path: str  # of the file, or the name with `hf:`
    kind: Kind
    size: int  # bytes on the disk; 0 for a stream
    given: int  # which of the inputs it belongs to


def find_sources(settings: Settings) -> list[Source]:
    """All sources, in order: of a folder the files below it that the settings ask for, sorted by
    their paths; without hidden files, empty ones and those in the folder that is written. Raises a
    UserError if an input is missing, empty or no file, holds no documents, or cannot be read."""
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
    asked = [path for inside, path in paths if _is_asked_for(inside, settings)]
    if paths and not asked:
        raise UserError(
            f"--include and --exclude leave nothing of the folder {quoted(name)}: the first of its "
            f"{len(paths)} files is {quoted(paths[0][0])}. Give other patterns."
        )
    binary, found = list[Path](), list[Source]()
    for path in asked:
        status = _status(str(path))
        if status.st_size > 0 or not stat.S_ISREG(status.st_mode):
            source = _source(path, status, given)
            if source.kind == "text" and b"\0" in _head(path):
                binary.append(path)
            else:
                found.append(source)
    if binary:
        count, hidden = len(binary), len(binary) - NAMED_BINARIES
        named = quoted(", ".join(map(str, binary[:NAMED_BINARIES])))
        named += f" and {hidden} more" if hidden > 0 else ""
        if not settings.skip_binary:
            raise UserError(
                f"{count} of {len(asked)} files look binary: {named}. Leave them out by "
                "--skip-binary, or by --include and --exclude, such as --exclude '*.png'."
            )
        say(f"note: {count} files that look binary are left out: {named}")
    if not found:
        raise UserError(
            f"The folder {quoted(name)} holds no data. Put text, .jsonl or .parquet files into it."
        )
    return found


def _is_asked_for(inside: str, settings: Settings) -> bool:
    """Whether a file of a folder, by its path there, is to be read."""

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
            f"{quoted(str(path))} is a table in {name.rpartition('.')[2].upper()}, whose documents "
            "are not seen. Make JSON lines or parquet of it, give it the name .txt to have it as "
            f"one text, or leave it out by --exclude '*{Path(name).suffix + packed}'."
        )
    if name.endswith(".json"):
        head = _head(path)
        if b"".join(head.split()).startswith(b"[{"):
            raise UserError(
                f"{quoted(str(path))} is an array of JSON objects, whose documents are not seen. "
                "Make JSON lines of it, such as by `jq -c '.[]'`, give it the name .txt to have it "
                "as one text, or leave it out by --exclude."
            )
        # It holds JSON lines if the first one is a whole object, as far as it was read.
        first, newline, _ = head.lstrip().partition(b"\n")
        if first.startswith(b"{"):
            with suppress(ValueError, RecursionError):
                if newline or len(head) < SNIFFED_BYTES:
                    json.loads(first)
                return "lines"
    return "text"
