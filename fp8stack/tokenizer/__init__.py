"""Tokenizers: bytes, GPT-2's, and any `tokenizer.json`."""

from pathlib import Path

from fp8stack.errors import UserError, quoted
from fp8stack.tokenizer.base import END_OF_TEXT, Decoder, Tokenizer, TokenizerIdentity
from fp8stack.tokenizer.byte_level import ByteTokenizer

__all__ = [
    "END_OF_TEXT",
    "NAMED",
    "Decoder",
    "Tokenizer",
    "TokenizerIdentity",
    "alike",
    "load_tokenizer",
    "tokenizer_from_json",
]

TOKENIZER_FILE = "tokenizer.json"
NAMED = ("bytes", "gpt2")  # tokenizers without a file
LARGEST_BYTES = 2**28  # of a file: ten times what 256,000 tokens take


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: "bytes", whose ids are the bytes of UTF-8; "gpt2", by tiktoken; or the path of a
            `tokenizer.json`, or of a folder that has one, such as one that transformers saved.

    Raises:
        UserError: there is no such tokenizer, its file cannot be used, or tiktoken is missing or
            cannot download it.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        from fp8stack.tokenizer.gpt2 import load_gpt2

        return load_gpt2()
    path = _file(name)
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UserError(f"Tokenizer {quoted(str(path))} is too large. Give another.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot read tokenizer {quoted(str(path))}: {error.strerror}. Give another."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"Tokenizer {quoted(str(path))} is not a tokenizer.json: it is not text. Give one that "
            "the tokenizers library or transformers saved."
        ) from error
    return tokenizer_from_json(text, path.name)


def tokenizer_from_json(text: str, name: str = TOKENIZER_FILE) -> Tokenizer:
    """The tokenizer of the contents of a `tokenizer.json`, as `Tokenizer.to_json` gives it, or as
    the tokenizers library saves it. It is called `name`; one that is `bytes` is called so. Raises a
    UserError if it is not a `tokenizer.json`."""
    bytes_alone = ByteTokenizer()
    if text == bytes_alone.to_json():
        return bytes_alone
    from fp8stack.tokenizer.file import FileTokenizer

    return FileTokenizer(text, name)


def alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether ids stand for the same texts in both; the rest of their files may differ."""
    return one.identity.is_alike(other.identity)


def _file(name: str) -> Path:
    """The file that `name` means."""
    folder = False
    try:
        folder = bool(name) and Path(name).is_dir()
        path = Path(name, TOKENIZER_FILE) if folder else Path(name)
        if path.is_file():
            return path
    except (OSError, ValueError):  # such as a NUL in the name
        pass
    if folder:
        what = f"The folder {quoted(name)} has no {TOKENIZER_FILE}"
        raise UserError(f"{what}. Give bytes, gpt2, or the path of one.")
    raise UserError(
        f"No tokenizer {quoted(name)!r}. Give bytes, gpt2, or the path of a {TOKENIZER_FILE}."
    )
