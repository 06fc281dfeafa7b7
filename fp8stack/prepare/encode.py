"""Tokenizes the documents of blocks, in the processes that `datasets` starts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8stack.errors import UserError, quoted
from fp8stack.prepare.blocks import Block
from fp8stack.prepare.tables import kind_of, text_in
from fp8stack.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

KEPT = ("source", "offset", "state", "continues", "unfinished", "inside_a_word", "listing")
"""Columns of a block that its tokens keep."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Tokenizes blocks; without a tokenizer, only looks for problems."""

    tokenizer: Tokenizer | None
    text_key: str

    def __call__(self, block: Block) -> dict[str, Any]:
        """The row of a block: `tokens` of the tokenizer's type, each document but an unfinished one
        followed by the end-of-text token; `lengths` and `text_bytes` of each document, as int64;
        how many U+FFFD `replaced` invalid Unicode; the `problem`, if there is one."""
        texts, problem = list[tuple[str, int]](), block.problem
        try:
            texts = [] if problem else list(texts_of(block, self.text_key))
        except UserError as error:
            problem = str(error)
        tokens, counts = [np.empty(0, dtype=np.uint32)], list[int]()
        if self.tokenizer is not None and not problem:
            end = self.tokenizer.end_of_text
            ends = [np.array([] if end is None else [end], dtype=np.uint32)] * len(texts)
            if block.unfinished:
                ends[-1] = ends[-1][:0]
            ids = self.tokenizer.encode_batch([text for text, _ in texts])
            tokens += [piece for pair in zip(ids, ends, strict=True) for piece in pair]
            counts = [len(i) + len(e) for i, e in zip(ids, ends, strict=True)]
        dtype = np.uint32 if self.tokenizer is None else self.tokenizer.dtype
        return {key: getattr(block, key) for key in KEPT} | {
            "tokens": np.concatenate(tokens).astype(dtype).tobytes(),
            "lengths": np.array(counts, dtype=np.int64).tobytes(),
            "text_bytes": np.array([bytes_of(text) for text, _ in texts], np.int64).tobytes(),
            "replaced": sum(replaced for _, replaced in texts),
            "problem": problem,
        }


def bytes_of(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def texts_of(block: Block, text_key: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each document of a block, see `Block`, with the number of U+FFFD that
    replaced invalid Unicode. Raises a UserError if a line is no JSON object or has no text."""
    if block.kind == "lines":
        yield from _in_lines(block.content[0], block.path, block.first, text_key)
    else:
        yield from map(_decoded, block.content)


def _decoded(content: bytes) -> tuple[str, int]:
    """Bytes as text, with the number of U+FFFD that replaced invalid UTF-8."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def _in_lines(content: bytes, path: str, first: int, key: str) -> Iterator[tuple[str, int]]:
    """Yield the texts of JSON lines, numbered from `first`."""
    for number, line in enumerate(content.split(b"\n"), first):
        if not line.strip():
            continue
        where = f"{quoted(path)} line {number}"
        try:
            decoded, replaced = _decoded(line)
            row = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(
                f"{where} is not JSON ({reason}). Correct the line; the same command then "
                "continues."
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{where} is no object but a {kind_of(row)}. Give one object on each line, such as "
                f'{{"{quoted(key)}": "..."}}.'
            )
        if key not in row:
            keys = ", ".join(sorted(quoted(name) for name in list(row)[:20])) or "none"
            raise UserError(
                f"{where} has no {quoted(key)!r}. Its keys: {keys}. Name the one with the text by "
                "--text-key."
            )
        text, more = _without_surrogates(text_in(row[key], path, f"line {number}"))
        yield text, replaced + more


def _without_surrogates(text: str) -> tuple[str, int]:
    """A string without lone surrogates, which JSON can represent and UTF-8 cannot, and the number
    of U+FFFD in their place."""
    try:
        text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return paired, paired.count(REPLACEMENT) - text.count(REPLACEMENT)
    return text, 0
