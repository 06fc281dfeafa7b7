"""Documents of sources, a generator for each format. The only file that imports datasets: it reads
arrow files, saved datasets and datasets of the Hub, but would change documents of other formats,
since it types columns of JSON and shifts fields of CSV."""

import csv
import glob
import itertools
import json
import logging
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from fp8stack.common.errors import UserError, quoted, unknown
from fp8stack.common.io import storage_errors
from fp8stack.data.files import is_saved
from fp8stack.data.parquet import is_text, open_parquet, read_column, values_of
from fp8stack.data.prepare.inputs import Source
from fp8stack.data.prepare.streams import PACKED, ByteStream, unpacked_suffix
from fp8stack.data.tokenizer import Tokenizer

LONGEST_LINE = 2**29
LONGEST_WORD = 2**24
LONGEST_UNCUT = 2**28  # bytes of a text that has to be tokenized in one piece
ROWS_AT_ONCE = 64
REPLACEMENT = "\ufffd"
REMEDY = "Download or correct it; the same command then continues."
_LONGEST_CHARACTER = 4  # bytes in UTF-8
PROBES = (
    "Hello world, it's 12 o'clock; isn't  it?\tYes... 3.14 (x) [y] {z}\nnext line\n\n  indented",
    "def f(x):\n    return x+1 # a comment\n\n\tprint( f( 2 ) )\r\n",
    "lines\nwithout\nspaces\r\nあ\nж",
    "Grüße aus Köln, où ça? naïve Привет мир 你好 世界 ελληνικά\u3000wide \u00a0 hard 😀 face",
)


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    on_disk: int = 0  # bytes of the file (packed) read so far, if known
    replaced: int = 0  # number of U+FFFD that replaced invalid Unicode
    state: str = ""  # where a stream of `datasets` continues, as JSON
    unfinished: bool = False  # whether the next piece continues the document
    inside_a_word: bool = False  # whether it was cut where tokens may change


Texts = Generator[Text, None, None]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads sources; `text_key` is the field or column of the text."""

    text_key: str
    cut_texts: bool = True  # whether long texts may be cut into pieces
    size: int  # bytes of a piece
    scratch: Path  # folder for unpacked tables

    def read(self, source: Source, skip: int = 0, state: str = "") -> Texts:
        """Yield the documents of a source after its first `skip`, where `state` says where a
        stream of `datasets` continues. Raises a UserError if the source cannot be read."""
        if source.kind in ("arrow", "hf"):
            return self._dataset(source, skip, state)
        readers = {"text": self._text, "lines": self._lines, "json": self._array}
        return readers.get(source.kind, self._table)(source, skip)

    def _text(self, source: Source, skip: int) -> Texts:
        with ByteStream(Path(source.path)) as stream:
            pieces = _pieces(stream, source.path, self.size, self.cut_texts)
            for content, is_last, inside_a_word in itertools.islice(pieces, skip, None):
                text, replaced = _decoded(content)
                yield Text(text, stream.on_disk, replaced, "", not is_last, inside_a_word)

    def _lines(self, source: Source, skip: int) -> Texts:
        with ByteStream(Path(source.path)) as stream:
            lines = enumerate(iter(partial(stream.readline, LONGEST_LINE + 1), b""), 1)
            filled = ((number, line) for number, line in lines if line.strip())
            for number, line in itertools.islice(filled, skip, None):
                if len(line) > LONGEST_LINE:
                    raise UserError(
                        f"{quoted(source.path)} has a line of more than {LONGEST_LINE:,} bytes. "
                        "Give JSON lines: one object for each document, on a line of its own."
                    )
                content, replaced = _decoded(line)
                where = f"{quoted(source.path)} line {number}"
                text, more = self._field(_parsed(content, where), where)
                yield Text(text, stream.on_disk, replaced + more)

    def _array(self, source: Source, skip: int) -> Texts:
        name = quoted(source.path)
        with ByteStream(Path(source.path)) as stream:
            content, replaced = _decoded(stream.read())
            rows = _parsed(content, name)
        for number, row in enumerate(rows[skip:], skip + 1):
            text, more = self._field(row, f"{name} row {number}")
            yield Text(text, source.size, more + (replaced if number == 1 else 0))

    def _field(self, row: Any, where: str) -> tuple[str, int]:
        """The text of a JSON object, with the number of U+FFFD that replaced lone surrogates, which
        JSON can represent and UTF-8 cannot."""
        key = self.text_key
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

    def _table(self, source: Source, skip: int) -> Texts:
        """The rows of CSV, TSV or parquet."""
        rows = self._csv(source, skip) if source.kind == "csv" else self._parquet(source, skip)
        for number, (text, on_disk) in enumerate(rows, skip + 1):
            decoded, replaced = _cell(text, f"{quoted(source.path)} row {number}")
            yield Text(decoded, on_disk, replaced)

    def _csv(self, source: Source, skip: int) -> Iterator[tuple[object, int]]:
        csv.field_size_limit(LONGEST_LINE)
        with ByteStream(Path(source.path)) as stream:
            text = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
            separator = "\t" if unpacked_suffix(Path(source.path)) == ".tsv" else ","
            table = csv.reader(text, delimiter=separator, strict=True)
            try:
                header = next(filter(None, table), [])
                self._require_column(source, header)
                column = header.index(self.text_key)
                for row in itertools.islice(filter(None, table), skip, None):
                    if len(row) != len(header):
                        raise csv.Error(f"a row has {len(row)} fields, the header {len(header)}")
                    yield row[column], stream.on_disk
            except csv.Error as error:
                raise UserError(
                    f"{quoted(source.path)} is not CSV up to line {table.line_num} ({error}). Put "
                    "quotes around texts with separators, or give JSON lines."
                ) from error

    def _parquet(self, source: Source, skip: int) -> Iterator[tuple[object, int]]:
        with open_parquet(self._unpacked(source), REMEDY) as file:
            self._require_column(source, file.schema_arrow.names, file.schema_arrow)
            number, total = skip, file.metadata.num_rows
            for array in read_column(file, self.text_key, skip, ROWS_AT_ONCE):
                number += len(array)
                on_disk = source.size * number // total
                yield from ((text, on_disk) for text in values_of(array))

    def _dataset(self, source: Source, skip: int, state: str) -> Texts:
        """The rows of a dataset. A state is the number of rows before a batch, and the state of the
        stream there."""
        datasets = _library()
        torch, datasets.config.TORCH_AVAILABLE = datasets.config.TORCH_AVAILABLE, False  # slow
        try:
            if source.kind == "hf":
                stream = _open_dataset(datasets, source.path)
            else:
                files = {"train": glob.escape(str(self._unpacked(source)))}
                stream = datasets.load_dataset(
                    source.kind, data_files=files, split="train", streaming=True,
                    cache_dir=str(self.scratch),
                )  # fmt: skip
            stream = stream.with_format("arrow")
            number, before = json.loads(state) if state else (0, stream.state_dict())
            stream.load_state_dict(before)
            with closing(stream.iter(ROWS_AT_ONCE)) as tables:
                for table in tables:
                    self._require_column(source, table.schema.names, table.schema)
                    state = json.dumps([number, before])
                    for value in values_of(table[self.text_key]):
                        number += 1
                        if number > skip:
                            where = f"{quoted(source.path)} row {number}"
                            text, replaced = _cell(value, where)
                            yield Text(text, replaced=replaced, state=state)
                    before = stream.state_dict()
        except UserError:
            raise
        except Exception as error:  # any error of the network, the Hub or a file format
            reason = quoted(" ".join(str(error).split()) or repr(error)).rstrip(".")
            is_hub = source.path.startswith("hf:")
            remedy = f"Check its name and the network{REMEDY[REMEDY.index(';') :]}"
            raise UserError(
                f"Cannot read {quoted(source.path)}: {reason}. {remedy if is_hub else REMEDY}"
            ) from error
        finally:
            datasets.config.TORCH_AVAILABLE = torch

    def _unpacked(self, source: Source) -> Path:
        """The file of a table; one in `scratch` if it was packed."""
        path, plain = Path(source.path), self.scratch / f"table.{source.kind}"
        if path.suffix.lower() not in PACKED:
            return path
        with ByteStream(path) as stream, storage_errors(plain):
            self.scratch.mkdir(parents=True, exist_ok=True)
            with plain.open("wb") as file:
                shutil.copyfileobj(stream, file, 2**20)
        return plain

    def _require_column(self, source: Source, names: Sequence[str], schema: Any = None) -> None:
        """Raise a UserError unless there is a column of text."""
        key, path = self.text_key, quoted(source.path)
        if key not in names:
            raise UserError(f"{path}: {unknown('column', key, names)} Name one by --text-key.")
        if schema is not None:
            kind = schema.field(key).type
            if not is_text(kind) and str(kind) != "null":
                raise UserError(
                    f"The column {quoted(key)!r} of {path} holds {quoted(str(kind))}, not text. "
                    "Name another by --text-key."
                )


def _text_in(value: object, where: str) -> str:
    """A value that is text. Raises a UserError if it is none."""
    if not isinstance(value, str):
        raise UserError(
            f"{where} has a {_kind_of(value)} where text should be. Correct it, or name another "
            "field with --text-key."
        )
    return value


def _cell(value: object, where: str) -> tuple[str, int]:
    """The text in a cell of a table, with the number of U+FFFD that replaced invalid UTF-8. Raises
    a UserError if it holds no text."""
    if isinstance(value, bytes):
        return _decoded(value)
    return _decoded(_text_in(value, where).encode(errors="surrogateescape"))


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


def _library() -> Any:
    """The package datasets, silenced. Raises a UserError if it is missing."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "Datasets and arrow files need the extra 'data'. Install it: pip install '.[data]' in "
            "the folder of fp8stack, or pip install datasets zstandard tiktoken."
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
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(
                f"{quoted(path)}: {unknown('split', split, list(saved))} Give hf:FOLDER@SPLIT."
            )
        saved = saved[split]
    elif "@" in path and split not in ("train", str(saved.split)):
        raise UserError(
            f"{quoted(path)}: the folder holds a single dataset, without splits. Leave out "
            f"@{quoted(split)}."
        )
    return saved.to_iterable_dataset()


def _pieces(
    stream: ByteStream, path: str, size: int, cut_texts: bool
) -> Iterator[tuple[bytes, bool, bool]]:
    """Yield the bytes of a text in pieces, each with whether it is the last, and whether it was
    cut at a place where tokens may change.

    A piece has at most `size` bytes, or up to 16 MiB if there is no earlier place to cut (see
    `cut_of`), where it is cut anywhere. Raises a UserError if a text that must not be cut is longer
    than 256 MiB. A stream without any bytes has no piece.
    """
    longest = LONGEST_WORD if cut_texts else LONGEST_UNCUT
    piece, want, is_last = stream.read(size + 1), size, False
    while piece and not is_last:
        piece += stream.read(max(0, want + 1 - len(piece)))
        is_last = len(piece) <= want
        at = len(piece) if is_last else cut_of(piece[:want]) if cut_texts else 0
        if at == 0 and want < longest:
            want = min(2 * want, longest)
            continue
        if at == 0 and not cut_texts:
            raise UserError(
                f"{quoted(path)} is longer than {longest:,} bytes, and with this tokenizer "
                "a text has to be tokenized in one piece. Split it into documents, such as the "
                "lines of a .jsonl file."
            )
        inside_a_word = at == 0
        at = at or _cut_anywhere(piece[:want])
        yield piece[:at], is_last, inside_a_word
        piece, want = piece[at:], size


def cut_of(content: bytes) -> int:
    """The number of bytes of UTF-8 before the last place where a text may be cut; 0 if there is
    none. That place is before a space that follows a character other than white space, since no
    pattern that splits words like GPT-2's combines the two. If there is none, it is before a
    newline after a letter."""
    for mark in (b" ", b"\n"):
        at = content.rfind(mark)
        while at > 0:
            before = content[max(0, at - _LONGEST_CHARACTER) : at].decode(errors="replace")[-1]
            if before.isalpha() or (mark == b" " and not before.isspace()):
                return at
            at = content.rfind(mark, 0, at)
    return 0


def _cut_anywhere(content: bytes) -> int:
    """The number of bytes up to the end of the last complete UTF-8 character."""
    at = len(content) - 1
    while at > max(0, len(content) - _LONGEST_CHARACTER) and content[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 1)


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether cutting texts at `cut_of` keeps the tokens of this tokenizer, tried on some examples.
    It does not if the tokenizer puts a space before every text, for example."""
    for text in PROBES:
        content, tokens = text.encode(), list[int]()
        while content:  # from its end
            at = cut_of(content)
            tokens = tokenizer.encode(content[at:].decode()) + tokens
            content = content[:at]
        if tokens != tokenizer.encode(text):
            return False
    return True
