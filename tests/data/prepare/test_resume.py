"""`fp8stack prepare`: a command that was stopped ends in the same bytes when it is given again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fp8stack.data import load_corpora
from fp8stack.data.prepare import pipeline, readers
from fp8stack.data.prepare.shards import Writer
from tests.conftest import contents
from tests.conftest import refusal as refused_by
from tests.support.preparing import documents, lines, prepared, refusal, written
from tests.support.small_tokenizers import trained


class Cut(BaseException):
    """Stands for the end of a process that is killed."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_CHARACTERS", 2000)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 500)


@pytest.fixture
def mixed(tmp_path) -> list[str]:
    """An input of every kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "mixed"
    written(folder / "a.jsonl", lines(documents(40, seed=1)))
    written(folder / "b.txt", " ".join(documents(30, seed=2)).encode())
    pq.write_table(pa.table({"text": documents(40, seed=3)}), folder / "c.parquet", 17)
    for number, text in enumerate(documents(20, seed=4)):
        written(folder / f"d{number:02}.md", text.encode())
    rows = [{"text": text} for text in documents(60, seed=7)]
    written(folder / "e.json", json.dumps(rows).encode())
    written(folder / "f.csv", b"text\n" + b"some words\n" * 300)
    written(tmp_path / "set" / "a.jsonl", lines(documents(100, seed=5)))
    return [str(folder), f"hf:{tmp_path / 'set'}", str(folder / "a.jsonl")]


SETTINGS: dict[str, Any] = {"shard_tokens": 700, "train_bpe": 300}


def cut_after(blocks: int, *paths: object, out: Path, **changes: Any) -> None:
    """Begin a preparation, which dies after so many blocks."""
    real = Writer.add

    def add(*arguments: Any) -> int:
        nonlocal blocks
        blocks -= 1
        if blocks < 0:
            raise Cut
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Writer, "add", add)
        with pytest.raises(Cut):
            prepared(*paths, out=out, **changes)


def test_wherever_it_is_cut_it_goes_on_from_the_last_shard_and_ends_in_the_same_bytes(
    mixed, tmp_path, capsys
):
    prepared(*mixed, out=tmp_path / "whole", **SETTINGS)
    assert len(contents(tmp_path / "whole")) > 20
    for cut in (1, 3, 3, 1, 4, 2, 7, 3):
        cut_after(cut, *mixed, out=tmp_path / "cut", **SETTINGS, overwrite=cut == 4)
        assert "did not finish it" in refused_by(load_corpora, str(tmp_path / "cut"), 300)
    capsys.readouterr()
    prepared(*mixed, out=tmp_path / "cut", **SETTINGS)
    going_on = [line for line in capsys.readouterr().out.splitlines() if "going on" in line]
    assert len(going_on) == 1
    assert int(going_on[0].split()[3]) > 50
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not any(path.name.startswith(".") for path in (tmp_path / "cut").iterdir())


def test_work_on_other_inputs_or_with_another_tokenizer_is_done_again(tmp_path, capsys):
    path = written(tmp_path / "a.jsonl", lines(documents(200)))
    file = tmp_path / "tokenizer.json"
    trained(300).save(str(file))
    options: dict[str, Any] = {"tokenizer": str(file), "shard_tokens": 2000}
    for number, change in enumerate(
        [
            lambda: trained(310).save(str(file)),
            lambda: path.write_bytes(path.read_bytes().replace(b"alpha", b"ALPHA")),
            lambda: (tmp_path / "out2" / "train-00001.bin").unlink(),
        ]
    ):
        out, expected = tmp_path / f"out{number}", tmp_path / f"whole{number}"
        cut_after(8, path, out=out, **options)
        message = refusal(path, out=out, **options, held_out=0.2)
        assert "was prepared with other settings: --held-out was 0.1, now 0.2" in message
        change()
        capsys.readouterr()
        prepared(path, out=out, **options)
        assert "going on after" not in capsys.readouterr().out
        prepared(path, out=expected, **options)
        assert contents(out) == contents(expected)


COMMAND = (
    "import sys; from fp8stack.cli import main; from fp8stack.data.prepare import pipeline;"
    "pipeline.BLOCK_CHARACTERS = 2000; main(sys.argv[1:])"
)
STOPPED = "fp8stack: Stopped. The same command continues from the last whole shard.\n"


@pytest.mark.full
def test_a_command_that_is_stopped_says_so_and_goes_on(tmp_path):
    path = written(tmp_path / "a.jsonl", lines(documents(2000)) * 6)
    options: dict[str, Any] = {"shard_tokens": 20_000, "held_out": 0.01}
    prepared(path, out=tmp_path / "whole", **options)
    out = tmp_path / "out"
    words = [sys.executable, "-c", COMMAND, "prepare", str(path), "--out", str(out)]
    words += ["--shard-tokens", "20000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as running:
        while not (out / "train-00002.bin").exists():
            assert running.poll() is None, running.communicate()
            time.sleep(0.001)
        running.terminate()
        _, printed = running.communicate(timeout=60)
    assert (running.returncode, printed) == (75, STOPPED)
    prepared(path, out=out, **options)
    assert contents(out) == contents(tmp_path / "whole")
