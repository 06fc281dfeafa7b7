"""Any `tokenizer.json`, by the `tokenizers` library."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import parse_json
from fp8stack.data.tokenizer.base import END_OF_TEXT, Tokenizer
from fp8stack.data.tokenizer.byte_level import BYTE_OF_CHARACTER

if TYPE_CHECKING:
    import tokenizers

ENDS_OF_TEXT = (
    *(END_OF_TEXT, "<|end_of_text|>", "<|endofdocument|>", "<|eos|>", "<eos>", "</s>"),
    *("[EOS]", "<eod>", "<|eod|>", "<EOS>", "[SEP]"),
)
"""Special tokens that end a document, as files call them: of several, the first one here counts."""
MOST_IDS = 2**24

_stderr = threading.Lock()  # held while stderr is redirected


class FileTokenizer(Tokenizer):
    """The contents of a `tokenizer.json`. Truncation and padding that it may ask for are left out.
    `end_of_text` is the token that ends a document; if it is None, or not in the vocabulary, it is
    a special token of a usual name. Raises a UserError if it is none, or has ids beyond 16
    million."""

    def __init__(self, text: str, name: str, end_of_text: str | None = None) -> None:
        self.name = name
        self._tokenizer, self._content = _parsed(text, name)
        # The file's own text, unless it would make others cut or pad what they encode.
        unlimited = {"truncation": None, "padding": None}
        if any(self._content.get(key) is not None for key in unlimited):
            text = json.dumps(self._content | unlimited, ensure_ascii=False, indent=2)
        self._text = text
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=-1) + 1
        if not 0 < self.vocabulary <= MOST_IDS:
            raise UserError(
                f"The ids of tokenizer {quoted(name)} go up to {self.vocabulary - 1}; there must "
                f"be some, and at most {MOST_IDS:,}. Give another tokenizer."
            )
        self.leaves_out = _leaves_out(self._content)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        self.end_of_text = next((special[n] for n in ENDS_OF_TEXT if n in special), None)
        if (
            end_of_text is not None
            and (token := self._tokenizer.token_to_id(end_of_text)) is not None
        ):
            self.end_of_text = token

    @property
    def end_token(self) -> str | None:
        """See `Tokenizer.end_token`."""
        end = self.end_of_text
        return None if end is None else self._tokenizer.id_to_token(end)

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[str, str, str | None]]:
        return FileTokenizer, (self._text, self.name, self.end_token)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_batch`."""
        with _library_errors(f"Tokenizer {quoted(self.name)} cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        if self._token_bytes is not None:
            return super().decode(tokens)
        inside = [int(token) for token in tokens if 0 <= token < self.vocabulary]
        with _library_errors(f"Tokenizer {quoted(self.name)} cannot decode tokens"):
            return str(self._tokenizer.decode(inside, skip_special_tokens=True))

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return self._text

    def _bytes_of_tokens(self) -> Sequence[bytes] | None:
        decoder = self._content.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        token_bytes = [b""] * self.vocabulary
        for token, id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            spelled = all(char in BYTE_OF_CHARACTER for char in token)  # else it is taken for text
            written = bytes(BYTE_OF_CHARACTER[char] for char in token) if spelled else b""
            token_bytes[id] = written if spelled else token.encode()
        for id, added in self._tokenizer.get_added_tokens_decoder().items():
            token_bytes[id] = b"" if added.special else added.content.encode()
        return token_bytes


def _parsed(text: str, name: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    import tokenizers

    with _library_errors(f"Tokenizer {quoted(name)} is not a tokenizer.json that can be read"):
        content = parse_json(text, "the file")
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError("it has no 'model'")
        parsed = tokenizers.Tokenizer.from_str(text)
    parsed.no_truncation()
    parsed.no_padding()
    parsed.encode_special_tokens = True  # "<|endoftext|>" within a document does not end it
    return parsed, content


def _leaves_out(content: dict[str, Any]) -> bool:
    """Whether a BPE has neither tokens for all bytes nor one for what is unknown."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return False
    of_bytes = "ByteLevel" in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return not (of_bytes and BYTE_OF_CHARACTER.keys() <= model.get("vocab", {}).keys())


@contextmanager
def _library_errors(failed: str) -> Iterator[None]:
    """Turn any error within into a UserError that begins with `failed`. The library raises plain
    `Exception`, and panics in Rust as a BaseException, about which Rust prints lines of its own."""
    with _stderr, tempfile.TemporaryFile() as printed:
        terminal = _redirect_stderr(printed.fileno())
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            if not (panicked or isinstance(error, Exception)):
                raise  # a signal's
            reason = quoted((str(error) or type(error).__name__).rstrip("."))
            remedy = "Give one that the tokenizers library or transformers saved"
            raise UserError(f"{failed}: {reason}. {remedy}.") from error
        finally:
            if terminal is not None:
                os.dup2(terminal, 2)
                os.close(terminal)
                printed.seek(0)
                if not panicked:
                    os.write(2, printed.read())


def _redirect_stderr(descriptor: int) -> int | None:
    """Redirect stderr to `descriptor`. Returns a copy of stderr's descriptor; None if it is
    closed."""
    try:
        terminal = os.dup(2)
    except OSError:
        return None
    os.dup2(descriptor, 2)
    return terminal
