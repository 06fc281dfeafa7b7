"""Files written whole or not at all, and the system's errors in one line. No torch here."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

from safetensors import SafetensorError

from fp8stack.errors import StorageError

TEMPORARY = ".tmp-"
"""What the names of files and folders begin with that are being written or removed."""


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the system's error into one line that names the path and the remedy. Raises a
    StorageError in place of an OSError or a SafetensorError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = error.errno if isinstance(error, OSError) else None
        if told := re.search(r"\(os error (\d+)\)", str(error)):  # as safetensors tells it
            code = int(told[1])
        full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else os.strerror(code) if code else str(error)
        remedy = "Make room there" if full else "Give a folder that can be written"
        raise StorageError(f"Cannot write to {path}: {reason}. {remedy}.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path` whole: a reader sees the old content or the new. Raises a
    StorageError if the disk is full or cannot be written."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with storage_errors(path):
        try:
            write_flushed(temporary, content, replaces=path)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_flushed(path: Path, content: bytes, replaces: Path | None = None) -> None:
    """Write a file and flush it to the disk, with the mode of the file that it `replaces`."""
    with path.open("wb") as stream:
        if os.name == "posix":
            restrict(stream.fileno(), path.parent)
            if replaces is not None:
                keep_mode(replaces, stream.fileno())
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def keep_mode(replaced: Path, descriptor: int) -> None:
    """Give an open file the mode of the file that it is about to replace, if there is one."""
    with suppress(FileNotFoundError):
        mode = replaced.lstat().st_mode
        if stat.S_ISREG(mode):
            os.fchmod(descriptor, stat.S_IMODE(mode))


def restrict(descriptor: int, folder: Path) -> None:
    """Take access to an open file from those who have none to the folder it was created in."""
    os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode & folder.stat().st_mode))


def settle(file: Path) -> None:
    """Have whoever may read its folder read a file, which safetensors wrote for its owner alone,
    and flush it to the disk."""
    file.chmod(file.parent.stat().st_mode & 0o666)
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Hold a file or folder, by its open descriptor, until that is closed; False if another process
    does, and not both as `shared`. Where there are no locks, on Windows and on some file systems,
    all are told True."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            pass
    return True


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
