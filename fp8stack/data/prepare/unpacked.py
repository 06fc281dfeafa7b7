"""The bytes of a text file: unpacked, and in UTF-8 whatever its byte order mark says."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.data.files import encoding_of
from fp8stack.data.parquet import open_zst

PACKED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zst,
}
REMEDY = "Download or correct it, and give the same command again."


def unpacked_suffix(path: Path) -> str:
    """The suffix of a file's name, in lower case; a suffix of `PACKED` is left out first."""
    inner = Path(path.name.lower())
    return (inner.with_suffix("") if inner.suffix in PACKED else inner).suffix


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """A context with the bytes of a text file in UTF-8, unpacked and without a byte order mark, and
    with the file itself, whose position says how much was read. Raises a UserError if the file
    cannot be read or its packed data are damaged, then or later in the context."""
    try:
        with path.open("rb") as file:
            unpack = PACKED.get(path.suffix.lower())
            # Referenced to the end: where it is collected, it closes the file.
            unpacked = io.BufferedReader(unpack(file)) if unpack else file
            stream: io.BufferedReader[Any] = unpacked
            mark, encoding = encoding_of(unpacked.peek(4))
            unpacked.read(len(mark))
            if encoding != "utf-8":
                text = unpacked.read().decode(encoding, "replace")
                stream = io.BufferedReader(io.BytesIO(text.encode()))
            yield stream, file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or f"cut short or damaged, {error}"
        raise UserError(f"Cannot read {quoted(str(path))}: {quoted(reason)}. {REMEDY}") from error
