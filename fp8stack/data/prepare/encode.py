"""Tokenizes blocks of documents, in several processes."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import RankLost
from fp8stack.data.prepare.readers import Text
from fp8stack.data.tokenizer import Tokenizer

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in the sources, from which reading can continue."""

    source: int = 0
    texts: int = 0  # number of `Text`s that were read of the source
    state: str = ""  # see `Text`


@dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Documents and pieces, and the place after them."""

    texts: Sequence[Text]
    place: Place
    on_disk: int  # bytes of all files (packed) read so far


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokens of a block."""

    tokens: npt.NDArray[Any]  # of all its texts: [tokens], in the tokenizer's type
    lengths: npt.NDArray[np.int64]  # tokens of each text: [texts]
    text_bytes: npt.NDArray[np.int64]  # bytes of each text in UTF-8: [texts]


def encode(tokenizer: Tokenizer, texts: Sequence[Text]) -> Encoded:
    """Tokenize texts, with the end-of-text token after each document."""
    end = tokenizer.end_of_text
    ids = tokenizer.encode_batch([text.text for text in texts])
    after = np.array([] if end is None else [end], dtype=np.uint32)
    with_ends = [
        piece
        for tokens, text in zip(ids, texts, strict=True)
        for piece in (tokens, after[: 0 if text.unfinished else 1])
    ]
    lengths = np.array([len(piece) for piece in with_ends], dtype=np.int64)
    return Encoded(
        tokens=np.concatenate(with_ends).astype(tokenizer.dtype),
        lengths=lengths.reshape(-1, 2).sum(axis=1),
        text_bytes=np.array([bytes_of(text.text) for text in texts], dtype=np.int64),
    )


def bytes_of(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def encode_blocks(
    tokenizer: Tokenizer, blocks: Iterable[TextBlock], workers: int
) -> Generator[tuple[TextBlock, Encoded], None, None]:
    """Yield blocks with their tokens, in order, from `workers` processes, which end with this
    generator or this process. Raises a RankLost if a worker dies."""
    if workers == 1:
        for block in blocks:
            yield block, encode(tokenizer, block.texts)
        return
    context = multiprocessing.get_context("fork")  # which starts at once
    pool = ProcessPoolExecutor(workers, context, _begin, (tokenizer,))
    waiting: deque[tuple[TextBlock, Future[Encoded]]] = deque()
    try:
        with _signals_afterwards():
            pool.submit(int)  # starts all processes
        for block in blocks:
            waiting.append((block, pool.submit(_encode, block.texts)))
            if len(waiting) > 2 * workers:
                block, encoded = waiting.popleft()
                yield block, encoded.result()
        while waiting:
            block, encoded = waiting.popleft()
            yield block, encoded.result()
    except BrokenProcessPool:
        raise RankLost(
            "A process that tokenizes died; the system may have run out of memory. Progress is "
            "saved: the same command continues, with fewer --workers if necessary."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)  # waits a second for blocks in progress


@contextmanager
def _signals_afterwards() -> Iterator[None]:
    """A context in which signals wait for its end. In a fork, an exception of a handler would be
    lost, and later leave processes that nobody ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = list[int]()
    handlers = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in _heeded()
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived_number in arrived:
            signal.raise_signal(arrived_number)


def _heeded() -> list[signal.Signals]:
    """The signals that this process does not ignore, as nohup makes it ignore SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


_tokenizer: Tokenizer | None = None  # of a process that tokenizes


def _begin(tokenizer: Tokenizer) -> None:
    """Prepare a process: it ignores Ctrl-C, which its parent answers, and ends with its parent."""
    global _tokenizer
    _tokenizer = tokenizer
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: Sequence[Text]) -> Encoded:
    assert _tokenizer is not None
    return encode(_tokenizer, texts)
