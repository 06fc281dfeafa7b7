"""The rows of parquet files and of `datasets`. The only file of this package that
imports pyarrow and datasets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.data.parquet import is_text
from fp8stack.errors import UserError, quoted, unknown

ROWS_AT_ONCE = 64
MOST_ROWS = 4096
"""Of an item, in case they are all empty."""
BUFFER_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows.

    Attributes:
        content: what each holds.
        share: how much of the table was read up to there, as far as that is known.
        state: of a `datasets` stream, from which it can go on.
    """

    content: list[object]
    share: float = 0.0
    state: dict[str, Any] | None = None


def parquet_rows(
    path: str, start: int, state: dict[str, Any] | None, key: str, size: int
) -> Iterator[Rows]:
    """The column `key` of a parquet file from row `start` on, some `size` bytes at a time.

    Raises:
        UserError: the file cannot be read, or has no such column of text.
    """
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise UserError("Parquet files need pyarrow. Install it: pip install pyarrow.") from None
    try:
        with _opened(path, key) as file:
            number = start
            for held in _gathered(_values(file, start, key), size):
                number += len(held)
                yield Rows(content=held, share=number / file.metadata.num_rows)
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{quoted(path)} is not a parquet file that can be read "
            f"({quoted(' '.join(str(error).split()))}). Get it anew; the same command then goes on "
            "with it."
        ) from error


@contextmanager
def _opened(path: str, key: str) -> Iterator[Any]:
    """A parquet file whose column `key` holds text."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        schema = file.schema_arrow
        if key not in schema.names:
            raise _no_column(path, key, schema.names)
        kind = schema.field(key).type
        if not is_text(kind):
            raise UserError(
                f"The column {quoted(key)!r} of {quoted(path)} holds {quoted(str(kind))}, not "
                "text. Name another with --text-key."
            )
        yield file


def _values(file: Any, start: int, key: str) -> Iterator[object]:
    """Each value of a column from row `start` on."""
    first = 0
    for group in range(file.metadata.num_row_groups):
        there = file.metadata.row_group(group).num_rows
        if first + there > start:
            left_out = max(0, start - first)
            batches = file.iter_batches(
                ROWS_AT_ONCE, row_groups=[group], columns=[key], use_threads=False
            )
            for batch in batches:
                yield from batch.column(0)[left_out:].to_pylist()
                left_out = max(0, left_out - batch.num_rows)
        first += there


def _no_column(path: str, key: str, names: list[str]) -> UserError:
    return UserError(f"{quoted(path)}: {unknown('column', key, names)} Name one with --text-key.")


def _gathered(values: Iterator[object], size: int) -> Iterator[list[object]]:
    """Values put together until they have `size` bytes or so; none is taken before it is needed."""
    held, held_bytes = list[object](), 0
    for value in values:
        held.append(value)
        held_bytes += len(value) if isinstance(value, str) else 0
        if held_bytes >= size or len(held) >= MOST_ROWS:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def parse_dataset(name: str) -> tuple[str, str | None, str]:
    """The name, the configuration and the split of `hf:NAME[:CONFIG][@SPLIT]`; the split is train
    if none is named.

    >>> parse_dataset("hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 'train')
    """
    name, _, split = name.removeprefix("hf:").partition("@")
    name, _, config = name.partition(":")
    if not name:
        raise UserError("hf: needs the name of a dataset, such as hf:roneneldan/TinyStories.")
    return name, config or None, split or "train"


def dataset_rows(
    path: str, start: int, state: dict[str, Any] | None, key: str, size: int
) -> Iterator[Rows]:
    """The column `key` of a dataset, streamed, some `size` bytes at a time.

    Args:
        path: `hf:NAME[:CONFIG][@SPLIT]`, or `hf:FOLDER[@SPLIT]` of what `save_to_disk` wrote.
        start: how many rows were read.
        state: what the last `Rows` before had; None from the beginning.
        key: the name of the column.
        size: bytes.

    Raises:
        UserError: the dataset cannot be had, or has no such column.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{quoted(path)} needs datasets. Install it: pip install datasets."
        ) from None
    name, config, split = parse_dataset(path)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
    try:
        stream = _saved(path, name, split) if _is_saved(name) else None
        stream = stream or datasets.load_dataset(name, config, split=split, streaming=True)
        if state is not None:
            stream.load_state_dict(state)
        with closing(iter(stream)) as rows:
            for held in _gathered(_values_of(path, rows, key), size):
                yield Rows(content=held, state=stream.state_dict())
    except UserError:
        raise
    except Exception as error:  # whatever the network, the hub and the formats of files come to
        raise UserError(
            f"Cannot read {quoted(path)}: {quoted(' '.join(str(error).split()) or repr(error))}. "
            "Check its name and the network; the same command goes on with it."
        ) from error


def _is_saved(name: str) -> bool:
    """Whether this is a folder that `save_to_disk` of a Dataset or a DatasetDict wrote."""
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _saved(path: str, folder: str, split: str) -> Any:
    """A stream of what `save_to_disk` wrote; a single Dataset has no splits to choose from."""
    import datasets

    found = datasets.load_from_disk(folder)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UserError(f"{quoted(path)}: {unknown('split', split, list(found))}")
        found = found[split]
    elif "@" in path and split != str(found.split):
        raise UserError(
            f"{quoted(path)}: the folder holds a single dataset, without splits. Leave out "
            f"@{quoted(split)}."
        )
    return found.to_iterable_dataset()


def _values_of(path: str, rows: Iterator[dict[str, Any]], key: str) -> Iterator[object]:
    """What each row of a dataset has in the column `key`."""
    for row in rows:
        if key not in row:
            raise _no_column(path, key, list(row))
        yield row[key]
