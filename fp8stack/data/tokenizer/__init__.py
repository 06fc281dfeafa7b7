"""Tokenizers: bytes, GPT-2's, and any `tokenizer.json`."""

import json
from pathlib import Path

from fp8stack.common.errors import UserError, described, quoted, unknown
from fp8stack.common.hub import SPECIAL_TOKENS, TOKENIZER_FILE
from fp8stack.common.io import read_json, storage_errors, write_atomically
from fp8stack.data.tokenizer.base import END_OF_TEXT, Decoder, Tokenizer, TokenizerIdentity
from fp8stack.data.tokenizer.byte_level import ByteTokenizer

__all__ = [
    "END_OF_TEXT",
    "NAMED",
    "SPECIAL_TOKENS",
    "TOKENIZER_FILE",
    "Decoder",
    "Tokenizer",
    "TokenizerIdentity",
    "alike",
    "end_token_in",
    "load_tokenizer",
    "save_tokenizer",
    "tokenizer_from_json",
]

TOKENIZER_FILES = (TOKENIZER_FILE, SPECIAL_TOKENS)
NAMED = ("bytes", "gpt2")  # tokenizers without a file
LARGEST_BYTES = 2**28  # of a file: ten times what 256,000 tokens take


def load_tokenizer(name: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: "bytes", whose ids are the bytes of UTF-8; "gpt2", by tiktoken; or the path of a
            `tokenizer.json`, or of a folder that has one, such as one that transformers saved.
        end_of_text: the token that ends a document; None for the `eos_token` of files next to
            `tokenizer.json`, or else a special token of a usual name.

    Raises:
        UserError: there is no such tokenizer or token, its file cannot be used, or tiktoken is
            missing or cannot download it.
    """
    if not isinstance(name, str | Path):
        raise UserError(f"A tokenizer is given by name or path, not by {described(name)}.")
    name = str(name)
    tokenizer = _load(name, end_of_text)
    if end_of_text is not None and tokenizer.end_token != end_of_text:
        added = json.loads(tokenizer.to_json()).get("added_tokens") or []
        tokens = [token["content"] for token in added]
        raise unknown(f"token in tokenizer {quoted(name)} is", end_of_text, tokens)
    return tokenizer


def _load(name: str, end_of_text: str | None) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        from fp8stack.data.tokenizer.gpt2 import load_gpt2

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
    return tokenizer_from_json(text, path.name, end_of_text or end_token_in(path.parent))


def end_token_in(folder: Path) -> str | None:
    """The `eos_token` that `tokenizer_config.json` or `special_tokens_map.json` names; None if
    none does."""
    for name in ("tokenizer_config.json", SPECIAL_TOKENS):
        try:
            token = read_json(folder / name)["eos_token"]
            token = token["content"] if isinstance(token, dict) else token
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(token, str):
            return token
    return None


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` to a folder, and `special_tokens_map.json` where the former does not
    say which token ends a text. Raises a StorageError if that fails."""
    text = tokenizer.to_json()
    says_the_end = tokenizer_from_json(text).end_of_text == tokenizer.end_of_text
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if says_the_end:
            (folder / SPECIAL_TOKENS).unlink(missing_ok=True)
    if not says_the_end:
        table = json.dumps({"eos_token": tokenizer.end_token}, ensure_ascii=False)
        write_atomically(folder / SPECIAL_TOKENS, f"{table}\n".encode())
    write_atomically(folder / TOKENIZER_FILE, text.encode())


def tokenizer_from_json(
    text: str, name: str = TOKENIZER_FILE, end_of_text: str | None = None
) -> Tokenizer:
    """The tokenizer of the contents of a `tokenizer.json`, as `Tokenizer.to_json` gives it, or as
    the tokenizers library saves it. It is called `name`; one that is `bytes` is called so. The
    token `end_of_text` ends a document, if it has that. Raises a UserError if it is not a
    `tokenizer.json`."""
    bytes_alone = ByteTokenizer()
    if text == bytes_alone.to_json():
        return bytes_alone
    from fp8stack.data.tokenizer.file import FileTokenizer

    return FileTokenizer(text, name, end_of_text)


def alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether ids stand for the same texts in both; the rest of their files may differ."""
    return first.identity.is_alike(second.identity)


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
        problem = f"The folder {quoted(name)} has no {TOKENIZER_FILE}"
        raise UserError(f"{problem}. Give bytes, gpt2, or the path of one.")
    raise UserError(
        f"No tokenizer {quoted(name)!r}. Give bytes, gpt2, or the path of a {TOKENIZER_FILE}."
    )
