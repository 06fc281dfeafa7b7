"""Data that are bad, or go bad while they are read, and what must be said of them (R9)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from fp8stack.data import StepBatches, load_corpora, validation_windows
from tests.faults.bounded import bounded

VOCABULARY = 300
TOKENS = 4000
NOBODY = 65534  # root may read everything
Change = Callable[[Path], object]


def good(path: Path) -> Path:
    """A file of good tokens."""
    (np.arange(TOKENS) % VOCABULARY).astype("<u2").tofile(path)
    return path


def _bad(place: int, value: int = 400, dtype: str = "<u2") -> Change:
    """A token that does not fit, at this offset."""

    def write(path: Path) -> None:
        tokens = np.arange(TOKENS).astype(dtype) % VOCABULARY
        tokens[place] = value
        tokens.tofile(path)

    return write


def _as(dtype: str) -> Change:
    return lambda path: (np.arange(TOKENS) % VOCABULARY).astype(dtype).tofile(path)


def _array(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.arange(TOKENS, dtype="<u2"))


def _text(path: Path) -> None:
    path.unlink()
    path.with_name("a.txt").write_bytes(("Sein oder Nichtsein, wär's\n" * 99).encode("utf-16-le"))


def _forbidden(path: Path) -> None:
    path.chmod(0)
    path.parent.chmod(0o755)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)


def _replaced(path: Path) -> None:
    other_path = path.with_name("other")
    np.zeros(10, "<u2").tofile(other_path)
    other_path.replace(path)


def _rewritten(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(np.full(TOKENS, 500, "<u2").tobytes())


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BEFORE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "token beyond the vocabulary": (_bad(1234), ("a.bin: token 400 at offset 1234",)),
    "negative tokens": (_bad(7, value=-1, dtype="<i2"), ("a.bin: token 65535 at offset 7 ",)),
    "odd length": (lambda path: path.write_bytes(bytes(range(99))), ("a.bin has 99 bytes",)),
    "tokens that would wrap": (_as("<u4"), ("a.bin holds wider tokens",)),
    "big-endian tokens": (_as(">u2"), ("a.bin: token ", " at offset ")),
    "an array with a header": (_array, ("a.bin is a .npy file",)),
    "an empty file": (lambda path: os.truncate(path, 0), ("a.bin is empty",)),
    "an unreadable file": (_forbidden, ("Cannot read ", "a.bin", "Permission denied")),
    "a folder in its place": (_folder, ("a.bin holds no data",)),
    "text of two bytes a letter": (_text, ("a.txt looks binary: byte ",)),
}
"""Done to the file before it is opened, and what must be said."""
MEANWHILE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a file that shrinks": (lambda path: os.truncate(path, 100), ("a.bin shrank", "offset 50 ")),
    "a file that is gone": (Path.unlink, ("a.bin any more: No such file",)),
    "a shorter one in its place": (_replaced, ("a.bin shrank", "offset 10 ")),
    "other tokens in its place": (_rewritten, ("a.bin: token 500 at offset ",)),
}
"""Done to the file between two steps, and what must be said."""
FAULTS = [*BEFORE, *MEANWHILE]


def problem(place: Path, fault: str, workers: int = 0) -> str:
    """Try a fault in the empty folder `place`. Returns the problem, "" if there is none. A child
    process reads the data: a page that is gone would kill it."""
    change, message = (BEFORE | MEANWHILE)[fault]
    folder = place / "data"
    folder.mkdir(parents=True)
    path = good(folder / "a.bin")
    (folder / ".hidden").touch()
    ended = bounded(lambda: _read(path, change, fault in BEFORE, workers), seconds=30)
    shutil.rmtree(folder, ignore_errors=True)
    if ended.code != 2 or not ended.is_one_line:
        return f"exit {ended.code}, {ended.stderr[-300:]}{ended.stdout}"
    missing = [words for words in message if words not in ended.stderr]
    return f"'{missing[0]}' is not said: {ended.stderr}" if missing else ""


def _read(path: Path, change: Change, before: bool, workers: int) -> None:
    """Read every window of `path`, which is changed first or after the first step."""
    if before:
        change(path)
    text = path.with_name("a.txt")
    data = text if os.path.exists(text) else path
    train, held_out = load_corpora(str(data), VOCABULARY)
    # A batch so large that next to every token is in one of its windows.
    step = StepBatches(train, batch=4000, context=64, seed=0, vocabulary=VOCABULARY)
    step[1]
    if not before:
        change(path)
    for _ in DataLoader(step, sampler=range(2, 4), batch_size=None, num_workers=workers):
        pass
    validation_windows(held_out, count=9999, context=8, vocabulary=VOCABULARY)
