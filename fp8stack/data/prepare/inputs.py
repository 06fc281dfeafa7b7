"""Settings of a preparation, and its sources: files, saved datasets, and datasets of the Hub."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.files import SNIFFED_BYTES, is_saved, status_of, walk
from fp8stack.data.prepare.unpacked import opened, unpacked_suffix
from fp8stack.data.tokenizer.base import END_OF_TEXT

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20

Kind = Literal["text", "lines", "json", "csv", "arrow", "parquet", "hf"]
KINDS: dict[str, Kind] = {
    **{".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv"},
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
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    end_of_text: str | None = None  # the token after each document; None is the tokenizer's

    def check(self) -> None:
        """Raise a UserError unless the numbers are valid."""
        if not 0 <= self.held_out < 1:
            raise UserError(f"Cannot hold out {self.held_out} of the documents. Use 0 to 0.99.")
        if self.shard_tokens < 1:
            raise UserError(f"Shards of {self.shard_tokens} tokens hold nothing. Use 1 or more.")
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
        output = {key: value for key, value in vars(self).items() if key != "out"}
        output |= {key: list(output[key]) or None for key in ("inputs", "include", "exclude")}
        output["tokenizer"] = self.tokenizer if self.train_bpe is None else None
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


def find_sources(settings: Settings) -> list[Source]:
    """All sources, in order: for a folder, the files below it that the settings select, sorted by
    path, without hidden and empty files and those in the output folder. Raises a UserError if an
    input is missing, empty, binary or no file, or cannot be read."""
    sources = list[Source]()
    for number, name in enumerate(settings.inputs):
        if name.startswith("hf:"):
            sources.append(_dataset(name, number))
            continue
        status = status_of(name)
        if status is None:
            raise UserError(
                f"No input {quoted(name)!r}. Give files, folders, or hf:NAME for a dataset."
            )
        if stat.S_ISDIR(status.st_mode) and not is_saved(Path(name)):
            paths = _paths_in(Path(name), settings)
            in_folder = [source for path in paths if (source := _source(path, number)).size]
            if not in_folder:
                raise UserError(
                    f"The folder {quoted(name)} holds no data. Put text, JSON or parquet files "
                    "into it."
                )
            sources += in_folder
        else:
            sources.append(_source(Path(name), number))
            if not sources[-1].size:
                raise UserError(f"{quoted(name)} is empty. Give a file with text in it.")
    return sources


def _paths_in(folder: Path, settings: Settings) -> Iterator[Path]:
    """The files and saved datasets in a folder that the settings select, sorted by path."""
    out, saved = settings.out.resolve(), list[Path]()

    def skips(inside: Path) -> bool:
        if is_saved(inside):
            saved.append(inside)
        return inside in saved or inside.resolve() == out

    files = [*walk(folder, skips), *saved]
    paths = sorted((path.relative_to(folder).as_posix(), path) for path in files)
    selected = [path for inside, path in paths if _is_selected(inside, settings)]
    if paths and not selected:
        raise UserError(
            f"--include and --exclude leave nothing of the folder {quoted(str(folder))}: the first "
            f"of its {len(paths)} files is {quoted(paths[0][0])}. Give other patterns."
        )
    return iter(selected)


def _is_selected(inside: str, settings: Settings) -> bool:
    """Whether the settings select a file, by its path within an input folder."""

    def matches(patterns: tuple[str, ...]) -> bool:
        name = inside.rpartition("/")[2]
        return any(fnmatchcase(inside, p) or fnmatchcase(name, p) for p in patterns)

    return (not settings.include or matches(settings.include)) and not matches(settings.exclude)


def _source(path: Path, input_index: int) -> Source:
    """The source of a file, or of a folder of `save_to_disk`. Raises a UserError if it is no
    regular file or looks binary, or cannot be read."""
    status = status_of(str(path))
    if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UserError(f"{quoted(str(path))} is not a regular file. Give a file or a folder.")
    if stat.S_ISDIR(status.st_mode):
        return _dataset(str(path), input_index)
    kind = KINDS.get(unpacked_suffix(path), "text")
    if kind == "text" and status.st_size:
        with opened(path) as (stream, _):
            at = stream.read(SNIFFED_BYTES).find(b"\0")
        if at >= 0:
            pattern = f"*{path.suffix}" if path.suffix else path.name
            raise UserError(
                f"{quoted(str(path))} looks binary: byte {at} is NUL. Leave it out, in a folder by "
                f"--exclude {shell_quoted(pattern)}; text in UTF-16 needs a byte order mark."
            )
    return Source(
        path=str(path),
        kind=kind,
        size=status.st_size,
        input_index=input_index,
        changed=status.st_mtime_ns,
    )


def _dataset(name: str, input_index: int) -> Source:
    """The source of a dataset: of the Hub, or a folder of `save_to_disk`."""
    folder, states = Path(name), list[os.stat_result]()
    if name.startswith("hf:"):
        folder = Path(name.removeprefix("hf:").partition("@")[0])
    if is_saved(folder):
        states = [file.stat() for file in sorted(folder.rglob("*")) if file.is_file()]
    return Source(
        path=name,
        kind="hf",
        size=sum(state.st_size for state in states),
        input_index=input_index,
        changed=max((state.st_mtime_ns for state in states), default=0),
    )
