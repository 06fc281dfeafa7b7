"""Rows of tables, and `map` over blocks in several processes. The only file that imports
datasets."""

import csv
import itertools
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fp8stack.data.parquet import is_text, open_parquet, read_column
from fp8stack.errors import RankLost, UserError, quoted, unknown
from fp8stack.io import storage_errors, sync_folder
from fp8stack.prepare.inputs import Source, is_saved
from fp8stack.prepare.streams import PACKED, ByteStream

ROWS_AT_ONCE = 64
LONGEST_FIELD = 2**29  # of CSV


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Values of at least one row."""

    values: list[object]
    share: float = 0.0  # of the table, read so far, if known
    state: str = ""  # where a stream of `datasets` continues, as JSON


def library() -> Any:
    """The package datasets, silenced. Raises a UserError if it is missing."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "fp8stack prepare needs the extra 'data'. Install it: pip install '.[data]' in the "
            "folder of fp8stack, or pip install datasets zstandard tiktoken."
        ) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL + 1)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    return datasets


def read(source: Source, key: str, rows: int, state: str, scratch: Path) -> Iterator[Rows]:
    """Yield the column `key` of a table after its first `rows`, where `state` is where it
    continues, unless that is "". Files are unpacked in `scratch`. Raises a UserError if the table
    cannot be read or has no such column."""
    readers = {"parquet": _read_parquet, "csv": _read_csv}
    return readers.get(source.kind, _read_stream)(source, key, rows, state, scratch)


def _read_parquet(source: Source, key: str, rows: int, state: str, scratch: Path) -> Iterator[Rows]:
    """Rows of a parquet file; `datasets` would hold a row group as a whole."""
    remedy = "Download it again; the same command then continues."
    with open_parquet(_unpacked(source, scratch), remedy) as file:
        _require_text(source.path, key, file.schema_arrow)
        for array in read_column(file, key, rows, ROWS_AT_ONCE):
            rows += len(array)
            if len(array):
                yield Rows(values=array.to_pylist(), share=rows / file.metadata.num_rows)


def _read_csv(source: Source, key: str, rows: int, state: str, scratch: Path) -> Iterator[Rows]:
    """Rows of CSV or TSV; `datasets` would drop or shift fields where a row has too many."""
    path, separator = quoted(source.path), "\t" if ".tsv" in source.path.lower() else ","
    csv.field_size_limit(LONGEST_FIELD)
    with _unpacked(source, scratch).open(encoding="utf-8", errors="replace", newline="") as file:
        table = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = next(table, [])
            _require_column(source.path, key, header)
            at = header.index(key)
            filled = itertools.islice(filter(None, table), rows, None)
            while batch := list(itertools.islice(filled, ROWS_AT_ONCE)):
                if wrong := next((row for row in batch if len(row) != len(header)), None):
                    raise csv.Error(f"a row has {len(wrong)} fields, and the header {len(header)}")
                yield Rows(values=[row[at] for row in batch])
        except csv.Error as error:
            raise UserError(
                f"{path} is not CSV up to line {table.line_num} ({error}). Put quotes around texts "
                "with separators, or give JSON lines."
            ) from error


def _read_stream(source: Source, key: str, rows: int, state: str, scratch: Path) -> Iterator[Rows]:
    """Rows of any other table."""
    datasets = library()
    torch, datasets.config.TORCH_AVAILABLE = datasets.config.TORCH_AVAILABLE, False  # no import
    try:
        stream = _open(datasets, source, key, scratch).with_format("arrow")
        if state:
            stream.load_state_dict(json.loads(state))
        with closing(stream.iter(ROWS_AT_ONCE)) as tables:
            for table in tables:
                _require_text(source.path, key, table.schema)
                yield Rows(values=table[key].to_pylist(), state=json.dumps(stream.state_dict()))
    except UserError:
        raise
    except Exception as error:  # any error of the network, the Hub or a file format
        why = quoted(" ".join(str(error).split()) or repr(error)).rstrip(".")
        remedy = "Check its name and the network" if source.path.startswith("hf:") else "Correct it"
        raise UserError(
            f"Cannot read {quoted(source.path)}: {why}. {remedy}; the same command then continues."
        ) from error
    finally:
        datasets.config.TORCH_AVAILABLE = torch


def _require_column(path: str, key: str, names: Sequence[str]) -> None:
    if key not in names:
        raise UserError(f"{quoted(path)}: {unknown('column', key, names)} Name one by --text-key.")


def _require_text(path: str, key: str, schema: Any) -> None:
    """Raise a UserError unless `key` is a column of text."""
    _require_column(path, key, schema.names)
    kind = schema.field(key).type
    if not is_text(kind) and str(kind) != "null":
        raise UserError(
            f"The column {quoted(key)!r} of {quoted(path)} holds {quoted(str(kind))}, not text. "
            "Name another by --text-key."
        )


def _unpacked(source: Source, scratch: Path) -> Path:
    """The file of a table, or its plain content in `scratch`."""
    path = Path(source.path)
    if source.kind in ("parquet", "arrow") and path.suffix.lower() not in PACKED:
        return path
    plain = scratch / f"table.{source.kind}"
    with closing(ByteStream(path)) as stream, storage_errors(plain):
        scratch.mkdir(parents=True, exist_ok=True)
        with plain.open("wb") as file:
            while chunk := stream.read(2**20):
                file.write(chunk)
    return plain


def _open(datasets: Any, source: Source, key: str, scratch: Path) -> Any:
    """The stream of a table other than parquet."""
    if source.kind == "hf":
        return _open_dataset(datasets, source.path)
    plain, link = _unpacked(source, scratch), scratch / "table"
    scratch.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(plain.resolve())  # the path itself would be taken for a pattern
    files = {"data_files": {"train": [str(link)]}, "cache_dir": str(scratch)}
    return datasets.load_dataset(source.kind, split="train", streaming=True, **files)


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


def text_in(value: object, path: str, place: str) -> str:
    """A value that is text. Raises a UserError if it is none."""
    if not isinstance(value, str):
        raise UserError(
            f"{quoted(path)} {place} has a {kind_of(value)} where text should be. Correct it, or "
            "name another field with --text-key."
        )
    return value


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {
        **{dict: "object", list: "list", str: "string", type(None): "null"},
        **{bool: "true or false", int: "number", float: "number"},
    }
    return names.get(type(value), type(value).__name__)


ROW = {  # columns of the rows that `encode` writes
    **dict.fromkeys(("source", "offset", "replaced"), "int64"),
    **dict.fromkeys(("state", "listing", "problem"), "string"),
    **dict.fromkeys(("continues", "unfinished", "inside_a_word"), "bool"),
    **dict.fromkeys(("tokens", "lengths", "text_bytes"), "large_binary"),
}

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_parent = 0  # the process that maps; 0 while none does
_is_forking = False
_work: tuple[Callable[[Any], dict[str, Any]], Sequence[Any]] | None = None  # its children inherit


def _encode_one(indices: Sequence[int]) -> dict[str, list[Any]]:
    assert _work is not None
    encoder, blocks = _work
    return {key: [value] for key, value in encoder(blocks[indices[0]]).items()}


def encode(
    blocks: Sequence[Any], encoder: Callable[[Any], dict[str, Any]], folder: Path, workers: int
) -> None:
    """Write the rows that `encoder` makes of blocks to the new `folder`, which appears when all
    are done.

    Raises:
        RankLost: a process died.
        StorageError: the disk is full or cannot be written.
    """
    global _work
    datasets, unfinished = library(), folder.with_suffix(".part")
    features = datasets.Features({name: datasets.Value(kind) for name, kind in ROW.items()})
    _work = encoder, blocks
    try:
        with storage_errors(folder), _children(workers):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            datasets.Dataset.from_dict({"block": range(len(blocks))}).map(
                _encode_one,
                batched=True,
                batch_size=1,
                writer_batch_size=4,
                input_columns="block",
                remove_columns="block",
                features=features,
                num_proc=workers if workers > 1 else None,
                cache_file_name=str(unfinished / "rows.arrow"),
                new_fingerprint="encoded",
            )
            for file in unfinished.iterdir():
                with file.open("rb+") as written:
                    os.fsync(written.fileno())
            unfinished.rename(folder)
            sync_folder(folder.parent)
    except Exception as error:
        cause: BaseException | None = error
        while isinstance(cause, Exception):  # `map` hides a request to stop behind an error of its
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        if "abruptly died" not in str(error):
            raise
        raise RankLost(
            "A process that tokenizes died; the system may have run out of memory. Progress is "
            "saved: the same command continues, with fewer --workers if necessary."
        ) from None
    finally:
        _work = None


def encoded(folder: Path, columns: Sequence[str] = tuple(ROW)) -> Iterator[dict[str, Any]]:
    """Yield the rows that `encode` wrote to a folder, with some of their columns."""
    for file in sorted(folder.iterdir()):
        yield from library().Dataset.from_file(str(file)).select_columns(list(columns))


def last_row(folder: Path) -> dict[str, Any]:
    """The last of the rows that `encode` wrote to a folder."""
    row: dict[str, Any] = library().Dataset.from_file(str(max(folder.iterdir())))[-1]
    return row


@contextmanager
def _children(workers: int) -> Iterator[None]:
    """A context in which processes are forked that end with it, or with this process. Signals that
    arrive during a fork are handled after it: what a handler raises there would be lost."""
    global _parent
    import multiprocess  # what `map` starts them by

    method, config = multiprocess.get_start_method(), multiprocess.current_process()._config
    multiprocess.set_start_method("fork" if workers > 1 else method, force=True)  # for `_work`
    config["tempdir"] = _folder_for_sockets()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {n: h for n in SIGNALS if is_main and (h := signal.getsignal(n)) is not None}

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_forking:
            threading.Timer(0.02, os.kill, (os.getpid(), number)).start()
        elif callable(handler := handlers[signal.Signals(number)]):
            handler(number, frame)

    for number in (number for number, handler in handlers.items() if callable(handler)):
        signal.signal(number, handle)
    _parent = os.getpid()
    try:
        yield
    finally:
        for child in multiprocess.active_children():
            child.terminate()
            child.join()
        _parent = 0
        for number, handler in handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(config.pop("tempdir"), ignore_errors=True)
        multiprocess.set_start_method(method, force=True)


def _folder_for_sockets() -> str:
    """A new temporary folder in which sockets can have a path: of at most 107 bytes on Linux."""
    name_bytes = len("/fp8stack-xxxxxxxx/listener-xxxxxxxx")
    fits = len(os.fsencode(tempfile.gettempdir())) + name_bytes < 100
    return tempfile.mkdtemp(prefix="fp8stack-", dir=None if fits else "/tmp")


def _fork(begins: bool) -> None:
    global _is_forking
    _is_forking = begins


def _begin_child() -> None:
    """Let a child ignore Ctrl-C, which its parent answers, and end with its parent."""
    if _parent:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(_parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    import multiprocess

    while os.getppid() == parent:
        time.sleep(0.2)
    shutil.rmtree(multiprocess.current_process()._config["tempdir"], ignore_errors=True)
    os._exit(1)


os.register_at_fork(
    before=partial(_fork, True), after_in_parent=partial(_fork, False), after_in_child=_begin_child
)
