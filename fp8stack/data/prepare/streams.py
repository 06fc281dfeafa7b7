"""The bytes of a text file: unpacked, and in UTF-8 whatever its byte order mark says. The only file
that imports zstandard."""

import bz2
import codecs
import gzip
import io
import itertools
import lzma
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.data.files import encoding_of

CHUNK_BYTES = 2**18
ZST_BYTES = 2**14  # at a time: they may expand a thousandfold
LONGEST_WINDOW = 2**31  # zstd --long=31
PACKED = (".gz", ".bz2", ".xz", ".zst")

# An invalid code becomes a byte that is invalid in UTF-8, which is replaced and counted later.
codecs.register_error("fp8stack.not_unicode", lambda error: ("\udcff", getattr(error, "end", 0)))


def unpacked_suffix(path: Path) -> str:
    """The suffix of a file's name, in lower case; a suffix of `PACKED` is left out first."""
    inner = Path(path.name.lower())
    return (inner.with_suffix("") if inner.suffix in PACKED else inner).suffix


class ByteStream(io.BufferedReader):
    """A text file, read from beginning to end as UTF-8 without a byte order mark; packed files are
    unpacked by their suffix. Raises a UserError, also while it is read, if the file cannot be read
    or its packed data are damaged."""

    def __init__(self, path: Path) -> None:
        self._unpacked = _Unpacked(path)
        super().__init__(self._unpacked, CHUNK_BYTES)

    @property
    def on_disk(self) -> int:
        """The number of bytes read from the file itself."""
        return self._unpacked.file.tell()


class _Unpacked(io.RawIOBase):
    """The bytes of a `ByteStream`."""

    def __init__(self, path: Path) -> None:
        self._path, self._ready = path, memoryview(b"")
        try:
            self.file = path.open("rb")
        except OSError as error:
            raise self._refused(error) from error
        self._chunks = self._utf8()

    def close(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _utf8(self) -> Iterator[bytes]:
        chunks, head = self._plain(), b""
        while len(head) < 4 and (chunk := next(chunks, None)) is not None:
            head += chunk  # a chunk may be empty
        mark, encoding = encoding_of(head)
        chunks = itertools.chain([head.removeprefix(mark)], chunks)
        if encoding == "utf-8":
            yield from chunks
            return
        decoder = codecs.getincrementaldecoder(encoding)("fp8stack.not_unicode")
        for chunk in chunks:
            yield decoder.decode(chunk).encode(errors="surrogateescape")
        yield decoder.decode(b"", final=True).encode(errors="surrogateescape")

    def _plain(self) -> Iterator[bytes]:
        """Yield the bytes, unpacked."""
        suffix = self._path.suffix.lower()
        unpack: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        try:
            if suffix == ".zst":
                yield from _unpack_zst(self.file)
            else:
                reader = unpack[suffix](self.file) if suffix in unpack else self.file
                yield from iter(partial(reader.read, CHUNK_BYTES), b"")
        except UserError:
            raise
        except Exception as error:  # each library has its own
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> UserError:
        name = quoted(str(self._path))
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"Cannot read {name}: {error.strerror}. Check its permissions.")
        return UserError(
            f"{name} is cut short or damaged ({error}). Download it again; the same command then "
            "continues."
        )


def _unpack_zst(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of all frames. Raises a UserError if zstandard is missing, and an EOFError if
    the file ends within a frame."""
    try:
        import zstandard
    except ImportError:
        hint = "Install it: pip install zstandard."
        raise UserError(f"Files that end in .zst need zstandard. {hint}") from None
    frame = None
    for packed in iter(partial(file.read, ZST_BYTES), b""):
        while packed:
            unpacker = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
            frame = frame or unpacker.decompressobj()
            yield frame.decompress(packed)
            packed, frame = frame.unused_data, None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends within a frame")
