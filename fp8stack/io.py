"""Files written whole or not at all, TOML and JSON that anyone may have written, and the system's
errors in one line. No torch here."""

import errno
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

from safetensors import SafetensorError

from fp8stack.errors import StorageError, UserError, quoted

TEMPORARY = ".tmp-"
"""What the names of files and folders begin with that are being written or removed."""

DEEPEST = 64
"""The most levels of tables and lists in TOML and JSON: several times what any program writes, and
few enough for code that recurses."""
LARGEST_TOML = 2**20  # bytes: a hundred times what anyone writes
LARGEST_JSON = 2**26  # bytes: the index of a large model takes megabytes

_KEY = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
# tomllib takes quadratic time and memory for a dotted key.
_DEEP_KEY = re.compile(
    rf"(?:^|[\[{{,])[ \t]*{_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{{DEEPEST}}}", re.MULTILINE
)


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
            write_flushed(temporary, content)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def settle(file: Path) -> None:
    """Have whoever may read its folder read a file, which safetensors wrote for its owner alone,
    and flush it to the disk."""
    file.chmod(file.parent.stat().st_mode & 0o666)
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises a UserError if it cannot be read or is not TOML."""
    return parse_toml(_text_of(path, "TOML", LARGEST_TOML), str(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The table in a TOML text, which errors call `name`. Raises a UserError, in bounded time, if
    it is not TOML, or has more than `DEEPEST` levels."""
    name = quoted(name)
    if key := _DEEP_KEY.search(text):
        shown = quoted(key[0].strip(" \t\n[{,")[:60])
        raise UserError(
            f"{name}: key '{shown}...' is nested too deeply: it has more than {DEEPEST} parts."
        )
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer too long to convert
        raise UserError(f"{name} is not valid TOML: {quoted(str(error))}.") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deeply.") from error
    _require_shallow(table, name)
    return table


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """The value in a JSON file. Raises a UserError if it cannot be read, has more than `largest`
    bytes, or is not JSON."""
    return parse_json(_text_of(path, "JSON", largest), str(path))


def parse_json(text: str | bytes, name: str) -> Any:
    """The value of a JSON text, which errors call `name`. Raises a UserError if it is not JSON, or
    has more than `DEEPEST` levels."""
    name = quoted(name)
    try:
        value = json.loads(text)
    except ValueError as error:  # not JSON, not UTF-8, or an integer too long to convert
        raise UserError(f"{name} is not valid JSON: {quoted(str(error))}.") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deeply.") from error
    _require_shallow(value, name)
    return value


def _text_of(path: Path, kind: str, largest: int) -> str:
    name = quoted(str(path))
    try:
        if path.exists() and not path.is_file():  # /dev/zero has no end
            raise UserError(f"{name} is no regular file. Give a {kind} file.")
        if path.stat().st_size > largest:
            raise UserError(f"{name} is too large. Give a {kind} file.")
        return path.read_text(encoding="utf-8-sig")
    except UserError:  # a ValueError too
        raise
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "invalid path"
        reason = getattr(error, "strerror", None) or reason
        raise UserError(f"Cannot read {name}: {reason}. Give a {kind} file.") from error


def _require_shallow(value: Any, name: str) -> None:
    """Raise a UserError if `value` has more than `DEEPEST` levels; found without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        outer = [item for item in level if isinstance(item, dict | list)]
        level = [
            inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise UserError(f"{name} is nested too deeply: more than {DEEPEST} levels.")


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
