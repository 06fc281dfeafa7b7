"""The data package: inputs that are read or refused, and the windows of a step."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fp8stack.data import (
    Corpus,
    Segment,
    StepBatches,
    corpus,
    load_corpora,
    texts,
    validation_windows,
)
from tests.conftest import refusal as refused_by

GPT2 = 50257


def write_bin(path: Path, tokens: object) -> Path:
    np.asarray(tokens).astype("<u2").tofile(path)
    return path


def refusal(data: object, vocabulary: int = GPT2, **options: Any) -> str:
    """The message with which `data` is refused."""
    return refused_by(load_corpora, str(data), vocabulary, **options)


def in_memory(tokens: object, name: str = "some tokens") -> Corpus:
    return Corpus(
        name=name, segments=(Segment(path=Path("x"), tokens=np.array(tokens, np.uint32)),)
    )


def batches(of: Corpus, **changes: Any) -> StepBatches:
    return StepBatches(of, **{"batch": 3, "context": 8, "seed": 7, "vocabulary": GPT2} | changes)


def counting(tmp_path: Path, n: int = 1000) -> Corpus:
    """A mapped training split whose token at offset i is i."""
    write_bin(tmp_path / "train.bin", range(n))
    write_bin(tmp_path / "val.bin", range(n))
    return load_corpora(str(tmp_path), GPT2)[0]


# The default corpus


@pytest.fixture(scope="module")
def library() -> tuple[Corpus, Corpus]:
    return load_corpora(None, 256)


def test_the_default_corpus_is_about_ten_megabytes_of_python_as_every_install_has_it(library):
    train, val = library
    assert 7e6 < len(train) + len(val) < 15e6
    assert len(val) == int(0.1 * (len(train) + len(val)))
    assert b"import" in bytes(train.window(0, 100_000).tolist())
    root = Path(sysconfig.get_path("stdlib"))
    for segment in train.segments[:20]:
        assert segment.path.read_bytes().startswith(segment.tokens.tobytes())
    names = {p.path.relative_to(root).as_posix() for split in library for p in split.segments}
    assert {"argparse.py", "json/decoder.py"} <= names
    for name in names:
        assert not set(name.split("/")) & {"site-packages", "test", "__pycache__", "idlelib"}
        assert not name.startswith("_sysconfigdata")
    # Ordered by hash and not by folder.
    assert len({segment.path.relative_to(root).parts[0] for segment in val.segments}) > 15


def test_the_default_corpus_is_the_same_in_another_process(library):
    code = "from fp8stack.data.sources import load_corpora; splits = load_corpora(None, 256);"
    command = [sys.executable, "-c", f"{code} print(*[c.fingerprint() for c in splits])"]
    environment = {**os.environ, "PYTHONHASHSEED": "99"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.split() == [split.fingerprint() for split in library]


def test_a_python_without_its_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    assert re.search(r"python311\.zip.*--data", refused_by(load_corpora, None, 256))


# Files and folders that are read


def test_a_text_file_is_its_bytes_its_end_is_held_out_and_a_large_one_is_mapped(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.txt"
    path.write_bytes("Grüße, ".encode() * 100)
    train, val = load_corpora(str(path), 256, held_out=0.25)
    everything = np.concatenate([train.window(0, len(train)), val.window(0, len(val))])
    assert bytes(everything.tolist()) == path.read_bytes()
    assert len(val) == 900 // 4
    assert (train.name, val.name) == (f"{path} (training part)", f"{path} (held-out part)")
    monkeypatch.setattr(texts, "MAPPED_FROM_BYTES", 800)
    mapped, _ = load_corpora(str(path), 256, held_out=0.25)
    assert [segment.mapped for segment in (*train.segments, *mapped.segments)] == [False, True]
    assert (train.window(0, len(train)) == mapped.window(0, len(mapped))).all()
    assert train.fingerprint() == mapped.fingerprint()


@pytest.mark.parametrize("mapped_from", [1, 1000])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, monkeypatch, mapped_from):
    monkeypatch.setattr(texts, "MAPPED_FROM_BYTES", mapped_from)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + name.encode() * 20)
    segments = [texts.text(tmp_path / f"{name}.txt", 256) for name in ("a", "b")]
    assert {segment.mapped for segment in segments} == {mapped_from == 1}
    joined = [pickle.loads(pickle.dumps(segment)) for segment in texts.joined(segments)]
    content = b"".join(segment.read(0, len(segment)).tobytes() for segment in joined)
    assert content == b"a" * 20 + b"\n" + b"b" * 20


def test_a_folder_of_text_is_joined_by_newlines_without_hidden_and_empty_files(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("third")
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "__init__.py").write_text("")
    train, val = load_corpora(str(tmp_path), 256, held_out=0.01)
    assert bytes(train.window(0, len(train)).tolist()) == b"first\nsecond\nthird"
    assert len(val) == 0


# Refusals while loading; more of them are in tests/faults/inputs/input_data.py


@pytest.mark.parametrize(
    ("name", "content", "phrase"),
    [
        ("a.txt", b"", "is empty. Give a file with tokens"),
        ("a.txt", b"\x1f\x8b\x08\0", "is compressed (gzip). Make tokens of it with `fp8stack"),
        ("a.jsonl", b'{"text": "x"}\n', "holds JSON lines"),
        ("a.arrow", b"\xff\xff\xff\xff\0", "holds arrow tables, not text. Make tokens of it"),
        ("a.txt", b"x" * 65535 + b"\0", "looks binary: byte 65535 is NUL"),
    ],
)
def test_a_file_with_the_wrong_content_is_refused(tmp_path, name, content, phrase):
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name} {phrase}" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "phrase"),
    [
        ({".hidden": b"x", "empty.txt": b""}, "holds no data"),
        ({"a.bin": b"\1\0", "b.txt": b"x"}, "mixes .bin files (a.bin) with others (b.txt)"),
        ({"dataset_dict.json": b"{}"}, "with `fp8stack prepare "),
        ({}, "a.txt: No such file"),
    ],
    ids=["nothing", "two kinds", "a saved dataset", "a broken link"],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, files, phrase):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if not files:
        (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert phrase in message


def test_the_limit_of_open_files_is_raised_where_it_can_be(tmp_path, monkeypatch):
    path, limits, memmap = write_bin(tmp_path / "a.bin", [7]), [(3, 9)], np.memmap

    def mapped(*arguments: Any, **options: Any) -> Any:
        if limits[-1][0] < 9:
            raise OSError(errno.EMFILE, "Too many open files")
        return memmap(*arguments, **options)

    def refuses(*arguments: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(np, "memmap", mapped)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert corpus.map_tokens(path, "<u2").tolist() == [7]
    assert limits == [(3, 9), (9, 9)]
    monkeypatch.setattr(resource, "setrlimit", refuses)
    for unraisable in ((3, 9), (3, 3)):
        limits.append(unraisable)
        message = refused_by(corpus.map_tokens, path, "<u2")
        assert "a.bin: Too many open files. Check the file, and `ulimit -n`" in message


@pytest.mark.parametrize("name", ["a.bin", ""])
def test_a_path_that_may_not_be_read_is_named(tmp_path, name, monkeypatch):
    def denied(path: object, *more: object):
        raise PermissionError(13, "Permission denied", str(path))

    write_bin(tmp_path / "a.bin", [1])
    monkeypatch.setattr(Path, "open", denied)  # root may read everything, so chmod shows nothing
    monkeypatch.setattr(os, "scandir", denied)
    path = tmp_path / name
    assert f"{path}: Permission denied. Check its permissions" in refusal(path)


def test_a_vocabulary_that_data_do_not_fit_is_refused(tmp_path):
    path = write_bin(tmp_path / "a.bin", [1] * 20)
    load_corpora(str(path), 65536)
    assert re.search("128256.*wrapped", refusal(path, vocabulary=128256))
    (tmp_path / "a.txt").write_text("text")
    assert "a.txt do not fit a vocabulary of 255" in refusal(tmp_path / "a.txt", vocabulary=255)
    message = refused_by(load_corpora, None, 255)
    assert re.search("Python standard library.*255.*256 tokens or more", message)
    for held_out in (0.0, 1.0, -1.0, float("nan")):
        assert "Use a share between 0 and 1" in refusal("x", held_out=held_out)
    # A .bin file of zeros is not taken for wider tokens.
    assert len(load_corpora(str(write_bin(path, [0] * 1000)), GPT2)[0]) == 900


# A corpus as one array


def test_a_window_is_contiguous_over_the_borders_of_parts(tmp_path):
    (tmp_path / "c").mkdir()  # files are joined in the order of their paths
    for name, tokens in {"b": [5], "c/d": range(6, 20), "a": range(5)}.items():
        write_bin(tmp_path / f"{name}.bin", tokens)
    train, val = load_corpora(str(tmp_path), GPT2, held_out=0.2)
    for start, end in itertools.combinations_with_replacement(range(len(train) + 1), 2):
        window = train.window(start, end - start)
        assert window.dtype == np.int64
        assert window.tolist() == list(range(start, end))
    for start, length in ((-1, 2), (15, 2), (17, 0), (0, -1)):
        with pytest.raises(IndexError, match="which has 16"):
            train.window(start, length)
    assert val.window(0, 4).tolist() == [16, 17, 18, 19]
    assert val.locate(1) == (tmp_path / "c" / "d.bin", 11)


def test_the_fingerprint_follows_contents_and_not_names(tmp_path):
    a = write_bin(tmp_path / "a.bin", range(100))
    b = write_bin(tmp_path / "b.bin", range(100))
    c = write_bin(tmp_path / "c.bin", [*range(99), 0])
    prints = [load_corpora(str(path), GPT2)[1].fingerprint() for path in (a, b, c)]
    assert prints[0] == prints[1] != prints[2]
    assert len(bytes.fromhex(prints[0])) == 32
    wide = Corpus(name="", segments=(Segment(path=a, tokens=np.array([1], np.uint16)),))
    narrow = Corpus(name="", segments=(Segment(path=a, tokens=np.array([1, 0], np.uint8)),))
    assert wide.fingerprint() != narrow.fingerprint()


def test_the_fingerprint_of_a_large_file_samples_pages_from_first_to_last(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "HASHED_WHOLE_BYTES", 1000)
    monkeypatch.setattr(corpus, "SAMPLED_PAGES", 3)
    monkeypatch.setattr(corpus, "PAGE_BYTES", 10)
    path = tmp_path / "train.bin"
    write_bin(tmp_path / "val.bin", [1])

    def fingerprint_with(changed: int | None, n: int = 1000) -> str:
        tokens = np.ones(n)
        if changed is not None:
            tokens[changed] = 2
        write_bin(path, tokens)
        return load_corpora(str(tmp_path), GPT2)[0].fingerprint()

    fingerprints = {fingerprint_with(c) for c in (None, 0, 4, 499, 995, 999)}
    assert len(fingerprints) == 6
    assert fingerprint_with(200) == fingerprint_with(None)  # between the pages, as documented
    assert fingerprint_with(None, 1001) not in fingerprints


def test_a_file_that_is_gone_when_a_worker_opens_it_is_named(tmp_path):
    pickled = pickle.dumps(counting(tmp_path))
    (tmp_path / "train.bin").write_bytes(b"\1\2")
    assert "train.bin changed its size" in refused_by(pickle.loads, pickled)
    (tmp_path / "train.bin").unlink()
    assert "train.bin: No such file" in refused_by(pickle.loads, pickled)


# The batch of a step


def test_the_windows_of_a_step_never_change_between_releases(tmp_path):
    train = counting(tmp_path)
    batch = batches(train)[5]
    assert (batch.dtype, batch.shape) == (torch.int64, (3, 9))
    assert (batch - batch[:, :1] == torch.arange(9)).all()
    starts = [batches(train, seed=s)[n][:, 0].tolist() for s, n in [(0, 0), (0, 1), (7, 10**9)]]
    assert starts == [[731, 338, 281], [87, 353, 409], [531, 568, 407]]
    drawn = {
        tuple(batches(train, seed=seed)[step][:, 0].tolist())
        for seed in (0, 1, 2**64 - 1)
        for step in (0, 1, 2, 10**12)
    }
    assert len(drawn) == 12


def test_every_start_is_drawn_and_equally_often():
    starts = batches(in_memory(range(20)), batch=12_000)[0][:, 0]
    counts = torch.bincount(starts)
    assert len(counts) == 12  # 20 tokens hold 12 windows of 8 + 1
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    assert batches(in_memory(range(9)))[3].tolist() == [list(range(9))] * 3  # the only window


def loaded(of: StepBatches, steps: range, **options: Any) -> list[torch.Tensor]:
    iterator: Any = iter(DataLoader(of, sampler=steps, batch_size=None, **options))
    try:
        return list(iterator)
    finally:
        if options["num_workers"]:  # after an error the garbage collector would wait 5 s for each
            iterator._shutdown_workers()


@pytest.mark.capability("D4")
@pytest.mark.full
def test_batches_and_errors_are_the_same_for_any_workers_and_from_any_step(tmp_path):
    dataset = batches(counting(tmp_path))
    expected = [dataset[step] for step in range(4)]
    bad = batches(counting(tmp_path), vocabulary=1)
    for workers, way in ((0, None), (2, "fork")):
        options = {"num_workers": workers, "multiprocessing_context": way}
        assert all(map(torch.equal, loaded(dataset, range(4), **options), expected))
        assert all(map(torch.equal, loaded(dataset, range(2, 4), **options), expected[2:]))
        message = refused_by(loaded, bad, range(2), **options)
        assert message == refused_by(bad.__getitem__, 0)
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert all(map(torch.equal, loaded(dataset, range(4), **spawned), expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "--seed -1"),
        ({"batch": 0}, "--batch 0"),
        ({"context": 0}, "--context 0"),
    ],
)
def test_sizes_and_seeds_that_make_no_batch_are_refused(change, message):
    assert message in refused_by(batches, in_memory(range(100)), **change)


def test_a_split_shorter_than_a_window_says_how_many_tokens_it_has():
    for n in (0, 8):
        short = in_memory([0] * n)
        sizes = {"count": 1, "context": 8, "vocabulary": 9}
        messages = [refused_by(batches, short), refused_by(validation_windows, short, **sizes)]
        for message in messages:
            assert f"some tokens has {n} tokens; --context 8 needs 9" in message
            assert (f"Lower --context to {n - 1} or give" in message) == (n > 1)


def test_a_file_that_grows_or_loses_the_other_split_trains_on(tmp_path):
    path = write_bin(tmp_path / "a.bin", range(100))
    train, val = load_corpora(str(path), GPT2)
    before = batches(train)[0]
    for size in (400, 190):
        os.truncate(path, size)
        assert torch.equal(batches(train)[0], before)
    for call in (lambda: val.window(0, 1), val.fingerprint):
        assert f"{path} shrank" in refused_by(call)


# Validation and samples


def test_validation_windows_are_evenly_spaced_from_first_to_last_token():
    windows = validation_windows(in_memory(range(101)), count=5, context=4, vocabulary=101)
    assert windows.dtype == torch.int64
    assert windows[:, 0].tolist() == [0, 24, 48, 72, 96]
    assert windows[-1].tolist() == [96, 97, 98, 99, 100]
    windows = validation_windows(in_memory(range(50)), count=1, context=4, vocabulary=50)
    assert windows.tolist() == [[0, 1, 2, 3, 4]]
    for n in (5, 8, 9, 101):  # no label stands in two windows
        windows = validation_windows(in_memory(range(n)), count=1000, context=4, vocabulary=n)
        labels = windows[:, 1:].flatten().tolist()
        assert len(set(labels)) == len(labels) == (n - 1) // 4 * 4
    sizes = {"count": 0, "context": 4, "vocabulary": 50}
    assert "0 validation windows" in refused_by(validation_windows, in_memory(range(50)), **sizes)
