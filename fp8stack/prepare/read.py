"""Sources as a stream of items that can be tokenized one by one, each with the place after it.

What an item holds is not looked into here: JSON is parsed where it is tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fp8stack.data.files import SNIFFED_BYTES
from fp8stack.errors import UserError, quoted
from fp8stack.prepare import tables
from fp8stack.prepare.inputs import Source
from fp8stack.prepare.settings import Position
from fp8stack.prepare.streams import CHECKED_BYTES, ByteStream, check_of
from fp8stack.prepare.text_split import cut_anywhere, cut_of

ITEM_BYTES = 2**20
LONGEST_LINE = 2**29
LONGEST_WORD = 2**24
LONGEST_WHOLE = 2**28
"""Bytes of a text that has to be tokenized in one piece."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A piece of the inputs.

    Attributes:
        kind: "texts": whole documents, or a piece of one, as bytes; "lines": JSON lines, as bytes;
            "rows": what the rows of a table hold, of any type.
        path: of the source, for messages; of several, the first.
        content: of that kind; one block of bytes for lines.
        first: the number of the first line or row.
        unfinished: whether the last document goes on in the next item.
        inside_a_word: whether it was cut where the tokens may differ from the whole text's.
        before: the place before the item.
        after: the place after it.
        on_disk: how many bytes of the files were read up to there, as they are packed.
    """

    kind: Literal["texts", "lines", "rows"]
    path: str
    content: Sequence[object]
    first: int = 1
    unfinished: bool = False
    inside_a_word: bool = False
    before: Position
    after: Position
    on_disk: int


Items = Generator[Item, None, None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How sources are read.

    Attributes:
        text_key: of JSON lines and tables.
        cut_texts: whether long texts may be cut into pieces.
        item_bytes: about how large an item is.
    """

    text_key: str
    cut_texts: bool = True
    item_bytes: int = ITEM_BYTES


def read_items(sources: Sequence[Source], start: Position, how: Reading) -> Items:
    """All items from `start` on.

    Raises:
        UserError: a source cannot be read.
    """
    return _merged(_items(sources, start, how), how.item_bytes)


def _items(sources: Sequence[Source], start: Position, how: Reading) -> Items:
    done = sum(source.size for source in sources[: start.source])
    position = start
    for source in sources[start.source :]:
        with closing(_READERS[source.kind](source, position, how)) as items:
            for item in items:
                yield replace(item, on_disk=done + item.on_disk)
        done += source.size
        position = Position(source=position.source + 1)


def _merged(items: Items, size: int) -> Items:
    """Small texts put together: a process is asked once for many."""
    held: Item | None = None
    held_bytes = 0
    with closing(items):
        for item in items:
            small = item.kind == "texts" and not item.unfinished and not item.before.continues
            bytes_of = sum(len(text) for text in item.content if isinstance(text, bytes))
            if held is not None and (not small or held_bytes + bytes_of > size):
                yield held
                held = None
            if not small:
                yield item
            elif held is None:
                held, held_bytes = item, bytes_of
            else:
                held = replace(
                    held,
                    content=[*held.content, *item.content],
                    after=item.after,
                    on_disk=item.on_disk,
                )
                held_bytes += bytes_of
        if held is not None:
            yield held


@dataclass(frozen=True, kw_only=True)
class _Piece:
    content: bytes
    last: bool
    inside_a_word: bool
    after: Position


def _pieces(
    stream: ByteStream,
    position: Position,
    size: int,
    most: int,
    cut: Callable[[bytes], int],
    too_long: str | None,
) -> Generator[_Piece, None, None]:
    """The bytes of a stream from `position` on. Where each is cut depends on those after the cut
    before alone, so that it is the same for one that goes on from there.

    Args:
        stream: is read.
        position: where it begins.
        size: of a piece, at most; more where nothing up to there is a place to cut.
        most: how much that may become.
        cut: how many bytes come before the last place where some may be cut; 0 if none does.
        too_long: what to say of one that cannot be cut; None to cut it anywhere.
    """
    tail = stream.go_to(position.offset, position.check)
    block, want = b"", size
    while True:
        block += stream.read(want + 1 - len(block))
        last = len(block) <= want
        at = len(block) if last else cut(block[:want])
        if at == 0 and want < most:
            want = min(2 * want, most)
            if not last:
                continue
        inside = at == 0 and not last
        if inside and too_long is not None:
            raise UserError(too_long)
        if inside:
            at = cut_anywhere(block[:want])
        content, block, want = block[:at], block[at:], size
        if not content and not position.continues:
            return
        tail = (tail + content)[-CHECKED_BYTES:]
        position = Position(
            source=position.source,
            offset=position.offset + at,
            line=position.line + content.count(b"\n"),
            check=check_of(tail),
            continues=True,
        )
        end = Position(source=position.source + 1)
        yield _Piece(
            content=content, last=last, inside_a_word=inside, after=end if last else position
        )
        if last:
            return


def _read_text(source: Source, position: Position, how: Reading) -> Items:
    """A text in pieces."""
    name = quoted(source.path)
    too_long = (
        f"{name} is longer than {LONGEST_WHOLE:,} bytes, and with this tokenizer a text has to be "
        "tokenized in one piece. Split it into documents, such as the lines of a .jsonl file."
    )
    rules = (LONGEST_WORD, cut_of, None) if how.cut_texts else (LONGEST_WHOLE, _nowhere, too_long)
    with ByteStream(Path(source.path)) as stream:
        for piece in _pieces(stream, position, how.item_bytes, *rules):
            if position.offset == 0 and b"\0" in piece.content[:SNIFFED_BYTES]:
                raise UserError(
                    f"{name} looks binary: byte {piece.content.index(0)} is NUL. Give UTF-8 text, "
                    ".jsonl or .parquet files, or leave it out."
                )
            yield Item(
                kind="texts",
                path=source.path,
                content=[piece.content],
                unfinished=not piece.last,
                inside_a_word=piece.inside_a_word,
                before=position,
                after=piece.after,
                on_disk=source.size if piece.last else stream.on_disk,
            )
            position = piece.after


def _nowhere(content: bytes) -> int:
    return 0


def _read_lines(source: Source, position: Position, how: Reading) -> Items:
    """Whole lines."""
    too_long = (
        f"{quoted(source.path)} has a line of more than {LONGEST_LINE:,} bytes. Give JSON lines: "
        "one object for each document, on a line of its own."
    )
    with ByteStream(Path(source.path)) as stream:
        position = replace(position, continues=False)
        rules = (LONGEST_LINE, _last_line, too_long)
        for piece in _pieces(stream, position, how.item_bytes, *rules):
            after = piece.after if piece.last else replace(piece.after, continues=False)
            yield Item(
                kind="lines",
                path=source.path,
                content=[piece.content],
                first=position.line,
                before=position,
                after=after,
                on_disk=source.size if piece.last else stream.on_disk,
            )
            position = after


def _last_line(content: bytes) -> int:
    return content.rfind(b"\n") + 1


def _read_rows(source: Source, position: Position, how: Reading) -> Items:
    """The rows of a table."""
    read = tables.parquet_rows if source.kind == "parquet" else tables.dataset_rows
    if source.kind == "parquet" and position.offset:
        before = next(read(source.path, position.offset - 1, None, how.text_key, 1), None)
        if before is None or _row_check(before.content[0]) != position.check:
            raise UserError(
                f"{quoted(source.path)} has changed where it was read already, before row "
                f"{position.offset + 1}. Put it back as it was, or begin anew with --overwrite."
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


_READERS: dict[str, Callable[[Source, Position, Reading], Items]] = {
    "text": _read_text,
    "lines": _read_lines,
    "parquet": _read_rows,
    "hf": _read_rows,
}
