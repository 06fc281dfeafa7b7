"""Atomic writes of files and folders, TOML and JSON from untrusted files, and one-line system
errors. No torch here.

A file or folder is written under a temporary name in the same folder, and the writing process locks
it. A temporary without a lock was left behind by a killed process; the next process that writes to
the same path removes it.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from sys import intern
from typing import Any

from fp8stack.common.errors import StorageError, UserError, quoted

TEMPORARY = ".tmp-"
"""Prefix of the names of files and folders that are being written or removed."""
LOCK = ".lock"
"""The file in a run's folder that the training process locks."""
_OLD = "-old"
_TEMPORARY_NAME = re.compile(rf"{re.escape(TEMPORARY)}(?P<name>.+?)-\d+({_OLD})?", re.DOTALL)
_LOCK_RETRY_S = 0.05

DEEPEST = 64
"""The maximum depth of tables and lists in TOML and JSON: several times the depth that programs
write, and small enough for recursive code."""
LARGEST_TOML = 2**20  # bytes: a hundred times the size of real files
LARGEST_JSON = 2**26  # bytes: the index of a large model takes megabytes
LONGEST_LINE = 2**24  # characters of a file of JSON lines

_KEY = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
# tomllib needs quadratic time and memory for a dotted key.
_DEEP_KEY = re.compile(
    rf"(?:^|[\[{{,])[ \t]*{_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{{DEEPEST}}}", re.MULTILINE
)


def absolute_path(path: str) -> str:
    """`path` from the root, without symbolic links, except that a link to a file keeps its name:
    its suffix and the files next to it say what it holds."""
    if not os.path.isfile(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder or os.curdir), name)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Context that turns an OSError or a SafetensorError into a StorageError, whose one line names
    the path and the remedy; into a plain UserError if a folder of the path is a file."""
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError  # not needed to read files

        if not isinstance(error, OSError | SafetensorError):
            raise
        code = error.errno if isinstance(error, OSError) else None
        if os_code := re.search(r"\(os error (\d+)\)", str(error)):  # the format of safetensors
            code = int(os_code[1])
        file = next((folder for folder in path.parents if os.path.isfile(folder)), None)
        if file is not None:
            raise UserError(
                f"Cannot write to {path}: {file} is a file. Give a path in a folder."
            ) from error
        is_full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if is_full else os.strerror(code) if code else str(error)
        remedy = "Make room there" if is_full else "Give a folder that can be written"
        raise StorageError(f"Cannot write to {path}: {reason}. {remedy}.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically: a reader sees the old or the new content, even if this
    process is killed. Removes the temporaries of killed processes that wrote to it. Raises a
    StorageError if the disk is full or cannot be written."""
    with storage_errors(path):
        sweep(path.parent, path.name.__eq__)
        with _temporary(path, lambda temporary: temporary.open("xb").close()) as temporary:
            try:
                write_flushed(temporary, content, replaces=path)
                temporary.replace(path)
                sync_folder(path.parent)
            finally:
                temporary.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder that replaces `folder` at the end of the context. After an error
    `folder` is unchanged. If the system can exchange two folders (Linux, on most file systems), a
    killed process leaves the old or the new folder. On other systems it may leave neither; then
    `restore` brings back the old one. Raises a StorageError if the disk is full or cannot be
    written."""
    with storage_errors(folder):
        restore(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(folder, Path.mkdir) as fresh:
            try:
                yield fresh
                sync_folder(fresh)
                _take_place(fresh, folder)
                sync_folder(folder.parent)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)


def restore(folder: Path) -> None:
    """Undo a `replacing` whose process was killed: restore `folder` if it is missing, and remove
    temporaries. Raises a StorageError if the disk cannot be written."""
    with storage_errors(folder):
        for path in _abandoned(folder.parent, folder.name.__eq__):
            if path.name.endswith(_OLD) and not os.path.lexists(folder):
                path.rename(folder)
    sweep(folder.parent, folder.name.__eq__)


def _take_place(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`. An existing `folder` is at `fresh` afterwards."""
    if not os.path.lexists(folder):
        fresh.rename(folder)
    elif not _exchange(fresh, folder):
        old = fresh.with_name(f"{fresh.name}{_OLD}")
        folder.rename(old)
        try:
            fresh.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
        old.rename(fresh)


def _exchange(path: Path, with_path: Path) -> bool:
    """Exchange two paths atomically. Returns False if the system or file system cannot."""
    import ctypes

    current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # no Linux, or an old C library
        return False
    names = [os.fsencode(path), os.fsencode(with_path)]
    failed: int = rename(current_folder, names[0], current_folder, names[1], exchange)
    return failed == 0


def sweep(folder: Path, is_written: Callable[[str], object] = bool) -> None:
    """Remove the temporaries that killed processes left in `folder`, for files and folders whose
    names `is_written` accepts."""
    for path in _abandoned(folder, is_written):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _abandoned(folder: Path, is_written: Callable[[str], object]) -> Iterator[Path]:
    """Yield the temporaries in `folder` that no process holds. This process holds a temporary
    until the next one."""
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return
    for name in names:
        match = _TEMPORARY_NAME.fullmatch(name)
        if match is None or not is_written(match["name"]):
            continue
        with suppress(OSError), ExitStack() as released:  # such as a link
            if _holds(folder / name, released):
                yield folder / name


@contextmanager
def _temporary(path: Path, create: Callable[[Path], object]) -> Iterator[Path]:
    """Create a temporary in the folder of `path`, and hold it during the context."""
    with ExitStack() as released:
        for number in itertools.count(os.getpid()):
            temporary = path.with_name(f"{TEMPORARY}{path.name}-{number}")
            with suppress(FileExistsError):
                create(temporary)
                with suppress(FileNotFoundError):  # another process has just removed it
                    if _holds(temporary, released):
                        break
        yield temporary


def _holds(path: Path, released: ExitStack) -> bool:
    """Hold a regular file or a folder until `released`, see `lock`. Returns False if another
    process holds it, or if it is something else. Raises an OSError for a link or a missing path."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    released.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or not lock(descriptor):
        return False
    return os.path.samestat(status, os.stat(path))


def write_flushed(path: Path, content: bytes, replaces: Path | None = None) -> None:
    """Write a file and flush it to the disk, with the mode of the file that it `replaces`."""
    with path.open("wb") as stream:
        restrict(stream.fileno(), path.parent)
        if replaces is not None:
            keep_mode(replaces, stream.fileno())
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def keep_mode(replaced: Path, descriptor: int) -> None:
    """Give an open file the mode of the file `replaced` that it will replace, if that exists."""
    with suppress(FileNotFoundError):
        mode = replaced.lstat().st_mode
        if stat.S_ISREG(mode):
            os.fchmod(descriptor, stat.S_IMODE(mode))


def restrict(descriptor: int, folder: Path) -> None:
    """Restrict the mode of an open file to the permissions of its folder."""
    os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode & folder.stat().st_mode))


def settle(file: Path) -> None:
    """Give a file, which safetensors made readable only for its owner, the permissions of its
    folder, and flush it to the disk."""
    file.chmod(file.parent.stat().st_mode & 0o666)
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises a UserError if it cannot be read or is not TOML."""
    return parse_toml(_text_of(path, "TOML", LARGEST_TOML), str(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The table in a TOML text, called `name` in errors. Raises a UserError, in bounded time, if it
    is not TOML or has more than `DEEPEST` levels."""
    name = quoted(name)
    if key := _DEEP_KEY.search(text):
        key_text = quoted(key[0].strip(" \t\n[{,")[:60])
        raise UserError(
            f"{name}: key '{key_text}...' is nested too deeply: it has more than {DEEPEST} parts."
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
    """The value of a JSON text, called `name` in errors. Raises a UserError if it is not JSON or
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


def json_lines(path: Path, notes: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, up to the first line that is no object; none if
    the file is missing. `notes` gets a sentence on a damaged line; a last line without an end is
    being written. Raises a UserError if the file cannot be read."""
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe would block
        raise UserError(f"{quoted(str(path))} is no regular file. Give the folder of a run.")
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            for count, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), ""), start=1):
                row = None
                if len(line) < LONGEST_LINE:
                    with suppress(UserError):
                        row = parse_json(line, path.name)
                if not isinstance(row, dict):
                    is_whole = line.endswith("\n") or len(line) == LONGEST_LINE
                    if is_whole and notes is not None:
                        notes.append(f"{path.name} is damaged: line {count} and on are left out.")
                    return
                yield {intern(key): value for key, value in row.items()}  # rows share their keys
    except OSError as error:
        raise UserError(f"Cannot read {quoted(str(path))}: {error.strerror}.") from error


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
    """Raise a UserError if `value` has more than `DEEPEST` levels. Does not recurse."""
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


def lock(descriptor: int, *, shared: bool = False, wait_s: float = 0.0) -> bool:
    """Lock a file or folder by its open descriptor, until the descriptor is closed. Several
    processes may hold a `shared` lock. Returns False if another process still holds it after
    `wait_s` seconds. Returns True without a lock on file systems without locks."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < until:
                time.sleep(_LOCK_RETRY_S)
                continue
            return False
        except OSError:  # a file system without locks
            pass
        return True


@contextmanager
def claimed(folder: Path, busy: str) -> Iterator[None]:
    """Create a folder, and lock it during the context. Raises a UserError with the message `busy`
    if another process holds the lock, a StorageError if the folder cannot be created."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise UserError(busy)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the file at `path`; see `lock`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    except OSError:
        return False
    try:
        return not lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
