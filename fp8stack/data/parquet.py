"""Parquet files with a column of text, and .zst files: the only file that imports pyarrow. No torch
here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import UserError, quoted, require
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.corpus import Segment, Separator

MOST_BYTES = 2 * 2**30
ROWS_AT_ONCE = 4096
BUFFER_BYTES = 2**20
END_OF_TEXT = 255  # of the bytes tokenizer: no byte of UTF-8


def is_parquet(path: Path) -> bool:
    """Whether the path names a parquet file."""
    return path.suffix.lower() == ".parquet"


def open_zst(file: IO[bytes]) -> Any:
    """The unpacked bytes of a file. Raises a UserError if pyarrow is missing, and an OSError, also
    while they are read, if the data are damaged or end within a frame."""
    require("pyarrow", f"Reading {file.name}")
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A context with a `pyarrow.parquet.ParquetFile`. Raises a UserError if pyarrow is missing, or
    if the file cannot be read, then or later in the context."""
    require("pyarrow", f"Reading {path}")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    except UserError:
        raise
    # A damaged file may have names that are not UTF-8, or lack a column that it lists.
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UserError(
            f"Cannot read {quoted(str(path))} as parquet: {quoted(' '.join(reason.split()))}. "
            "Write or copy it again."
        ) from error


def read_column(file: Any, name: str, rows: int) -> Iterator[Any]:
    """Yield the values of a column as pyarrow arrays of at most `rows`."""
    # One row group at a time, in one thread, so that memory does not grow with the file.
    for group in range(file.metadata.num_row_groups):
        for batch in file.iter_batches(rows, row_groups=[group], columns=[name], use_threads=False):
            yield batch.column(0)


def values_of(column: Any) -> list[Any]:
    """The values of a pyarrow column of text, None for null; all in bytes if one is not UTF-8."""
    import pyarrow

    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
    return values


def parquet_segments(paths: Sequence[Path]) -> tuple[Segment, ...]:
    """The documents of parquet files, a segment for each file: uint8 [bytes].

    Each document is the UTF-8 bytes of a row's text, then a byte 255. The text is the column
    `text`, or the only string column. An empty text is the byte 255 alone; null is left out. Raises
    a UserError if a file cannot be read or has no text column, or if they hold more than 2 GiB.
    """
    segments: list[Segment] = []
    for path in paths:
        tokens = bytearray()
        with open_parquet(path) as file:
            column = _text_column(path, file.schema_arrow)
            for texts in read_column(file, column, ROWS_AT_ONCE):
                tokens += _documents(texts).data
                if len(tokens) + sum(map(len, segments)) > MOST_BYTES:
                    raise UserError(
                        f"{path} holds too much text to be read into memory: "
                        f"{MOST_BYTES / 2**30:g} GiB is the most. Make tokens of it: fp8stack "
                        f"prepare {shell_quoted(str(path))} --text-key {shell_quoted(column)} "
                        "--tokenizer bytes --out tokens, and give --data tokens."
                    )
            if tokens.count(END_OF_TEXT) == len(tokens):
                raise UserError(
                    f"{path} has no text in its column {column!r}. Give a file with text."
                )
        content = np.frombuffer(tokens, dtype=np.uint8)
        segments.append(Segment(path=path, tokens=content, documents=Separator(token=END_OF_TEXT)))
    return tuple(segments)


def is_text(kind: Any) -> bool:
    """Whether a column of this pyarrow type holds strings."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return any((types.is_string(kind), types.is_large_string(kind), types.is_string_view(kind)))


def _text_column(path: Path, schema: Any) -> str:
    texts = [field.name for field in schema if is_text(field.type)]
    if texts.count("text") == 1:
        return "text"
    if len(texts) == 1:
        return str(texts[0])
    named = quoted(", ".join(texts or schema.names))
    if not texts:
        raise UserError(f"{path} has no column of text, only {named}. Give a file with one.")
    raise UserError(
        f"{path} has several columns of text ({named}) and none is called text. Rename the one to "
        "train on."
    )


def _documents(texts: Any) -> npt.NDArray[np.uint8]:
    """The bytes of each text of a column, each followed by END_OF_TEXT."""
    import pyarrow

    texts.validate(full=True)  # before arithmetic on offsets that may point anywhere
    texts = texts.cast(pyarrow.large_string())
    texts = texts.drop_null()
    if not len(texts):
        return np.empty(0, dtype=np.uint8)
    _, offsets, characters = texts.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[texts.offset :][: len(texts) + 1]
    text = np.frombuffer(characters, dtype=np.uint8)[ends[0] : ends[-1]]
    return np.insert(text, ends[1:] - ends[0], END_OF_TEXT)
