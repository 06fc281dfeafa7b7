"""The bytes of a text file: unpacked, and in UTF-8 whatever its byte order mark says. The only file
that imports zstandard. `datasets` would stop after the first frame of a .zst file."""

import bz2
import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from fp8stack.data.files import encoding_of
from fp8stack.errors import UserError, quoted

CHUNK_BYTES = 2**18
UNPACKED_BYTES = 2**14  # of a .zst, at a time: they may expand a thousandfold
LONGEST_WINDOW = 2**31  # zstd --long=31
PACKED = (".gz", ".bz2", ".xz", ".zst")

# An invalid code becomes a byte that is invalid in UTF-8, which is replaced and counted later.
codecs.register_error("fp8stack.not_unicode", lambda error: ("\udcff", getattr(error, "end", 0)))


class ByteStream:
    """A text file, read from beginning to end as UTF-8 without a byte order mark; packed files are
    unpacked by their suffix. Raises a UserError, also in `read`, if the file cannot be read or its
    packed data are damaged."""

    def __init__(self, path: Path) -> None:
        self._path, self._unpacked, self._ready = path, 0, b""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._refused(error) from error
        self._chunks = _chunks(self._file, path.suffix.lower())
        while len(self._ready) < 4 and (chunk := self._next()):
            self._ready += chunk
        mark, encoding = encoding_of(self._ready)
        decoder = codecs.getincrementaldecoder(encoding)("fp8stack.not_unicode")
        self._decoder = None if encoding == "utf-8" else decoder
        self._ready = self._in_utf8(self._ready.removeprefix(mark))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def on_disk(self) -> int:
        """The number of bytes read from the file itself."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts, more = list[bytes](), True
        while size > 0 and (self._ready or more):
            part, self._ready = self._ready[:size], self._ready[size:]
            parts.append(part)
            size -= len(part)
            if not self._ready:
                chunk = self._next()
                self._ready, more = self._in_utf8(chunk, final=not chunk), chunk != b""
        return b"".join(parts)

    def _in_utf8(self, chunk: bytes, final: bool = False) -> bytes:
        if self._decoder is None:
            return chunk
        return self._decoder.decode(chunk, final).encode(errors="surrogateescape")

    def _next(self) -> bytes:
        """The next unpacked bytes; b"" at the end."""
        try:
            chunk = next(self._chunks, b"")
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise error if isinstance(error, UserError) else self._refused(error) from error
        self._unpacked += len(chunk)
        return chunk

    def _refused(self, error: Exception) -> UserError:
        name = quoted(str(self._path))
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"Cannot read {name}: {error.strerror}. Check its permissions.")
        return UserError(
            f"{name} is cut short or damaged after {self._unpacked} bytes unpacked ({error}). "
            "Download it again; the same command then continues."
        )


def _chunks(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked if `suffix` says that it is packed."""
    if suffix == ".zst":
        yield from _unpack_zstd(file)
    else:
        unpack: dict[str, Any] = {".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
        reader = gzip.GzipFile(fileobj=file) if suffix == ".gz" else file
        reader = unpack[suffix](file) if suffix in unpack else reader
        yield from iter(partial(reader.read, CHUNK_BYTES), b"")


def _unpack_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of all frames. Raises a UserError if zstandard is missing, an EOFError if the
    file ends within a frame, and a ValueError if it is damaged."""
    try:
        import zstandard
    except ImportError:
        hint = "Install it: pip install zstandard."
        raise UserError(f"Files that end in .zst need zstandard. {hint}") from None
    packed, frame = file.read(UNPACKED_BYTES), None
    while packed:
        unpacker = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
        frame = frame or unpacker.decompressobj()
        try:
            if unpacked := frame.decompress(packed):
                yield unpacked
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        packed = frame.unused_data
        frame = None if frame.eof else frame
        packed = packed or file.read(UNPACKED_BYTES)
    if frame is not None:
        raise EOFError("it ends within a frame")
