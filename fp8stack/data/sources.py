"""From `--data` to the two splits: text files, `.bin` files, folders, or Python's own source.

Knows files, not batches. No torch here.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from fp8stack.data.corpus import Corpus, Part, map_tokens
from fp8stack.errors import UserError

BYTE_VALUES = 256
UINT16_VALUES = 2**16
SNIFFED_BYTES = 2**16
MAPPED_FROM_BYTES = 8 * 2**20  # a map costs a file descriptor; smaller texts are read instead
STANDARD_LIBRARY = "the Python standard library"

# Tests, and packages that distributions ship apart or that left the library in a later version.
NOT_EVERYWHERE = frozenset(
    {
        *("test", "tests", "__pycache__"),
        *("ensurepip", "idlelib", "tkinter", "turtle", "turtledemo"),
        *("distutils", "lib2to3"),
    }
)


def load_corpora(data: str | None, vocabulary: int, held_out: float = 0.1) -> tuple[Corpus, Corpus]:
    """The training and the validation split of `data`.

    Args:
        data: None for the source of the running Python's standard library; a text file, whose
            bytes are the tokens; a `.bin` file of little-endian uint16 tokens; a folder with
            `train.bin` and `val.bin`; or a folder of `.bin` files or of text files, joined in
            the order of their paths. Hidden files and links to folders are skipped.
        vocabulary: how many tokens the model knows.
        held_out: the share of the tokens, at the end, that is the validation split; without
            effect where there is a `val.bin`.

    Raises:
        UserError: the data cannot be used; the message names the file and the remedy.
    """
    if not 0 < held_out < 1:
        raise UserError(f"Cannot hold out {held_out} of the data. Use a share between 0 and 1.")
    if data is None:
        _require_bytes_fit(vocabulary, STANDARD_LIBRARY)
        return _split(STANDARD_LIBRARY, _standard_library(), held_out)
    path = Path(data)
    if not _is_folder(path, data):
        part = _bin(path, vocabulary) if _is_bin(path) else _text(path, vocabulary)
        return _split(data, (part,), held_out)
    train, val = path / "train.bin", path / "val.bin"
    if os.path.exists(train) and os.path.exists(val):
        return (
            Corpus(name=str(train), parts=(_bin(train, vocabulary),)),
            Corpus(name=str(val), parts=(_bin(val, vocabulary),)),
        )
    return _split(data, _folder(path, vocabulary), held_out)


def _is_folder(path: Path, data: str) -> bool:
    """Whether the existing `path`, which the user spelled `data`, is a folder."""
    try:
        if data:  # Path("") would be the current folder
            return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        pass
    except OSError as error:
        _unreadable(path, error)
    raise UserError(f"No data at {data!r}. Give a file or a folder with --data, or leave it out.")


def _split(name: str, parts: tuple[Part, ...], held_out: float) -> tuple[Corpus, Corpus]:
    whole = Corpus(name=name, parts=parts)
    before, after = whole.split(len(whole) - int(len(whole) * held_out))
    return (
        Corpus(name=f"{name} (training part)", parts=before),
        Corpus(name=f"{name} (held-out part)", parts=after),
    )


def _is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def _require_bytes_fit(vocabulary: int, name: str) -> None:
    if vocabulary < BYTE_VALUES:
        raise UserError(
            f"The bytes of {name} do not fit a vocabulary of {vocabulary}. "
            f"Use a model with {BYTE_VALUES} tokens or more, or a .bin file with smaller ones."
        )


def _unreadable(path: Path | str, error: OSError) -> NoReturn:
    raise UserError(
        f"Cannot read {path}: {error.strerror}. Check its permissions, or give other data."
    ) from error


def _head_and_size(path: Path) -> tuple[bytes, int]:
    """The first 64 KiB and the size in bytes of a regular file that is not empty."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file. Give a text or .bin file, or a folder.")
        with path.open("rb") as file:
            head = file.read(SNIFFED_BYTES)
    except OSError as error:
        _unreadable(path, error)
    if not head:
        raise UserError(f"{path} is empty. Give a file with tokens in it, or remove it.")
    return head, status.st_size


def _bin(path: Path, vocabulary: int) -> Part:
    """The tokens of a `.bin` file: uint16 [tokens], memory-mapped."""
    head, size = _head_and_size(path)
    if size % 2:
        raise UserError(
            f"{path} has {size} bytes, an odd number: it does not hold whole uint16 tokens. "
            "Write or copy it again."
        )
    if problem := _foreign_format(head):
        raise UserError(f"{path} {problem}.")
    if vocabulary > UINT16_VALUES:
        raise UserError(
            f"{path} holds uint16 tokens, and of a vocabulary of {vocabulary} those above 65535 "
            f"would have wrapped. Use a model with at most {UINT16_VALUES} tokens, or give text."
        )
    return Part(path=path, tokens=map_tokens(path, "<u2"))


def _foreign_format(head: bytes) -> str:
    """What is wrong with a `.bin` file that is not headerless uint16, or an empty string."""
    if head.startswith(b"\x93NUMPY"):
        return "is a .npy file. Write its tokens with `array.astype('<u2').tofile(path)`"
    # https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
    if int.from_bytes(head[:4], "little") in (20240520, 20240801):
        return "starts with llm.c's header of 1024 bytes. Remove it with `tail -c +1025`"
    tokens = np.frombuffer(head[: len(head) // 4 * 4], dtype="<u2")
    low, high = tokens[0::2], tokens[1::2]
    if not high.any() and len(np.unique(low)) > 16:
        return "holds wider tokens than uint16 (every other one is 0). Write it as '<u2'"
    return ""


def _text(path: Path, vocabulary: int) -> Part:
    """The bytes of a text file: uint8 [tokens], memory-mapped when the file is large."""
    _require_bytes_fit(vocabulary, str(path))
    head, size = _head_and_size(path)
    if b"\0" in head:
        raise UserError(
            f"{path} looks binary: byte {head.index(0)} is NUL. Give UTF-8 text, "
            "or a .bin file of little-endian uint16 tokens."
        )
    if size >= MAPPED_FROM_BYTES:
        return Part(path=path, tokens=map_tokens(path, "|u1"))
    return _text_in_memory(path)


def _text_in_memory(path: Path) -> Part:
    try:
        return Part(path=path, tokens=np.frombuffer(path.read_bytes(), dtype=np.uint8))
    except OSError as error:
        _unreadable(path, error)


def _folder(folder: Path, vocabulary: int) -> tuple[Part, ...]:
    """The parts of all files below `folder`, which are all `.bin` or all text."""
    files = sorted(_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    bins = [path for path in files if _is_bin(path)]
    texts = [path for path in files if not _is_bin(path)]
    if bins and texts:
        raise UserError(
            f"{folder} mixes .bin files ({bins[0].name}) with others ({texts[0].name}). "
            "Give a folder with one kind, or name one file."
        )
    if bins:
        return tuple(_bin(path, vocabulary) for path in bins)
    # An empty text is nothing lost; an empty .bin is a shard that was not written.
    parts = [_text(path, vocabulary) for path in texts if not _is_empty(path)]
    if not parts:
        raise UserError(f"{folder} holds no data. Put .bin or text files into it.")
    return _joined(parts)


def _is_empty(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError as error:
        _unreadable(path, error)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _files(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """All files below `folder` except hidden ones; folders named in `skipped` are left out."""

    def fail(error: OSError) -> NoReturn:
        _unreadable(error.filename, error)

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in skipped]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """The texts one after the other, with a newline where one does not end in it."""
    newline = np.array([ord("\n")], dtype=np.uint8)
    joined = list[Part]()
    for part in parts:
        if joined and joined[-1].tokens[-1] != ord("\n"):
            last = joined[-1]
            joined.append(Part(path=last.path, tokens=newline, start=last.start + len(last)))
        joined.append(part)
    return tuple(joined)


def _standard_library() -> tuple[Part, ...]:
    """The standard library's source, about 10 MB, in an order that only its paths decide.

    The order is that of the SHA-256 of each path, so the held-out end is a fair mix of packages.
    Left out is what a distribution may add or leave away, so that the contents depend on the
    Python version alone.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = sys.stdlib_module_names - NOT_EVERYWHERE
    ordered: list[tuple[bytes, Path]] = []
    for top in root.iterdir() if root.is_dir() else ():
        if top.name.removesuffix(".py") not in modules:
            continue
        files = _files(top, skipped=NOT_EVERYWHERE) if top.is_dir() else iter([top])
        for path in files:
            name = path.relative_to(root).as_posix()
            if name.endswith(".py"):
                ordered.append((hashlib.sha256(name.encode()).digest(), path))
    parts = [_text_in_memory(path) for _, path in sorted(ordered) if not _is_empty(path)]
    if not parts:
        raise UserError(f"No source of {STANDARD_LIBRARY} in {root}. Give text with --data.")
    return _joined(parts)
