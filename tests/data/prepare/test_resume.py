"""`fp8stack prepare`: the same bytes with any number of processes and of interruptions."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cost.prepare import prepare
from fp8stack.common.errors import RankLost, StorageError
from fp8stack.data import load_corpora
from fp8stack.data.prepare import encode
from fp8stack.data.prepare import pipeline as run
from fp8stack.data.prepare.output_folder import OutputFolder
from fp8stack.data.prepare.shards import SplitWriter
from fp8stack.data.tokenizer import load_tokenizer
from tests.conftest import contents
from tests.conftest import refusal as refused_by
from tests.data.prepare.test_pipeline import (
    documents,
    lines,
    pack,
    parquet,
    prepared,
    refusal,
    require,
    written,
)
from tests.support.cases import case
from tests.support.small_tokenizers import trained


class Cut(BaseException):
    """Stands for the end of a process that is killed."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    monkeypatch.setattr(run, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(run, "GROUP_BYTES", 5000)


@pytest.fixture
def mixed(tmp_path) -> list[str]:
    """An input of every kind."""
    folder = tmp_path / "mixed"
    written(folder / "a.jsonl", lines(documents(40, seed=1)))
    written(folder / "b.txt", " ".join(documents(30, seed=2)).encode())
    parquet(folder / "c.parquet", documents(40, seed=3), 17)
    for number, text in enumerate(documents(20, seed=4)):
        written(folder / f"d{number:02}.md", text.encode())
    rows = [{"text": text} for text in documents(200, seed=7)]
    written(folder / "e.json", json.dumps(rows).encode())
    written(folder / "f.csv", b"text\n" + b"some words\n" * 900)
    written(tmp_path / "set" / "a.jsonl", lines(documents(300, seed=5)))
    written(tmp_path / "set" / "b.jsonl", lines(documents(30, seed=6)))
    return [str(folder), f"hf:{tmp_path / 'set'}", str(folder / "a.jsonl")]


SETTINGS: dict[str, Any] = {"shard_tokens": 3000, "train_bpe": 300}


def test_the_number_of_processes_changes_nothing(mixed, tmp_path):
    for workers in (1, 3):
        prepared(*mixed, out=tmp_path / str(workers), workers=workers, **SETTINGS)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "1")) > 8


@pytest.mark.parametrize("seed", [case(seed, quick=seed == 0) for seed in range(3)])
def test_however_it_is_cut_it_ends_in_the_same_bytes(seed, mixed, tmp_path, monkeypatch):
    prepared(*mixed, out=tmp_path / "whole", **SETTINGS)
    rng, cuts = random.Random(seed), 0
    steps: list[tuple[Any, str]] = [
        (SplitWriter, "_append"),
        (SplitWriter, "finish"),
        (encode, "encode"),
        (run, "save_tokenizer"),
    ]
    steps += [(OutputFolder, name) for name in ("record", "return_to", "remove_scratch")]
    for _ in range(15):
        with monkeypatch.context() as patched:
            owner, name = rng.choice(steps)
            countdown, after = (
                rng.randrange(1, {"encode": 6, "record": 3}.get(name, 2)),
                rng.random() < 0.5,
            )
            real = getattr(owner, name)

            def cut(*arguments: Any, real: Any = real, after: bool = after) -> Any:
                nonlocal countdown
                countdown -= 1
                if countdown == 0 and after:
                    real(*arguments)
                if countdown == 0:
                    raise Cut
                return real(*arguments)

            patched.setattr(owner, name, cut)
            patched.setattr(run, "GROUP_BYTES", rng.choice([3000, 5000, 9000]))
            try:
                prepared(*mixed, out=tmp_path / "cut", **SETTINGS)
                break
            except Cut:
                cuts += 1
    assert cuts > 1
    prepared(*mixed, out=tmp_path / "cut", **SETTINGS)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not any(path.name.startswith(".") for path in (tmp_path / "cut").iterdir())


def test_a_command_that_is_stopped_while_a_tokenizer_is_trained_saves_none(
    mixed, tmp_path, command, capsys, monkeypatch
):
    def stopped(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(run, "_train", stopped)
    words = ["prepare", *mixed, "--train-bpe", "300", "--out", str(tmp_path / "out")]
    assert command(*words) == 75
    message = "fp8stack: Stopped. The same command trains the tokenizer anew.\n"
    assert capsys.readouterr().err == message
    assert contents(tmp_path / "out") == {}


TRAINING = """
import os, random, signal, sys, threading, time
from fp8stack.cli import main
from fp8stack.data.prepare import train

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
    "import sys; from fp8stack.cli import main; from fp8stack.data.prepare import pipeline;"
    "pipeline.BLOCK_BYTES = 2000; pipeline.GROUP_BYTES = 20000; main(sys.argv[1:])"
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """JSON lines, and the folder that they are prepared to with a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("large")
    path = written(folder / "a.jsonl", lines(documents(2000)) * 6)
    prepared(path, out=folder / "whole", train_bpe=300, held_out=0.01)
    return path, contents(folder / "whole")


def alive(process: int) -> bool:
    """Whether the process runs; a process that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STOPPED = "Stopped. Progress is saved; the same command continues.\n"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("signal_number", "group", "code", "message"),
    [
        case(signal.SIGKILL, False, -signal.SIGKILL, "", quick=True),
        case(signal.SIGTERM, False, 75, STOPPED, quick=False),
        case(signal.SIGINT, True, 75, STOPPED, quick=True),
    ],
)
def test_a_command_that_is_killed_goes_on_and_leaves_nothing(
    signal_number, group, code, message, large, tmp_path
):
    sockets = Path(tempfile.mkdtemp())
    words = ["prepare", large[0], "--train-bpe", 300, "--out", tmp_path / "out", "--workers", 2]
    running = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(sockets)},
        start_new_session=True,
    )
    listed = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    children: list[str] = []

    def is_mapping() -> bool:
        assert running.poll() is None, running.communicate()
        children[:] = listed.read_text().split()
        return (tmp_path / "out/.tmp-prepare/journal.jsonl").exists() and len(children) >= 2

    wait_until(is_mapping)
    (os.killpg if group else os.kill)(running.pid, signal_number)
    _, printed = running.communicate(timeout=60)
    assert running.returncode == code
    assert printed == (f"fp8stack: {message}" if message else "")
    wait_until(lambda: not any(alive(int(child)) for child in children))
    sockets.rmdir()  # fails if a socket remains
    prepared(large[0], out=tmp_path / "out", train_bpe=300, held_out=0.01)
    assert contents(tmp_path / "out") == large[1]


@pytest.mark.slow
def test_processes_find_each_other_where_temporary_files_have_long_paths(
    large, tmp_path, monkeypatch
):
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    prepared(large[0], out=tmp_path / "out", train_bpe=300, held_out=0.01, workers=2)
    assert contents(tmp_path / "out") == large[1]


# Inputs and tokenizers that changed meanwhile


def cut_after(count: int, *paths: object, out: Path, **changes: Any) -> None:
    """A preparation that died after so many blocks."""
    remaining, real = count, encode.encode

    def call(*arguments: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise Cut
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode, "encode", call)
        with pytest.raises(Cut):
            prepared(*paths, out=out, **changes)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.csv"])
def test_work_on_inputs_that_changed_is_done_again(name, tmp_path, capsys):
    def write(texts: list[str]) -> None:
        if path.suffix == ".parquet":
            parquet(path, texts)
        elif path.suffix == ".csv":
            written(path, "".join(f"{line}\n" for line in ["text", *texts]).encode())
        else:
            written(path, pack(lines(texts), path.suffix))

    first = written(tmp_path / "0.jsonl", lines(documents(200)))
    path = tmp_path / name
    write(["before " * 9] * 900)
    cut_after(15, first, path, out=tmp_path / "out")
    assert "did not finish it" in refused_by(load_corpora, str(tmp_path / "out"), 256)
    write(["after " * 9] * 900)
    capsys.readouterr()
    prepared(first, path, out=tmp_path / "out")
    require(tmp_path / "out", documents(200) + ["after " * 9] * 900)
    assert "going on after" in capsys.readouterr().out
    cut_after(15, first, path, out=tmp_path / "other")
    first.write_bytes(lines(documents(201)))
    capsys.readouterr()
    prepared(first, path, out=tmp_path / "other")
    require(tmp_path / "other", documents(201) + ["after " * 9] * 900)
    assert "going on after" not in capsys.readouterr().out


def test_another_tokenizer_of_that_name_starts_over(tmp_path):
    path = written(tmp_path / "a.jsonl", lines(documents(100)))
    tokenizer_file = tmp_path / "tokenizer.json"
    trained(300).save(str(tokenizer_file))
    options: dict[str, Any] = {"out": tmp_path / "out", "tokenizer": str(tokenizer_file)}
    cut_after(5, path, **options)
    trained(310).save(str(tokenizer_file))
    prepared(path, **options)
    prepared(path, **options | {"out": tmp_path / "whole"})
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_after_an_input_that_no_tokenizer_is_trained_on_is_mended_the_same_command_works(tmp_path):
    content = lines(documents(200))
    path = written(tmp_path / "a.jsonl", content)
    options: dict[str, Any] = {"out": tmp_path / "out", **SETTINGS}
    cut_after(20, path, **options)
    assert list((tmp_path / "out").glob("train-*.bin"))
    written(path, content + b"oops\n")
    assert "line 201 is not JSON" in refusal(path, **options)
    written(path, content)
    prepared(path, **options)
    prepared(path, **options | {"out": tmp_path / "whole"})
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# The machine fails


def test_a_hangup_that_is_ignored_stays_ignored_in_all_processes(monkeypatch):
    monkeypatch.setattr(encode, "encode", lambda *arguments: signal.getsignal(signal.SIGHUP))
    block = encode.TextBlock(texts=[], place=encode.Place(), on_disk=0)

    def handlers(of_parent: Any) -> set[Any]:
        earlier = signal.signal(signal.SIGHUP, of_parent)
        try:
            with encode._signals_afterwards():
                of_context = signal.getsignal(signal.SIGHUP)
            encoded = encode.encode_blocks(load_tokenizer("bytes"), [block] * 3, 2)
            of_workers = {handler for _, handler in encoded}
        finally:
            signal.signal(signal.SIGHUP, earlier)
        return {of_context, *of_workers}

    assert handlers(signal.SIG_IGN) == {signal.SIG_IGN}
    assert signal.SIG_DFL in handlers(lambda *_: None)  # of a worker


def test_a_full_disk_ends_in_code_4_and_goes_on(large, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options = {"out": tmp_path / "out", "train_bpe": 300, "held_out": 0.01}
    try:
        for size, workers in ((3000, 1), (3000, 2), (100_000, 1)):  # of a group, and of a shard
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(StorageError, match=r"the disk is full\. Make room there") as caught:
                prepared(large[0], workers=workers, **options)
            assert caught.value.exit_code == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    prepared(large[0], **options)
    assert contents(tmp_path / "out") == large[1]


def test_a_process_that_dies_is_reported_and_nothing_is_lost(large, tmp_path, monkeypatch):
    options: dict[str, Any] = {"out": tmp_path / "out", "train_bpe": 300, "held_out": 0.01}
    monkeypatch.setattr(run, "GROUP_BYTES", 100_000)
    with monkeypatch.context() as patched:
        patched.setattr(encode, "encode", lambda *arguments: os._exit(9))
        with pytest.raises(RankLost, match="fewer --workers") as caught:
            prepared(large[0], workers=2, **options)
        assert caught.value.exit_code == 4
    prepared(large[0], **options)
    assert contents(tmp_path / "out") == large[1]


def test_a_folder_that_cannot_be_written_or_is_in_use_ends_the_command(mixed, tmp_path):
    with pytest.raises(StorageError) as caught:
        prepared(*mixed, out=Path("/proc/none/out"))
    assert caught.value.exit_code == 4
    written(tmp_path / "file", b"")
    assert "file is a file. Give a path" in refusal(*mixed, out=tmp_path / "file" / "out")
    with OutputFolder(tmp_path / "out").claimed():
        assert "Another command prepares" in refusal(*mixed, out=tmp_path / "out")


def test_a_bad_line_is_the_same_with_any_number_of_processes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(documents(100)) + b"no\n" + lines(documents(100)) + b"no\n")
    messages = [refusal(path, out=tmp_path / str(n), workers=n) for n in (1, 2)]
    assert messages[0] == messages[1]
    assert "line 101 is not JSON" in messages[0]


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "jsonl.gz", "csv"])
def test_memory_does_not_grow_with_the_input(kind, tmp_path):
    peaks: dict[str, float] = {}  # of the command's process, or one that it started
    texts = documents(20000)  # 2 to 3 MB
    for times in (4, 40):
        path = tmp_path / f"{times}.{kind}"
        content = " ".join(texts).encode() if kind == "txt" else lines(texts)
        if kind == "parquet":
            parquet(path, texts * times, len(texts))
        elif kind == "csv":
            quoted = (text.replace('"', '""') for text in texts)
            rows = "".join(f'"{text}"\n' for text in quoted)
            written(path, b"text\n" + rows.encode() * times)
        else:
            written(path, pack(content, path.suffix) * times)
        prepare(peaks, f"{times}", path, "--out", tmp_path / f"out-{times}", "--workers", 2)
    assert peaks["40"] - peaks["4"] < 40, peaks


def test_processes_that_tokenize_start_without_torch():
    code = "import sys, fp8stack.data.prepare.pipeline; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
