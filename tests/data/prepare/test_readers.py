"""`fp8stack prepare`: each kind of input becomes the documents of a plain loop, or is refused."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fp8stack.data.prepare import readers
from fp8stack.data.tokenizer import load_tokenizer
from tests.support.preparing import documents, lines, prepared, refusal, require, written

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard.compress,
}  # fmt: skip


def packed(content: bytes, suffix: str) -> bytes:
    """Pack `content` in two members, as parallel packers do."""
    middle = len(content) // 3
    return PACK[suffix](content[:middle]) + PACK[suffix](content[middle:])


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refused(*address: object):
        raise ConnectionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


# Kinds of inputs


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *((kind, "") for kind in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")),
        *((".jsonl", suffix) for suffix in PACK if suffix),
        *((".csv", ".zst"), (".txt", ".gz")),
    ],
)
def test_a_file_is_read_packed_or_not(kind, suffix, tmp_path, out):
    texts = ["one, with a comma", 'two "quoted"\nin lines', "NA", "007", "", *documents(50)]
    buffer = io.StringIO()
    separator = "\t" if kind == ".tsv" else ","
    table = csv.writer(buffer, delimiter=separator)
    table.writerows([[], ["n", "body"], *enumerate(texts)])
    content = buffer.getvalue().encode() if kind in (".csv", ".tsv") else lines(texts, "body")
    prepared(
        written(tmp_path / f"a{kind}{suffix}", packed(content, suffix)), out=out, text_key="body"
    )
    require(out, [content.decode()] if kind == ".txt" else texts)


def test_a_json_array_and_arrow_are_read_row_by_row(tmp_path, out):
    texts = documents(50)
    rows = [{"n": [1] if n else "x", "body": text} for n, text in enumerate(texts)]
    array = written(tmp_path / "a.json", b"\n " + json.dumps(rows, indent=1).encode())
    import pyarrow as pa

    table = pa.table({"n": range(50), "body": texts})
    arrow = tmp_path / "b[1].arrow"
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    prepared(array, arrow, out=out, text_key="body")
    require(out, texts * 2)


@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_is_read_row_by_row_and_its_bytes_that_are_no_utf8_replaced(
    dictionary, tmp_path, out
):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = documents(150)
    column = pa.array([b"Gr\xf6\xdfe", *map(str.encode, texts)], pa.binary()).view(pa.string())
    column = column.dictionary_encode() if dictionary else column
    pq.write_table(pa.table({"body": column}), tmp_path / "a.parquet", 7)
    manifest = prepared(tmp_path / "a.parquet", out=out, text_key="body")
    require(out, ["Gr\ufffd\ufffde", *texts])
    assert manifest["documents"]["replaced"] == 2


def test_datasets_are_read_from_their_folders(tmp_path, out):
    import datasets

    texts = documents(90)
    written(tmp_path / "data" / "train.jsonl", lines(texts))
    written(tmp_path / "data" / "test.jsonl", lines(["no"]))
    saved = datasets.Dataset.from_dict({"text": texts}, split="train")
    saved.save_to_disk(tmp_path / "b")
    datasets.DatasetDict(train=saved, val=saved.select([1])).save_to_disk(tmp_path / "c")
    names = [f"hf:{tmp_path}/{name}" for name in ("data@train", "b@train", "c", "c@val")]
    prepared(*names, tmp_path / "b", out=out)
    require(out, [*texts * 3, texts[1], *texts])
    assert "No split 'val'" in refusal(f"hf:{tmp_path}/b@val", out=tmp_path / "other")


def test_a_folder_is_read_in_the_order_of_its_paths_and_files_are_chosen_by_patterns(tmp_path):
    folder = tmp_path / "folder"
    for name, content in {
        "b/2.txt": b"two", "a.md": b"first", "b/1.jsonl": lines(["x", "y"]), "c.py": b"pass\n",
        ".hidden": b"no", "b/.cache/z.txt": b"no", "empty.txt": b"", "logo.png": b"PNG\0",
    }.items():  # fmt: skip
        written(folder / name, content)
    (folder / "link").symlink_to(folder / "b")
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"exclude": ("*.png",)}, ["first", "x", "y", "two", "pass\n", "first"]),
        ({"include": ("*.py", "*.md"), "exclude": ("a.*",)}, ["pass\n", "first"]),
        ({"include": ("b/*",)}, ["x", "y", "two", "first"]),
    ]
    for number, (changes, texts) in enumerate(cases):
        out = folder / f"out{number}"
        manifest = prepared(folder, folder / "a.md", out=out, held_out=0.0, **changes)
        require(out, texts, share=0.0)
        assert manifest["inputs"][1]["files"] == 1
        out.rename(tmp_path / out.name)
    assert "--exclude '*.png'" in refusal(folder, out=folder / "out")
    message = refusal(folder, out=folder / "out", include=("*.csv",))
    assert "has no data: no file that --include and --exclude select" in message


# Long texts and text that is not Unicode


@pytest.mark.parametrize("characters", [32, 97, 2**20])
def test_a_long_text_is_cut_where_its_tokens_stay_and_is_one_document(
    characters, tmp_path, out, monkeypatch
):
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", characters)
    texts = [
        " ".join(documents(60)).replace("  ", " x "),
        "世界 \ufffd  \u3000 b\n\n" + "あ\nж\r\n" * 90 + " " * 30 + "end",
        "\ufeffno mark",  # a second one
    ]
    texts = [text.replace("zeta,\n\teta", "zeta\neta") for text in texts]
    for number, text in enumerate(texts):
        written(tmp_path / "in" / f"{number}.txt", f"\ufeff{text}".encode())
    manifest = prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, texts, share=0.0)
    assert manifest["documents"] == {"documents": 3, "empty": 0, "replaced": 1}
    text = texts[0] * 3
    path = written(tmp_path / "a.txt", text.encode())
    prepared(path, out=tmp_path / "bpe", train_bpe=400)
    require(tmp_path / "bpe", [text], load_tokenizer(str(tmp_path / "bpe")).encode)


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path, out, capsys):
    inputs = [
        written(tmp_path / "a.txt", b"caf\xe9 and \xff\xfe \xef\xbf\xbd"),
        # A byte order mark and empty lines in JSON lines are skipped.
        written(
            tmp_path / "b.jsonl",
            b'\xef\xbb\xbf{"text": "b\xe9"}\r\n\n{"text": "\\ud800x\\ud83d\\ude00"}\n',
        ),
        written(tmp_path / "c.csv", "text\nGröße\n".encode("cp1252")),
        written(tmp_path / "d.json", '[{"text": "Größe"}, {"text": ""}]'.encode("cp1252")),
    ]
    prepared(*inputs, out=out, held_out=0.0)
    texts = ["caf\ufffd and \ufffd\ufffd \ufffd", "b\ufffd", "\ufffdx😀"]
    require(out, [*texts, *["Gr\ufffd\ufffde"] * 2, ""], share=0.0)
    printed = capsys.readouterr().out
    assert "note: 10 characters are U+FFFD\n" in printed
    assert "note: 1 empty document\n" in printed


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-be", "utf-32"])
def test_files_are_read_by_their_byte_order_mark(encoding, tmp_path, out):
    def marked(text: str) -> bytes:
        mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
        return mark + text.encode(encoding)

    texts = ["Grüße, 世界 😀\n", *documents(20)]
    written(tmp_path / "in" / "a.txt", marked(texts[0]))
    written(tmp_path / "in" / "b.jsonl", marked(lines(texts).decode()))
    written(tmp_path / "in" / "c.csv.zst", zstandard.compress(marked("n,text\n1,世界\n")))
    written(tmp_path / "in" / "d.json", marked(json.dumps([{"text": "世界"}])))
    prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, [texts[0], *texts, "世界", "世界"], share=0.0)


# Refusals

BAD_LINES = {
    "deep": (b"[" * 100000, "line 3 is not JSON"),
    "another key": (b'{"body": "a", "id": 3}', "line 3 has no 'text'. Its fields: body, id."),
    "null": (b'{"text": null}', "line 3 has null where text should be"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name, tmp_path, out):
    bad, phrase = BAD_LINES[name]
    path = written(tmp_path / "a.jsonl", lines(["x"]) + b"\n" + bad + b"\n" + lines(["y"]))
    assert f"{path} {phrase}" in refusal(path, out=out)
    assert list(out.iterdir()) == []  # another command may use it


JSON_LINES = lines(documents(99))
BAD_FILES = {
    "cut.jsonl.gz": (gzip.compress(JSON_LINES)[:-9], "cut short or damaged"),
    "cut.jsonl.zst": (zstandard.compress(JSON_LINES)[:-5], "cut short or damaged"),
    "no.parquet": (b"PAR1" + bytes(99), "as parquet"),
    "short.csv": (b"n,text\n1,one\n2\n", "up to line 3 (a row has 1 fields"),
    "columns.csv": (b"n,texts\n1,one\n", "has no 'text'. Its fields: n, texts."),
    "mixed.json": (b'[{"text": "one"}, {"text": 2}]', "row 2 has 2 where text should be"),
    "no.arrow": (b"ARROW1" + bytes(99), "Cannot read"),
    "empty.txt": (b"", "has no data"),
    "empty.jsonl": (lines(["", ""]), "There is no text in the inputs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(name, tmp_path, out):
    content, phrase = BAD_FILES[name]
    path = written(tmp_path / name, content)
    message = refusal(path, out=out)
    assert phrase in message
    assert str(path) in message or "no text in the inputs" in message


def test_bad_rows_and_columns_are_named(tmp_path, out):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), path)
    for name in (path, f"hf:{written(tmp_path / 'data' / 'a.parquet', path.read_bytes()).parent}"):
        assert f"{name} row 2 has null where text" in refusal(name, out=out)
        assert f"{name} row 1 has 1 where text" in refusal(name, out=out, text_key="n")
        assert "has no 'texts'. Its fields: n, text." in refusal(name, out=out, text_key="texts")


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("{}/nowhere", "No input"),
        ("{}/pipe", "is not a regular file"),
        ("hf:{}/nowhere", "Cannot read hf:"),
        ("hf:{}@val", "Available splits: ['train']"),
        ("hf:", "needs the name of a dataset"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused_by_name(name, phrase, tmp_path, out):
    written(tmp_path / "a.jsonl", lines(["a"]))
    os.mkfifo(tmp_path / "pipe")
    name = name.format(tmp_path)
    message = refusal(name, out=out)
    assert phrase in message
    assert name in message


@pytest.mark.parametrize(
    ("package", "name", "phrase"),
    [
        ("pyarrow", "a.jsonl.zst", "pip install pyarrow"),
        ("datasets", "hf:owner/name", "pip install datasets"),
    ],
)
def test_a_package_that_is_missing_is_named(package, name, phrase, tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.jsonl.zst", zstandard.compress(lines(["x"])))
    monkeypatch.setitem(sys.modules, package, None)
    assert phrase in refusal(name, out=out)
