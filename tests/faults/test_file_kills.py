"""Commands that are killed before each operation on files: the same command then ends as if that
had not been. What it writes is whole, old or new, and nothing is left behind."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from fp8stack.common import io
from fp8stack.data.prepared import prepared_segments
from tests.faults.processes import Change, run_ranks, unchanged
from tests.support.cases import case

pytestmark = pytest.mark.full


def kill_at_each(
    words: Sequence[str],
    begin: Callable[[Path], object],
    is_whole: Callable[[Path], bool],
    tmp_path: Path,
    change: Change = unchanged,
    every: int = 1,
) -> int:
    """Run a command in a folder that `begin` fills and kill it, before each operation on files in
    turn, or `every` so many. See that `is_whole` holds then, and that the same command leaves what
    it leaves where it was never killed. Returns how many operations there are."""
    begin(expected := tmp_path / "expected")
    assert run_ranks(words, expected, 1, change=change)[0].code == 0
    for number in itertools.count(1, every):
        begin(folder := tmp_path / str(number))
        ended = run_ranks(words, folder, 1, f"kill@file:{number}", change)[0]
        if ended.code == 0:
            return number - every
        assert ended.code == -signal.SIGKILL
        assert is_whole(folder), number
        again = run_ranks(words, folder, 1, change=change)[0]
        assert again.code == 0, (number, again.stderr)
        assert entries(folder) == entries(expected), number
        shutil.rmtree(folder)
    raise AssertionError


def entries(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below `folder`, by its path there; None for a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("every", [case(9, quick=True), case(1, quick=False)])
def test_a_killed_prepare_leaves_a_whole_folder_or_none_and_the_next_one_sweeps(every, tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    text = "".join(f'{{"text": "document {n}"}}\n' for n in range(20))
    (before / "a.jsonl").write_text(text)
    words = ["prepare", "a.jsonl", "--out", "x", "--shard-tokens"]
    assert run_ranks([*words, "99"], before, 1)[0].code == 0
    (before / "x" / ".DS_Store").write_text("somebody's")

    def begin(folder: Path) -> None:
        shutil.copytree(before, folder)

    def is_whole(folder: Path) -> bool:
        return not (folder / "x/manifest.json").exists() or bool(
            prepared_segments(folder / "x", 256)
        )

    words += ["40", "--held-out", "0.3", "--overwrite"]
    assert kill_at_each(words, begin, is_whole, tmp_path, every=every) >= 30


@contextmanager
def without_exchange(rank: int) -> Iterator[None]:
    """A change: a file system that cannot exchange two folders."""
    with patch.object(io, "_exchange", lambda path, with_path: False):
        yield


@pytest.mark.parametrize(
    ("change", "every"),
    [
        case(unchanged, 4, quick=True),
        case(unchanged, 1, quick=False),
        case(without_exchange, 1, quick=False),
    ],
)
def test_a_killed_export_leaves_the_old_or_the_new_folder_and_the_next_one_sweeps(
    change, every, pristine, tmp_path
):
    old = tmp_path / "old"
    assert run_ranks(["export", str(pristine), "--out", str(old)], tmp_path, 1)[0].code == 0
    (old / ".gitattributes").write_text("somebody's")
    new = {"model.safetensors", "model.toml", ".gitattributes"}
    names = [{path.name for path in old.iterdir()}, new]

    def begin(folder: Path) -> None:
        shutil.copytree(old, folder / "x")

    def is_whole(folder: Path) -> bool:
        if not (folder / "x").exists():
            return change is without_exchange  # the next command brings it back
        return {path.name for path in (folder / "x").iterdir()} in names

    words = ["export", str(pristine), "--out", "x", "--format", "safetensors", "--overwrite"]
    assert kill_at_each(words, begin, is_whole, tmp_path, change, every) >= 13
