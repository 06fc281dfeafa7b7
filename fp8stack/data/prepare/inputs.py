"""Settings of a preparation, and its sources: files, saved datasets, and datasets of the Hub."""

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.tables import counted
from fp8stack.common.terminal import say
from fp8stack.data.files import SNIFFED_BYTES, is_saved, status_of, walk
from fp8stack.data.prepare.streams import ByteStream, unpacked_suffix
from fp8stack.data.tokenizer.base import END_OF_TEXT

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20
MOST_NAMED = 3
MOST_PROBLEMS = 10
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

Kind = Literal["text", "lines", "json", "csv", "arrow", "parquet", "hf"]
KINDS: dict[str, Kind] = {
    **{".jsonl": "lines", ".ndjson": "lines", ".csv": "csv", ".tsv": "csv"},
    **{".arrow": "arrow", ".parquet": "parquet"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a preparation. Patterns of `include` and `exclude` match names, or paths
    within an input folder."""

    inputs: tuple[str, ...]  # files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order
    tokenizer: str  # "bytes", "gpt2", a `tokenizer.json` or `hf:NAME`; ignored with `train_bpe`
    train_bpe: int | None  # vocabulary size of a tokenizer to train on the inputs
    text_key: str  # the field or column that holds the text
    held_out: float  # the share of documents that is held out
    shard_tokens: int  # a shard ends with the document that reaches this many
    workers: int  # processes
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_binary: bool = False  # skip files that look binary, instead of raising an error
    end_of_text: str | None = None  # the token after each document; None is the tokenizer's

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
        if self.train_bpe is not None and self.end_of_text not in (None, END_OF_TEXT):
            raise UserError(
                f"--train-bpe makes {END_OF_TEXT} the end of a document. Leave out --end-of-text "
                f"{quoted(self.end_of_text)}."
            )

    def of_output(self) -> dict[str, Any]:
        """The settings that determine the output, as JSON data; null where they were not given."""
        output = {key: value for key, value in vars(self).items() if key not in ("workers", "out")}
        output |= {key: list(output[key]) or None for key in ("inputs", "include", "exclude")}
        output["tokenizer"] = self.tokenizer if self.train_bpe is None else None
        output["skip_binary"] = self.skip_binary or None
        if self.end_of_text is None:
            del output["end_of_text"]
        return output


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or a dataset of `datasets`."""

    path: str  # of the file, or the name with `hf:`
    kind: Kind
    size: int  # bytes on the disk; 0 for a dataset of the Hub
    input_index: int  # index of its input
    changed: int = 0  # when the file was changed, in nanoseconds


def listings(sources: Sequence[Source]) -> list[str]:
    """For each source, a hash of the paths, sizes and times of change up to this source."""
    digest, hashes = hashlib.sha256(), list[str]()
    for source in sources:
        digest.update(f"{source}\n".encode(errors="surrogateescape"))
        hashes.append(digest.hexdigest())
    return hashes


def find_sources(settings: Settings) -> list[Source]:
    """All sources, in order: for a folder, the files below it that the settings select, sorted by
    path, without hidden and empty files and those in the output folder. Raises one UserError that
    names all inputs that are missing, empty or no file, or cannot be read."""
    sources, problems = list[Source](), list[str]()
    for number, name in enumerate(settings.inputs):
        try:
            if name.startswith("hf:"):
                sources.append(_dataset(name, number))
                continue
            status = _status(name)
            if stat.S_ISDIR(status.st_mode) and not is_saved(Path(name)):
                sources += _in_folder(Path(name), settings, number, problems)
            elif status.st_size == 0 and stat.S_ISREG(status.st_mode):
                raise UserError(f"{quoted(name)} is empty. Give a file with text in it.")
            else:
                sources.append(_source(Path(name), number))
        except UserError as error:
            problems.append(str(error))
    require_none(problems)
    counts = Counter(os.path.abspath(source.path) for source in sources)
    if repeated := [path for path, count in counts.items() if count > 1]:
        say(
            f"note: inputs that are given more than once are read as often, so a document "
            f"may be both held out and trained on: {_named(repeated)}"
        )
    return sources


def require_none(problems: Sequence[str]) -> None:
    """Raise one UserError for all problems of the inputs, if there are any."""
    if problems:
        more = len(problems) - MOST_PROBLEMS
        begin = f"{len(problems)} inputs cannot be read. " if len(problems) > 1 else ""
        end = f" And {more} more." if more > 0 else ""
        raise UserError(f"{begin}{' '.join(problems[:MOST_PROBLEMS])}{end}")


def _status(name: str) -> os.stat_result:
    status = status_of(name, _unreadable)
    if status is None:
        raise UserError(
            f"No input {quoted(name)!r}. Give files, folders, or hf:NAME for a dataset."
        )
    return status


def _unreadable(name: str, error: OSError) -> NoReturn:
    raise UserError(f"Cannot read {quoted(name)}: {error.strerror}. Check its permissions.")


class _Binary(UserError):
    """A file that is not text."""


class _WithNul(_Binary):
    """A file that is text, but for its encoding or a NUL."""


def _in_folder(
    folder: Path, settings: Settings, input_index: int, problems: list[str]
) -> list[Source]:
    """The sources in a folder; the problems of other files are added to `problems`."""
    out, saved = settings.out.resolve(), list[Path]()

    def skips(inside: Path) -> bool:
        if is_saved(inside):
            saved.append(inside)
        return inside in saved or inside.resolve() == out

    files = [*walk(folder, skips, _unreadable), *saved]
    paths = sorted((path.relative_to(folder).as_posix(), path) for path in files)
    selected = [path for inside, path in paths if _is_selected(inside, settings)]
    if paths and not selected:
        raise UserError(
            f"--include and --exclude leave nothing of the folder {quoted(str(folder))}: the first "
            f"of its {len(paths)} files is {quoted(paths[0][0])}. Give other patterns."
        )
    binary, sources, before = list[Path](), list[Source](), len(problems)
    for path in selected:
        try:
            status = _status(str(path))
            if status.st_size > 0 or not stat.S_ISREG(status.st_mode):
                sources.append(_source(path, input_index))
        except UserError as error:
            if type(error) is _Binary or (settings.skip_binary and isinstance(error, _Binary)):
                binary.append(path)
                continue
            problems.append(str(error))
    if binary and settings.skip_binary:
        skipped = counted(len(binary), "file that looks binary is", "files that look binary are")
        say(f"note: {skipped} left out: {_named(binary)}")
    elif binary:
        verb = "looks" if len(binary) == 1 else "look"
        problems.append(
            f"{len(binary)} of {counted(len(selected), 'file')} {verb} binary: {_named(binary)}. "
            "Leave them out by --skip-binary, or by --include and --exclude, such as --exclude "
            "'*.png'."
        )
    if not sources and len(problems) == before:
        name = quoted(str(folder))
        raise UserError(
            f"The folder {name} holds no data. Put text, JSON or parquet files into it."
        )
    return sources


def _named(paths: Sequence[object]) -> str:
    """The first of some paths, in words."""
    hidden = len(paths) - MOST_NAMED
    named = quoted(", ".join(map(str, paths[:MOST_NAMED])))
    return f"{named} and {hidden} more" if hidden > 0 else named


def _is_selected(inside: str, settings: Settings) -> bool:
    """Whether the settings select a file, by its path within an input folder."""

    def matches(patterns: tuple[str, ...]) -> bool:
        name = inside.rpartition("/")[2]
        return any(fnmatchcase(inside, p) or fnmatchcase(name, p) for p in patterns)

    return (not settings.include or matches(settings.include)) and not matches(settings.exclude)


def _source(path: Path, input_index: int) -> Source:
    """The source of a file, or of a folder of `save_to_disk`. Raises a UserError if it cannot be
    one, a `_Binary` if a text looks binary."""
    status = _status(str(path))
    if stat.S_ISDIR(status.st_mode):
        return _dataset(str(path), input_index)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{quoted(str(path))} is not a regular file. Give a file or a folder.")
    kind, size, changed = _kind(path), status.st_size, status.st_mtime_ns
    return Source(path=str(path), kind=kind, size=size, input_index=input_index, changed=changed)


def _dataset(name: str, input_index: int) -> Source:
    """The source of a dataset: of the Hub, or a folder of `save_to_disk`."""
    place = name.removeprefix("hf:")
    folder, states = Path(name if place == name else place.partition("@")[0]), []
    if is_saved(folder):
        states = [file.stat() for file in sorted(folder.rglob("*")) if file.is_file()]
    return Source(
        path=name,
        kind="hf",
        size=sum(state.st_size for state in states),
        input_index=input_index,
        changed=max((state.st_mtime_ns for state in states), default=0),
    )


def _kind(path: Path) -> Kind:
    """The kind of a file, by its name and beginning. Raises what `_source` raises."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        _unreadable(str(path), error)
    if is_pointer:
        raise UserError(
            f"{quoted(str(path))} is a Git LFS pointer and not the file itself. Run `git lfs pull` "
            "where it is."
        )
    suffix = unpacked_suffix(path)
    if suffix in KINDS:
        return KINDS[suffix]
    with ByteStream(path) as stream:
        head = stream.read(SNIFFED_BYTES)
    if suffix == ".json":
        if b"".join(head.split()).startswith(b"[{"):
            return "json"
        # It holds JSON lines if the first line, as far as it was read, is an object.
        first, newline, _ = head.lstrip().partition(b"\n")
        if first.startswith(b"{"):
            with suppress(ValueError, RecursionError):
                if newline or len(head) < SNIFFED_BYTES:
                    json.loads(first)
                return "lines"
    if b"\0" in head:
        _refuse_nul(quoted(str(path)), head)
    return "text"


def _refuse_nul(name: str, head: bytes) -> NoReturn:
    """Raise the UserError for a file with NULs in its `head`: a `_Binary` unless it is text."""
    at = head.index(b"\0")
    for encoding, high in (("UTF-16LE", head[1::2]), ("UTF-16BE", head[::2])):
        if high.count(0) > len(high) / 2 and head.count(0) < len(head) * 0.6:
            raise _WithNul(
                f"{name} looks like {encoding} without a byte order mark. Convert it: iconv -f "
                f"{encoding} -t UTF-8."
            )
    with suppress(UnicodeDecodeError):
        if head.count(0) < len(head) / 100 and head[:-3].decode():
            raise _WithNul(f"{name} is text with a NUL at byte {at}. Remove it: tr -d '\\0'.")
    raise _Binary(
        f"{name} looks binary: byte {at} is NUL. Give text, JSON, CSV, parquet or arrow files."
    )
