"""Items to tokens in several processes, in order, with a bounded number under way."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker

from fp8stack.errors import RankLost, UserError
from fp8stack.prepare.encode import Encoded, Encoder, encode, start_worker
from fp8stack.prepare.read import Item
from fp8stack.tokenizer import Tokenizer

WAITING_EACH = 2
"""Items under way for each process, so that none waits for the reader."""


def encoded(
    items: Iterator[Item], tokenizer: Tokenizer, text_key: str, workers: int
) -> Generator[tuple[Item, Encoded], None, None]:
    """Each item with its tokens, in the order of the items, whatever the number of workers.

    Raises:
        UserError: an item cannot be read or tokenized; all before it were given.
        RankLost: a process died.
    """
    if workers == 1:
        with _one_thread():
            encoder = Encoder(tokenizer, text_key)
            for item in items:
                yield item, encoder(item)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # forks of threads may hang
        initializer=start_worker,
        initargs=(tokenizer, text_key),
    )
    try:
        yield from _in_order(pool, items, (WAITING_EACH + 1) * workers)
    except BrokenProcessPool:
        raise RankLost(
            "A process that tokenizes died; the system may have run out of memory. What is done "
            "is kept: the same command goes on with it, with fewer --workers if need be."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, items: Iterator[Item], window: int
) -> Generator[tuple[Item, Encoded], None, None]:
    """The items with their tokens; at most `window` are under way."""
    under_way = deque[tuple[Item, Future[Encoded]]]()
    failed: UserError | None = None
    while True:
        while failed is None and len(under_way) < window:
            try:
                item = next(items, None)
            except UserError as error:  # what was read before it still counts
                failed = error
                break
            if item is None:
                break
            with _unheard():
                under_way.append((item, pool.submit(encode, item)))
        if not under_way:
            break
        item, future = under_way.popleft()
        yield item, future.result()
    if failed is not None:
        raise failed


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within, the `tokenizers` library takes one core."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _unheard() -> Iterator[None]:
    """Within, a process may be started: Ctrl-C does not reach it before it ignores that itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its own start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
