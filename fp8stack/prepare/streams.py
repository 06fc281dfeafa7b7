"""The bytes of a file, unpacked if it is packed. The only file that imports zstandard."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, Any, Protocol

from fp8stack.errors import UserError, quoted

CHUNK_BYTES = 2**18
UNPACKED_BYTES = 2**14  # of a .zst, at a time: they may become a thousand times as many
CHECKED_BYTES = 4096


def check_of(content: bytes) -> int:
    """What the last 4 KiB of `content` come to: a CRC-32."""
    return zlib.crc32(content[-CHECKED_BYTES:])


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class ByteStream:
    """A file that is read from its beginning to its end; `.gz` and `.zst` are unpacked.

    Args:
        path: the file.

    Raises:
        UserError: here and in `read`: it cannot be read, or what is packed is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._reader: _Reader
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._unreadable(str(error.strerror)) from error
        suffix = path.suffix.lower()
        if suffix == ".gz":
            self._reader = gzip.GzipFile(fileobj=self._file)
        elif suffix == ".zst":
            self._reader = _Unpacked(self._file)
        else:
            self._reader = self._file
        self.is_packed = self._reader is not self._file

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def on_disk(self) -> int:
        """How many of the file's own bytes were read."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end alone."""
        parts = []
        while size > 0:
            try:
                part = self._reader.read(size)
            except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(
                    f"{quoted(str(self.path))} is cut short or damaged after {self.offset} bytes "
                    f"unpacked ({error}). Get it anew; the same command then goes on with it."
                ) from error
            except OSError as error:
                raise self._unreadable(str(error.strerror or error)) from error
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self.offset += len(part)
        return b"".join(parts)

    def go_to(self, offset: int, check: int) -> bytes:
        """Go on at `offset`, before which there must be what there was: `check_of` it is `check`.
        The last 4 KiB of that.

        Raises:
            UserError: there is something else.
        """
        before = max(0, offset - CHECKED_BYTES)
        if not self.is_packed:
            self._file.seek(before)
            self.offset = before
        while self.offset < before and self.read(min(CHUNK_BYTES, before - self.offset)):
            pass
        tail = self.read(offset - self.offset)
        if check_of(tail) != check or self.offset != offset:
            raise UserError(
                f"{quoted(str(self.path))} has changed where it was read already, before byte "
                f"{offset}. Put it back as it was, or begin anew with --overwrite."
            )
        return tail

    def _unreadable(self, reason: str) -> UserError:
        return UserError(
            f"Cannot read {quoted(str(self.path))}: {reason}. Check its permissions, or leave it "
            "out."
        )


class _Unpacked:
    """The frames of a `.zst` file, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(
                "Files that end in .zst need zstandard. Install it: pip install zstandard."
            ) from None
        self._file = file
        self._new = zstandard.ZstdDecompressor
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._packed = b""
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end. EOFError within a frame, ValueError for damage."""
        while not self._ready:
            if not self._packed:
                self._packed = self._file.read(CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return b""
            self._ready = self._unpack()
        part, self._ready = self._ready[:size], self._ready[size:]
        return part

    def _unpack(self) -> bytes:
        if self._frame is None:
            self._frame = self._new().decompressobj()
        some, self._packed = self._packed[:UNPACKED_BYTES], self._packed[UNPACKED_BYTES:]
        try:
            unpacked: bytes = self._frame.decompress(some)
        except self._error as error:
            raise ValueError(str(error)) from error
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data + self._packed, None
        return unpacked
