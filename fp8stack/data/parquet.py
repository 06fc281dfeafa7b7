"""Parquet files with a column of text, read into memory as bytes. No torch here.

The only file of this package that imports pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.corpus import Part
from fp8stack.data.documents import Separator
from fp8stack.errors import UserError, quoted

MOST_BYTES = 2 * 2**30
ROWS_AT_ONCE = 4096
END_OF_TEXT = 255  # of the bytes tokenizer: no byte of UTF-8


def is_parquet(path: Path) -> bool:
    """Whether the file's name says that it is a parquet file."""
    return path.suffix.lower() == ".parquet"


def parquet_parts(paths: Sequence[Path]) -> tuple[Part, ...]:
    """The documents of parquet files, a part for each file: uint8 [bytes].

    Each document is the UTF-8 bytes of a row's text and a byte 255 after it. The text is the
    column `text`, or the only column of strings. An empty text is the byte 255 alone; null is no
    text and left out.

    Raises:
        UserError: a file cannot be read, or holds no column of text; or they hold more than 2 GiB.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"Reading {paths[0]} needs pyarrow. Install it with `pip install pyarrow`."
        ) from error
    parts: list[Part] = []
    for path in paths:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                parts.append(_part(path, file, MOST_BYTES - sum(map(len, parts))))
        except UserError:
            raise
        # A damaged file may also have names that are no UTF-8, or lack a column that it lists.
        except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise UserError(
                f"Cannot read {path} as parquet: {' '.join(why.split())[:200]}. "
                "Write or copy it again."
            ) from error
    return tuple(parts)


def _part(path: Path, file: Any, most: int) -> Part:
    """One file, at most `most` bytes of text."""
    column = _text_column(path, file.schema_arrow)
    tokens = bytearray()
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
        tokens += _documents(batch.column(0)).data
        if len(tokens) > most:
            raise UserError(
                f"{path} holds too much text to be read into memory: {MOST_BYTES / 2**30:g} GiB "
                f"is the most. Make tokens of it with `fp8stack prepare {path} --tokenizer bytes "
                "--out tokens` and give `--data tokens`."
            )
    if tokens.count(END_OF_TEXT) == len(tokens):
        raise UserError(f"{path} has no text in its column {column!r}. Give a file with text.")
    separator = Separator(token=END_OF_TEXT)
    return Part(path=path, tokens=np.frombuffer(tokens, dtype=np.uint8), documents=separator)


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
    if texts:
        raise UserError(
            f"{path} has several columns of text ({named}) and none is called text. Rename the one "
            "to train on."
        )
    raise UserError(f"{path} has no column of text, only {named}. Give a file with one.")


def _documents(texts: Any) -> npt.NDArray[np.uint8]:
    """The bytes of each text of a column and END_OF_TEXT after it, one after the other."""
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
