"""The rows of parquet files and of `datasets`. The only file that imports datasets."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.data.parquet import is_text, open_parquet, read_column
from fp8stack.errors import UserError, quoted, unknown

ROWS_AT_ONCE = 64
MOST_ROWS = 4096  # of an item, in case they are all empty


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The values of some rows."""

    content: list[object]
    share: float = 0.0  # bytes of the table read so far, if known
    state: dict[str, Any] | None = None  # the state of a `datasets` stream


def parquet_rows(
    path: str, start: int, state: dict[str, Any] | None, key: str, size: int
) -> Iterator[Rows]:
    """Yield the column `key` of a parquet file from row `start` on, about `size` bytes at a time.
    Raises a UserError if the file cannot be read or has no such text column."""
    remedy = "Download it again; the same command then continues."
    with open_parquet(Path(path), remedy) as file:
        schema = file.schema_arrow
        if key not in schema.names:
            raise _no_column(path, key, schema.names)
        kind = schema.field(key).type
        if not is_text(kind):
            raise UserError(
                f"The column {quoted(key)!r} of {quoted(path)} holds {quoted(str(kind))}, not "
                "text. Name another with --text-key."
            )
        arrays = read_column(file, key, start, ROWS_AT_ONCE)
        values = (value for array in arrays for value in array.to_pylist())
        number = start
        for held in _gathered(values, size):
            number += len(held)
            yield Rows(content=held, share=number / file.metadata.num_rows)


def _no_column(path: str, key: str, names: list[str]) -> UserError:
    return UserError(f"{quoted(path)}: {unknown('column', key, names)} Name one with --text-key.")


def _gathered(values: Iterator[object], size: int) -> Iterator[list[object]]:
    """Combine values until they have about `size` bytes. Values are taken lazily."""
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
    """The name, configuration and split of `hf:NAME[:CONFIG][@SPLIT]`; the default split is train.

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
    """Stream the column `key` of `hf:NAME[:CONFIG][@SPLIT]`, or of `hf:FOLDER[@SPLIT]` that
    `save_to_disk` wrote, about `size` bytes at a time. It continues from `state`, that of the last
    `Rows` before; None is the beginning. Raises a UserError if the dataset cannot be loaded or has
    no such column."""
    try:
        import datasets
    except ImportError:
        hint = "Install it: pip install datasets."
        raise UserError(f"{quoted(path)} needs datasets. {hint}") from None
    name, config, split = parse_dataset(path)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry

    def values(rows: Iterator[dict[str, Any]]) -> Iterator[object]:
        for row in rows:
            if key not in row:
                raise _no_column(path, key, list(row))
            yield row[key]

    try:
        saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
        if saved:
            stream = _saved(path, name, split)
        else:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
        if state is not None:
            stream.load_state_dict(state)
        with closing(iter(stream)) as rows:
            for held in _gathered(values(rows), size):
                yield Rows(content=held, state=stream.state_dict())
    except UserError:
        raise
    except Exception as error:  # any error of the network, the Hub or a file format
        raise UserError(
            f"Cannot read {quoted(path)}: {quoted(' '.join(str(error).split()) or repr(error))}. "
            "Check its name and the network; the same command continues."
        ) from error


def _saved(path: str, folder: str, split: str) -> Any:
    """Stream a dataset that `save_to_disk` wrote; a single Dataset has no splits to choose from."""
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
