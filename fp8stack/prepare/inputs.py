"""From the inputs that a user names to sources, one after the other. It opens no file to read it
but a `.json`, to see what kind it is.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from fp8stack.data.files import SNIFFED_BYTES, walk
from fp8stack.errors import UserError, quoted
from fp8stack.prepare.streams import ByteStream

Kind = Literal["text", "lines", "parquet", "hf"]
HUB = "hf:"
PACKED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or a stream of `datasets`.

    Attributes:
        path: of the file, or the name with `hf:`.
        kind: what it holds.
        size: bytes on the disk; 0 for a stream.
        given: which of the inputs it belongs to.
    """

    path: str
    kind: Kind
    size: int
    given: int


def find_sources(inputs: Sequence[str], out: Path) -> list[Source]:
    """All sources, in order: of a folder the files below it, sorted by their paths; without hidden
    files, empty ones and those in `out`.

    Raises:
        UserError: an input is missing, empty or no file, or cannot be read.
    """
    found: list[Source] = []
    for number, name in enumerate(inputs):
        if name.startswith(HUB):
            found.append(Source(path=name, kind="hf", size=0, given=number))
            continue
        path = Path(name)
        status = _status(path, name)
        if stat.S_ISDIR(status.st_mode):
            inside = list(_folder(path, out.resolve(), number))
            if not inside:
                raise UserError(
                    f"The folder {quoted(name)} holds no data. Put text, .jsonl or .parquet files "
                    "into it."
                )
            found += inside
        elif status.st_size == 0 and stat.S_ISREG(status.st_mode):
            raise UserError(f"{quoted(name)} is empty. Give a file with text in it.")
        else:
            found.append(_source(path, status, number))
    return found


def _status(path: Path, name: str) -> os.stat_result:
    try:
        if name:  # Path("") would be the current folder
            return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        pass
    except OSError as error:
        _unreadable(name, error)
    raise UserError(f"No input {quoted(name)!r}. Give files, folders, or hf:NAME for a dataset.")


def _unreadable(name: str, error: OSError) -> NoReturn:
    raise UserError(
        f"Cannot read {quoted(name)}: {error.strerror}. Check its permissions, or leave it out."
    ) from error


def _folder(folder: Path, out: Path, given: int) -> Iterator[Source]:
    files = walk(folder, lambda inside: inside.resolve() == out, _unreadable)
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        status = _status(path, str(path))
        if status.st_size > 0 or not stat.S_ISREG(status.st_mode):
            yield _source(path, status, given)


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
    if name.endswith(".json") and _begins_with_an_object(path):
        return "lines"
    return "text"


def _begins_with_an_object(path: Path) -> bool:
    """Whether the first line of a `.json` file is a whole object, so that it holds JSON lines."""
    with ByteStream(path) as stream:
        head = stream.read(SNIFFED_BYTES)
    first, newline, _ = head.lstrip().partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not newline and len(head) == SNIFFED_BYTES:
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True
