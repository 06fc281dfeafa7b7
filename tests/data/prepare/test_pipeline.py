"""`fp8stack prepare`: its output compared with a plain loop; tokenizers, settings and folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers

from fp8stack.common.errors import StorageError
from fp8stack.data import tokenizer_of
from fp8stack.data.prepare import pipeline
from fp8stack.data.prepare.output_folder import OutputFolder
from fp8stack.data.tokenizer import load_tokenizer, tokenizer_from_json
from tests.conftest import contents
from tests.support.preparing import documents, lines, prepared, refusal, require, shards, written
from tests.support.small_tokenizers import trained


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def corpus(tmp_path) -> Path:
    return written(tmp_path / "corpus.jsonl", lines(documents(300)))


# The files that it writes


@pytest.mark.parametrize(("block", "share"), [(97, 0.1), (2**20, 0.0), (2**20, 0.5)])
def test_documents_become_the_tokens_of_a_plain_loop(block, share, corpus, out, monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_CHARACTERS", block)
    manifest = prepared(corpus, out=out, held_out=share)
    texts = documents(300)
    require(out, texts, share=share)
    val = manifest["splits"]["val"]
    assert (val["shards"] == []) == (share == 0)
    assert abs(val["documents"] - share * 290) < 30
    empty = sum(not text for text in texts)
    assert manifest["documents"] == {"documents": 300, "empty": empty, "replaced": 0}
    assert sum(split["bytes"] for split in manifest["splits"].values()) == sum(
        len(text.encode()) for text in texts
    )


def test_shards_end_with_the_document_that_fills_them_and_the_manifest_tells_of_all(corpus, out):
    manifest = prepared(corpus, out=out, shard_tokens=2000)
    require(out, documents(300))
    files = contents(out)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest["tokenizer"]["sha256"] == sums.pop("tokenizer.json")
    sums.pop("manifest.json")
    for split in manifest["splits"].values():
        assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
        for shard in split["shards"]:
            ends_file = shard["file"].replace(".bin", ".ends")
            assert shard["sha256"] == sums.pop(shard["file"])
            assert shard["ends_sha256"] == sums.pop(ends_file)
            ends = np.frombuffer(files[ends_file], dtype="<u8")
            assert len(ends) == 1 or ends[-2] < 2000
            assert shard is split["shards"][-1] or ends[-1] >= 2000
    assert not sums
    assert len(manifest["splits"]["train"]["shards"]) > 5
    (listed,) = manifest["inputs"]
    size = corpus.stat().st_size
    assert (listed["input"], listed["files"], listed["bytes"]) == (str(corpus), 1, size)
    assert listed["listing_sha256"] == hashlib.sha256(f"{size} {corpus}\n".encode()).hexdigest()


def test_the_summary_is_json_on_request_and_progress_is_elsewhere(
    corpus, command, capsys, monkeypatch
):
    monkeypatch.setattr(pipeline, "LINE_EVERY_S", 0.0)
    words = ["prepare", str(corpus), "--out", "prepared", "--held-out", "0.1"]
    words += ["--shard-tokens", "9000", "--json"]
    for is_finished in (False, True):
        assert command(*words) == 0
        printed = capsys.readouterr()
        summary = json.loads(printed.out)
        splits = json.loads(Path("prepared/manifest.json").read_text())["splits"]
        assert summary["out"] == "prepared"
        assert summary["shards"] == [
            shard["file"] for name in ("train", "val") for shard in splits[name]["shards"]
        ]
        assert summary["documents"] == 300
        assert summary["tokens"] == sum(len(shards(Path("prepared"), name)[0]) for name in splits)
        assert summary["held_out"]["documents"] == splits["val"]["documents"] > 0
        assert ("is finished already." in printed.err) == is_finished
        assert ("M tokens | " in printed.err and " | 0.1 of 0.1 MB" in printed.err) != is_finished
        assert "documents: 300" in printed.err


# Tokenizers


def test_a_trained_bpe_has_its_size_is_the_library_s_and_the_same_each_time(
    corpus, tmp_path, out, monkeypatch, capsys
):
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
    # A tokenizer given as a file is used and copied.
    file = out / "tokenizer.json"
    manifest = prepared(corpus, out=tmp_path / "given", tokenizer=str(file))
    assert (tmp_path / "given" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert shards(tmp_path / "given", "train") == shards(out, "train")
    assert manifest["tokenizer"]["name"] == "tokenizer.json"
    # Or one of the Hub; and a wide vocabulary needs wide tokens.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(out))
    prepared(corpus, out=tmp_path / "hub", tokenizer="hf:owner/name")
    assert shards(tmp_path / "hub", "train") == shards(out, "train")
    content = json.loads(load_tokenizer("bytes").to_json())
    content["model"]["vocab"]["<far>"] = 70000
    wide = written(tmp_path / "wide.json", json.dumps(content).encode())
    assert prepared(corpus, out=tmp_path / "w", tokenizer=str(wide))["dtype"] == "uint32"
    require(tmp_path / "w", documents(300))
    capsys.readouterr()
    prepared(written(tmp_path / "a.txt", b"aa aa"), out=tmp_path / "few", train_bpe=400)
    # Bytes, the end, "aa" and " aa".
    assert "note: the text gives 259 tokens and no more" in capsys.readouterr().out


def test_the_eos_token_of_a_tokenizer_or_the_one_asked_for_ends_documents(corpus, tmp_path, out):
    folder = tmp_path / "given"
    folder.mkdir()
    library = trained(special_tokens=["<seed:eos>", "<seed:bos>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"tokenizer": str(folder), "held_out": 0.0}
    for name, token in (("by name", "</s>"), ("by option", "<seed:bos>"), ("beside", "<seed:eos>")):
        if name == "beside":
            written(folder / "tokenizer_config.json", b'{"eos_token": "<seed:eos>"}')
        end: dict[str, Any] = {"end_of_text": token} if name == "by option" else {}
        manifest = prepared(corpus, out=tmp_path / name, **options, **end)
        assert manifest["tokenizer"]["end_of_text"] == library.token_to_id(token)
        assert len(shards(tmp_path / name, "train")[1]) == 300
        assert tokenizer_of(str(tmp_path / name)).end_token == token
    message = refusal(corpus, out=tmp_path / "beside", **options, end_of_text="</s>")
    assert "--end-of-text was none, now </s>" in message
    message = refusal(corpus, out=tmp_path / "by name", **options)
    assert "the tokenizer has changed since" in message
    message = refusal(corpus, out=out, train_bpe=300, end_of_text="</s>")
    assert "--train-bpe makes <|endoftext|> the end of a document" in message
    assert not out.exists()


def test_a_tokenizer_that_cannot_end_a_text_or_leaves_out_characters_is_noted(
    corpus, tmp_path, out, capsys
):
    content = json.loads(load_tokenizer("bytes").to_json()) | {"added_tokens": []}
    del content["model"]["vocab"]["a"]
    endless = written(tmp_path / "endless.json", json.dumps(content).encode())
    prepared(corpus, out=out, tokenizer=str(endless), held_out=0.0)
    printed = capsys.readouterr().out
    assert "note: endless.json names no token that ends a text" in printed
    assert "note: endless.json leaves out characters that it has no token for.\n" in printed
    texts = [text.replace("a", "") for text in documents(300)]
    assert f"note: {sum(not text for text in documents(300))} empty documents\n" in printed
    ends = np.fromfile(out / "train-00000.ends", dtype="<u8")
    assert ends.tolist() == np.cumsum([len(text.encode()) for text in texts]).tolist()


# Settings and folders


def test_a_finished_folder_is_left_as_it_is_and_must_be_of_the_same_inputs_and_settings(
    corpus, out, capsys
):
    prepared(corpus, out=out)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    prepared(corpus, out=out)
    assert "is finished already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times
    for changes in ({"held_out": 0.2}, {"text_key": "n"}, {"train_bpe": 300}):
        message = refusal(corpus, out=out, **changes)
        assert "was prepared with other settings: --" in message
        assert "--overwrite" in message
    corpus.write_bytes(lines(documents(301)))
    assert "the inputs have changed since" in refusal(corpus, out=out)


def test_overwriting_removes_its_own_files_alone_and_only_for_what_can_begin(corpus, out):
    prepared(corpus, out=out, shard_tokens=5000)
    written(out / "notes.md", b"mine")
    before = contents(out)
    assert "mistyped" in refusal(corpus, out=out, overwrite=True, tokenizer="mistyped.json")
    assert contents(out) == before
    prepared(corpus, out=out, overwrite=True)
    assert (out / "notes.md").read_bytes() == b"mine"
    require(out, documents(300))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-00000.bin", b"mine"),
        ("manifest.json", b'{"name": "my web app"}'),
        ("manifest.json", b"[1"),
    ],
)
def test_a_folder_of_somebody_else_is_refused(name, content, corpus, out):
    written(out / name, content)
    for overwrite in (False, True):
        message = refusal(corpus, out=out, overwrite=overwrite)
        assert f"holds {name}, which is no preparation" in message
    assert (out / name).read_bytes() == content


def test_a_file_or_a_place_that_cannot_be_written_is_refused(corpus):
    assert "is a file" in refusal(corpus, out=corpus)
    with pytest.raises(StorageError) as caught:
        prepared(corpus, out=Path("/proc/none/out"))
    assert caught.value.exit_code == 4
    with OutputFolder(corpus.parent / "x").claimed():
        assert "Another command prepares" in refusal(corpus, out=corpus.parent / "x")


def test_a_finished_folder_that_is_damaged_is_not_called_finished(corpus, out):
    manifest = prepared(corpus, out=out)
    ends = (out / "val-00000.ends").read_bytes()
    for name, content, phrase in (
        ("manifest.json", json.dumps(manifest | {"dtype": "x"}).encode(), "prepared data: dtype: "),
        ("val-00000.ends", ends[:-8], "val-00000.ends should hold"),
    ):
        written(out / name, content)
        message = refusal(corpus, out=out)
        assert phrase in message
        assert "Start over with --overwrite" in message
        prepared(corpus, out=out, overwrite=True)
        require(out, documents(300))
