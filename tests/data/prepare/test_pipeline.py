"""`fp8stack prepare`: its output compared with a plain loop; bad inputs and bad folders."""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from fp8stack.data import tokenizer_of
from fp8stack.data.prepare import inputs, readers, streams, train
from fp8stack.data.prepare import pipeline as run
from fp8stack.data.prepare.inputs import Settings
from fp8stack.data.prepare.progress_display import ProgressDisplay
from fp8stack.data.prepare.shards import Writer
from fp8stack.data.tokenizer import load_tokenizer, tokenizer_from_json
from tests.conftest import contents
from tests.conftest import refusal as refused_by
from tests.data.tokenizer.test_tokenizer import of_characters
from tests.support.small_tokenizers import metaspace, trained

WORDS = (
    "alpha beta Gamma delta's (epsilon) 12345 zeta,\n\teta  theta Grüße мир 世界 😀 <|endoftext|>"
)


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of some words each; a few are empty."""
    rng = np.random.default_rng(seed)
    words = WORDS.split(" ")
    lengths = rng.integers(0, 40, count)
    return [" ".join(rng.choice(words, n)) for n in lengths]


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"n": 1, key: text}) + "\n" for text in texts).encode()


def pack(content: bytes, suffix: str) -> bytes:
    """Pack `content` in two members, as parallel packers do."""
    members = [content[: len(content) // 3], content[len(content) // 3 :]]
    if suffix == ".gz":
        return b"".join(map(gzip.compress, members))
    if suffix == ".zst":
        return b"".join(zstandard.ZstdCompressor().compress(member) for member in members)
    return content


def parquet(path: Path, texts: list[Any], rows: int | None = None, column: str = "text") -> Path:
    pq.write_table(pa.table({column: texts}), path, rows)
    return path


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def settings_of(*paths: object, out: Path, **changes: Any) -> Settings:
    options = {
        "tokenizer": "bytes", "train_bpe": None, "text_key": "text", "held_out": 0.1,
        "shard_tokens": 10**8, "workers": 1, **changes,
    }  # fmt: skip
    return Settings(inputs=tuple(map(str, paths)), out=out, **options)


def prepared(*paths: object, out: Path, overwrite: bool = False, **changes: Any) -> dict[str, Any]:
    """The manifest of a preparation in this process."""
    run.prepare(settings_of(*paths, out=out, **changes), overwrite)
    return json.loads((out / "manifest.json").read_text())


def shards(out: Path, split: str) -> tuple[list[int], list[list[int]]]:
    """All tokens of a split, and the documents of all its shards, without their last tokens."""
    manifest = json.loads((out / "manifest.json").read_text())
    tokens, split_documents = [], []
    for shard in manifest["splits"][split]["shards"]:
        shard_tokens = np.fromfile(out / shard["file"], dtype=manifest["dtype"]).tolist()
        ends = np.fromfile(out / shard["file"].replace(".bin", ".ends"), dtype="<u8").tolist()
        assert ends[-1] == len(shard_tokens) == shard["tokens"]
        assert len(ends) == shard["documents"]
        split_documents += [
            shard_tokens[a : b - 1] for a, b in zip([0, *ends[:-1]], ends, strict=True)
        ]
        assert all(shard_tokens[end - 1] == manifest["tokenizer"]["end_of_text"] for end in ends)
        tokens += shard_tokens
    return tokens, split_documents


def is_held_out(place: int, share: float) -> bool:
    """SplitMix64 with Python's integers."""
    mask = 2**64 - 1
    x = (place + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return place > 0 and (x >> 11) / 2**53 < share


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def require(out: Path, texts: list[str], encode: Any = by_bytes, share: float = 0.1) -> None:
    """Check that the folder holds the documents as a plain loop tokenizes and splits them."""
    expected: dict[str, list[list[int]]] = {"train": [], "val": []}
    for place, text in enumerate(texts):
        expected["val" if is_held_out(place, share) else "train"].append(encode(text))
    assert {split: shards(out, split)[1] for split in expected} == expected


def refusal(*paths: object, out: Path, **changes: Any) -> str:
    return refused_by(prepared, *paths, out=out, **changes)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def corpus(tmp_path) -> Path:
    return written(tmp_path / "corpus.jsonl", lines(documents(300)))


@pytest.fixture(params=[97, 1500, 2**20])
def item_bytes(request, monkeypatch):
    """The size of the items that inputs are cut into."""
    monkeypatch.setattr(run, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(run, "GROUP_BYTES", 3 * request.param)


# The files that it writes


@pytest.mark.usefixtures("item_bytes")
def test_json_lines_become_the_tokens_of_a_plain_loop(corpus, out):
    manifest = prepared(corpus, out=out)
    texts = documents(300)
    require(out, texts)
    assert manifest["documents"]["documents"] == 300
    assert manifest["documents"]["empty"] == sum(not text for text in texts) > 0
    assert 10 < manifest["splits"]["val"]["documents"] < 60
    assert sum(split["bytes"] for split in manifest["splits"].values()) == sum(
        len(text.encode()) for text in texts
    )


def test_the_share_that_training_a_tokenizer_has_read_never_passes_the_whole(tmp_path, monkeypatch):
    """Packed text is many times as long as its file."""
    packed = gzip.compress("\n".join(documents(500)).encode())
    paths = [written(tmp_path / f"{n}.txt.gz", packed) for n in range(3)]
    total = 3 * len(packed)
    updates = []
    monkeypatch.setattr(ProgressDisplay, "update", lambda _, done, line="": updates.append(done))
    prepared(*paths, out=tmp_path / "out", train_bpe=300)
    assert updates == sorted(updates)
    assert (updates[-1], len(set(updates))) == (total, 3)
    line = ProgressDisplay("read", total, clock=iter([0.0, 9.0]).__next__).describe(total, "")
    assert line.startswith("read | 100.0 % of")
    assert line.endswith("ETA 0:00:00")


def test_a_trained_bpe_has_its_size_is_the_library_s_and_the_same_each_time(corpus, tmp_path, out):
    manifest = prepared(corpus, out=out, train_bpe=300)
    assert manifest["tokenizer"]["vocabulary"] == 300
    library = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert library.token_to_id("<|endoftext|>") == manifest["tokenizer"]["end_of_text"]
    library.encode_special_tokens = True
    require(out, documents(300), lambda text: library.encode(text).ids)
    assert len(shards(out, "train")[0]) < manifest["splits"]["train"]["bytes"] / 2
    mine = tokenizer_from_json((out / "tokenizer.json").read_text(encoding="utf-8"))
    again = prepared(corpus, out=tmp_path / "again", train_bpe=300)
    assert manifest["tokenizer"]["sha256"] == mine.sha256 == again["tokenizer"]["sha256"]
    # A command without the flag is refused by the name of the flag.
    assert "--train-bpe was 300, now none" in refusal(corpus, out=out)
    # A tokenizer given as a file is used and copied.
    tokenizer_file = out / "tokenizer.json"
    manifest = prepared(corpus, out=tmp_path / "given", tokenizer=str(tokenizer_file))
    assert (tmp_path / "given" / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    assert shards(tmp_path / "given", "train") == shards(out, "train")
    assert manifest["tokenizer"]["name"] == "tokenizer.json"


def test_a_bpe_of_more_tokens_than_the_text_gives_says_so(tmp_path, out, capsys):
    manifest = prepared(written(tmp_path / "a.txt", b"aa aa"), out=out, train_bpe=400)
    assert manifest["tokenizer"]["vocabulary"] == 259  # bytes, the end, "aa" and " aa"
    assert "note: the text gives 259 tokens and no more" in capsys.readouterr().out


def test_sources_are_sampled_by_size_for_a_tokenizer(monkeypatch):
    monkeypatch.setattr(train, "SAMPLE_BYTES", train.SAMPLE_BYTES // 100)

    def sampled(*sizes: int) -> list[tuple[inputs.Source, int]]:
        sources = [inputs.Source(path=str(s), kind="text", size=s, input_index=0) for s in sizes]
        return train.sample_of(sources)

    assert all(budget >= source.size for source, budget in sampled(10, 30))
    gib = 2**30
    budgets = [budget for _, budget in sampled(gib, 3 * gib)]
    assert budgets == [train.SAMPLE_BYTES // 4, 3 * train.SAMPLE_BYTES // 4]
    many = sampled(*[4096] * 10_000)
    assert sum(min(budget, source.size) for source, budget in many) <= train.SAMPLE_BYTES
    assert len(many) == 625


def test_wide_vocabularies_are_written_as_uint32(corpus, tmp_path, out):
    content = json.loads(load_tokenizer("bytes").to_json())
    content["model"]["vocab"]["<far>"] = 70000
    wide = written(tmp_path / "wide.json", json.dumps(content).encode())
    assert prepared(corpus, out=out, tokenizer=str(wide))["dtype"] == "uint32"
    require(out, documents(300))


def test_shards_end_with_the_document_that_fills_them_and_the_manifest_tells_of_all(corpus, out):
    manifest = prepared(corpus, out=out, shard_tokens=2000)
    require(out, documents(300))
    contents = {path.name: path.read_bytes() for path in out.iterdir()}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert manifest["tokenizer"]["sha256"] == sums.pop("tokenizer.json")
    sums.pop("manifest.json")
    for split in manifest["splits"].values():
        assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
        for shard in split["shards"]:
            ends_file = shard["file"].replace(".bin", ".ends")
            assert shard["sha256"] == sums.pop(shard["file"])
            assert shard["ends_sha256"] == sums.pop(ends_file)
            ends = np.frombuffer(contents[ends_file], dtype="<u8")
            assert len(ends) == 1 or ends[-2] < 2000
            assert shard is split["shards"][-1] or ends[-1] >= 2000
    assert not sums
    assert len(manifest["splits"]["train"]["shards"]) > 5
    assert manifest["inputs"][0]["bytes"] == corpus.stat().st_size


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_held_out_share_is_the_requested_share(corpus, out, share):
    manifest = prepared(corpus, out=out, held_out=share)
    require(out, documents(300), share=share)
    val = manifest["splits"]["val"]
    assert (val["shards"] == []) == (share == 0)
    assert abs(val["documents"] - share * 290) < 30


# Kinds of inputs


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.json.gz", "a.ndjson.zst"]
)
def test_json_lines_are_read_packed_or_not(name, tmp_path, out):
    texts = documents(50)
    path = written(tmp_path / name, pack(lines(texts, "body"), Path(name).suffix))
    prepared(path, out=out, text_key="body")
    require(out, texts)


@pytest.mark.usefixtures("item_bytes")
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_text_is_one_document_however_it_is_cut(packed, tmp_path, out):
    text = " ".join(documents(60))
    path = written(tmp_path / f"a.txt{packed}", pack(text.encode(), packed))
    manifest = prepared(path, out=out, train_bpe=300)
    library = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    library.encode_special_tokens = True
    assert shards(out, "train")[1] == [library.encode(text).ids]
    assert manifest["documents"] == {"documents": 1, "empty": 0, "replaced": 0, "cut_words": 0}


def test_a_text_without_spaces_is_cut_and_the_cuts_are_reported(tmp_path, out, monkeypatch, capsys):
    monkeypatch.setattr(run, "BLOCK_BYTES", 64)
    monkeypatch.setattr(readers, "LONGEST_WORD", 256)
    text = "世界" * 500
    manifest = prepared(written(tmp_path / "a.txt", text.encode()), out=out)
    require(out, [text])  # no character is torn
    assert manifest["documents"]["cut_words"] == 11
    assert manifest["documents"]["replaced"] == 0
    assert "11 cuts within a text without spaces" in capsys.readouterr().out


@pytest.mark.usefixtures("item_bytes")
@pytest.mark.parametrize("rows", [7, 100])
@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_is_read_row_by_row(rows, dictionary, tmp_path, out):
    texts = documents(150)
    column = pa.array(texts).dictionary_encode() if dictionary else pa.array(texts)
    prepared(parquet(tmp_path / "a.parquet", column, rows, "body"), out=out, text_key="body")
    require(out, texts)


@pytest.mark.usefixtures("item_bytes")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dataset_is_streamed_from_its_folder(kind, tmp_path, out):
    texts = documents(90)
    data = tmp_path / "data"
    written(data / "train.jsonl", lines(texts))
    written(data / "test.jsonl", lines(["no"]))
    if kind == "parquet":
        (data / "train.jsonl").unlink()
        (data / "test.jsonl").unlink()
        parquet(data / "train.parquet", texts)
    prepared(f"hf:{data}@train", out=out)
    require(out, texts)


def test_a_folder_that_a_dataset_was_saved_to_is_read(tmp_path):
    texts = documents(40)
    saved = datasets.Dataset.from_dict({"text": texts}, split="train")
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, val=saved.select([1])).save_to_disk(tmp_path / "two")
    for name in ("one", "one@train", "two", "two@train"):
        prepared(f"hf:{tmp_path}/{name}", out=tmp_path / f"of {name}")
        require(tmp_path / f"of {name}", texts)
    out = tmp_path / "out"
    assert "holds a single dataset" in refusal(f"hf:{tmp_path}/one@val", out=out)
    assert "No split 'test'" in refusal(f"hf:{tmp_path}/two@test", out=out)


def test_a_change_of_a_saved_folder_is_seen_where_it_is_named_as_a_dataset(tmp_path, out):
    folder = tmp_path / "saved"
    for name in ("state.json", "dataset_info.json"):
        os.utime(written(folder / name, b"{}"), ns=(5, 5))
    settings = settings_of(f"hf:{folder}", f"hf:{folder}@train", out=out)
    sources = inputs.find_sources(settings)
    assert [(source.size, source.changed) for source in sources] == [(4, 5), (4, 5)]
    os.utime(folder / "state.json", ns=(6, 6))
    assert [source.changed for source in inputs.find_sources(settings)] == [6, 6]
    written(folder / "data.arrow", b"more")
    assert [source.size for source in inputs.find_sources(settings)] == [8, 8]


def test_an_input_that_is_given_twice_is_read_twice_with_a_note(corpus, out, capsys):
    prepared(corpus, f"{corpus.parent}/./{corpus.name}", out=out)
    require(out, documents(300) * 2)
    printed = capsys.readouterr().out
    assert (
        "note: inputs that are given more than once are read as often, so a document may be"
        in printed
    )
    assert f"both held out and trained on: {corpus}\n" in printed


@pytest.mark.parametrize("bad", ["hf:nowhere/at-all", "a.png"])
def test_an_input_that_fails_at_its_beginning_leaves_a_folder_that_takes_another(
    bad, corpus, out, tmp_path, monkeypatch
):
    def offline(*name: object, **options: object):
        raise ConnectionError("Couldn't reach 'nowhere/at-all' on the Hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    written(Path("a.png"), b"PNG\0")
    refusal(bad, out=out)
    assert not out.exists() or list(out.iterdir()) == []
    prepared(corpus, out=out)
    require(out, documents(300))


def test_the_name_of_a_dataset_has_its_parts():
    parsed = {
        "hf:a/b": ("a/b", None, "train"),
        "hf:a/b:c-1": ("a/b", "c-1", "train"),
        "hf:a/b@test": ("a/b", None, "test"),
        "hf:a/b:c@train[:10%]": ("a/b", "c", "train[:10%]"),
    }
    assert {name: readers.parse_dataset(name) for name in parsed} == parsed


@pytest.mark.usefixtures("item_bytes")
def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    folder = tmp_path / "folder"
    for name, content in {
        "b/2.txt": b"two", "a.md": b"first", "b/1.jsonl": lines(["x", "y"]), "c.py": b"pass\n",
        ".hidden": b"no", "b/.cache/z.txt": b"no", "empty.txt": b"", "b/0.json": b'{\n "a": 1\n}\n',
        "d.json": lines(["in lines"]),
    }.items():  # fmt: skip
        written(folder / name, content)
    manifest = prepared(folder, folder / "a.md", out=folder / "out", held_out=0.0)
    texts = ["first", '{\n "a": 1\n}\n', "x", "y", "two", "pass\n", "in lines", "first"]
    require(folder / "out", texts, share=0.0)
    assert [entry["files"] for entry in manifest["inputs"]] == [6, 1]
    listing = f"5 {folder / 'a.md'}\n".encode()
    assert manifest["inputs"][1] == {
        "input": str(folder / "a.md"),
        "files": 1,
        "bytes": 5,
        "listing_sha256": hashlib.sha256(listing).hexdigest(),
    }


# The choice of files in a folder


@pytest.fixture
def mixed_folder(tmp_path) -> Path:
    """Two texts, two pictures and a table."""
    folder = tmp_path / "folder"
    for name in ("a.md", "sub/b.py"):
        written(folder / name, name.encode())
    written(folder / "logo.png", b"PNG\0")
    written(folder / "sub" / "x.png.gz", gzip.compress(b"PNG\0"))
    return folder


def test_binary_files_and_patterns_for_nothing_are_named_before_anything_is_written(
    mixed_folder, out
):
    message = refusal(mixed_folder, out=out)
    assert "2 of 4 files look binary: " in message
    assert str(mixed_folder / "logo.png") in message
    assert "--skip-binary" in message
    message = refusal(mixed_folder, out=out, include=("*.txt",))
    assert "leave nothing of the folder" in message
    assert "the first of its 4 files is a.md" in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"skip_binary": True}, ["a.md", "sub/b.py"]),
        ({"exclude": ("*.png", "sub/*.gz")}, ["a.md", "sub/b.py"]),
        ({"include": ("*.py", "*.md"), "exclude": ("a.*",)}, ["sub/b.py"]),
        ({"include": ("sub/*",), "skip_binary": True}, ["sub/b.py"]),
    ],
)
def test_files_of_a_folder_are_chosen_by_patterns(changes, texts, mixed_folder, out):
    prepared(mixed_folder, out=out, held_out=0.0, **changes)
    require(out, texts, share=0.0)
    message = refusal(mixed_folder, out=out, held_out=0.0, include=("a.md",))
    assert "was prepared with other settings: --" in message


def test_csv_json_and_arrow_are_read_packed_or_not(tmp_path, out):
    texts = ["one, with a comma", 'two "quoted"\nin lines', "NA", "007", ""]
    table = pa.table({"n": range(5), "body": texts})
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["n", "body"], *enumerate(texts)])
    rows = json.dumps([{"n": [1] if n else "x", "body": text} for n, text in enumerate(texts)])
    path = str(tmp_path / "a.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    arrow = (tmp_path / "a.arrow").read_bytes()
    contents = {"a.csv": buffer.getvalue().encode(), "b.tsv": b"n\tbody\n1\ttab\n"}
    contents |= {"c.json": rows.encode(), "d[1].arrow": arrow}
    for name, content in contents.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        written(tmp_path / "in" / name, content)
        written(tmp_path / "in" / f"{name}.gz", gzip.compress(content))
        written(tmp_path / "in" / f"{name}.xz", lzma.compress(content))
    prepared(tmp_path / "in", out=out, held_out=0.0, text_key="body")
    require(out, [*texts * 3, *["tab"] * 3, *texts * 6], share=0.0)


def test_a_table_is_separated_by_its_last_suffix_and_may_begin_with_blank_lines(tmp_path, out):
    for name, content in {
        "x.tsv.csv": b"n,text\n1,comma\n", "y.csv.TSV": b"n\ttext\n1\ttab\n",
        "z.csv": b"\n\r\ntext\nblank\n",
    }.items():  # fmt: skip
        written(tmp_path / "in" / name, content)
    prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, ["comma", "tab", "blank"], share=0.0)


def test_a_saved_dataset_in_a_folder_is_one_of_its_sources(tmp_path, out):
    written(tmp_path / "in" / "a.txt", b"text")
    saved = datasets.Dataset.from_dict({"text": ["x", "y"]})
    saved.save_to_disk(tmp_path / "in" / "b")
    datasets.DatasetDict(train=saved, val=saved).save_to_disk(tmp_path / "in" / "c")
    written(tmp_path / "in" / "d.txt", b"end")
    prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, ["text", "x", "y", "x", "y", "end"], share=0.0)
    prepared(tmp_path / "in" / "b", out=tmp_path / "other", held_out=0.0)
    require(tmp_path / "other", ["x", "y"], share=0.0)


def test_local_files_are_read_without_the_network(tmp_path, out, monkeypatch):
    def refused(*address: object):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    for name, content in (("a.csv", b"text\none\n"), ("b.json", b'[{"text": "two"}]')):
        written(tmp_path / "in" / name, content)
    datasets.Dataset.from_dict({"text": ["three"]}).save_to_disk(tmp_path / "in" / "c")
    prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, ["one", "two", "three"], share=0.0)


def test_all_bad_files_of_a_folder_are_named_at_once(tmp_path, out):
    bad = {
        "a.png": (b"PNG\0", "1 of 8 files looks binary: "),
        "b.jsonl": (lines(["x"]) + b"oops\n", "line 2 is not JSON"),
        "c.jsonl.gz": (gzip.compress(lines(documents(99)))[:-9], "cut short or damaged"),
        "d.parquet": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        "e.csv": (b"n,texts\n1,one\n", "No column 'text'. Did you mean 'texts'?"),
        "f.txt": ("no mark".encode("utf-16-le"), "looks like UTF-16LE without a byte order mark"),
        "g.txt": (b"text " * 99 + b"\0", "is text with a NUL at byte 495"),
    }
    for name, (content, _) in bad.items():
        written(tmp_path / "in" / name, content)
    written(tmp_path / "in" / "h.txt", b"good")
    first = refusal(tmp_path / "in", out=out)
    assert all(bad[name][1] in first for name in ("a.png", "d.parquet", "f.txt", "g.txt"))
    for name in ("a.png", "d.parquet", "f.txt", "g.txt"):  # by their beginnings
        (tmp_path / "in" / name).unlink()
    second = refusal(tmp_path / "in", out=out)
    assert second.startswith("3 inputs cannot be read. ")
    assert all(bad[name][1] in second for name in ("b.jsonl", "c.jsonl.gz", "e.csv"))
    assert "--skip-binary" not in second


def test_text_with_nuls_is_left_out_as_binary_on_request_and_else_has_its_remedy(
    tmp_path, out, capsys
):
    written(tmp_path / "in" / "a.txt", "no mark".encode("utf-16-le"))
    written(tmp_path / "in" / "b.txt", b"text " * 99 + b"\0")
    written(tmp_path / "in" / "c.txt", b"good")
    message = refusal(tmp_path / "in", out=out)
    assert "Convert it: iconv -f UTF-16LE -t UTF-8" in message
    assert "Remove it: tr -d" in message
    prepared(tmp_path / "in", out=out, held_out=0.0, skip_binary=True)
    require(out, ["good"], share=0.0)
    assert "note: 2 files that look binary are left out: " in capsys.readouterr().out


def test_the_first_bad_input_is_named_at_once_and_no_dataset_after_it_is_streamed(
    tmp_path, out, monkeypatch, capsys
):
    streamed = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **options: streamed.append(name))
    first, last = (written(tmp_path / name, b"oops\n") for name in ("a.jsonl", "b.jsonl"))
    message = refusal(first, "hf:owner/name", last, out=out)
    assert message.startswith(f"2 inputs cannot be read. {first} line 1 is not JSON")
    assert f"{last} line 1 is not JSON" in message
    assert streamed == []
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert f"{first} line 1 is not JSON" in notes[0]
    assert notes[0].endswith(" The other files are looked through for more problems.")


@pytest.mark.parametrize("train_bpe", [None, 300])
def test_many_bad_files_are_counted(train_bpe, tmp_path, out):
    for number in range(13):
        written(tmp_path / "in" / f"{number:02}.jsonl", b"no")
    message = refusal(tmp_path / "in", out=out, train_bpe=train_bpe)
    assert message.startswith("13 inputs cannot be read. ")
    assert "09.jsonl line 1" in message
    assert message.endswith(" And 3 more.")


# Text that is not Unicode


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path, out):
    text = written(tmp_path / "a.txt", b"caf\xe9 and \xff\xfe \xef\xbf\xbd")
    # A byte order mark and empty lines in JSON lines are skipped.
    content = b'\xef\xbb\xbf{"text": "b\xe9"}\r\n\n{"text": "\\ud800x\\ud83d\\ude00"}\n'
    manifest = prepared(text, written(tmp_path / "b.jsonl", content), out=out, held_out=0.0)
    require(out, ["caf\ufffd and \ufffd\ufffd \ufffd", "b\ufffd", "\ufffdx😀"], share=0.0)
    assert manifest["documents"]["replaced"] == 5


@pytest.mark.parametrize("item_bytes", [8, 1000])
def test_a_byte_order_mark_is_no_part_of_a_text(item_bytes, tmp_path, out, monkeypatch):
    monkeypatch.setattr(run, "BLOCK_BYTES", item_bytes)
    texts = ["one two three four", " spaced out", "\ufeff two", "x \ufeff y", "\ufeff"]
    marks = ["\ufeff", "\ufeff", "\ufeff", "", ""]  # a file of nothing else is empty
    for number, (mark, text) in enumerate(zip(marks, texts, strict=True)):
        written(tmp_path / "in" / f"{number}.txt", (mark + text).encode())
    manifest = prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, texts[:4], share=0.0)
    assert manifest["documents"]["empty"] == 0


def test_one_of_a_kind_is_not_called_many(tmp_path, out, capsys):
    (tmp_path / "in").mkdir()
    written(tmp_path / "in/a.png", b"PNG\0")
    written(tmp_path / "in/b.jsonl", lines(["b", "", "X"]).replace(b"X", b"\xff"))
    assert "1 of 2 files looks binary: " in refusal(tmp_path / "in", out=out)
    prepared(tmp_path / "in", out=out, skip_binary=True)
    printed = capsys.readouterr().out
    assert "note: 1 file that looks binary is left out: " in printed
    assert "note: 1 empty document, an end token\n" in printed
    assert "note: 1 piece that is not Unicode became U+FFFD\n" in printed


# Refusals

BAD_LINES = {
    "cut short": (b'{"text": "a"', "line 3 is not JSON"),
    "no JSON": (b"hello", "line 3 is not JSON"),
    "deep": (b"[" * 100000, "line 3 is not JSON"),
    "a list": (b'["text"]', "line 3 is no object but a list"),
    "another key": (b'{"body": "a", "id": 3}', "line 3 has no 'text'. Its keys: body, id."),
    "null": (b'{"text": null}', "line 3 has a null where text should be"),
    "a number": (b'{"text": 3.5}', "line 3 has a number where text should be"),
    "an object": (b'{"text": {"a": 1}}', "line 3 has a object where text should be"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name, tmp_path, out):
    bad, phrase = BAD_LINES[name]
    path = written(tmp_path / "a.jsonl", lines(["x"]) + b"\n" + bad + b"\n" + lines(["y"]))
    assert f"{path} {phrase}" in refusal(path, out=out)


def test_after_a_bad_line_is_mended_the_same_command_goes_on(tmp_path, out, monkeypatch, capsys):
    monkeypatch.setattr(run, "BLOCK_BYTES", 500)
    monkeypatch.setattr(run, "GROUP_BYTES", 2000)
    texts = documents(100)
    content = lines(texts)
    broken = content.replace(b"\n", b"\noops\n", 61).replace(b"oops\n", b"", 60)
    good = written(tmp_path / "a.jsonl", content)
    path = written(tmp_path / "b.jsonl", broken)
    assert "line 62 is not JSON" in refusal(good, path, out=out)
    prepared(good, written(path, content), out=out)
    require(out, texts * 2)
    assert "going on after " in capsys.readouterr().out
    assert {path.suffix for path in out.iterdir()} == {".bin", ".ends", ".json"}


def test_bad_rows_and_columns_are_named(tmp_path, out):
    data = tmp_path / "data"
    for rows, phrase in (
        ([{"text": "a"}, {"text": None}], "row 2 has a null where text"),
        ([{"text": 3}], "holds int64, not text"),
        ([{"body": "x"}], "No column 'text'"),
    ):
        written(data / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        message = refusal(f"hf:{data}", out=out)
        assert phrase in message
        assert "--text-key" in message
    path = parquet(tmp_path / "a.parquet", ["a", None])
    assert f"{path} row 2 has a null where text" in refusal(path, out=out)
    pq.write_table(pa.table({"texts": ["a"], "n": [1]}), path)
    out = tmp_path / "other"
    assert "No column 'text'. Did you mean 'texts'?" in refusal(path, out=out)
    assert "holds int64, not text" in refusal(path, out=out, text_key="n")


JSON_LINES = lines(documents(99))
ROTTEN = bytearray(gzip.compress(JSON_LINES))
ROTTEN[len(ROTTEN) // 2] ^= 0xFF
BAD_FILES = {
    "cut.jsonl.gz": (gzip.compress(JSON_LINES)[:-9], "cut short"),
    "rotten.txt.gz": (bytes(ROTTEN), "cut short or damaged"),
    "no.txt.gz": (b"plain text", "is cut short or damaged"),
    "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(JSON_LINES)[:-5], "cut short or damaged"),
    "no.txt.zst": (b"plain text", "is cut short or damaged"),
    "no.parquet": (b"PAR1" + bytes(99), "as parquet"),
    "short.csv": (b"n,text\n1,one\n2\n", "up to line 3 (a row has 1 fields"),
    "quote.csv": (b'n,text\n1,"one\n', "unexpected end of data"),
    "torn.json.gz": (gzip.compress(b'[\n {"text": "one"}\n'), "is not JSON"),
    "mixed.json": (b'[{"text": "one"}, {"text": 2}]', "row 2 has a number where text"),
    "no.arrow": (b"ARROW1" + bytes(99), "Cannot read"),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "looks binary: byte 8"),
    "empty.txt": (b"", "is empty"),
    "blank.jsonl": (b"\n\n", "There is no text in the inputs"),
    "empty.jsonl": (lines(["", ""]), "There is no text in the inputs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(name, tmp_path, out):
    content, phrase = BAD_FILES[name]
    path = written(tmp_path / name, content)
    message = refusal(path, out=out)
    assert phrase in message
    assert str(path) in message or "no text in the inputs" in message


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("{}/nothing", "holds no data"),
        ("{}/nowhere", "No input"),
        ("", "No input ''"),
        ("{}/pipe", "is not a regular file"),
        ("hf:{}/nowhere", "Cannot read hf:"),
        ("hf:{}@val", "Available splits: ['train']"),
        ("hf:", "needs the name of a dataset"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused_by_name(name, phrase, tmp_path, out):
    written(tmp_path / "a.jsonl", lines(["a"]))
    (tmp_path / "nothing").mkdir()
    if "pipe" in name:
        os.mkfifo(tmp_path / "pipe")
    name = name.format(tmp_path)
    message = refusal(name, out=out)
    assert phrase in message
    assert name in message


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"held_out": 1.0}, "Cannot hold out 1.0"),
        ({"held_out": float("nan")}, "Cannot hold out nan"),
        ({"shard_tokens": 0}, "Shards of 0 tokens"),
        ({"workers": 0}, "0 workers"),
        ({"train_bpe": 256}, "Use 257"),
        ({"tokenizer": "gtp2"}, "No tokenizer 'gtp2'"),
    ],
)
def test_bad_settings_are_refused(changes, phrase, corpus, out):
    assert phrase in refusal(corpus, out=out, **changes)


def test_a_tokenizer_that_cannot_end_a_text_is_noted_and_a_line_without_an_end_refused(
    corpus, tmp_path, out, monkeypatch, capsys
):
    content = json.loads(load_tokenizer("bytes").to_json()) | {"added_tokens": []}
    endless = written(tmp_path / "endless.json", json.dumps(content).encode())
    prepared(corpus, out=out, tokenizer=str(endless), held_out=0.0)
    printed = capsys.readouterr().out
    assert "note: endless.json names no token that ends a text" in printed
    assert " tokens of endless.json, 1.00 bytes per token" in printed
    assert f"note: {sum(not text for text in documents(300))} empty documents\n" in printed
    ends = np.fromfile(out / "train-00000.ends", dtype="<u8")
    assert ends.tolist() == np.cumsum([len(text.encode()) for text in documents(300)]).tolist()
    out = tmp_path / "b"
    monkeypatch.setattr(run, "BLOCK_BYTES", 100)
    monkeypatch.setattr(readers, "LONGEST_LINE", 1000)
    path = written(tmp_path / "a.jsonl", lines(["x" * 2000]))
    assert "has a line of more than 1,000 bytes" in refusal(path, out=out)


def test_a_tokenizer_that_leaves_out_characters_is_noted(tmp_path, out, capsys):
    path = written(tmp_path / "a.txt", b"abba, ab")
    few = written(tmp_path / "few.json", of_characters("ab ").encode())
    manifest = prepared(path, out=out, tokenizer=str(few))
    assert manifest["splits"]["train"]["tokens"] == len("abba ab")
    note = " leaves out characters that it has no token for."
    assert f"note: few.json{note}\n" in capsys.readouterr().out
    prepared(path, out=tmp_path / "bytes")
    prepared(path, out=tmp_path / "trained", train_bpe=257)
    assert note not in capsys.readouterr().out


def test_a_package_that_is_missing_is_named(corpus, tmp_path, out, monkeypatch):
    packed = written(tmp_path / "a.jsonl.zst", b"x")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        assert "pip install zstandard" in refusal(packed, out=out)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "need the extra 'data'" in refusal("hf:owner/name", out=out)
    prepared(corpus, out=out)  # JSON lines need no datasets


def test_the_eos_token_of_a_tokenizer_or_the_one_asked_for_ends_documents(corpus, tmp_path, out):
    folder = tmp_path / "given"
    folder.mkdir()
    library = trained(special_tokens=["<seed:eos>", "<seed:bos>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"tokenizer": str(folder), "held_out": 0.0}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("by name", "</s>", {}),
        ("by option", "<seed:bos>", {"end_of_text": "<seed:bos>"}),
        ("beside", "<seed:eos>", {}),
    ]
    for name, token, end_option in cases:
        if name == "beside":
            written(folder / "tokenizer_config.json", b'{"eos_token": "<seed:eos>"}')
        manifest = prepared(corpus, out=tmp_path / name, **options, **end_option)
        assert manifest["tokenizer"]["end_of_text"] == library.token_to_id(token)
        assert len(shards(tmp_path / name, "train")[1]) == 300
        assert tokenizer_of(str(tmp_path / name)).end_token == token
    message = refusal(corpus, out=tmp_path / "beside", **options, end_of_text="</s>")
    assert "--end-of-text was none, now </s>" in message
    refused = refusal(corpus, out=tmp_path / "by name", **options)
    assert "was prepared with another tokenizer of that name" in refused
    refused = refusal(corpus, out=out, train_bpe=300, end_of_text="</s>")
    assert "--train-bpe makes <|endoftext|> the end of a document" in refused
    assert not out.exists()


def test_a_tokenizer_of_the_hub_is_fetched(corpus, tmp_path, out, monkeypatch):
    saved = tmp_path / "saved"
    saved.mkdir()
    trained().save(str(saved / "tokenizer.json"))
    fetched: list[str] = []

    def fetch(repository: str, **options: Any) -> str:
        fetched.append(repository)
        assert "*.safetensors" not in options["allow_patterns"]
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    prepared(corpus, out=out, tokenizer="hf:owner/name")
    prepared(corpus, out=tmp_path / "local", tokenizer=f"hf:{saved}")
    assert fetched == ["owner/name"]
    assert shards(out, "train") == shards(tmp_path / "local", "train")

    def offline(*name: object, **options: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    unfetched = tmp_path / "other"
    assert "hf:owner/name cannot be fetched" in refusal(
        corpus, out=unfetched, tokenizer="hf:owner/name"
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_files_are_read_by_their_byte_order_mark(encoding, tmp_path, out):
    def marked(text: str) -> bytes:
        mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
        return mark + text.encode(encoding)

    texts = ["Grüße, 世界 😀\n", *documents(20)]
    written(tmp_path / "in" / "a.txt", marked(texts[0]))
    written(tmp_path / "in" / "b.jsonl", marked(lines(texts).decode()))
    written(tmp_path / "in" / "c.csv.gz", gzip.compress(marked("n,text\n1,世界\n")))
    written(tmp_path / "in" / "d.json", marked(json.dumps([{"text": "世界"}])))
    prepared(tmp_path / "in", out=out, held_out=0.0)
    require(out, [texts[0], *texts, "世界", "世界"], share=0.0)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_byte_order_mark_is_read_in_a_zst_file_that_begins_with_a_long_block(
    suffix, encoding, tmp_path, out
):
    text = random.Random(0).randbytes(2**16).hex()
    content = lines([text]).decode() if suffix == ".jsonl" else text
    packed = zstandard.ZstdCompressor().compress(content.encode(encoding))
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    assert unpacker.decompress(packed[: streams.ZST_BYTES]) == b""
    prepared(written(tmp_path / f"a{suffix}.zst", packed), out=out, held_out=0.0)
    require(out, [text], share=0.0)


def test_codes_that_are_not_utf16_are_counted(tmp_path, out):
    content = codecs.BOM_UTF16_LE + b"a\0\x00\xd8b\0\1"
    manifest = prepared(written(tmp_path / "a.txt", content), out=out, held_out=0.0)
    require(out, ["a\ufffdb\ufffd"], share=0.0)
    assert manifest["documents"]["replaced"] == 2


@pytest.mark.slow
def test_a_zst_file_of_a_long_window_is_read(tmp_path, out):
    block = random.Random(0).randbytes(2**20).hex()
    text = block + "0123456789" * 13 * 2**20 + block  # the end refers far back
    parameters = zstandard.ZstdCompressionParameters(
        window_log=31, enable_ldm=True, compression_level=1
    )
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(text.encode())
    assert zstandard.get_frame_parameters(packed).window_size > 2**27
    prepared(written(tmp_path / "a.txt.zst", packed), out=out, held_out=0.0)
    content = np.fromfile(out / "train-00000.bin", dtype="<u2").astype("u1").tobytes()
    assert content == text.encode() + b"\xff"


# Texts that must not be cut


def test_with_a_tokenizer_that_looks_at_the_beginning_of_a_text_none_is_cut(
    tmp_path, out, monkeypatch
):
    file = str(tmp_path / "prefix.json")
    metaspace().save(file)  # it puts a space before every text
    prefix = load_tokenizer(file)
    assert not readers.may_be_cut(prefix)
    monkeypatch.setattr(run, "BLOCK_BYTES", 64)
    text = "some words " * 60
    path = written(tmp_path / "a.txt", text.encode())
    prepared(path, out=out, tokenizer=file)
    require(out, [text], prefix.encode)
    monkeypatch.setattr(readers, "LONGEST_UNCUT", 256)
    message = refusal(path, out=tmp_path / "b", tokenizer=file)
    assert "is longer than 256 bytes" in message


def test_a_cut_comes_before_a_space_after_a_word():
    assert readers.may_be_cut(load_tokenizer("bytes"))
    assert readers.cut_of(b"one two  three") == len("one two")
    assert readers.cut_of("один два".encode()) == len("один".encode())
    assert readers.cut_of("a\u00a0 \u3000 b".encode()) == 0
    assert readers.cut_of(b"one.\ntwo\nthree.\nfour;") == len(b"one.\ntwo")
    assert readers.cut_of(b" word") == 0


# The folder


def test_a_finished_folder_is_left_as_it_is_and_must_be_of_the_same_inputs_and_tokenizer(
    corpus, out, tmp_path, capsys
):
    file = written(tmp_path / "tok.json", load_tokenizer("bytes").to_json().encode())
    options = {"out": out, "tokenizer": str(file)}
    prepared(corpus, **options)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    prepared(corpus, **options)
    assert "is finished already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times
    file.write_text(metaspace().to_str())
    assert "another tokenizer of that name" in refusal(corpus, **options)
    written(file, load_tokenizer("bytes").to_json().encode())
    corpus.write_bytes(lines(documents(301)))
    assert "inputs have changed" in refusal(corpus, **options)


@pytest.mark.parametrize(
    "changes",
    [{"held_out": 0.2}, {"shard_tokens": 50}, {"text_key": "n"}, {"train_bpe": 300}],
    ids=str,
)
def test_another_command_is_refused_unless_it_may_overwrite(changes, corpus, out):
    prepared(corpus, out=out)
    message = refusal(corpus, out=out, **changes)
    assert "was prepared with other settings" in message
    assert "--overwrite" in message
    if changes != {"text_key": "n"}:
        written(out / "notes.md", b"mine")
        prepared(corpus, out=out, overwrite=True, **changes)
        assert (out / "notes.md").exists()
        if "train_bpe" not in changes:
            require(out, documents(300), share=changes.get("held_out", 0.1))


def test_a_folder_with_something_else_is_refused(corpus, out):
    written(out / "train-00000.bin", b"mine")
    assert "holds train-00000.bin, which is no preparation" in refusal(corpus, out=out)
    assert "is a file" in refusal(corpus, out=corpus)
    # The manifest.json of another program protects its folder, with `overwrite` as well.
    written(out / "manifest.json", b'{"name": "my web app"}')
    assert "is not of fp8stack prepare" in refusal(corpus, out=out, overwrite=True)
    assert (out / "train-00000.bin").read_bytes() == b"mine"
    assert (out / "manifest.json").read_text() == '{"name": "my web app"}'


def test_a_damaged_manifest_is_refused(corpus, out):
    for content in (b"", b"{}", b"[1]", b'{"format": 1}', b'{"format": 9}', b"\xff"):
        path = written(out / "manifest.json", content)
        message = refusal(corpus, out=out)
        assert f"{path} is not a manifest of prepared data" in message
        assert "Start over with --overwrite" in message


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"splits": []}, "prepared data: splits: "),
        ({"splits": {"train": {"shards": []}}}, "holds no training data"),
        ({"dtype": "x"}, "prepared data: dtype: "),
        ({"settings": 5}, "has no valid settings"),
        ({"tokenizer": None}, "prepared data: tokenizer: "),
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused_by_its_key(change, phrase, corpus, out):
    manifest = prepared(corpus, out=out)
    written(out / "manifest.json", json.dumps(manifest | change).encode())
    assert phrase in refusal(corpus, out=out)


def test_a_finished_folder_that_lost_a_shard_is_not_called_finished(corpus, out):
    prepared(corpus, out=out)
    for name, cut in (("train-00000.bin", True), ("val-00000.ends", False)):
        content = (out / name).read_bytes()
        (out / name).unlink()
        if cut:
            (out / name).write_bytes(content[:-8])
        assert "Start over with --overwrite" in refusal(corpus, out=out)
        prepared(corpus, out=out, overwrite=True)
        require(out, documents(300))


@pytest.mark.parametrize("reason", ["Permission denied", "Too many open files"])
def test_a_finished_folder_that_cannot_be_read_now_is_not_to_be_overwritten(
    reason, corpus, out, monkeypatch
):
    prepared(corpus, out=out)

    def denied(path: Path, *more: object, **options: object) -> str:
        raise PermissionError(errno.EACCES, reason)

    def mapped(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, reason)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 9))
    if reason == "Permission denied":
        monkeypatch.setattr(Path, "read_text", denied)
    else:
        monkeypatch.setattr(np, "memmap", mapped)
    message = refusal(corpus, out=out)
    assert f": {reason}. " in message
    assert "--overwrite" not in message
    assert "remove it" not in message


def test_overwriting_that_is_cut_short_leaves_nothing_that_looks_finished(corpus, out, monkeypatch):
    for removals in range(4):
        prepared(corpus, out=out, overwrite=True)
        steps = iter(range(removals))

        def killed(path: Path, *more: Any, steps: Any = steps, **options: Any) -> None:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            os.remove(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(KeyboardInterrupt):
                prepared(corpus, out=out, overwrite=True)
        assert not (out / "manifest.json").exists() or removals == 0


def test_what_was_prepared_is_json_on_request_and_progress_is_elsewhere(corpus, command, capsys):
    words = ["prepare", str(corpus), "--out", "prepared", "--held-out", "0.1"]
    words += ["--shard-tokens", "9000", "--workers", "1", "--json"]
    for again in (False, True):
        assert command(*words) == 0
        printed = capsys.readouterr()
        summary = json.loads(printed.out)
        manifest = json.loads(Path("prepared/manifest.json").read_text())
        splits = manifest["splits"]
        files = [shard["file"] for name in ("train", "val") for shard in splits[name]["shards"]]
        assert len(files) > 2
        assert summary["out"] == "prepared"
        assert summary["shards"] == files
        assert all(Path("prepared", file).is_file() for file in files)
        assert summary["documents"] == 300 == manifest["documents"]["documents"]
        assert summary["tokens"] == sum(len(shards(Path("prepared"), name)[0]) for name in splits)
        assert summary["tokenizer"]["name"] == "bytes"
        held = len(shards(Path("prepared"), "val")[1])
        assert summary["held_out"]["documents"] == held == splits["val"]["documents"] > 0
        assert ("is finished already." in printed.err) == again
        assert "documents: 300" in printed.err


def test_places_to_cut_that_are_far_apart_are_found(tmp_path, out, monkeypatch):
    monkeypatch.setattr(run, "BLOCK_BYTES", 64)
    text = b"1," * 70 + b" " + b"1," * 90  # after the cut more than a block is left
    manifest = prepared(written(tmp_path / "a.txt", text), out=out, held_out=0)
    assert manifest["documents"]["cut_words"] == 0
    assert bytes(shards(out, "train")[1][0]) == text


def test_bytes_that_are_no_utf8_are_counted_in_tables_and_arrays_too(tmp_path, out):
    table = written(tmp_path / "a.csv", "text\nGröße\nok\n".encode("cp1252"))
    array = written(tmp_path / "b.json", '[{"text": "Größe"}, {"text": "a"}]'.encode("cp1252"))
    manifest = prepared(table, array, out=out, held_out=0)
    assert manifest["documents"]["replaced"] == 4
    texts = [bytes(tokens).decode() for tokens in shards(out, "train")[1]]
    assert texts == ["Gr\ufffd\ufffde", "ok", "Gr\ufffd\ufffde", "a"]


@pytest.mark.parametrize("kind", ["a file", "a dictionary", "a dataset"])
def test_bytes_that_are_no_utf8_are_counted_in_columns_too(kind, tmp_path, out):
    column = pa.array([b"Gr\xf6\xdfe", b"ok"], pa.binary()).view(pa.string())
    column = column.dictionary_encode() if kind == "a dictionary" else column
    (tmp_path / "in").mkdir()
    path = parquet(tmp_path / "in" / "train.parquet", column)
    manifest = prepared(f"hf:{path.parent}" if kind == "a dataset" else path, out=out, held_out=0)
    require(out, ["Gr\ufffd\ufffde", "ok"], share=0)
    assert manifest["documents"]["replaced"] == 2


def test_overwriting_removes_nothing_before_what_is_new_can_begin(corpus, out):
    prepared(corpus, out=out)
    before = contents(out)
    wrong: list[dict[str, Any]] = [{"tokenizer": "mistyped.json"}, {"text_key": "mistyped"}]
    for changes in wrong:
        assert "mistyped" in refusal(corpus, out=out, overwrite=True, **changes)
        assert contents(out) == before


def test_overwriting_goes_on_with_the_same_preparation_that_was_interrupted(
    corpus, out, monkeypatch, capsys
):
    monkeypatch.setattr(run, "BLOCK_BYTES", 1500)
    monkeypatch.setattr(run, "GROUP_BYTES", 1500)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepared(corpus, out=out)
    capsys.readouterr()
    prepared(corpus, out=out, overwrite=True)
    assert "going on after" in capsys.readouterr().out
    require(out, documents(300))


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt
