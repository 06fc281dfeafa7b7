"""Text as bytes or as tokens: files, and Python's own source. No torch here."""

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.corpus import Segment, Separator, map_tokens
from fp8stack.data.files import encoding_of, head_and_size, is_empty, unreadable, walk
from fp8stack.data.parquet import END_OF_TEXT
from fp8stack.data.tokenizer import Tokenizer

BYTE_VALUES = 256
MAPPED_FROM_BYTES = 8 * 2**20  # smaller texts are read, since a map costs a file descriptor
MOST_BYTES = 128 * 2**20  # that a run tokenizes at its start; it takes a core about a minute
STANDARD_LIBRARY = "the Python standard library"
JSON_LINES = {".jsonl", ".ndjson"}
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

# Tests, and packages that distributions ship apart or that left the library in a later version.
NOT_EVERYWHERE = {
    *("test", "tests", "__pycache__", "distutils", "lib2to3"),
    *("ensurepip", "idlelib", "tkinter", "turtle", "turtledemo"),
}


def require_bytes_fit(vocabulary: int | None, name: str) -> None:
    """Raise a UserError unless the vocabulary has a token for every byte, or is None, for text that
    is not trained on as bytes."""
    if vocabulary is not None and vocabulary < BYTE_VALUES:
        raise UserError(
            f"The bytes of {name} do not fit a vocabulary of {vocabulary}. "
            f"Use a model with {BYTE_VALUES} tokens or more, or a .bin file with smaller ones."
        )


def refuse_unprepared(path: Path, problem: str) -> NoReturn:
    """Raise the UserError for data that only `prepare` reads."""
    raise UserError(
        f"{path} {problem}. Make tokens of it with `fp8stack prepare {shell_quoted(str(path))} "
        "--tokenizer bytes --out tokens` and give `--data tokens`."
    )


def text(path: Path, vocabulary: int | None) -> Segment:
    """The bytes of a text file but for a byte order mark: uint8 [tokens], memory-mapped if large;
    in UTF-8 where the mark is UTF-16's or UTF-32's. Raises a UserError if the file cannot be read,
    is empty or compressed, or is not text."""
    require_bytes_fit(vocabulary, str(path))
    head, size = head_and_size(path)
    problem = next(
        (f"is compressed ({COMPRESSED[m]})" for m in COMPRESSED if head.startswith(m)), None
    )
    if path.suffix.lower() in JSON_LINES:
        problem = "holds JSON lines, not text"
    if path.suffix == ".arrow":
        problem = "holds arrow tables, not text"
    if problem:
        refuse_unprepared(path, problem)
    mark, encoding = encoding_of(head)
    if encoding != "utf-8":
        content = _in_memory(path).tokens.tobytes()[len(mark) :].decode(encoding, errors="replace")
        return Segment(path=path, tokens=np.frombuffer(content.encode() or b"\n", dtype=np.uint8))
    if b"\0" in head:
        raise UserError(
            f"{path} looks binary: byte {head.index(0)} is NUL. Give UTF-8 text, "
            "or a .bin file of little-endian uint16 tokens."
        )
    mapped = size >= MAPPED_FROM_BYTES
    segment = Segment(path=path, tokens=map_tokens(path, "|u1")) if mapped else _in_memory(path)
    return segment.slice(len(mark), size) if size > len(mark) else segment


def _in_memory(path: Path) -> Segment:
    try:
        return Segment(path=path, tokens=np.frombuffer(path.read_bytes(), dtype=np.uint8))
    except OSError as error:
        unreadable(path, error)


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Concatenate texts, with a newline after one that does not end in it."""
    newline = np.array([ord("\n")], dtype=np.uint8)
    with_newlines = list[Segment]()
    for segment in segments:
        if with_newlines and with_newlines[-1].tokens[-1] != ord("\n"):
            last = with_newlines[-1]
            with_newlines.append(
                Segment(path=last.path, tokens=newline, start=last.start + len(last))
            )
        with_newlines.append(segment)
    return tuple(with_newlines)


def standard_library(vocabulary: int | None) -> list[Segment]:
    """The standard library's source, about 10 MB, a segment for each file, in the order of the
    SHA-256 of each path, so that the held-out end is a mix of packages.

    Modules that distributions may add or leave out are excluded, so that the contents depend only
    on the Python version. Raises a UserError if this Python has no source, or if the vocabulary is
    too small.
    """
    require_bytes_fit(vocabulary, STANDARD_LIBRARY)
    root = Path(sysconfig.get_path("stdlib"))
    modules = sys.stdlib_module_names - NOT_EVERYWHERE
    ordered: list[tuple[bytes, Path]] = []
    tops = root.iterdir() if root.is_dir() else iter(())
    for top in (path for path in tops if path.name.removesuffix(".py") in modules):
        inside = walk(top, lambda folder: folder.name in NOT_EVERYWHERE)
        for path in inside if top.is_dir() else [top]:
            name = path.relative_to(root).as_posix()
            if name.endswith(".py"):
                ordered.append((hashlib.sha256(name.encode()).digest(), path))
    segments = [_in_memory(path) for _, path in sorted(ordered) if not is_empty(path)]
    if not segments:
        raise UserError(f"No source of {STANDARD_LIBRARY} in {root}. Give text with --data.")
    return segments


def encoded(name: str, segments: Sequence[Segment], tokenizer: Tokenizer) -> tuple[Segment, ...]:
    """Tokenize segments of text, uint8 [bytes], each a file of the data called `name`: uint16 or
    uint32, with the end-of-text token after each document. A document is a file, or a row of a
    table that is not empty. Raises a UserError if there is more text than a run tokenizes at
    its start."""
    size = sum(map(len, segments))
    if size > MOST_BYTES:
        raise UserError(
            f"{name} has {size / 2**20:,.0f} MiB of text; at most {MOST_BYTES / 2**20:g} become "
            f"tokens when a run begins. Make them before, of {quoted(tokenizer.name)}: fp8stack "
            f"prepare {shell_quoted(name)} --tokenizer NAME|PATH --out tokens, and give "
            "--data tokens."
        )
    return tuple(_tokens_of(segment, tokenizer) for segment in segments)


def _tokens_of(segment: Segment, tokenizer: Tokenizer) -> Segment:
    content = segment.read(0, len(segment)).tobytes()
    rows = [content] if segment.documents is None else content.split(bytes([END_OF_TEXT]))
    ids = tokenizer.encode_batch([row.decode(errors="replace") for row in rows if row])
    end = tokenizer.end_of_text
    if end is not None:
        separator = np.array([end], dtype=np.uint32)
        ids = [piece for document in ids for piece in (document, separator)]
    documents = None if end is None else Separator(token=end)
    return replace(segment, tokens=np.concatenate(ids).astype(tokenizer.dtype), documents=documents)
