"""The interface of tokenizers, and decoders of text that comes token by token. No torch here."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

END_OF_TEXT = "<|endoftext|>"


class TokenizerIdentity(BaseModel, frozen=True, extra="forbid", strict=True):
    """A tokenizer as a run records it, to be recognized without its file."""

    name: str
    sha256: str
    ids_sha256: str

    def is_alike(self, identity: TokenizerIdentity) -> bool:
        """Whether ids stand for the same texts in both; the rest of their files may differ."""
        return self.sha256 == identity.sha256 or self.ids_sha256 == identity.ids_sha256


class Decoder(Protocol):
    """Text that comes token by token, in whole characters."""

    def step(self, token: int) -> str:
        """The characters that this token completes; "" if it completes none."""
        ...

    def finish(self) -> str:
        """The rest of a character that was cut, as U+FFFD; "" if none was."""
        ...


class Tokenizer(ABC):
    """Text as ids, and back. What looks like a special token in a text is encoded as the ordinary
    text that it is."""

    name: str  # "bytes", "gpt2", or the name of the file that it was read from
    vocabulary: int  # the number of ids: every id is below it, though not each need be in use
    end_of_text: int | None  # the id that stands between documents; None if there is none
    leaves_out: bool = False  # whether characters without a token are left out

    @property
    def end_token(self) -> str | None:
        """The token with the id `end_of_text`, as files call it."""
        return END_OF_TEXT

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of ids in a file: little-endian, as wide as the vocabulary needs."""
        return np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text, uint32 [tokens], with no special tokens added."""

    @abstractmethod
    def to_json(self) -> str:
        """A `tokenizer.json` that the `tokenizers` library loads and that encodes alike."""

    @abstractmethod
    def _bytes_of_tokens(self) -> Sequence[bytes] | None:
        """The bytes that each id stands for, b"" for a special token or an id that is not in use;
        None if they depend on the ids around."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no special tokens added."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def begin(self, text: str) -> list[int]:
        """The ids that a model continues: the ids of a text, or the end of a document if there is
        no text. [] if the tokenizer has no such id."""
        return self.encode(text) or ([] if self.end_of_text is None else [self.end_of_text])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids. Special tokens and ids outside the vocabulary are left out; bytes
        that are not UTF-8 become U+FFFD."""
        token_bytes = self._token_bytes
        assert token_bytes is not None, "a tokenizer without bytes for its tokens decodes by itself"
        inside = (token_bytes[token] for token in tokens if 0 <= token < len(token_bytes))
        return b"".join(inside).decode(errors="replace")

    def stream(self) -> Decoder:
        """A decoder for ids that come one by one."""
        token_bytes = self._token_bytes
        return _TextStream(self) if token_bytes is None else _ByteStream(token_bytes)

    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """The number of bytes of UTF-8 for each id, int64 [vocabulary], 0 for special tokens; None
        if that depends on the ids around."""
        if self._token_bytes is None:
            return None
        return np.array([len(token) for token in self._token_bytes], dtype=np.int64)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of `to_json()` in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def ids_sha256(self) -> str:
        """The SHA-256 of what its ids stand for, whatever else is in its file, in hexadecimal."""
        content = json.loads(self.to_json())
        vocabulary = content["model"].get("vocab")
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        if isinstance(vocabulary, dict):
            vocabulary |= added
        elif added:
            vocabulary = [vocabulary, added]
        return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> TokenizerIdentity:
        """The identity that a run records."""
        return TokenizerIdentity(name=self.name, sha256=self.sha256, ids_sha256=self.ids_sha256)

    @cached_property
    def _token_bytes(self) -> Sequence[bytes] | None:
        return self._bytes_of_tokens()


class _ByteStream(Decoder):
    """Decodes ids that stand for bytes, whatever is around them."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token: int) -> str:
        inside = 0 <= token < len(self._bytes)
        return self._decoder.decode(self._bytes[token] if inside else b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TextStream(Decoder):
    """Decodes ids of any other tokenizer: the ids since the last complete character, and the ids
    that gave the last characters, because these may decide about a space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._decoded = 0  # the number of ids whose text was returned

    def step(self, token: int) -> str:
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[: self._decoded])
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._ids, self._decoded = self._ids[self._decoded :], len(self._ids) - self._decoded
        return text[len(before) :]

    def finish(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._decoded])
        return self._tokenizer.decode(self._ids)[len(before) :]
