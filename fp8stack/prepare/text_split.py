"""Where a long text may be cut so that its pieces have the tokens of the whole."""

from __future__ import annotations

from fp8stack.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes in UTF-8
PROBES = (
    "Hello world, it's 12 o'clock; isn't  it?\tYes... 3.14 (x) [y] {z}\nnext line\n\n  indented",
    "def f(x):\n    return x+1 # a comment\n\n\tprint( f( 2 ) )\r\n",
    "lines\nwithout\nspaces\r\nあ\nж",
    "Grüße aus Köln, où ça? naïve Привет мир 你好 世界 ελληνικά\u3000wide \u00a0 hard 😀 face",
)


def cut_of(content: bytes) -> int:
    """How many bytes of UTF-8 come before the last place where a text may be cut; 0 if none does.

    That is before a space after what is not white space: no pattern that splits words as GPT-2's
    does takes both into one word. Where there is no such place, before a newline after a letter.
    """
    for mark in (b" ", b"\n"):
        at = content.rfind(mark)
        while at > 0:
            before = content[max(0, at - _LONGEST_CHARACTER) : at].decode(errors="replace")[-1]
            if before.isalpha() or (mark == b" " and not before.isspace()):
                return at
            at = content.rfind(mark, 0, at)
    return 0


def cut_anywhere(content: bytes) -> int:
    """How many bytes come before the last whole character of UTF-8."""
    at = len(content) - 1
    while at > max(0, len(content) - _LONGEST_CHARACTER) and content[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 1)


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether texts that are cut at `cut_of` have the same tokens with this tokenizer, as far as
    some examples tell. With one that puts a space before every text, for one, they have not."""
    for text in PROBES:
        content, tokens = text.encode(), list[int]()
        while content:  # from its end
            at = cut_of(content)
            tokens = tokenizer.encode(content[at:].decode()) + tokens
            content = content[:at]
        if tokens != tokenizer.encode(text):
            return False
    return True
