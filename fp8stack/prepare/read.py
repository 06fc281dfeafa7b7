"""Reads sources as a stream of items that can be tokenized independently, each with the position
after it, and finds places where long texts can be cut without changing their tokens. JSON is parsed
later, when it is tokenized."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp8stack.data.files import BYTE_ORDER_MARK, SNIFFED_BYTES
from fp8stack.errors import UserError, quoted
from fp8stack.prepare import tables
from fp8stack.prepare.inputs import Source
from fp8stack.prepare.streams import CHECKED_BYTES, ByteStream, check_of
from fp8stack.tokenizer import Tokenizer

ITEM_BYTES = 2**20
LONGEST_LINE = 2**29
LONGEST_WORD = 2**24
LONGEST_WHOLE = 2**28  # bytes of a text that has to be tokenized in one piece
_LONGEST_CHARACTER = 4  # bytes in UTF-8
PROBES = (
    "Hello world, it's 12 o'clock; isn't  it?\tYes... 3.14 (x) [y] {z}\nnext line\n\n  indented",
    "def f(x):\n    return x+1 # a comment\n\n\tprint( f( 2 ) )\r\n",
    "lines\nwithout\nspaces\r\nあ\nж",
    "Grüße aus Köln, où ça? naïve Привет мир 你好 世界 ελληνικά\u3000wide \u00a0 hard 😀 face",
)


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position between two items, from which reading can continue."""

    source: int = 0  # sources that were read completely
    offset: int = 0  # bytes (unpacked) or rows read from the next source
    line: int = 1  # number of the next line
    check: int = 0  # `check_of` the last bytes before `offset`, or of the last row
    continues: bool = False  # whether the last document continues here
    state: dict[str, Any] | None = None  # the state of a `datasets` stream


@dataclass(frozen=True, kw_only=True)
class Item:
    """A piece of the inputs: whole documents or a piece of one, as bytes ("texts"); a block of JSON
    lines, as bytes; or the values of table rows, of any type."""

    kind: Literal["texts", "lines", "rows"]
    path: str  # name of the source, or of the first of several, for messages
    content: Sequence[object]
    first: int = 1  # the number of the first line or row
    unfinished: bool = False  # whether the last document continues in the next item
    inside_a_word: bool = False  # whether it was cut where tokens may change
    before: Position
    after: Position
    on_disk: int  # bytes of the files (packed) read up to its end


Items = Generator[Item, None, None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options of reading sources."""

    text_key: str  # of JSON lines and tables
    cut_texts: bool = True  # whether long texts may be cut into pieces
    item_bytes: int = ITEM_BYTES  # approximate bytes of an item


def read_items(sources: Sequence[Source], start: Position, how: Reading) -> Items:
    """Yield all items from `start` on, with small texts combined into one item, so that processes
    get fewer requests. Raises a UserError if a source cannot be read."""
    held: Item | None = None
    held_bytes = 0
    with closing(_items(sources, start, how)) as items:
        for item in items:
            small = item.kind == "texts" and not item.unfinished and not item.before.continues
            bytes_of = sum(len(text) for text in item.content if isinstance(text, bytes))
            if held is not None and (not small or held_bytes + bytes_of > how.item_bytes):
                yield held
                held = None
            if not small:
                yield item
            elif held is None:
                held, held_bytes = item, bytes_of
            else:
                content = [*held.content, *item.content]
                held = replace(held, content=content, after=item.after, on_disk=item.on_disk)
                held_bytes += bytes_of
        if held is not None:
            yield held


def _items(sources: Sequence[Source], start: Position, how: Reading) -> Items:
    done = sum(source.size for source in sources[: start.source])
    position = start
    for source in sources[start.source :]:
        read = _read_bytes if source.kind in ("text", "lines") else _read_rows
        with closing(read(source, position, how)) as items:
            for item in items:
                yield replace(item, on_disk=done + item.on_disk)
        done += source.size
        position = Position(source=position.source + 1)


def _read_bytes(source: Source, position: Position, how: Reading) -> Items:
    name = quoted(source.path)
    lines = source.kind == "lines"
    cut: Callable[[bytes], int] = cut_of
    most, too_long = LONGEST_WORD, None
    if lines:
        cut, most = lambda content: content.rfind(b"\n") + 1, LONGEST_LINE
        too_long = (
            f"{name} has a line of more than {most:,} bytes. Give JSON lines: one object for each "
            "document, on a line of its own."
        )
    elif not how.cut_texts:
        cut, most = lambda content: 0, LONGEST_WHOLE
        too_long = (
            f"{name} is longer than {most:,} bytes, and with this tokenizer a text has to be "
            "tokenized in one piece. Split it into documents, such as the lines of a .jsonl file."
        )
    with closing(ByteStream(Path(source.path))) as stream:
        tail = stream.go_to(position.offset, position.check)
        for content, last, anywhere in _blocks(stream, how.item_bytes, most, cut, too_long):
            shown = content.removeprefix(BYTE_ORDER_MARK) if position.offset == 0 else content
            if last and not shown and not position.continues:
                return
            if not lines and position.offset == 0 and b"\0" in content[:SNIFFED_BYTES]:
                raise UserError(
                    f"{name} looks binary: byte {content.index(0)} is NUL. Give UTF-8 text, "
                    ".jsonl or .parquet files, or leave it out."
                )
            tail = (tail + content)[-CHECKED_BYTES:]
            after = Position(source=position.source + 1)
            if not last:
                after = Position(
                    source=position.source,
                    offset=position.offset + len(content),
                    line=position.line + content.count(b"\n"),
                    check=check_of(tail),
                    continues=not lines,
                )
            yield Item(
                kind="lines" if lines else "texts",
                path=source.path,
                content=[shown],
                first=position.line,
                unfinished=not lines and not last,
                inside_a_word=anywhere,
                before=position,
                after=after,
                on_disk=source.size if last else stream.on_disk,
            )
            position = after


def _blocks(
    stream: ByteStream, size: int, most: int, cut: Callable[[bytes], int], too_long: str | None
) -> Iterator[tuple[bytes, bool, bool]]:
    """Yield the bytes of a stream in blocks, each with whether it is the last, and whether it was
    cut at a place where tokens may change. The end of a block depends only on the bytes since the
    last cut, so it is the same when reading continues from there.

    A block has at most `size` bytes, or up to `most` if `cut` (see `cut_of`) finds no earlier
    place. If it finds none at all, `too_long` is raised as an error; if that is None, the block is
    cut anywhere.
    """
    block, want, last = b"", size, False
    while not last:
        block += stream.read(want + 1 - len(block))
        last = len(block) <= want
        at = len(block) if last else cut(block[:want])
        if not last and at == 0 and want < most:
            want = min(2 * want, most)
            continue
        anywhere = at == 0 and not last
        if anywhere:
            if too_long is not None:
                raise UserError(too_long)
            at = cut_anywhere(block[:want])
        yield block[:at], last, anywhere
        block, want = block[at:], size


def _read_rows(source: Source, position: Position, how: Reading) -> Items:
    read = tables.parquet_rows if source.kind == "parquet" else tables.dataset_rows
    if source.kind == "parquet" and position.offset:
        before = next(read(source.path, position.offset - 1, None, how.text_key, 1), None)
        if before is None or _row_check(before.content[0]) != position.check:
            raise UserError(
                f"{quoted(source.path)} has changed where it was read already, before row "
                f"{position.offset + 1}. Put it back as it was, or start over with --overwrite."
            )
    for rows in read(source.path, position.offset, position.state, how.text_key, how.item_bytes):
        first = position.offset
        after = replace(
            position,
            offset=first + len(rows.content),
            check=_row_check(rows.content[-1]),
            state=rows.state,
        )
        yield Item(
            kind="rows",
            path=source.path,
            content=rows.content,
            first=first + 1,
            before=position,
            after=after,
            on_disk=round(source.size * rows.share),
        )
        position = after


def _row_check(value: object) -> int:
    return check_of(repr(value).encode(errors="surrogatepass"))


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
