"""Settings of a preparation, and its sources: files, saved datasets, and datasets of the Hub."""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PositiveInt, model_validator

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


class Settings(BaseModel, frozen=True):
    """The settings of a preparation. Patterns of `include` and `exclude` match names, or paths
    within an input folder."""

    inputs: tuple[str, ...]  # files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order
    out: Path
    tokenizer: str = "bytes"  # or "gpt2", a `tokenizer.json` or `hf:NAME`; not with `train_bpe`
    train_bpe: Annotated[int, Field(ge=LEAST_BPE, le=MOST_BPE)] | None = None
    """The vocabulary size of a tokenizer to train on the inputs."""
    text_key: str = "text"  # the field or column that holds the text
    held_out: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """The share of documents that is held out."""
    shard_tokens: PositiveInt = 100_000_000  # a shard ends with the document that reaches this many
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    end_of_text: str | None = None  # the token after each document; None is the tokenizer's

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.train_bpe is not None and self.end_of_text not in (None, END_OF_TEXT):
            raise ValueError(
                f"--train-bpe makes {END_OF_TEXT} the end of a document. Leave out --end-of-text"
            )
        return self

    def of_output(self) -> dict[str, Any]:
        """The settings that determine the output, as JSON data; null where they were not given."""
        output = self.model_dump(mode="json", exclude={"out"})
        output |= {key: output[key] or None for key in ("include", "exclude")}
        if self.train_bpe is not None:
            output["tokenizer"] = None
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
    sources: list[Source] = []
    for number, name in enumerate(settings.inputs):
        if name.startswith("hf:"):
            sources.append(_dataset(name, number))
            continue
        status = status_of(name)
        if status is None:
            raise UserError(
                f"No input {quoted(name)!r}. Give files, folders, or hf:NAME for a dataset."
            )
        paths = [Path(name)]
        if stat.S_ISDIR(status.st_mode):
            if is_saved(paths[0]):
                sources.append(_dataset(name, number))
                continue
            paths = _paths_in(paths[0], settings)
        with_text = [source for path in paths if (source := _source(path, number)).size]
        if not with_text:
            raise UserError(
                f"{quoted(name)} has no data: no file that --include and --exclude select, or only "
                "empty ones. Give files with text in them."
            )
        sources += with_text
    return sources


def _paths_in(folder: Path, settings: Settings) -> list[Path]:
    """The files in a folder that the settings select, sorted by path."""
    out = settings.out.resolve()

    def matches(inside: str, patterns: Sequence[str]) -> bool:
        name = inside.rpartition("/")[2]
        return any(fnmatchcase(inside, p) or fnmatchcase(name, p) for p in patterns)

    def selected() -> Iterator[tuple[str, Path]]:
        for path in walk(folder, lambda inside: inside.resolve() == out):
            inside = path.relative_to(folder).as_posix()
            is_included = not settings.include or matches(inside, settings.include)
            if is_included and not matches(inside, settings.exclude):
                yield inside, path

    return [path for _, path in sorted(selected())]


def _source(path: Path, input_index: int) -> Source:
    """The source of a file. Raises a UserError if it is no regular file or looks binary, or cannot
    be read."""
    status = status_of(str(path))
    if status is None or not stat.S_ISREG(status.st_mode):
        raise UserError(f"{quoted(str(path))} is not a regular file. Give a file or a folder.")
    kind = KINDS.get(unpacked_suffix(path), "text")
    if kind == "text" and status.st_size:
        with opened(path) as (stream, _):
            is_binary = b"\0" in stream.read(SNIFFED_BYTES)
        if is_binary:
            pattern = f"*{path.suffix}" if path.suffix else path.name
            raise UserError(
                f"{quoted(str(path))} looks binary: it has a NUL. Leave it out, in a folder by "
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
    folder = Path(name.removeprefix("hf:").partition("@")[0])
    files = []
    if is_saved(folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
    return Source(
        path=name,
        kind="hf",
        size=sum(path.stat().st_size for path in files),
        input_index=input_index,
        changed=max((path.stat().st_mtime_ns for path in files), default=0),
    )
