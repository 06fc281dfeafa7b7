"""Items become tokens. This runs in processes of its own: it must not know files or shards."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from fp8stack.errors import UserError, quoted
from fp8stack.prepare.read import Item
from fp8stack.tokenizer import Tokenizer

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of an item.

    Attributes:
        tokens: of all documents one after the other, each but an unfinished one with the
            end-of-text token: uint16 or uint32 [tokens].
        lengths: tokens of each document, int64 [documents].
        text_bytes: bytes of each as UTF-8, int64 [documents].
        replaced: how many U+FFFD took the place of what was not Unicode.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    lengths: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]
    replaced: int


def texts_of(item: Item, text_key: str) -> Iterator[tuple[str, int]]:
    """The text of each document, with how many U+FFFD took the place of what was not Unicode.

    Raises:
        UserError: a line is no JSON object, or there is no text in a line or a row.
    """
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
    """Bytes as text."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def _valid(text: str) -> tuple[str, int]:
    """A string without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    if text.isascii():
        return text, 0
    try:
        text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return paired, paired.count(REPLACEMENT) - text.count(REPLACEMENT)
    return text, 0


def _parsed_lines(item: Item, key: str) -> Iterator[tuple[int, object, int]]:
    """The number of each line that is not blank, what its object has under `key`, and how many
    U+FFFD took the place of what in the line was not UTF-8."""
    block = item.content[0]
    assert isinstance(block, bytes)
    if item.first == 1:
        block = block.removeprefix(BYTE_ORDER_MARK)
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
                f"{where} is not JSON ({reason}). Mend the line or take it out; the same command "
                "then goes on from there."
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{where} is no object but a {_named(row)}. Give one object on each line, such as "
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
            f"{quoted(path)} {place} has a {_named(value)} where text should be. Mend it or take "
            "it out, or name another field with --text-key."
        )
    return value


def _named(value: object) -> str:
    """What JSON calls it."""
    names = {dict: "object", list: "list", bool: "true or false", str: "string"}
    if value is None:
        return "null"
    return "number" if type(value) in (int, float) else names.get(type(value), type(value).__name__)


class Encoder:
    """What makes tokens of items.

    Args:
        tokenizer: has an end-of-text token.
        text_key: of JSON lines and tables.
    """

    def __init__(self, tokenizer: Tokenizer, text_key: str) -> None:
        self.tokenizer = tokenizer
        self.text_key = text_key
        self.dtype = dtype_of(tokenizer)

    def __call__(self, item: Item) -> Encoded:
        """The tokens of an item.

        Raises:
            UserError: see `texts_of`.
        """
        end_of_text = self.tokenizer.end_of_text
        assert end_of_text is not None
        found = list(texts_of(item, self.text_key))
        texts = [text for text, _ in found]
        end = np.array([end_of_text], dtype=np.uint32)
        parts = [end[:0]]
        lengths = np.zeros(len(texts), dtype=np.int64)
        for number, ids in enumerate(self.tokenizer.encode_batch(texts)):
            ended = not (item.unfinished and number == len(texts) - 1)
            if ended:
                parts += [ids, end]
                lengths[number] = len(ids) + 1
            else:
                parts.append(ids)
                lengths[number] = len(ids)
        return Encoded(
            tokens=np.concatenate(parts).astype(self.dtype),
            lengths=lengths,
            text_bytes=np.array([bytes_of(text) for text in texts], dtype=np.int64),
            replaced=sum(replaced for _, replaced in found),
        )


def bytes_of(text: str) -> int:
    """Of a text, as UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def dtype_of(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    """Little-endian, as wide as the vocabulary needs."""
    return np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")


# In a process of its own

_encoder: Encoder | None = None


def start_worker(tokenizer: Tokenizer, text_key: str) -> None:
    """Make this process ready for `encode`. It ends with the process that started it, however that
    ends, and leaves signals to it."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(tokenizer, text_key)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def encode(item: Item) -> Encoded:
    """See `Encoder`."""
    assert _encoder is not None, "start_worker was not called"
    return _encoder(item)
