"""Documents of sources, a generator for each format. The only file that imports datasets: it reads
arrow files, saved datasets and datasets of the Hub, but would change documents of other formats,
since it types columns of JSON and shifts fields of CSV."""

import csv
import glob
import json
import logging
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

from fp8stack.common.errors import UserError, quoted, unknown
from fp8stack.data.files import is_saved
from fp8stack.data.parquet import is_text, open_parquet, read_column, values_of
from fp8stack.data.prepare.inputs import Source
from fp8stack.data.prepare.unpacked import opened, unpacked_suffix

LONGEST_LINE = 2**29
PIECE_CHARACTERS = 2**20
ROWS_AT_ONCE = 64
REPLACEMENT = "\ufffd"
REMEDY = "Download or correct it, and give the same command again."
# Up to a space after a character other than white space, or to a newline after a letter: patterns
# that split words as GPT-2's or GPT-4's does never join these.
_BEFORE_CUT = re.compile(r".*(?:\S(?= )|[^\W\d_](?=\n))", re.DOTALL)


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    on_disk: int = 0  # bytes of the file (packed) read so far, if known
    replaced: int = 0  # number of U+FFFD that replaced invalid Unicode
    is_unfinished: bool = False  # whether the next piece continues the document


Texts = Generator[Text, None, None]


def read(source: Source, text_key: str) -> Texts:
    """Yield the documents of a source, whose field or column `text_key` holds the text. Raises a
    UserError if the source cannot be read."""
    if source.kind == "text":
        return _text(source)
    readers = {"lines": _lines, "json": _json, "csv": _csv, "parquet": _parquet}
    return readers.get(source.kind, _dataset)(source, text_key)


def _text(source: Source) -> Texts:
    """A text, in pieces of about a million characters: the memory that tokenizers need for a piece
    is more than a hundred times its size."""
    with opened(Path(source.path)) as (stream, file):
        reader = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        piece = reader.read(PIECE_CHARACTERS)
        while piece:
            more = reader.read(PIECE_CHARACTERS)
            match = _BEFORE_CUT.match(piece) if more else None
            end = match.end() if match else len(piece)
            text, replaced = _in_unicode(piece[:end])
            yield Text(text, file.tell(), replaced, bool(more))
            piece = piece[end:] + more


def _lines(source: Source, text_key: str) -> Texts:
    with opened(Path(source.path)) as (stream, file):
        yield from _lines_of(source, text_key, stream, file)


def _lines_of(source: Source, text_key: str, stream: IO[bytes], file: IO[bytes]) -> Texts:
    for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE + 1), b""), 1):
        where = f"{quoted(source.path)} line {number}"
        if len(line) > LONGEST_LINE:
            raise UserError(
                f"{where} has more than {LONGEST_LINE:,} bytes. Give JSON lines: one object for "
                "each document, on a line of its own."
            )
        if line.strip():
            content, replaced = _decoded(line)
            text, surrogates = _field(_parsed(content, where), text_key, where)
            yield Text(text, file.tell(), replaced + surrogates)


def _json(source: Source, text_key: str) -> Texts:
    """An array of objects, or else JSON lines."""
    name = quoted(source.path)
    with opened(Path(source.path)) as (stream, file):
        if not stream.peek(1).lstrip().startswith(b"["):
            yield from _lines_of(source, text_key, stream, file)
            return
        content, replaced = _decoded(stream.read())
    for number, row in enumerate(_parsed(content, name), 1):
        text, surrogates = _field(row, text_key, f"{name} row {number}")
        yield Text(text, source.size, surrogates + (replaced if number == 1 else 0))


def _field(row: Any, key: str, where: str) -> tuple[str, int]:
    """The text of a JSON object, with the number of U+FFFD that replaced lone surrogates, which
    JSON can represent and UTF-8 cannot."""
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is no object but a {_kind_of(row)}. Give one object on each line, such "
            f'as {{"{quoted(key)}": "..."}}.'
        )
    if key not in row:
        keys = ", ".join(sorted(quoted(name) for name in list(row)[:20])) or "none"
        raise UserError(
            f"{where} has no {quoted(key)!r}. Its keys: {keys}. Name the one with the text by "
            "--text-key."
        )
    text = _text_in(row[key], where)
    try:
        text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return paired, paired.count(REPLACEMENT) - text.count(REPLACEMENT)
    return text, 0


def _csv(source: Source, text_key: str) -> Texts:
    csv.field_size_limit(LONGEST_LINE)
    path = Path(source.path)
    with opened(path) as (stream, file):
        text = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        separator = "\t" if unpacked_suffix(path) == ".tsv" else ","
        table = csv.reader(text, delimiter=separator, strict=True)
        try:
            header = next(filter(None, table), [])
            _require_column(source, text_key, header)
            column = header.index(text_key)
            for row in filter(None, table):
                if len(row) != len(header):
                    raise csv.Error(f"a row has {len(row)} fields, the header {len(header)}")
                cell, replaced = _in_unicode(row[column])
                yield Text(cell, file.tell(), replaced)
        except csv.Error as error:
            raise UserError(
                f"{quoted(source.path)} is not CSV up to line {table.line_num} ({error}). Put "
                "quotes around texts with separators, or give JSON lines."
            ) from error


def _parquet(source: Source, text_key: str) -> Texts:
    with open_parquet(Path(source.path), REMEDY) as file:
        _require_column(source, text_key, file.schema_arrow.names, file.schema_arrow)
        number, total = 0, file.metadata.num_rows
        for column in read_column(file, text_key, ROWS_AT_ONCE):
            for text in _column(source, column, number):
                number += 1
                yield text._replace(on_disk=source.size * number // total)


def _dataset(source: Source, text_key: str) -> Texts:
    """The rows of an arrow file, of a folder of `save_to_disk` or of a dataset of the Hub."""
    datasets = _library()
    try:
        if source.kind == "hf":
            stream = _open_dataset(datasets, source.path)
        else:
            files = {"train": glob.escape(source.path)}
            stream = datasets.load_dataset("arrow", data_files=files, split="train", streaming=True)
        number = 0
        with closing(stream.with_format("arrow").iter(ROWS_AT_ONCE)) as tables:
            for table in tables:
                _require_column(source, text_key, table.schema.names, table.schema)
                yield from _column(source, table[text_key], number)
                number += len(table)
    except UserError:
        raise
    except Exception as error:  # any error of the network, the Hub or a file format
        reason = quoted(" ".join(str(error).split()) or repr(error)).rstrip(".")
        remedy = REMEDY
        if source.path.startswith("hf:"):
            remedy = "Check its name and the network, and give the same command again."
        raise UserError(f"Cannot read {quoted(source.path)}: {reason}. {remedy}") from error


def _column(source: Source, column: Any, row: int) -> Iterator[Text]:
    """The texts of a pyarrow column after row `row`."""
    for number, value in enumerate(values_of(column), row + 1):
        if isinstance(value, bytes):
            text, replaced = _decoded(value)
        else:
            text = _text_in(value, f"{quoted(source.path)} row {number}")
            replaced = 0
        yield Text(text, replaced=replaced)


def _require_column(source: Source, key: str, names: Sequence[str], schema: Any = None) -> None:
    """Raise a UserError unless there is a column of text."""
    path = quoted(source.path)
    if key not in names:
        raise UserError(f"{path}: {unknown('column', key, names)} Name one by --text-key.")
    kind = None if schema is None else schema.field(key).type
    if kind is not None and not is_text(kind) and str(kind) != "null":
        raise UserError(
            f"The column {quoted(key)!r} of {path} holds {quoted(str(kind))}, not text. Name "
            "another by --text-key."
        )


def _text_in(value: object, where: str) -> str:
    """A value that is text. Raises a UserError if it is none."""
    if not isinstance(value, str):
        raise UserError(
            f"{where} has a {_kind_of(value)} where text should be. Correct it, or name another "
            "field with --text-key."
        )
    return value


def _kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names = {"dict": "object", "str": "string", "NoneType": "null", "bool": "true or false"}
    name = type(value).__name__
    return "number" if name in ("int", "float") else names.get(name, name)


def _parsed(content: str, where: str) -> Any:
    """The value of a JSON text. Raises a UserError if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        raise UserError(f"{where} is not JSON ({reason}). {REMEDY}") from error


def _decoded(content: bytes) -> tuple[str, int]:
    """Bytes as text, with the number of U+FFFD that replaced invalid UTF-8."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def _in_unicode(text: str) -> tuple[str, int]:
    """Text that was decoded with `surrogateescape`, as `_decoded` decodes it."""
    return _decoded(text.encode(errors="surrogateescape"))


def _library() -> Any:
    """The package datasets, silenced. Raises a UserError if it is missing."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "Datasets and arrow files need the extra 'data'. Install it: pip install '.[data]' in "
            "the folder of fp8stack, or pip install datasets."
        ) from None
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
