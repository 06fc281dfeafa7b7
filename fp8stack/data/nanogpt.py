"""nanoGPT's `meta.pkl`, the characters that its tokens stand for, read without unpickling: nothing
in it can run. No torch here.
https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py"""

import json
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

from fp8stack.common.errors import UserError
from fp8stack.data.files import unreadable
from fp8stack.data.tokenizer import Tokenizer, tokenizer_from_json

META = "meta.pkl"
CONSTANTS = {"BININT", "BININT1", "BININT2", "INT", "LONG1"} | {
    f"{kind}UNICODE{size}" for kind in ("SHORT_BIN", "BIN", "") for size in ("", "8")
}
MOST_BYTES = 2**24


class Characters(NamedTuple):
    """The vocabulary size, and the tokenizer, if the file has the characters."""

    vocabulary: int
    tokenizer: Tokenizer | None


def characters_beside(path: Path) -> Characters | None:
    """The contents of the `meta.pkl` in the folder of a `.bin` file; None if there is none. Raises
    a UserError if it holds anything but nanoGPT's dictionaries of characters."""
    file = path.parent / META
    if not file.is_file():
        return None
    try:
        content = file.read_bytes()[:MOST_BYTES]
    except OSError as error:
        unreadable(file, error)
    try:
        meta = _dictionaries(content)
        vocabulary, characters = meta["vocab_size"], meta.get("itos", {})
        ids = {text: id for id, text in characters.items()}
        ids_fit = all(isinstance(id, int) and 0 <= id < vocabulary for id in ids.values())
        if not (vocabulary > 0 and ids_fit and all(isinstance(text, str) for text in ids)):
            raise ValueError("its ids or characters are not valid")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{file} is not nanoGPT's meta.pkl of characters ({reason}), and nothing else in it is "
            "read. Move it away to train on the tokens alone."
        ) from error
    return Characters(vocabulary, _tokenizer(ids) if ids else None)


def _dictionaries(content: bytes) -> dict[str, Any]:
    """The dictionary of a pickle of strings, whole numbers and dictionaries of them. Raises a
    ValueError for anything else."""
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in CONSTANTS:
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0) if name != "MEMOIZE" else len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name in ("DICT", "SETITEM", "SETITEMS"):
            at = len(stack) - 2 if name == "SETITEM" else marks.pop()
            items = stack[at:]
            stack[at:] = [{}] if name == "DICT" else []
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "STOP":
            return dict(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}")
    raise ValueError("it has no end")


def _tokenizer(ids: dict[str, int]) -> Tokenizer:
    """A tokenizer of these characters, in which others have no token."""
    model = {"type": "BPE", "vocab": ids, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
    return tokenizer_from_json(json.dumps(content, ensure_ascii=False), "characters")
