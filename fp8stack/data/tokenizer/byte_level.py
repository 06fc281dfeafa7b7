"""Bytes as tokens, and as the characters that stand for bytes in byte-level vocabularies."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.tokenizer.base import END_OF_TEXT, Tokenizer

# The byte that UTF-8 never uses (RFC 3629, section 1), so that 256 ids are enough.
BYTES_END_OF_TEXT = 255


def _alphabet() -> dict[int, str]:
    """The character that stands for each byte: itself if it can be seen, else one from U+0100 on
    (`bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    invisible = [byte for byte in range(256) if byte not in visible]
    shifted = {byte: chr(256 + number) for number, byte in enumerate(invisible)}
    return {byte: chr(byte) for byte in visible} | shifted


CHARACTER_OF_BYTE: Mapping[int, str] = _alphabet()
BYTE_OF_CHARACTER: Mapping[str, int] = {char: byte for byte, char in CHARACTER_OF_BYTE.items()}


def written(token: bytes) -> str:
    """A token's bytes as a byte-level vocabulary spells them."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def bpe_json(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], end_of_text: int, words: bool
) -> str:
    """A `tokenizer.json` of byte-level BPE with one special token.

    Args:
        vocabulary: the ids of the tokens, spelled as `written` does.
        merges: the pairs that are joined, the highest priority first.
        end_of_text: the id of `<|endoftext|>`.
        words: split the text into words as GPT-2 does before pairs are joined.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end_of_text, "content": END_OF_TEXT, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": words},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": words},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**vocabulary, END_OF_TEXT: end_of_text},
            "merges": [list(pair) for pair in merges],
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


class ByteTokenizer(Tokenizer):
    """Ids are the bytes of UTF-8, and 255 ends a document."""

    name = "bytes"
    vocabulary = 256
    end_of_text = BYTES_END_OF_TEXT

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_batch`."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        vocabulary = {written(bytes([byte])): byte for byte in range(BYTES_END_OF_TEXT)}
        return bpe_json(vocabulary, [], BYTES_END_OF_TEXT, words=False)

    def _bytes_of_tokens(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(BYTES_END_OF_TEXT)), b""]
