"""`fp8stack prepare`: the same bytes with any number of processes and however often it was cut."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cost.prepare import prepare
from fp8stack.errors import RankLost, StorageError
from fp8stack.prepare import encode, run, shards
from fp8stack.prepare.folder import Folder
from tests.conftest import contents
from tests.prepare.dying import dies
from tests.prepare.test_run import documents, lines, pack, parquet, prepared, refusal, written
from tests.support.made_tokenizers import trained


class Cut(BaseException):
    """What a process that is killed would not live to see."""


@pytest.fixture(autouse=True)
def _small_items(monkeypatch):
    monkeypatch.setattr(run, "ITEM_BYTES", 2000)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)


@pytest.fixture
def mixed(tmp_path) -> list[str]:
    """An input of every kind."""
    folder = tmp_path / "mixed"
    written(folder / "a.jsonl", lines(documents(40, seed=1)))
    written(folder / "b.txt", " ".join(documents(30, seed=2)).encode())
    parquet(folder / "c.parquet", documents(40, seed=3), 17)
    for number, text in enumerate(documents(20, seed=4)):
        written(folder / f"d{number:02}.md", text.encode())
    written(tmp_path / "set" / "a.jsonl", lines(documents(30, seed=5)))
    written(tmp_path / "set" / "b.jsonl", lines(documents(30, seed=6)))
    return [str(folder), f"hf:{tmp_path / 'set'}", str(folder / "a.jsonl")]


SETTINGS: dict[str, Any] = {"shard_tokens": 3000, "train_bpe": 300}


def test_the_number_of_processes_changes_nothing(mixed, tmp_path):
    for workers in (1, 3):
        prepared(*mixed, out=tmp_path / str(workers), workers=workers, **SETTINGS)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "1")) > 8


@pytest.mark.parametrize("seed", range(3))
def test_however_it_is_cut_it_ends_in_the_same_bytes(seed, mixed, tmp_path, monkeypatch):
    prepared(*mixed, out=tmp_path / "whole", **SETTINGS)
    rng = random.Random(seed)
    names = ["_append", "_close_shard", "sync", "add"]
    cuts = 0
    for _ in range(12):
        with monkeypatch.context() as patched:
            left = rng.randrange(1, 10)
            doing = rng.choice(names)
            real = getattr(shards.SplitWriter, doing)

            def dies(self: Any, *a: Any, real: Any = real, doing: str = doing) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and rng.random() < 0.5 and doing == "_append":
                    real(self, a[0][: len(a[0]) // 2], a[1][:0])  # half of it was written
                elif left == 0 and rng.random() < 0.5:
                    real(self, *a)
                if left <= 0:
                    raise Cut
                return real(self, *a)

            patched.setattr(shards.SplitWriter, doing, dies)
            # Some of the journals do not come to be.
            patched.setattr(run, "SAVE_EVERY_S", rng.choice([0.0, 0.0, 0.02]))
            try:
                prepared(*mixed, out=tmp_path / "cut", **SETTINGS)
                break
            except Cut:
                cuts += 1
    assert cuts > 2
    prepared(*mixed, out=tmp_path / "cut", **SETTINGS)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_command_that_is_stopped_while_a_tokenizer_is_trained_saves_none(
    mixed, tmp_path, command, capsys, monkeypatch
):
    def stopped(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(run, "_train", stopped)
    words = ["prepare", *mixed, "--train-bpe", "300", "--out", str(tmp_path / "out")]
    assert command(*words) == 75
    said = "fp8stack: Stopped. The same command trains the tokenizer anew.\n"
    assert capsys.readouterr().err == said
    assert contents(tmp_path / "out") == {}


TRAINING = """
import os, random, signal, sys, threading, time
from fp8stack.cli import main
from fp8stack.prepare import train

read = train._beginning

def then_stopped(*given):
    yield from read(*given)
    def stop():
        time.sleep(0.5)  # it trains
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=stop).start()

train._beginning = then_stopped
main(sys.argv[1:])
"""


def test_a_tokenizer_that_is_trained_does_not_make_ctrl_c_wait(tmp_path):
    # One word of a million letters takes minutes: each pair is looked for in all of it.
    rng = random.Random(0)
    path = written(tmp_path / "a.txt", bytes(rng.choices(range(97, 123), k=1_000_000)))
    words = ["prepare", path, "--train-bpe", 50_000, "--out", tmp_path / "out"]
    command = [sys.executable, "-c", TRAINING, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "fp8stack: Stopped. The same command trains the tokenizer anew.\n"
    assert done.returncode == 75
    assert contents(tmp_path / "out") == {}


COMMAND = (
    "import sys; from fp8stack.cli import main; from fp8stack.prepare import run;"
    "run.ITEM_BYTES = 20000; run.SAVE_EVERY_S = 0.05; main(sys.argv[1:])"
)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """JSON lines, and what becomes of them by a tokenizer of their own."""
    folder = tmp_path_factory.mktemp("large")
    path = written(folder / "a.jsonl", lines(documents(2000)) * 2)
    prepared(path, out=folder / "whole", train_bpe=300, held_out=0.01)
    return path, contents(folder / "whole")


def alive(process: int) -> bool:
    """Whether it runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("asked", "code", "told"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGTERM, 75, "Stopped. Progress is saved; the same command continues.\n"),
    ],
)
def test_a_command_that_is_killed_goes_on_and_leaves_no_process(
    asked, code, told, large, tmp_path, monkeypatch
):
    words = ["prepare", large[0], "--train-bpe", 300, "--out", tmp_path / "out", "--workers", 2]
    command = [sys.executable, "-c", COMMAND, *map(str, words)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shard = tmp_path / "out" / "train-00000.bin"
    deadline = time.monotonic() + 180
    while not (shard.exists() and shard.stat().st_size > 20_000):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.send_signal(asked)
    _, said = running.communicate(timeout=60)
    assert running.returncode == code
    assert not told or said == f"fp8stack: {told}"
    while any(alive(int(child)) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    monkeypatch.setattr(run, "ITEM_BYTES", 100_000)
    prepared(large[0], out=tmp_path / "out", train_bpe=300, held_out=0.01)
    assert contents(tmp_path / "out") == large[1]


# What changed meanwhile


def cut_after(count: int, *paths: object, out: Path, **changes: Any) -> None:
    """A preparation that died after so many items."""
    left = count
    real = encode.encode

    def call(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cut
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode, "encode", call)
        with pytest.raises(Cut):
            prepared(*paths, out=out, **changes)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_changed_where_it_was_read_is_refused(name, tmp_path):
    path = tmp_path / name
    written(path, pack(lines(documents(100)), path.suffix))
    cut_after(3, path, out=tmp_path / "out")
    for content in (lines(documents(100, seed=9)), b"{}\n"):
        written(path, pack(content, path.suffix))
        assert "has changed where it was read already" in refusal(path, out=tmp_path / "out")


def test_inputs_read_already_must_be_as_they_were(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    for name in "abc":
        written(folder / f"{name}.jsonl", lines(documents(60)))
    cut_after(9, folder, out=out)
    assert json.loads((out / "progress.json").read_text())["position"]["source"] >= 1
    (folder / "0.jsonl").write_bytes(lines(["new"]))
    assert "read already have changed" in refusal(folder, out=out)
    (folder / "0.jsonl").unlink()
    (folder / "d.jsonl").write_bytes(lines(["new"]))  # was not yet to be read
    assert prepared(folder, out=out)["documents"]["documents"] == 181


def test_shards_that_are_shorter_and_another_tokenizer_of_that_name_are_refused(tmp_path):
    path = written(tmp_path / "a.jsonl", lines(documents(100)))
    given = tmp_path / "tokenizer.json"
    trained(300).save(str(given))
    asked = {"out": tmp_path / "out", "tokenizer": str(given)}
    cut_after(5, path, **asked)
    trained(310).save(str(given))
    assert "begun with another tokenizer" in refusal(path, **asked)
    trained(300).save(str(given))
    os.truncate(tmp_path / "out" / "train-00000.bin", 10)
    assert "train-00000.bin is missing or shorter than it was" in refusal(path, **asked)


# The machine fails


def test_a_full_disk_ends_in_code_4_and_goes_on(large, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ITEM_BYTES", 20_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    asked = {"out": tmp_path / "out", "train_bpe": 300, "held_out": 0.01}
    try:
        with pytest.raises(StorageError, match=r"the disk is full\. Make room there\.") as caught:
            prepared(large[0], **asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    assert caught.value.exit_code == 4
    prepared(large[0], **asked)
    assert contents(tmp_path / "out") == large[1]


def test_a_process_that_dies_is_told_and_nothing_is_lost(large, tmp_path):
    asked = {"out": tmp_path / "out", "train_bpe": 300, "held_out": 0.01}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fp8stack.prepare.encode.encode_in_worker", dies)
        with pytest.raises(RankLost, match="fewer --workers") as caught:
            prepared(large[0], workers=2, **asked)
        assert caught.value.exit_code == 4
    prepared(large[0], **asked)
    assert contents(tmp_path / "out") == large[1]


def test_a_folder_that_cannot_be_written_or_is_in_use_ends_the_command(mixed, tmp_path):
    written(tmp_path / "file", b"")
    with pytest.raises(StorageError) as caught:
        prepared(*mixed, out=tmp_path / "file" / "out")
    assert caught.value.exit_code == 4
    with Folder(tmp_path / "out").claimed():
        assert "Another command prepares" in refusal(*mixed, out=tmp_path / "out")


def test_a_bad_line_is_the_same_with_any_number_of_processes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(documents(100)) + b"no\n" + lines(documents(100)))
    said = [refusal(path, out=tmp_path / str(n), workers=n) for n in (1, 2)]
    assert said[0] == said[1]
    one, two = (json.loads((tmp_path / str(n) / "progress.json").read_text()) for n in (1, 2))
    assert one == two
    assert one["counts"]["documents"] > 80


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "jsonl.gz"])
def test_memory_does_not_grow_with_the_input(kind, tmp_path):
    peaks: dict[str, float] = {}  # of the command's process, or one that it started
    texts = documents(20000)  # 2 to 3 MB
    for times in (8, 80):
        path = tmp_path / f"{times}.{kind}"
        content = " ".join(texts).encode() if kind == "txt" else lines(texts)
        if kind == "parquet":
            parquet(path, texts * times, len(texts))
        else:
            written(path, pack(content, path.suffix) * times)
        prepare(peaks, f"{times}", path, "--out", tmp_path / f"out-{times}", "--workers", 2)
    assert peaks["80"] - peaks["8"] < 40, peaks


def test_processes_that_tokenize_start_without_torch():
    code = "import sys, fp8stack.prepare.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
