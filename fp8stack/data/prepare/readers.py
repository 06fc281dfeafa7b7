"""Documents of sources, a reader for each format. The only file that imports datasets: it reads
arrow files, saved datasets and datasets of the Hub, but would change documents of other formats,
since it types columns of JSON and shifts fields of CSV."""

import csv
import glob
import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

from fp8stack.common.errors import UserError, quoted, require, unknown
from fp8stack.data.files import is_saved
from fp8stack.data.parquet import open_parquet, read_column, values_of
from fp8stack.data.prepare.inputs import Source
from fp8stack.data.prepare.unpacked import REMEDY, opened, unpacked_suffix

LONGEST_FIELD = 2**29  # characters of a field of CSV
PIECE_CHARACTERS = 2**20
ROWS_AT_ONCE = 64
# Up to a space after a character other than white space, or to a newline after a letter: patterns
# that split words as GPT-2's or GPT-4's does never join these.
_BEFORE_CUT = re.compile(r".*(?:\S(?= )|[^\W\d_](?=\n))", re.DOTALL)


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    on_disk: int = 0  # bytes of the file (packed) read so far, if known
    is_unfinished: bool = False  # whether the next piece continues the document


Texts = Generator[Text, None, None]


def read(source: Source, text_key: str) -> Texts:
    """Yield the documents of a source, whose field or column `text_key` holds the text; what is not
    Unicode in them becomes U+FFFD. Raises a UserError that names the file, and the line or row, if
    the source cannot be read."""
    if source.kind == "parquet":
        return _parquet(source, text_key)
    if source.kind in ("arrow", "hf"):
        return _dataset(source, text_key)
    return _stream(source, text_key)


def _stream(source: Source, text_key: str) -> Texts:
    path = Path(source.path)
    with opened(path) as (stream, file):
        if source.kind == "text":
            texts = _pieces(stream)
        elif source.kind == "csv":
            separator = "\t" if unpacked_suffix(path) == ".tsv" else ","
            texts = _fields(stream, separator, text_key, quoted(source.path))
        else:
            is_array = source.kind == "json" and stream.peek(1).lstrip().startswith(b"[")
            rows = _array(stream, source.path) if is_array else _lines(stream, source.path)
            texts = (Text(_unicode(_field(row, text_key, where))) for row, where in rows)
        for text in texts:
            yield text._replace(on_disk=file.tell())


def _pieces(stream: IO[bytes]) -> Iterator[Text]:
    """A text, in pieces of about a million characters: the memory that tokenizers need for a piece
    is more than a hundred times its size."""
    reader = TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")
    piece = reader.read(PIECE_CHARACTERS)
    while piece:
        following = reader.read(PIECE_CHARACTERS)
        match = _BEFORE_CUT.match(piece) if following else None
        end = match.end() if match else len(piece)
        yield Text(piece[:end], is_unfinished=bool(following))
        piece = piece[end:] + following


def _fields(stream: IO[bytes], separator: str, text_key: str, name: str) -> Iterator[Text]:
    csv.field_size_limit(LONGEST_FIELD)
    text = TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")
    table = csv.reader(text, delimiter=separator, strict=True)
    try:
        header = next(filter(None, table), [])
        _require_key(text_key, header, name)
        column = header.index(text_key)
        for row in filter(None, table):
            if len(row) != len(header):
                raise csv.Error(f"a row has {len(row)} fields, the header {len(header)}")
            yield Text(row[column])
    except csv.Error as error:
        raise UserError(
            f"{name} is not CSV up to line {table.line_num} ({error}). Put quotes around texts "
            "with separators, or give JSON lines."
        ) from error


def _lines(stream: IO[bytes], path: str) -> Iterator[tuple[Any, str]]:
    """The value of each line of JSON, and where it is."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            where = f"{quoted(path)} line {number}"
            yield _parsed(line, where), where


def _array(stream: IO[bytes], path: str) -> Iterator[tuple[Any, str]]:
    for number, row in enumerate(_parsed(stream.read(), quoted(path)), 1):
        yield row, f"{quoted(path)} row {number}"


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        raise UserError(f"{where} is not JSON ({reason}). {REMEDY}") from error


def _field(row: Any, key: str, where: str) -> str:
    """The text of a JSON object."""
    _require_key(key, row if isinstance(row, dict) else (), where)
    return _text_in(row[key], where)


def _unicode(text: str) -> str:
    """A text without lone surrogates, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parquet(source: Source, text_key: str) -> Texts:
    with open_parquet(Path(source.path)) as file:
        _require_key(text_key, file.schema_arrow.names, quoted(source.path))
        number, total = 0, file.metadata.num_rows
        for column in read_column(file, text_key, ROWS_AT_ONCE):
            for text in _column(column, number, source.path):
                number += 1
                yield Text(text, source.size * number // total)


def _dataset(source: Source, text_key: str) -> Texts:
    """The rows of an arrow file, of a folder of `save_to_disk` or of a dataset of the Hub."""
    datasets = _library(source)
    try:
        if source.kind == "hf":
            stream = _open_dataset(datasets, source.path)
        else:
            files = {"train": glob.escape(source.path)}
            stream = datasets.load_dataset("arrow", data_files=files, split="train", streaming=True)
        number = 0
        with closing(stream.with_format("arrow").iter(ROWS_AT_ONCE)) as tables:
            for table in tables:
                _require_key(text_key, table.schema.names, quoted(source.path))
                for text in _column(table[text_key], number, source.path):
                    number += 1
                    yield Text(text)
    except UserError:
        raise
    except Exception as error:  # any error of the network, the Hub or a file format
        reason = quoted(" ".join(str(error).split()) or repr(error)).rstrip(".")
        raise UserError(
            f"Cannot read {quoted(source.path)}: {reason}. Check the file, or the name and the "
            "network, and give the same command again."
        ) from error


def _column(column: Any, row: int, path: str) -> Iterator[str]:
    """The texts of a pyarrow column after row `row`."""
    for number, value in enumerate(values_of(column), row + 1):
        if isinstance(value, bytes):
            yield value.decode(errors="replace")
        else:
            yield _text_in(value, f"{quoted(path)} row {number}")


def _require_key(key: str, keys: Iterable[str], where: str) -> None:
    """Raise a UserError unless `key` is among the fields or columns."""
    if key not in keys:
        names = ", ".join(sorted(quoted(str(name)) for name in keys)[:20]) or "none"
        raise UserError(
            f"{where} has no {quoted(key)!r}. Its fields: {names}. Name the one with the text by "
            "--text-key."
        )


def _text_in(value: object, where: str) -> str:
    """A value that is text. Raises a UserError if it is none."""
    if not isinstance(value, str):
        raise UserError(
            f"{where} has {quoted(json.dumps(value, default=repr)[:40])} where text should be. "
            "Correct it, or name another field by --text-key."
        )
    return value


def _library(source: Source) -> Any:
    """The package datasets, silenced. Raises a UserError if it is missing."""
    require("datasets", f"Reading {source.path}")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL + 1)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    return datasets


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


def _open_dataset(datasets: Any, path: str) -> Any:
    """The stream of a dataset of the Hub, or of a folder that `save_to_disk` wrote."""
    name, config, split = parse_dataset(path) if path.startswith("hf:") else (path, None, "train")
    if not is_saved(Path(name)):
        return datasets.load_dataset(name, config, split=split, streaming=True)
    saved = datasets.load_from_disk(name)
    if not isinstance(saved, datasets.DatasetDict):
        saved = {"train": saved, str(saved.split): saved}
    if split not in saved:
        raise UserError(
            f"{quoted(path)}: {unknown('split', split, list(saved))} Give hf:FOLDER@SPLIT."
        )
    return saved[split].to_iterable_dataset()
