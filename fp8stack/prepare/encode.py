"""Tokenizes items, in this process or in several, in order, with a bounded number in flight."""

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from fp8stack.errors import RankLost, UserError, quoted
from fp8stack.prepare.read import Item
from fp8stack.tokenizer import Tokenizer

WAITING_EACH = 2  # items in flight per process, so that none waits for the reader
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of an item's documents, uint16 or uint32 [tokens], concatenated, each document but
    an unfinished one followed by the end-of-text token."""

    tokens: npt.NDArray[np.unsignedinteger]
    lengths: npt.NDArray[np.int64]  # tokens of each document, [documents]
    text_bytes: npt.NDArray[np.int64]  # bytes of each as UTF-8, [documents]
    replaced: int  # U+FFFD that replaced invalid Unicode


def encode_all(
    items: Iterator[Item], tokenizer: Tokenizer, text_key: str, workers: int
) -> Generator[tuple[Item, Encoded], None, None]:
    """Yield each item with its tokens, in order, whatever the number of workers. Raises a UserError
    if an item cannot be read or tokenized, after yielding those before it, and a RankLost if a
    process died."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    if workers == 1:
        for item in items:
            yield item, encode(item, tokenizer, text_key)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # forking a process with threads may hang
        initializer=start_worker,
        initargs=(tokenizer, text_key),
    )
    try:
        yield from _in_order(pool, items, (WAITING_EACH + 1) * workers)
    except BrokenProcessPool:
        raise RankLost(
            "A process that tokenizes died; the system may have run out of memory. Progress is "
            "saved: the same command continues, with fewer --workers if necessary."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, items: Iterator[Item], window: int
) -> Generator[tuple[Item, Encoded], None, None]:
    """Yield the items with their tokens; at most `window` are in flight."""
    under_way = deque[tuple[Item, Future[Encoded]]]()
    failed: UserError | None = None
    more = True
    while more or under_way:
        while more and len(under_way) < window:
            try:
                item = next(items)
            except StopIteration:
                more = False
            except UserError as error:  # yield the items before it first
                failed, more = error, False
            else:
                with _without_interrupts():
                    under_way.append((item, pool.submit(encode_in_worker, item)))
        if under_way:
            item, future = under_way.popleft()
            yield item, future.result()
    if failed is not None:
        raise failed


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A context in which a process may be started: it does not receive Ctrl-C before it ignores
    it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_settings: tuple[Tokenizer, str] | None = None


def start_worker(tokenizer: Tokenizer, text_key: str) -> None:
    """Prepare this process for `encode_in_worker`. It exits when its parent does, however that
    ends, and ignores Ctrl-C."""
    global _settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _settings = tokenizer, text_key
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def encode_in_worker(item: Item) -> Encoded:
    """See `encode`."""
    assert _settings is not None, "start_worker was not called"
    return encode(item, *_settings)


def encode(item: Item, tokenizer: Tokenizer, text_key: str) -> Encoded:
    """Tokenize an item with a tokenizer that has an end-of-text token. Raises what `texts_of`
    does."""
    found = list(texts_of(item, text_key))
    texts = [text for text, _ in found]
    ids = tokenizer.encode_batch(texts)
    lengths = np.array([len(one) + 1 for one in ids], dtype=np.int64)
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    parts = [part for one in ids for part in (one, end)]
    if item.unfinished:
        parts.pop()
        lengths[-1] -= 1
    tokens = np.concatenate(parts) if parts else end[:0]
    return Encoded(
        tokens=tokens.astype(tokenizer.dtype),
        lengths=lengths,
        text_bytes=np.array([bytes_of(text) for text in texts], dtype=np.int64),
        replaced=sum(replaced for _, replaced in found),
    )


def bytes_of(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def texts_of(item: Item, text_key: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each document, with the number of U+FFFD that replaced invalid Unicode.
    Raises a UserError if a line is no JSON object, or if a line or row has no text."""
    if item.kind == "lines":
        for number, value, replaced in _parsed_lines(item, text_key):
            text, more = _valid(_text(value, item.path, f"line {number}"))
            yield text, replaced + more
    elif item.kind == "rows":
        for number, value in enumerate(item.content, item.first):
            yield _valid(_text(value, item.path, f"row {number}"))
    else:
        for content in item.content:
            assert isinstance(content, bytes)
            yield _decoded(content)


def _decoded(content: bytes) -> tuple[str, int]:
    """Bytes as text, with the number of U+FFFD that replaced invalid UTF-8."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def _valid(text: str) -> tuple[str, int]:
    """A string without lone surrogates, which JSON can represent and UTF-8 cannot."""
    if text.isascii():
        return text, 0
    try:
        text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return paired, paired.count(REPLACEMENT) - text.count(REPLACEMENT)
    return text, 0


def _parsed_lines(item: Item, key: str) -> Iterator[tuple[int, object, int]]:
    """The number of each line that is not blank, the value of its object under `key`, and the
    number of U+FFFD that replaced invalid UTF-8 in it."""
    block = item.content[0]
    assert isinstance(block, bytes)
    for number, line in enumerate(block.split(b"\n"), item.first):
        if not line.strip():
            continue
        where = f"{quoted(item.path)} line {number}"
        try:
            text, replaced = _decoded(line)
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(
                f"{where} is not JSON ({reason}). Correct or remove the line; the same command "
                "then continues from there."
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{where} is no object but a {_kind(row)}. Give one object on each line, such as "
                f'{{"{quoted(key)}": "..."}}.'
            )
        if key not in row:
            keys = ", ".join(sorted(quoted(name) for name in list(row)[:20])) or "none"
            raise UserError(
                f"{where} has no {quoted(key)!r}. Its keys: {keys}. Name the one with the text by "
                "--text-key."
            )
        yield number, row[key], replaced


def _text(value: object, path: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(
            f"{quoted(path)} {place} has a {_kind(value)} where text should be. Mend it or take "
            "it out, or name another field with --text-key."
        )
    return value


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {
        **{dict: "object", list: "list", str: "string", type(None): "null"},
        **{bool: "true or false", int: "number", float: "number"},
    }
    return names.get(type(value), type(value).__name__)
