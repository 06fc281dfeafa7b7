"""Checks of files before they are read: their existence, sizes and first bytes. No torch here."""

import codecs
import os
import stat
from collections.abc import Callable, Iterator
from os.path import isfile
from pathlib import Path
from typing import NoReturn

from fp8stack.common.errors import UserError

SNIFFED_BYTES = 2**16
BYTE_ORDER_MARKS = {  # some editors write one before the text
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16's, which it begins with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def encoding_of(head: bytes) -> tuple[bytes, str]:
    """The byte order mark at the beginning of a text, b"" if it has none, and the encoding."""
    marks = BYTE_ORDER_MARKS.items()
    return next((pair for pair in marks if head.startswith(pair[0])), (b"", "utf-8"))


def unreadable(path: Path | str, error: OSError) -> NoReturn:
    """Raise the UserError for a file or folder that cannot be read."""
    raise UserError(
        f"Cannot read {path}: {error.strerror}. Check its permissions, or give other data."
    ) from error


def status_of(name: str) -> os.stat_result | None:
    """The status of a file or folder; None if it does not exist."""
    try:
        if name:  # Path("") would be the current folder
            return Path(name).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        pass
    except OSError as error:
        unreadable(name, error)
    return None


def head_and_size(path: Path) -> tuple[bytes, int]:
    """The first 64 KiB and the size in bytes of a regular file that is not empty."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file. Give a text or .bin file, or a folder.")
        with path.open("rb") as file:
            head = file.read(SNIFFED_BYTES)
    except OSError as error:
        unreadable(path, error)
    if not head:
        raise UserError(f"{path} is empty. Give a file with tokens in it, or remove it.")
    return head, status.st_size


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the folder."""
    # os.path answers for folders that cannot be read, too.
    is_split = all(isfile(folder / name) for name in ("state.json", "dataset_info.json"))
    return is_split or isfile(folder / "dataset_dict.json")


def is_empty(path: Path) -> bool:
    """Whether `path` is an empty regular file."""
    try:
        status = path.stat()
    except OSError as error:
        unreadable(path, error)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def walk(folder: Path, skips: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """All files below `folder`, without hidden files and folders and those that `skips` selects.
    Links to folders are not followed."""

    def fail(error: OSError) -> NoReturn:
        unreadable(str(error.filename), error)

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [n for n in folders if not n.startswith(".") and not skips(Path(parent, n))]
        yield from (Path(parent, name) for name in names if not name.startswith("."))
