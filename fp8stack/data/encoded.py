"""Text that becomes tokens when a run begins, where there is little of it. No torch here."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fp8stack.data.corpus import Part
from fp8stack.data.documents import Separator
from fp8stack.data.parquet import END_OF_TEXT
from fp8stack.errors import UserError
from fp8stack.tokenizer import Tokenizer

MOST_BYTES = 128 * 2**20
"""Of text; it takes a core about a minute."""


def encoded(name: str, parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[Part, ...]:
    """Parts of text, uint8 [bytes], each of one file of the data called `name`, as tokens: uint16
    or uint32, with the end-of-text token after each document, as `fp8stack prepare` has them. A
    file is a document, or a row of a table. Raises a UserError if there is more text than is read
    at each start."""
    size = sum(map(len, parts))
    if size > MOST_BYTES:
        raise UserError(
            f"{name} has {size / 2**20:,.0f} MiB of text; at most {MOST_BYTES / 2**20:g} become "
            f"tokens when a run begins. Make them before: fp8stack prepare {name} --tokenizer "
            f"{tokenizer.name} --out tokens, and give --data tokens."
        )
    return tuple(_tokens_of(part, tokenizer) for part in parts)


def _tokens_of(part: Part, tokenizer: Tokenizer) -> Part:
    content = part.read(0, len(part)).tobytes()
    rows = [content] if part.documents is None else content.split(bytes([END_OF_TEXT]))
    ids = tokenizer.encode_batch([row.decode(errors="replace") for row in rows if row])
    end = tokenizer.end_of_text
    if end is not None:
        separator = np.array([end], dtype=np.uint32)
        ids = [piece for document in ids for piece in (document, separator)]
    documents = None if end is None else Separator(token=end)
    return replace(part, tokens=np.concatenate(ids).astype(tokenizer.dtype), documents=documents)
