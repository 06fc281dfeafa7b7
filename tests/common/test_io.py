"""Files and folders that are written whole or not at all, and who holds what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8stack.common import io
from fp8stack.common.errors import StorageError
from fp8stack.common.io import (
    DEEPEST,
    is_held,
    parse_json,
    parse_toml,
    read_json,
    read_toml,
    replacing,
    restore,
    sweep,
    write_atomically,
)
from tests.conftest import contents, refusal

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Context in which another process holds a file or folder."""
    words, pipe = [sys.executable, "-c", HOLD, str(path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_what_killed_processes_left_of_it_is_swept(tmp_path):
    for name in (".tmp-x.json-1", ".tmp-x.json-77", ".tmp-y.json-1", ".tmp-x.json", ".hidden"):
        (tmp_path / name).write_text("theirs")
    write_atomically(tmp_path / "x.json", b"old")
    write_atomically(tmp_path / "x.json", b"new")
    assert (tmp_path / "x.json").read_bytes() == b"new"
    assert names(tmp_path) == [".hidden", ".tmp-x.json", ".tmp-y.json-1", "x.json"]


def test_a_temporary_that_a_living_process_holds_stays(tmp_path):
    (tmp_path / ".tmp-x-1").write_text("being written")
    (tmp_path / ".tmp-x-2").mkdir()
    with held_by_another_process(tmp_path / ".tmp-x-1") as process:
        sweep(tmp_path)
        assert names(tmp_path) == [".tmp-x-1"]
        process.kill()
        process.wait()
        sweep(tmp_path)
        assert names(tmp_path) == []


def test_a_temporary_of_the_same_number_is_no_obstacle(tmp_path):
    temporary = tmp_path / f".tmp-x-{os.getpid()}"  # as of process 1 of another container
    temporary.write_text("being written")
    with held_by_another_process(temporary):
        write_atomically(tmp_path / "x", b"new")
        assert contents(tmp_path) == {"x": b"new", temporary.name: b"being written"}


def test_links_and_pipes_named_as_temporaries_are_neither_followed_nor_removed(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("mine")
    (tmp_path / ".tmp-x-1").symlink_to("theirs")
    (tmp_path / ".tmp-x-2").symlink_to("theirs/file")
    os.mkfifo(tmp_path / ".tmp-x-3")
    write_atomically(tmp_path / "x", b"new")
    sweep(tmp_path)
    assert names(tmp_path) == [".tmp-x-1", ".tmp-x-2", ".tmp-x-3", "theirs", "x"]
    assert (tmp_path / "theirs" / "file").read_text() == "mine"


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def folder(request, tmp_path, monkeypatch) -> Path:
    """A folder with a file, on a file system that can exchange folders or cannot."""
    if not request.param:
        monkeypatch.setattr(io, "_exchange", lambda path, with_path: False)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    return tmp_path / "x"


def test_a_folder_is_replaced_with_all_that_it_holds(folder):
    with replacing(folder) as fresh:
        (fresh / "new").write_text("new")
        assert names(folder) == ["old"]
    assert contents(folder.parent) == {"x/new": b"new"}
    assert names(folder.parent) == ["x"]
    with replacing(folder.parent / "a" / "b") as fresh:  # which is not there
        (fresh / "new").write_text("new")
    assert contents(folder.parent / "a") == {"b/new": b"new"}


@pytest.mark.parametrize("error", [OSError(28, "No space"), KeyboardInterrupt()])
def test_after_an_error_a_folder_is_as_before(folder, error):
    def fail() -> None:
        with replacing(folder) as fresh:
            (fresh / "new").write_text("new")
            raise error

    with pytest.raises((StorageError, KeyboardInterrupt)):
        fail()
    assert contents(folder.parent) == {"x/old": b"old"}
    assert names(folder.parent) == ["x"]


def test_a_folder_between_two_renames_comes_back_and_others_are_removed(tmp_path):
    for name in (".tmp-x-5", ".tmp-x-5-old", ".tmp-y-5-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    restore(tmp_path / "x")
    assert contents(tmp_path) == {"x/file": b".tmp-x-5-old", ".tmp-y-5-old/file": b".tmp-y-5-old"}
    (tmp_path / ".tmp-x-6-old").mkdir()
    restore(tmp_path / "x")  # which is there: what is old goes
    assert names(tmp_path) == [".tmp-y-5-old", "x"]


def test_a_file_is_held_as_long_as_the_process_that_locked_it_lives(tmp_path):
    file = tmp_path / ".lock"
    assert not is_held(file)
    file.touch()
    assert not is_held(file)
    with held_by_another_process(file) as process:
        assert is_held(file)
        process.kill()
        process.wait()
        assert not is_held(file)
    os.mkfifo(tmp_path / "pipe")
    assert not is_held(tmp_path / "pipe")


# TOML and JSON that anyone may have written

HUNDRED_KB = 50_000
DEEP_TOML = {
    "a dotted key": ".".join("a" * HUNDRED_KB) + " = 1",
    "a dotted header": f"[{'.'.join('a' * HUNDRED_KB)}]",
    "inline tables": "x = " + "{a = " * HUNDRED_KB,
    "arrays that Python can take": "x = " + "[" * 100 + "]" * 100,
    "headers that build on each other": "".join(
        f"[{'.'.join(f'a{n}' for n in range(depth))}]\n" for depth in range(40, 70)
    ),
}


@pytest.mark.parametrize("case", DEEP_TOML)
def test_deep_toml_is_refused_in_one_line_at_once(case):
    began = time.process_time()
    message = refusal(parse_toml, DEEP_TOML[case], "my.toml")
    assert time.process_time() - began < 30  # quadratic time would be many times as much
    assert message.startswith("my.toml")
    assert "nested too deeply" in message
    assert len(message) < 300


def test_text_of_the_most_levels_or_very_wide_is_read():
    wide = [{"a": [1, {"b": []}]}] * 1000
    assert parse_json(json.dumps(wide), "x") == wide
    keys = ".".join("a" * DEEPEST)
    table = parse_toml(f"{keys} = 1", "x")
    for _ in range(DEEPEST):
        table = table["a"]
    assert table == 1
    dots = "..." * 200 + ".".join("word" for _ in range(200))
    assert parse_toml(f'x = "{dots}"\ny = 1.5', "x") == {"x": dots, "y": 1.5}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 65 + "1" + "}" * 65])
def test_deep_json_is_refused_in_one_line(text):
    for content in (text, text.encode()):
        message = refusal(parse_json, content, "my.json")
        assert message.startswith("my.json is ")
        assert "nested too deeply" in message


@pytest.mark.parametrize("text", ["", "nonsense", "9" * 5000, b"\xff\xfe"])
def test_what_is_no_json_is_named(text):
    assert refusal(parse_json, text, "my.json").startswith("my.json is not valid JSON: ")


def test_files_that_cannot_be_read_are_named(tmp_path):
    for read, kind in ((read_toml, "TOML"), (read_json, "JSON")):
        assert refusal(read, tmp_path / "none").endswith(f"Give a {kind} file.")
        assert "is no regular file" in refusal(read, tmp_path)
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        assert "it is not UTF-8 text" in refusal(read, tmp_path / "bytes")
        with (tmp_path / "hole").open("wb") as stream:
            stream.truncate(2**40)
        assert "is too large" in refusal(read, tmp_path / "hole")
