"""Data in other projects' formats are read token by token, and damage is named."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fp8stack.data import Corpus, StepBatches, load_corpora, parquet, tokenizer_of
from fp8stack.data.tokenizer import load_tokenizer
from tests.conftest import refusal as refused_by
from tests.data.test_sources import refusal
from tests.support.data_writers import write_llmc, write_megatron, write_prepared

Change = Callable[[Path], object]


def everything(splits: tuple[Corpus, Corpus]) -> list[int]:
    return [token for split in splits for token in split.window(0, len(split)).tolist()]


# llm.c and modded-nanogpt


@pytest.mark.parametrize("llama", [False, True])
def test_an_llmc_file_is_the_tokens_after_its_header(tmp_path, llama):
    tokens = [50256, 1, 2, 65535] + [128255 if llama else 3] * 16
    path = write_llmc(tmp_path / "a.bin", tokens, llama=llama)
    splits = load_corpora(str(path), 130_000)
    assert everything(splits) == tokens
    assert all(segment.mapped for split in splits for segment in split.segments)
    assert splits[0].segments[0].tokens.itemsize == (4 if llama else 2)


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ({"a_train_02.bin": [3], "a_train_01.bin": [1, 2], "a_val_0.bin": [7]}, ([1, 2, 3], [7])),
        ({"tiny_train.bin": [1, 2], "tiny_val.bin": [7]}, ([1, 2], [7])),
        # The end is held out if there is no validation file.
        ({f"a_train_{n}.bin": [n] * 3 for n in range(3)}, ([0, 0, 0, 1, 1, 1, 2, 2], [2])),
    ],
    ids=["shards", "a pair", "no validation"],
)
def test_files_named_as_llmc_does_are_its_splits(tmp_path, files, splits):
    for name, tokens in files.items():
        write_llmc(tmp_path / name, tokens)
    loaded = load_corpora(str(tmp_path), 300, held_out=0.12)
    assert tuple(split.window(0, len(split)).tolist() for split in loaded) == splits
    if "tiny_val.bin" in files:
        write_llmc(tmp_path / "b.bin", [7])
        assert "b.bin is beside files that are named as training and val" in refusal(tmp_path)


@pytest.mark.parametrize("names", [("a.bin", "b.bin"), ("train.bin", "val.bin")])
def test_llmc_files_of_two_tokenizers_are_not_joined(tmp_path, names):
    first, second = (tmp_path / name for name in names)
    write_llmc(first, [1] * 9)
    write_llmc(second, [1] * 9, llama=True)
    message = refusal(tmp_path, 130_000)
    assert f"{first} of 50257 and {second} of 128256 are not the same" in message


def _header(*fields: int) -> bytes:
    return struct.pack("<256i", *fields, *[0] * (256 - len(fields)))


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (_header(20240520, 2, 4) + bytes(8), "is of version 2 of llm.c's format, and only 1"),
        (_header(20240520, 1, 5) + bytes(8), "should hold 5 tokens by its header, 1034 bytes, and"),
        (_header(20240520, 1, -4) + bytes(8), "should hold -4 tokens by its header"),
        (_header(20240520, 1, 4)[:100], "ends within llm.c's header of 1024 bytes"),
        (_header(20240522, 1, 4) + bytes(8), "holds llm.c's multiple-choice questions"),
    ],
)
def test_a_bad_header_of_llmc_is_named(tmp_path, content, phrase):
    (tmp_path / "a.bin").write_bytes(content)
    assert f"{tmp_path / 'a.bin'} {phrase}" in refusal(tmp_path / "a.bin")


# Megatron-LM

SEQUENCES = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8, 9], [10]]]


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [
        ("uint8", ""),
        ("int8", ".idx"),
        ("int16", ".bin"),
        ("int32", ""),
        ("int64", ""),
        ("uint16", ""),
    ],
)
def test_a_megatron_pair_is_read_by_either_name_or_its_prefix(tmp_path, dtype, suffix):
    prefix = write_megatron(tmp_path / "web_text_document", SEQUENCES, dtype)
    train, val = load_corpora(f"{prefix}{suffix}", 256, held_out=0.3)
    assert everything((train, val)) == list(range(1, 11))
    assert train.documents(0, train.window(0, 7)).tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert val.documents(0, val.window(0, 3)).tolist() == [0, 0, 0]
    assert train.segments[0].mapped


def test_a_bad_token_is_named_with_its_offset_in_the_file(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1] * 30 + [400] + [1] * 9)
    assert np.fromfile(path, "<u2")[542] == 400
    prefix = write_megatron(tmp_path / "b", [[[1, 2, -3] + [4] * 40]], "int32")
    for data, pattern in (
        (path, r"a\.bin: token 400 at offset 542 "),
        (prefix, r"b\.bin: token -3 at offset 2 is outside"),
    ):
        train, _ = load_corpora(str(data), 300)
        bad = StepBatches(train, batch=99, context=8, seed=0, vocabulary=300)
        assert re.search(pattern, refused_by(bad.__getitem__, 1))


def _patched(at: int, content: bytes) -> Change:
    def change(index: Path) -> None:
        patched = bytearray(index.read_bytes())
        patched[at : at + len(content)] = content
        index.write_bytes(patched)

    return change


LENGTHS, POSITIONS, DOCUMENTS = 34, 34 + 6 * 4, 34 + 6 * 12


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (_patched(0, b"TNTIDX\0\0"), "a.idx is not an index of Megatron-LM"),
        (lambda index: index.write_bytes(b""), "a.idx is empty"),
        (lambda index: index.write_bytes(b"MMIDIDX\0\0end"), "a.idx ends within its header"),
        (_patched(9, struct.pack("<Q", 2)), "a.idx is of version 2"),
        (_patched(17, b"\7"), "a.idx says that its tokens are float32 (code 7)"),
        (_patched(17, b"\x99"), "a.idx says that its tokens are an unknown type (code 153)"),
        (_patched(18, struct.pack("<Q", 0)), "a.idx has no sequences"),
        (lambda index: index.write_bytes(index.read_bytes()[:-3]), "a.idx should have 138 bytes"),
        (lambda index: index.write_bytes(index.read_bytes() + bytes(6)), "of multimodal data"),
        (_patched(LENGTHS, struct.pack("<i", -1)), "a.idx: sequence 0 does not begin"),
        (_patched(POSITIONS + 16, struct.pack("<q", -8)), "a.idx: sequence 2 does not begin"),
        (_patched(DOCUMENTS + 8, struct.pack("<q", 9)), "a.idx: its documents do not go"),
        (lambda index: index.with_suffix(".bin").write_bytes(bytes(22)), "and has 22 bytes"),
        (lambda index: index.with_suffix(".bin").unlink(), "a.bin is missing"),
    ],
)
def test_a_bad_index_of_megatron_is_named(tmp_path, change, phrase):
    prefix = write_megatron(tmp_path / "a", SEQUENCES)
    load_corpora(str(prefix), 256)
    change(tmp_path / "a.idx")
    assert phrase in refusal(prefix)


# Folders that `fp8stack prepare` wrote


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_prepared_folder_has_the_splits_of_its_manifest(tmp_path, dtype):
    large = 65_535 if dtype == "uint16" else 100_000
    shards = [[[1, 2, 0], [3, 0]], [[large, 0]]]
    folder = write_prepared(tmp_path / "p", shards, [[[9, 0]]], vocabulary=large + 1, dtype=dtype)
    train, val = load_corpora(str(folder), large + 1)
    assert train.window(0, 7).tolist() == [1, 2, 0, 3, 0, large, 0]
    assert train.documents(0, train.window(0, 7)).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert train.documents(1, train.window(1, 4)).tolist() == [0, 0, 1, 1]
    assert val.window(0, 2).tolist() == [9, 0]
    assert all(segment.mapped for segment in train.segments)


def test_the_end_of_a_folder_without_held_out_documents_is_held_out(tmp_path):
    train, val = load_corpora(str(write_prepared(tmp_path / "p", [[[1, 1, 1, 0]] * 5])), 256)
    assert (len(train), len(val)) == (18, 2)
    assert val.documents(0, val.window(0, 2)).tolist() == [0, 0]
    # Other ends of documents are other data.
    first, second = (
        load_corpora(str(write_prepared(tmp_path / str(number), [documents])), 256)[0]
        for number, documents in enumerate(([[1, 0], [0]], [[1], [0, 0]]))
    )
    assert everything((first, first)) == everything((second, second))
    assert first.fingerprint() != second.fingerprint()


def _manifest(key: str, value: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        *outer, last = key.split(".")
        inner = manifest
        for step in outer:
            inner = inner[int(step) if step.isdigit() else step]
        inner[last] = value
        path.write_text(json.dumps(manifest))

    return change


def _put(name: str, content: bytes | None) -> Change:
    """Give the file other contents; None: remove it."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (_manifest("dtype", "float32"), "manifest.json is not a manifest of prepared data: dtype"),
        (_manifest("splits.train.shards.0.tokens", 2**70), "splits.train.shards.0.tokens: "),
        (_manifest("splits.train.shards.0.file", "../a.bin"), "splits.train.shards.0.file: "),
        (_manifest("splits.train.shards", []), "holds no training data"),
        (_manifest("splits.train.shards.0.documents", 3), "train-00000.ends should hold the ends"),
        (_put("train-00000.bin", bytes(12)), "10 bytes, and has 12 bytes"),
        (_manifest("tokenizer.vocabulary", 300), "which has 300 tokens, and the model has 256"),
        (_put("manifest.json", None), "and no manifest.json: `fp8stack prepare` did not finish"),
        (_put("manifest.json", b"[]"), "its whole: "),
        (_put("train-00000.ends", None), "train-00000.ends: No such file"),
        (_put("train-00000.ends", struct.pack("<2Q", 7, 5)), "ends at token 5 of 5, or one ends"),
    ],
)
def test_a_prepared_folder_that_is_not_as_its_manifest_says_is_refused(tmp_path, change, phrase):
    folder = write_prepared(tmp_path / "p", [[[1, 2, 0], [3, 0]]])
    load_corpora(str(folder), 256)
    change(folder)
    assert phrase in refusal(folder, 256)


@pytest.mark.parametrize("form", ["prepared", "megatron"])
def test_an_index_that_changes_while_training_harms_nothing_but_documents(tmp_path, form):
    if form == "prepared":
        data = write_prepared(tmp_path / "p", [[[1, 0]] * 500])
        index = data / "train-00000.ends"
    else:
        data = write_megatron(tmp_path / "a", [[[1, 0]]] * 500)
        index = tmp_path / "a.idx"
    train, _ = load_corpora(str(data), 256)
    random = np.random.default_rng(0)
    for _ in range(20):
        index.write_bytes(random.bytes(index.stat().st_size))
        for start in range(0, 880, 40):
            numbers = train.documents(start, train.window(start, 20))
            assert numbers[0] == 0
            assert set(np.diff(numbers)) <= {0, 1}
    os.truncate(index, 8)  # the size is checked before the map is read
    message = refused_by(train.documents, 0, train.window(0, 9))
    assert f"{index.name} shrank while in use" in message


# Parquet

TEXTS = ["Grüße", "", None, "second\nline", "third"]


def write_parquet(path: Path, table: dict[str, object], **options: object) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(table), path, **options)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("rows", [2, 100])
def test_a_parquet_file_is_its_texts_with_a_byte_255_after_each(tmp_path, kind, rows):
    import pyarrow

    column = pyarrow.array(TEXTS)
    if kind == "dictionary":
        column = column.dictionary_encode()
    else:
        column = column.cast(getattr(pyarrow, kind)())
    table = {"id": [1, 2, 3, 4, 5], "text": column}
    path = write_parquet(tmp_path / "a.parquet", table, row_group_size=rows)
    splits = load_corpora(str(path), 256)
    expected = b"".join(text.encode() + b"\xff" for text in TEXTS if text is not None)
    assert bytes(everything(splits)) == expected
    assert all(split.has_documents for split in splits)


def test_the_only_column_of_strings_is_the_text_and_files_of_a_folder_are_joined(tmp_path):
    write_parquet(tmp_path / "b.parquet", {"n": [1.5], "story": ["b"]})
    write_parquet(tmp_path / "a.parquet", {"n": [1.5], "story": ["a"]})
    train, val = load_corpora(str(tmp_path), 256)
    assert bytes(everything((train, val))) == b"a\xffb\xff"


@pytest.mark.parametrize(
    ("table", "phrase"),
    [
        ({"n": [1], "tokens": [[1, 2]]}, "has no column of text, only n, tokens."),
        ({"a": ["x"], "b": ["y"]}, "has several columns of text (a, b) and"),
        ({"text": ["", None]}, "has no text in its column 'text'"),
    ],
)
def test_a_parquet_file_without_a_text_is_refused(tmp_path, table, phrase):
    path = write_parquet(tmp_path / "a.parquet", table)
    assert f"{path} {phrase}" in refusal(path)


def test_more_text_than_fits_in_memory_names_prepare_and_is_not_read(tmp_path, monkeypatch):
    for name in ("a", "b"):
        path = write_parquet(tmp_path / f"{name}.parquet", {"text": ["x" * 1999] * 5})
    read = Mock(wraps=parquet._documents)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(parquet, "_documents", read)
    for data, needed in ((path, 10_000), (tmp_path, 20_000)):  # with a byte after each text
        monkeypatch.setattr(parquet, "MOST_BYTES", needed)
        assert len(everything(load_corpora(str(data), 256))) == needed
        monkeypatch.setattr(parquet, "MOST_BYTES", needed - 1)
        remedy = f"fp8stack prepare {path} --text-key text --tokenizer bytes --out tokens"
        assert remedy in refusal(data)
    read.reset_mock()
    monkeypatch.setattr(parquet, "MOST_BYTES", 5000)
    refusal(path)
    assert read.call_count == 3


def test_without_pyarrow_the_remedy_is_named_and_kinds_of_files_are_not_mixed(
    tmp_path, monkeypatch
):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    write_llmc(tmp_path / "a.bin", [1, 2])
    assert "mixes .bin files (a.bin) with parquet files (a.parquet)" in refusal(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(path)


# The tokenizer of the tokens


def test_text_and_parquet_are_bytes_and_files_of_tokens_do_not_say_whose_they_are(tmp_path):
    text, table = tmp_path / "a.txt", tmp_path / "a.parquet"
    text.write_text("text")
    write_parquet(table, {"text": ["x"]})
    for data in (None, str(text), str(table)):
        tokenizer = tokenizer_of(data)
        assert tokenizer.sha256 == load_tokenizer("bytes").sha256
    prefix = write_megatron(tmp_path / "t" / "a", [[[1, 2]]])
    bin_file = write_llmc(tmp_path / "t" / "b.bin", [1])
    for path in (prefix, f"{prefix}.idx", bin_file, tmp_path / "t"):
        assert tokenizer_of(str(path)) is None


def test_a_prepared_folder_brings_its_tokenizer_and_another_is_refused(tmp_path):
    text = load_tokenizer("bytes").to_json()
    folder = write_prepared(tmp_path / "p", [[[1, 255]]], tokenizer=text)
    tokenizer = tokenizer_of(str(folder))
    assert tokenizer.sha256 == load_tokenizer("bytes").sha256
    assert tokenizer.decode([72, 105]) == "Hi"
    (folder / "tokenizer.json").write_text(text + " ")
    message = refused_by(tokenizer_of, str(folder))
    assert "tokenizer.json is not the tokenizer that made" in message
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json: No such file" in refused_by(tokenizer_of, str(folder))
