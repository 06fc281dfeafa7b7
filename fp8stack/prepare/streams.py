"""The bytes of a file, decompressed if necessary. The only file that imports zstandard."""

import gzip
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from fp8stack.errors import UserError, quoted

CHUNK_BYTES = 2**18
UNPACKED_BYTES = 2**14  # of a .zst, at a time: they may expand a thousandfold
CHECKED_BYTES = 4096


def check_of(content: bytes) -> int:
    """A CRC-32 of the last 4 KiB of `content`."""
    return zlib.crc32(content[-CHECKED_BYTES:])


class ByteStream:
    """A file read from beginning to end; `.gz` and `.zst` are decompressed. Raises a UserError,
    also in `read`, if it cannot be read or its compressed data are damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._ready = b""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._unreadable(str(error.strerror)) from error
        self._suffix = path.suffix.lower()
        if self._suffix == ".zst":
            self._chunks = _unpack_zstd(self._file)
        else:
            packed = self._suffix == ".gz"
            reader = gzip.GzipFile(fileobj=self._file) if packed else self._file
            self._chunks = iter(partial(reader.read, CHUNK_BYTES), b"")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def on_disk(self) -> int:
        """The number of bytes read from the file itself."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts = []
        while size > 0 and (self._ready or self._read_on()):
            part, self._ready = self._ready[:size], self._ready[size:]
            parts.append(part)
            size -= len(part)
            self.offset += len(part)
        return b"".join(parts)

    def go_to(self, offset: int, check: int) -> bytes:
        """Continue at `offset`. Raises a UserError unless `check_of` the 4 KiB before it is
        `check`."""
        before = max(0, offset - CHECKED_BYTES)
        if self._suffix not in (".gz", ".zst"):
            self._file.seek(before)
            self.offset = before
        while self.offset < before and self.read(min(CHUNK_BYTES, before - self.offset)):
            pass
        tail = self.read(offset - self.offset)
        if check_of(tail) != check or self.offset != offset:
            raise UserError(
                f"{quoted(str(self.path))} has changed where it was read already, before byte "
                f"{offset}. Put it back as it was, or start over with --overwrite."
            )
        return tail

    def _read_on(self) -> bool:
        try:
            self._ready = next(self._chunks, b"")
        except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{quoted(str(self.path))} is cut short or damaged after {self.offset} bytes "
                f"unpacked ({error}). Download it again; the same command then continues."
            ) from error
        except OSError as error:
            raise self._unreadable(str(error.strerror or error)) from error
        return self._ready != b""

    def _unreadable(self, reason: str) -> UserError:
        return UserError(
            f"Cannot read {quoted(str(self.path))}: {reason}. Check its permissions, or leave it "
            "out."
        )


def _unpack_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of the frames of a `.zst` file, some at a time.

    Raises:
        UserError: zstandard is missing.
        EOFError: while reading: the file ends within a frame.
        ValueError: while reading: the file is damaged.
    """
    try:
        import zstandard
    except ImportError:
        raise UserError(
            "Files that end in .zst need zstandard. Install it: pip install zstandard."
        ) from None

    def chunks() -> Iterator[bytes]:
        packed, frame = file.read(UNPACKED_BYTES), None
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                some = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            if some:
                yield some
            packed = frame.unused_data
            frame = None if frame.eof else frame
            packed = packed or file.read(UNPACKED_BYTES)
        if frame is not None:
            raise EOFError("it ends within a frame")

    return chunks()
