"""`fp8stack prepare`: what it writes, held to a plain loop; bad inputs and bad folders."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from fp8stack.errors import UserError
from fp8stack.prepare import inputs, read, run, tables, text_split
from fp8stack.prepare.progress import Display
from fp8stack.prepare.settings import Settings
from fp8stack.tokenizer import load_tokenizer, tokenizer_from_json
from tests.support.made_tokenizers import metaspace

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


def prepared(*paths: object, out: Path, overwrite: bool = False, **changes: Any) -> dict[str, Any]:
    """The manifest of a preparation in this process."""
    asked = {
        "tokenizer": "bytes", "train_bpe": None, "text_key": "text", "held_out": 0.1,
        "shard_tokens": 10**8, "workers": 1, **changes,
    }  # fmt: skip
    run.prepare(Settings(inputs=tuple(map(str, paths)), out=out, **asked), overwrite)
    return json.loads((out / "manifest.json").read_text())


def shards(out: Path, split: str) -> tuple[list[int], list[list[int]]]:
    """All tokens of a split, and the documents of all its shards, without their last tokens."""
    manifest = json.loads((out / "manifest.json").read_text())
    tokens, found = [], []
    for shard in manifest["splits"][split]["shards"]:
        here = np.fromfile(out / shard["file"], dtype="<u2").tolist()
        ends = np.fromfile(out / shard["file"].replace(".bin", ".ends"), dtype="<u8").tolist()
        assert ends[-1] == len(here) == shard["tokens"]
        assert len(ends) == shard["documents"]
        found += [here[a : b - 1] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        assert all(here[end - 1] == manifest["tokenizer"]["end_of_text"] for end in ends)
        tokens += here
    return tokens, found


def is_held_out(place: int, share: float) -> bool:
    """SplitMix64 with Python's integers."""
    mask = 2**64 - 1
    x = (place + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return place > 0 and (x >> 11) / 2**53 < share


def expected(texts: list[str], encode: Any, share: float = 0.1) -> dict[str, list[list[int]]]:
    """What a plain loop makes of documents: the ids of each, by split."""
    splits: dict[str, list[list[int]]] = {"train": [], "val": []}
    for place, text in enumerate(texts):
        splits["val" if is_held_out(place, share) else "train"].append(encode(text))
    return splits


def require(out: Path, texts: list[str], encode: Any, share: float = 0.1) -> None:
    for split, wanted in expected(texts, encode, share).items():
        assert shards(out, split)[1] == wanted


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def refusal(*paths: object, out: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepared(*paths, out=out, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines(documents(300)))
    return path


@pytest.fixture(params=[97, 1500, 2**20])
def item_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How large the items are that inputs are cut into."""
    monkeypatch.setattr(run, "ITEM_BYTES", request.param)
    return request.param


# What is written


def test_json_lines_become_the_tokens_of_a_plain_loop(
    corpus: Path, out: Path, item_bytes: int
) -> None:
    manifest = prepared(corpus, out=out)
    texts = documents(300)
    require(out, texts, by_bytes)
    assert manifest["documents"]["documents"] == 300
    assert manifest["documents"]["empty"] == sum(not text for text in texts) > 0
    assert 10 < manifest["splits"]["val"]["documents"] < 60
    assert sum(split["bytes"] for split in manifest["splits"].values()) == sum(
        len(text.encode()) for text in texts
    )


def test_the_share_that_training_a_tokenizer_has_read_never_passes_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed text is many times as long as its file."""
    paths = [tmp_path / f"{n}.txt.gz" for n in range(3)]
    for path in paths:
        path.write_bytes(gzip.compress("\n".join(documents(2000)).encode()))
    total = sum(path.stat().st_size for path in paths)
    seen = []
    monkeypatch.setattr(run.Display, "update", lambda _, done, line="": seen.append(done))
    prepared(*paths, out=tmp_path / "out", train_bpe=300)
    assert seen == sorted(seen)
    assert (seen[-1], len(set(seen))) == (total, 3)
    line = Display("read", total, 0, clock=iter([0.0, 9.0]).__next__).describe(total, "")
    assert line.startswith("read | 100.0 % of")
    assert line.endswith("ETA 0:00:00")


def test_a_trained_bpe_has_its_size_and_is_the_library_s(corpus: Path, out: Path) -> None:
    manifest = prepared(corpus, out=out, train_bpe=300)
    assert manifest["tokenizer"]["vocabulary"] == 300
    library = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert library.token_to_id("<|endoftext|>") == manifest["tokenizer"]["end_of_text"]
    library.encode_special_tokens = True
    require(out, documents(300), lambda text: library.encode(text).ids)
    assert len(shards(out, "train")[0]) < manifest["splits"]["train"]["bytes"] / 2
    mine = tokenizer_from_json((out / "tokenizer.json").read_text(encoding="utf-8"))
    assert manifest["tokenizer"]["sha256"] == mine.sha256


def test_a_bpe_is_trained_alike_each_time(corpus: Path, tmp_path: Path) -> None:
    made = [prepared(corpus, out=tmp_path / str(n), train_bpe=350) for n in range(3)]
    assert len({one["tokenizer"]["sha256"] for one in made}) == 1


def test_a_bpe_of_more_tokens_than_the_text_gives_says_so(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("aa aa")
    manifest = prepared(tmp_path / "a.txt", out=out, train_bpe=400)
    assert manifest["tokenizer"]["vocabulary"] == 259  # bytes, the end, "aa" and " aa"
    assert "note: the text gives 259 tokens and no more" in capsys.readouterr().out


def test_a_file_s_tokenizer_is_used_and_kept(corpus: Path, tmp_path: Path, out: Path) -> None:
    prepared(corpus, out=tmp_path / "first", train_bpe=300)
    given = tmp_path / "first" / "tokenizer.json"
    manifest = prepared(corpus, out=out, tokenizer=str(given))
    assert (out / "tokenizer.json").read_bytes() == given.read_bytes()
    assert shards(out, "train") == shards(tmp_path / "first", "train")
    assert manifest["tokenizer"]["name"] == "tokenizer.json"


def test_wide_vocabularies_are_written_as_uint32(corpus: Path, tmp_path: Path, out: Path) -> None:
    content = json.loads(load_tokenizer("bytes").to_json())
    content["model"]["vocab"]["<far>"] = 70000
    (tmp_path / "wide.json").write_text(json.dumps(content))
    manifest = prepared(corpus, out=out, tokenizer=str(tmp_path / "wide.json"))
    assert manifest["dtype"] == "uint32"
    text = np.fromfile(out / "train-00000.bin", dtype="<u4")
    assert len(text) == manifest["splits"]["train"]["tokens"]
    wanted = expected(documents(300), by_bytes)["train"]
    assert text.tolist() == [token for document in wanted for token in [*document, 255]]


def test_shards_end_with_the_document_that_fills_them(corpus: Path, out: Path) -> None:
    manifest = prepared(corpus, out=out, shard_tokens=2000)
    train = manifest["splits"]["train"]["shards"]
    assert len(train) > 5
    require(out, documents(300), by_bytes)
    for shard in train[:-1]:
        ends = np.fromfile(out / shard["file"].replace(".bin", ".ends"), dtype="<u8")
        assert ends[-1] >= 2000
        assert len(ends) == 1 or ends[-2] < 2000


def test_the_manifest_tells_the_checksums_and_the_tokenizer(corpus: Path, out: Path) -> None:
    import hashlib

    manifest = prepared(corpus, out=out, shard_tokens=3000)
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            content = (out / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(content).hexdigest()
            ends = (out / shard["file"]).with_suffix(".ends").read_bytes()
            assert shard["ends_sha256"] == hashlib.sha256(ends).hexdigest()
        assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
    text = (out / "tokenizer.json").read_bytes()
    assert manifest["tokenizer"]["sha256"] == hashlib.sha256(text).hexdigest()
    assert manifest["inputs"][0]["bytes"] == corpus.stat().st_size
    names = {path.name for path in out.iterdir()}
    listed = {s["file"] for split in manifest["splits"].values() for s in split["shards"]}
    ends_too = {name.replace(".bin", ".ends") for name in listed}
    assert names == listed | ends_too | {"manifest.json", "tokenizer.json"}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_share_held_out_is_what_is_asked(corpus: Path, out: Path, share: float) -> None:
    manifest = prepared(corpus, out=out, held_out=share)
    require(out, documents(300), by_bytes, share)
    val = manifest["splits"]["val"]
    assert (val["shards"] == []) == (share == 0)
    assert abs(val["documents"] - share * 290) < 30


# Kinds of inputs


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_json_lines_are_read_packed_or_not(
    name: str, packed: str, tmp_path: Path, out: Path
) -> None:
    texts = documents(50)
    (tmp_path / (name + packed)).write_bytes(pack(lines(texts, "body"), packed))
    prepared(tmp_path / (name + packed), out=out, text_key="body")
    require(out, texts, by_bytes)


def pack(content: bytes, suffix: str) -> bytes:
    """In two members, as parallel packers write them."""
    parts = [content[: len(content) // 3], content[len(content) // 3 :]]
    if suffix == ".gz":
        return b"".join(map(gzip.compress, parts))
    if suffix == ".zst":
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)
    return content


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_text_is_one_document_however_it_is_cut(
    packed: str, tmp_path: Path, out: Path, item_bytes: int
) -> None:
    text = " ".join(documents(60))
    (tmp_path / f"a.txt{packed}").write_bytes(pack(text.encode(), packed))
    manifest = prepared(tmp_path / f"a.txt{packed}", out=out, train_bpe=300)
    library = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    library.encode_special_tokens = True
    assert shards(out, "train")[1] == [library.encode(text).ids]
    assert manifest["documents"] == {"documents": 1, "empty": 0, "replaced": 0, "cut_words": 0}


def test_a_text_without_spaces_is_cut_all_the_same_and_that_is_told(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ITEM_BYTES", 64)
    monkeypatch.setattr(read, "LONGEST_WORD", 256)
    text = "世界" * 500
    (tmp_path / "a.txt").write_text(text)
    manifest = prepared(tmp_path / "a.txt", out=out)
    require(out, [text], by_bytes)  # no character is torn
    assert manifest["documents"]["cut_words"] == 11
    assert manifest["documents"]["replaced"] == 0
    assert "11 cuts within a text without spaces" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [7, 100])
@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_is_read_row_by_row(
    rows: int, dictionary: bool, tmp_path: Path, out: Path, item_bytes: int
) -> None:
    texts = documents(150)
    column = pa.array(texts).dictionary_encode() if dictionary else pa.array(texts)
    table = pa.table({"n": range(150), "body": column})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    prepared(tmp_path / "a.parquet", out=out, text_key="body")
    require(out, texts, by_bytes)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dataset_is_streamed_from_its_folder(
    kind: str, tmp_path: Path, out: Path, item_bytes: int
) -> None:
    texts = documents(90)
    (tmp_path / "data").mkdir()
    if kind == "jsonl":
        (tmp_path / "data" / "train.jsonl").write_bytes(lines(texts))
        (tmp_path / "data" / "test.jsonl").write_bytes(lines(["no"]))
    else:
        pq.write_table(pa.table({"text": texts}), tmp_path / "data" / "train.parquet")
    prepared(f"hf:{tmp_path / 'data'}@train", out=out)
    require(out, texts, by_bytes)


@pytest.mark.parametrize("split", ["", "@train"])
def test_a_folder_that_a_dataset_was_saved_to_is_read(
    split: str, tmp_path: Path, out: Path
) -> None:
    texts = documents(40)
    saved = datasets.Dataset.from_dict({"text": texts}, split="train")
    saved.save_to_disk(tmp_path / "one")
    prepared(f"hf:{tmp_path / 'one'}{split}", out=out)
    require(out, texts, by_bytes)
    assert "holds a single dataset" in refusal(f"hf:{tmp_path / 'one'}@val", out=tmp_path / "b")
    datasets.DatasetDict(train=saved, val=saved.select([1])).save_to_disk(tmp_path / "two")
    prepared(f"hf:{tmp_path / 'two'}{split}", out=tmp_path / "c")
    require(tmp_path / "c", texts, by_bytes)
    assert "No split 'test'" in refusal(f"hf:{tmp_path / 'two'}@test", out=tmp_path / "d")


@pytest.mark.parametrize("bad", ["hf:nowhere/at-all", "a.png"])
def test_an_input_that_fails_at_its_beginning_leaves_a_folder_that_takes_another(
    bad: str, corpus: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    written(Path("a.png"), b"PNG\0")
    refusal(bad, out=out)
    assert list(out.iterdir()) == []
    prepared(corpus, out=out)
    require(out, documents(300), by_bytes)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:c-1", ("a/b", "c-1", "train")),
        ("hf:a/b@test", ("a/b", None, "test")),
        ("hf:a/b:c@train[:10%]", ("a/b", "c", "train[:10%]")),
    ],
)
def test_the_name_of_a_dataset_has_its_parts(given: str, parsed: tuple[object, ...]) -> None:
    assert tables.parse_dataset(given) == parsed


def test_a_folder_is_read_in_the_order_of_its_paths(
    tmp_path: Path, out: Path, item_bytes: int
) -> None:
    files = {
        "b/2.txt": b"two", "a.md": b"first", "b/1.jsonl": lines(["x", "y"]), "c.py": b"pass\n",
        ".hidden": b"no", "b/.cache/z.txt": b"no", "empty.txt": b"", "b/0.json": b'{\n "a": 1\n}\n',
        "d.json": lines(["in lines"]),
    }  # fmt: skip
    folder = tmp_path / "folder"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = prepared(folder, folder / "a.md", out=folder / "out", held_out=0.0)
    texts = ["first", '{\n "a": 1\n}\n', "x", "y", "two", "pass\n", "in lines", "first"]
    require(folder / "out", texts, by_bytes, 0.0)
    assert [given["files"] for given in manifest["inputs"]] == [6, 1]


# Which files of a folder


@pytest.fixture
def mixed_folder(tmp_path: Path) -> Path:
    """Two texts, two pictures and a table."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.md", "sub/b.py"):
        (folder / name).write_text(name)
    (folder / "logo.png").write_bytes(b"PNG\0")
    (folder / "sub" / "x.png.gz").write_bytes(gzip.compress(b"PNG\0"))
    return folder


def test_binary_files_of_a_folder_are_named_before_anything_is_written(
    mixed_folder: Path, out: Path
) -> None:
    message = refusal(mixed_folder, out=out)
    assert "2 of 4 files look binary: " in message
    assert str(mixed_folder / "logo.png") in message
    assert "--skip-binary" in message
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
def test_files_of_a_folder_are_chosen_by_patterns(
    changes: dict[str, Any], texts: list[str], mixed_folder: Path, out: Path
) -> None:
    prepared(mixed_folder, out=out, held_out=0.0, **changes)
    require(out, texts, by_bytes, 0.0)
    message = refusal(mixed_folder, out=out, held_out=0.0, include=("a.md",))
    assert "was prepared otherwise: --" in message


def test_patterns_that_leave_nothing_are_refused(mixed_folder: Path, out: Path) -> None:
    message = refusal(mixed_folder, out=out, include=("*.txt",))
    assert "leave nothing of the folder" in message
    assert "the first of its 4 files is a.md" in message


def test_a_table_in_a_folder_is_left_out_where_it_is_excluded(tmp_path: Path, out: Path) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in" / "a.txt", b"text")
    written(tmp_path / "in" / "b.tsv.gz", gzip.compress(b"1\ttwo\n"))
    assert "by --exclude '*.tsv.gz'" in refusal(tmp_path / "in", out=out)
    prepared(tmp_path / "in", out=out, held_out=0.0, exclude=("*.tsv.gz",))
    require(out, ["text"], by_bytes, 0.0)


# What is not Unicode


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and \xff\xfe \xef\xbf\xbd")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b\xe9"}\n{"text": "\\ud800x\\ud83d\\ude00"}\n')
    manifest = prepared(tmp_path / "a.txt", tmp_path / "b.jsonl", out=out, held_out=0.0)
    texts = ["caf\ufffd and \ufffd\ufffd \ufffd", "b\ufffd", "\ufffdx😀"]
    require(out, texts, by_bytes, 0.0)
    assert manifest["documents"]["replaced"] == 5


def test_a_byte_order_mark_is_no_part_of_json_lines(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(["x"]) + b"\r\n\n" + lines(["y"]))
    prepared(tmp_path / "a.jsonl", out=out, held_out=0.0)
    require(out, ["x", "y"], by_bytes, 0.0)


# What is refused

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
def test_a_bad_line_is_named(name: str, tmp_path: Path, out: Path) -> None:
    bad, said = BAD_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]) + b"\n" + bad + b"\n" + lines(["y"]))
    message = refusal(tmp_path / "a.jsonl", out=out)
    assert f"{tmp_path / 'a.jsonl'} {said}" in message


def test_after_a_bad_line_is_mended_the_same_command_goes_on(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ITEM_BYTES", 500)
    texts = documents(100)
    content = lines(texts)
    broken = content.replace(b"\n", b"\noops\n", 61).replace(b"oops\n", b"", 60)
    path = tmp_path / "a.jsonl"
    path.write_bytes(broken)
    assert "line 62 is not JSON" in refusal(path, out=out)
    before = json.loads((out / "progress.json").read_text())
    assert before["position"]["line"] > 40
    path.write_bytes(content)
    prepared(path, out=out)
    require(out, texts, by_bytes)
    assert f"going on after {before['counts']['documents']} documents" in capsys.readouterr().out
    assert not (out / "progress.json").exists()


@pytest.mark.parametrize("value", [None, 3])
def test_a_bad_row_is_named(value: object, tmp_path: Path, out: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"text": "a"}, {"text": value}] if value is None else [{"text": value}]
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    said = f"row {len(rows)} has a {'null' if value is None else 'number'} where text"
    assert said in refusal(f"hf:{tmp_path / 'data'}", out=out)
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    if value is None:
        message = refusal(tmp_path / "a.parquet", out=tmp_path / "other")
        assert "a.parquet row 2 has a null where text" in message


def test_columns_that_are_not_there_or_not_text_are_named(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"texts": ["a"], "n": [1]}), path)
    message = refusal(path, out=out)
    assert "No column 'text'. Did you mean 'texts'?" in message
    assert "holds int64, not text" in refusal(path, out=tmp_path / "b", text_key="n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(lines(["x"], "body"))
    message = refusal(f"hf:{tmp_path / 'data'}", out=tmp_path / "c")
    assert "No column 'text'" in message
    assert "--text-key" in message


def damaged_gz(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.jsonl.gz", gzip.compress(lines(documents(99)))[:-9]), "cut short"


def rotten_gz(tmp_path: Path) -> tuple[str, str]:
    packed = bytearray(gzip.compress(lines(documents(99))))
    packed[len(packed) // 2] ^= 0xFF
    return written(tmp_path / "a.txt.gz", bytes(packed)), "cut short or damaged after"


def no_gz(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.txt.gz", b"plain text"), "damaged after 0 bytes"


def damaged_zst(tmp_path: Path) -> tuple[str, str]:
    packed = zstandard.ZstdCompressor().compress(lines(documents(99)))
    return written(tmp_path / "a.jsonl.zst", packed[:-5]), "cut short or damaged"


def no_zst(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.txt.zst", b"plain text"), "damaged after 0 bytes"


def damaged_parquet(tmp_path: Path) -> tuple[str, str]:
    pq.write_table(pa.table({"text": documents(99)}), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    return written(tmp_path / "a.parquet", content[: len(content) // 2]), "is not a parquet file"


def a_table(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.csv", b"n,text\n1,one\n"), "is a table in CSV"


def an_array(tmp_path: Path) -> tuple[str, str]:
    rows = [{"text": "one"}, {"text": "two"}]
    content = gzip.compress(json.dumps(rows, indent=1).encode())
    return written(tmp_path / "a.json.gz", content), "is an array of JSON objects"


def a_picture(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"), "looks binary: byte 8"


def an_empty_file(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.txt", b""), "is empty"


def blank_lines(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.jsonl", b"\n\n"), "There is no text in the inputs"


def empty_documents(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.jsonl", lines(["", ""])), "There is no text in the inputs"


def an_empty_folder(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "nothing").mkdir()
    return str(tmp_path / "nothing"), "holds no data"


def nothing(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "nothing"), "No input"


def no_name(tmp_path: Path) -> tuple[str, str]:
    return "", "No input ''"


def a_pipe(tmp_path: Path) -> tuple[str, str]:
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe"), "is not a regular file"


def no_dataset(tmp_path: Path) -> tuple[str, str]:
    return f"hf:{tmp_path}/nowhere", "Cannot read hf:"


def no_split(tmp_path: Path) -> tuple[str, str]:
    written(tmp_path / "a.jsonl", lines(["a"]))
    return f"hf:{tmp_path}@val", "Available splits: ['train']"


def no_dataset_name(tmp_path: Path) -> tuple[str, str]:
    return "hf:", "needs the name of a dataset"


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


BAD_INPUTS = [
    damaged_gz, rotten_gz, no_gz, damaged_zst, no_zst, damaged_parquet, a_table, an_array,
    a_picture, an_empty_file, blank_lines, empty_documents, an_empty_folder, nothing, no_name,
    a_pipe, no_dataset, no_split, no_dataset_name,
]  # fmt: skip


@pytest.mark.parametrize("make", BAD_INPUTS, ids=lambda make: make.__name__)
def test_a_bad_input_is_refused_by_name(make: Any, tmp_path: Path, out: Path) -> None:
    name, said = make(tmp_path)
    message = refusal(name, out=out)
    assert said in message
    assert name in message or "no text in the inputs" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"held_out": 1.0}, "Cannot hold out 1.0"),
        ({"held_out": float("nan")}, "Cannot hold out nan"),
        ({"shard_tokens": 0}, "Shards of 0 tokens"),
        ({"workers": 0}, "0 workers"),
        ({"train_bpe": 256}, "Use 257"),
        ({"tokenizer": "gtp2"}, "No tokenizer 'gtp2'"),
    ],
)
def test_bad_settings_are_refused(changes: Any, said: str, corpus: Path, out: Path) -> None:
    assert said in refusal(corpus, out=out, **changes)


def test_a_tokenizer_that_cannot_end_a_text_is_refused(
    corpus: Path, tmp_path: Path, out: Path
) -> None:
    content = json.loads(load_tokenizer("bytes").to_json())
    content["added_tokens"] = []
    (tmp_path / "endless.json").write_text(json.dumps(content))
    message = refusal(corpus, out=out, tokenizer=str(tmp_path / "endless.json"))
    assert "endless.json has no special token that ends a text" in message


def test_a_line_without_an_end_is_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ITEM_BYTES", 100)
    monkeypatch.setattr(read, "LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_bytes(lines(["x" * 2000]))
    assert "has a line of more than 1,000 bytes" in refusal(tmp_path / "a.jsonl", out=out)


@pytest.mark.parametrize("package", ["pyarrow", "zstandard", "datasets"])
def test_a_package_that_is_missing_is_named(
    package: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"pyarrow": "a.parquet", "zstandard": "a.jsonl.zst"}.get(package)
    given = written(tmp_path / name, b"x") if name else f"hf:{tmp_path}"
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package}" in refusal(given, out=out)


# Texts that must not be cut


def test_with_a_tokenizer_that_looks_at_the_beginning_of_a_text_none_is_cut(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metaspace().save(str(tmp_path / "prefix.json"))  # it puts a space before every text
    prefix = load_tokenizer(str(tmp_path / "prefix.json"))
    assert not text_split.may_be_cut(prefix)
    monkeypatch.setattr(run, "ITEM_BYTES", 64)
    text = "some words " * 60
    (tmp_path / "a.txt").write_text(text)
    prepared(tmp_path / "a.txt", out=out, tokenizer=str(tmp_path / "prefix.json"))
    require(out, [text], prefix.encode)
    monkeypatch.setattr(read, "LONGEST_WHOLE", 256)
    message = refusal(
        tmp_path / "a.txt", out=tmp_path / "b", tokenizer=str(tmp_path / "prefix.json")
    )
    assert "is longer than 256 bytes" in message


def test_a_cut_comes_before_a_space_after_a_word() -> None:
    assert text_split.may_be_cut(load_tokenizer("bytes"))
    assert text_split.cut_of(b"one two  three") == len("one two")
    assert text_split.cut_of("один два".encode()) == len("один".encode())
    assert text_split.cut_of("a\u00a0 \u3000 b".encode()) == 0
    assert text_split.cut_of(b"one.\ntwo\nthree.\nfour;") == len(b"one.\ntwo")
    assert text_split.cut_of(b" word") == 0


# The folder


def test_a_finished_folder_is_left_as_it_is(
    corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(corpus, out=out)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    prepared(corpus, out=out)
    assert "is finished already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize(
    "changes",
    [{"held_out": 0.2}, {"shard_tokens": 50}, {"text_key": "n"}, {"train_bpe": 300}],
    ids=str,
)
def test_another_command_is_refused_unless_it_may_overwrite(
    changes: Any, corpus: Path, out: Path
) -> None:
    prepared(corpus, out=out)
    message = refusal(corpus, out=out, **changes)
    assert "was prepared otherwise" in message
    assert "--overwrite" in message
    if changes != {"text_key": "n"}:
        (out / "notes.md").write_text("mine")
        prepared(corpus, out=out, overwrite=True, **changes)
        assert (out / "notes.md").exists()
        share = changes.get("held_out", 0.1)
        if "train_bpe" not in changes:
            require(out, documents(300), by_bytes, share)


def test_inputs_that_changed_since_are_refused(corpus: Path, out: Path) -> None:
    prepared(corpus, out=out)
    corpus.write_bytes(lines(documents(301)))
    assert "inputs have changed" in refusal(corpus, out=out)


def test_a_folder_with_something_else_is_refused(corpus: Path, out: Path) -> None:
    out.mkdir()
    (out / "train-00000.bin").write_bytes(b"mine")
    assert "holds train-00000.bin, which is no preparation" in refusal(corpus, out=out)
    assert "is a file" in refusal(corpus, out=corpus)


@pytest.mark.parametrize("name", ["progress.json", "manifest.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"format": 1}', b'{"format": 9}', b"\xff"]
)
def test_a_damaged_account_of_the_folder_is_refused(
    name: str, content: bytes, corpus: Path, out: Path
) -> None:
    out.mkdir()
    (out / name).write_bytes(content)
    message = refusal(corpus, out=out)
    assert f"{out / name} cannot be read" in message


@pytest.mark.parametrize("kind", [".bin", ".ends"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_finished_folder_that_lost_a_shard_is_not_called_finished(
    kind: str, cut: bool, corpus: Path, out: Path
) -> None:
    prepared(corpus, out=out)
    path = out / f"train-00000{kind}"
    if cut:
        path.write_bytes(path.read_bytes()[:-8])
    else:
        path.unlink()
    assert "is missing or has another size" in refusal(corpus, out=out)
    prepared(corpus, out=out, overwrite=True)
    require(out, documents(300), by_bytes, 0.1)


def test_another_tokenizer_under_the_same_name_is_refused(
    corpus: Path, out: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tok.json"
    file.write_text(load_tokenizer("bytes").to_json())
    prepared(corpus, out=out, tokenizer=str(file))
    prepared(corpus, out=out, tokenizer=str(file))
    file.write_text(metaspace().to_str())
    assert "another tokenizer of that name" in refusal(corpus, out=out, tokenizer=str(file))


def test_overwriting_leaves_what_another_program_calls_a_manifest(corpus: Path, out: Path) -> None:
    out.mkdir()
    (out / "manifest.json").write_text('{"name": "my web app"}')
    (out / "train-00000.bin").write_bytes(b"mine")
    assert "is not of fp8stack prepare" in refusal(corpus, out=out, overwrite=True)
    assert (out / "train-00000.bin").read_bytes() == b"mine"
    assert (out / "manifest.json").read_text() == '{"name": "my web app"}'


def test_overwriting_that_is_cut_short_leaves_nothing_that_looks_finished(
    corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left in range(4):
        prepared(corpus, out=out, overwrite=True)
        removed: list[Path] = []

        def killed(
            path: Path, *more: Any, gone: list[Path] = removed, left: int = left, **how: Any
        ) -> None:
            if len(gone) == left:
                raise KeyboardInterrupt
            gone.append(path)
            os.remove(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(KeyboardInterrupt):
                prepared(corpus, out=out, overwrite=True)
        message = refusal(corpus, out=out)
        assert "--overwrite" in message


def test_a_trained_tokenizer_that_is_asked_for_no_more_is_named_by_its_flag(
    corpus: Path, out: Path
) -> None:
    prepared(corpus, out=out, train_bpe=300)
    assert "--train-bpe there 300, now none" in refusal(corpus, out=out)


def test_a_parquet_file_that_changed_where_it_was_read_is_refused(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ITEM_BYTES", 2000)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    path = tmp_path / "a.parquet"
    texts: list[Any] = [f"first {n} " * 9 for n in range(300)]
    pq.write_table(pa.table({"text": [*texts, None]}), path)
    refusal(path, out=out)
    pq.write_table(pa.table({"text": [text.replace("first", "other") for text in texts]}), path)
    assert "has changed where it was read already" in refusal(path, out=out)
    pq.write_table(pa.table({"text": texts}), path, 17)  # mended, in other row groups
    prepared(path, out=out)
    require(out, texts, by_bytes, 0.1)


def test_sources_are_sampled_by_size_for_a_tokenizer() -> None:
    from fp8stack.prepare import train

    def some(sizes: list[int]) -> list[inputs.Source]:
        return [inputs.Source(path=str(s), kind="text", size=s, given=0) for s in sizes]

    small = train.sample_of(some([10, 30]))
    assert all(budget >= source.size for source, budget in small)
    gib = 2**30
    large = train.sample_of(some([gib, 3 * gib]))
    assert [budget for _, budget in large] == [train.SAMPLE_BYTES // 4, 3 * train.SAMPLE_BYTES // 4]
    many = train.sample_of(some([4096] * 1_000_000))
    assert sum(min(budget, source.size) for source, budget in many) <= train.SAMPLE_BYTES
    assert len(many) == 62500
