"""Reads sources as blocks that can be tokenized independently, and finds places where a long text
can be cut without changing its tokens. JSON lines are parsed later, when they are tokenized."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fp8stack.errors import UserError, quoted
from fp8stack.prepare.inputs import Source, listings
from fp8stack.prepare.streams import ByteStream
from fp8stack.prepare.tables import read, text_in
from fp8stack.tokenizer import Tokenizer

BLOCK_BYTES = 2**20
MOST_ROWS = 4096  # of a block, in case they are all empty
LONGEST_LINE = 2**29
LONGEST_WORD = 2**24
LONGEST_UNCUT = 2**28  # bytes of a text that has to be tokenized in one piece
_LONGEST_CHARACTER = 4  # bytes in UTF-8
PROBES = (
    "Hello world, it's 12 o'clock; isn't  it?\tYes... 3.14 (x) [y] {z}\nnext line\n\n  indented",
    "def f(x):\n    return x+1 # a comment\n\n\tprint( f( 2 ) )\r\n",
    "lines\nwithout\nspaces\r\nあ\nж",
    "Grüße aus Köln, où ça? naïve Привет мир 你好 世界 ελληνικά\u3000wide \u00a0 hard 😀 face",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place between two blocks, from which reading can continue."""

    source: int = 0
    offset: int = 0  # blocks, or rows of a table, that were read of the source
    state: str = ""  # where a stream of `datasets` continues, as JSON


@dataclass(frozen=True, kw_only=True)
class Block:
    """Documents or a piece of one; JSON lines; or a problem."""

    source: int  # this and the next two: the `Place` after it
    offset: int = 0
    state: str = ""
    path: str  # of its source, or of the last of several, for messages
    kind: Literal["texts", "lines"] = "texts"
    content: Sequence[bytes] = ()  # documents, or one piece of JSON lines
    first: int = 1  # number of the first JSON line
    continues: bool = False  # whether the first document began in an earlier block
    unfinished: bool = False  # whether the next block continues the last document
    inside_a_word: bool = False  # whether it was cut where tokens may change
    on_disk: int = 0  # bytes of all files (packed) read up to its end
    problem: str = ""  # the error message, if reading the source failed here
    listing: str = ""  # `listings` of the sources up to its own


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads blocks of about `size` bytes; `text_key` is the field or column of the text."""

    text_key: str
    cut_texts: bool = True  # whether long texts may be cut into pieces
    size: int = BLOCK_BYTES
    scratch: Path  # folder for unpacked tables

    def blocks(self, sources: Sequence[Source], start: Place) -> Generator[Block, None, None]:
        """Yield all blocks from `start` on, with small texts combined into one block. A source
        that cannot be read yields its `problem`, and the next one follows."""
        held, held_bytes = list[Block](), 0
        for block in self._blocks(sources, start):
            small = not (block.kind == "lines" or block.continues or block.unfinished)
            small = small and not block.problem
            size = sum(map(len, block.content))
            if held and not (small and held_bytes + size <= self.size):
                yield _joined(held)
                held, held_bytes = [], 0
            if small:
                held.append(block)
                held_bytes += size
            else:
                yield block
        if held:
            yield _joined(held)

    def _blocks(self, sources: Sequence[Source], start: Place) -> Iterator[Block]:
        done, listing = sum(source.size for source in sources[: start.source]), listings(sources)
        for number, source in enumerate(sources[start.source :], start.source):
            place = start if number == start.source else Place(source=number)
            blocks_of = self._texts if source.kind in ("text", "lines") else self._rows
            try:
                for block in blocks_of(source, place):
                    yield replace(block, on_disk=done + block.on_disk, listing=listing[number])
            except UserError as error:
                yield Block(source=number, path=source.path, problem=str(error))
            done += source.size

    def _texts(self, source: Source, place: Place) -> Iterator[Block]:
        """The blocks of a text or of JSON lines."""
        name, lines = quoted(source.path), source.kind == "lines"
        cut: Callable[[bytes], int] = cut_of
        most, too_long = LONGEST_WORD, ""
        if lines:
            cut, most = lambda content: content.rfind(b"\n") + 1, LONGEST_LINE
            too_long = (
                f"{name} has a line of more than {most:,} bytes. Give JSON lines: one object for "
                "each document, on a line of its own."
            )
        elif not self.cut_texts:
            cut, most = lambda content: 0, LONGEST_UNCUT
            too_long = (
                f"{name} is longer than {most:,} bytes, and with this tokenizer a text has to be "
                "tokenized in one piece. Split it into documents, such as the lines of a .jsonl "
                "file."
            )
        line = 1
        with closing(ByteStream(Path(source.path))) as stream:
            pieces = _pieces(stream, self.size, most, cut, too_long)
            for number, (content, last, anywhere) in enumerate(pieces, 1):
                if last and not content and number == 1:
                    return
                if number > place.offset:
                    yield Block(
                        source=place.source,
                        offset=number,
                        path=source.path,
                        kind="lines" if lines else "texts",
                        content=[content],
                        first=line,
                        continues=not lines and number > 1,
                        unfinished=not lines and not last,
                        inside_a_word=anywhere,
                        on_disk=source.size if last else stream.on_disk,
                    )
                line += content.count(b"\n")

    def _rows(self, source: Source, place: Place) -> Iterator[Block]:
        """The blocks of a table."""
        texts, texts_bytes = list[bytes](), 0
        at, share = place, 0.0

        def block() -> Block:
            done = round(source.size * share)
            return Block(path=source.path, content=texts, on_disk=done, **vars(at))

        for batch in read(source, self.text_key, place.offset, place.state, self.scratch):
            for row, value in enumerate(batch.values, at.offset + 1):
                texts.append(text_in(value, source.path, f"row {row}").encode())
                texts_bytes += len(texts[-1])
            at, share = Place(source=at.source, offset=row, state=batch.state), batch.share
            if texts_bytes >= self.size or len(texts) >= MOST_ROWS:
                yield block()
                texts, texts_bytes = [], 0
        if texts:
            yield block()


def _joined(blocks: Sequence[Block]) -> Block:
    return replace(blocks[-1], content=[text for block in blocks for text in block.content])


def _pieces(
    stream: ByteStream, size: int, most: int, cut: Callable[[bytes], int], too_long: str
) -> Iterator[tuple[bytes, bool, bool]]:
    """Yield the bytes of a stream in pieces, each with whether it is the last, and whether it was
    cut at a place where tokens may change.

    A piece has at most `size` bytes, or up to `most` if `cut` (see `cut_of`) finds no earlier
    place. If it finds none at all, `too_long` is raised as an error; if that is "", the text is cut
    anywhere.
    """
    piece, want, last = b"", size, False
    while not last:
        piece += stream.read(want + 1 - len(piece))
        last = len(piece) <= want
        at = len(piece) if last else cut(piece[:want])
        if not last and at == 0 and want < most:
            want = min(2 * want, most)
            continue
        anywhere = at == 0 and not last
        if anywhere:
            if too_long:
                raise UserError(too_long)
            at = cut_anywhere(piece[:want])
        yield piece[:at], last, anywhere
        piece, want = piece[at:], size


def cut_of(content: bytes) -> int:
    """The number of bytes of UTF-8 before the last place where a text may be cut; 0 if there is
    none. That place is before a space that follows a character other than white space, since no
    pattern that splits words like GPT-2's combines the two. If there is none, it is before a
    newline after a letter."""
    for mark in (b" ", b"\n"):
        at = content.rfind(mark)
        while at > 0:
            before = content[max(0, at - _LONGEST_CHARACTER) : at].decode(errors="replace")[-1]
            if before.isalpha() or (mark == b" " and not before.isspace()):
                return at
            at = content.rfind(mark, 0, at)
    return 0


def cut_anywhere(content: bytes) -> int:
    """The number of bytes up to the end of the last complete UTF-8 character."""
    at = len(content) - 1
    while at > max(0, len(content) - _LONGEST_CHARACTER) and content[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 1)


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether cutting texts at `cut_of` keeps the tokens of this tokenizer, tried on some examples.
    It does not if the tokenizer puts a space before every text, for example."""
    for text in PROBES:
        content, tokens = text.encode(), list[int]()
        while content:  # from its end
            at = cut_of(content)
            tokens = tokenizer.encode(content[at:].decode()) + tokens
            content = content[:at]
        if tokens != tokenizer.encode(text):
            return False
    return True
