"""GPT-2's tokenizer, by tiktoken. The only file that imports tiktoken."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import UserError, quoted, require
from fp8stack.data.tokenizer.base import Tokenizer
from fp8stack.data.tokenizer.byte_level import bpe_json, written

if TYPE_CHECKING:
    import tiktoken


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE, 50,257 ids, by an encoding of tiktoken's."""

    name = "gpt2"

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.vocabulary = encoding.n_vocab
        self.end_of_text = encoding.eot_token

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_batch`."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self._encode, texts))

    def _encode(self, text: str) -> npt.NDArray[np.uint32]:
        # No special token is disallowed and none allowed: all are ordinary text.
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:  # its pattern cannot match a million spaces
            reason = quoted(str(error).rstrip("."))
            raise UserError(
                f"tiktoken cannot encode the text that begins with {quoted(repr(text[:40]))}: "
                f"{reason}. Shorten its runs of white space, or give a tokenizer.json of gpt2."
            ) from error

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        ranks = self._ranks()
        vocabulary = {written(token): rank for token, rank in ranks.items()}
        merges = [(written(first), written(second)) for first, second in merges_of(ranks)]
        return bpe_json(vocabulary, merges, self._encoding.eot_token, words=True)

    def _ranks(self) -> dict[bytes, int]:
        tokens = self._encoding.token_byte_values()
        ranks = {token: self._encoding.encode_single_token(token) for token in tokens}
        return dict(sorted(ranks.items(), key=lambda pair: pair[1]))

    def _bytes_of_tokens(self) -> Sequence[bytes]:
        bytes_of_ids = [b""] * self.vocabulary
        for token, rank in self._ranks().items():
            bytes_of_ids[rank] = token
        return bytes_of_ids


def load_gpt2() -> Gpt2Tokenizer:
    """GPT-2's tokenizer, downloaded by tiktoken unless it has it already. Raises a UserError if
    tiktoken is missing or cannot download it."""
    require("tiktoken", "The tokenizer 'gpt2'")
    import tiktoken

    try:
        return Gpt2Tokenizer(tiktoken.get_encoding("gpt2"))
    except (OSError, ValueError) as error:
        reason = type(error).__name__
        raise UserError(
            f"tiktoken cannot download GPT-2's tokenizer ({reason}). Set TIKTOKEN_CACHE_DIR to a "
            "folder where another machine's tiktoken saved it, or give the path of a "
            "tokenizer.json."
        ) from error


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of more than one byte was made of, in the order of their ranks.

    tiktoken keeps the tokens alone. When a token was learned, its bytes had been joined by all
    earlier merges to two tokens: these are found by joining again. Raises a ValueError if a token
    cannot be made of two that come before it.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        if len(token) > 1:
            pieces = _joined(token, ranks, rank)
            if len(pieces) != 2:
                raise ValueError(
                    f"Token {token!r} is made of {len(pieces)} earlier ones, not of 2."
                )
            merges.append((pieces[0], pieces[1]))
    return merges


def _joined(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    """The bytes of `token`, joined by every merge whose rank is below `below`."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 1:
        pairs = [ranks.get(a + b, below) for a, b in itertools.pairwise(pieces)]
        least = min(pairs)
        if least >= below:
            break
        at = pairs.index(least)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces
