"""Mixtures: the source of each row, the shares of sources, and their independence of steps."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fp8stack.data import (
    Mixture,
    StepBatches,
    absolute,
    load_corpora,
    tokenizer_of,
    validation_windows,
)
from fp8stack.data.order import BLOCK, shares, sources_of
from fp8stack.data.tokenizer import load_tokenizer
from tests.conftest import refusal
from tests.support.data_writers import json_of_tokenizer, write_llmc, write_prepared


@pytest.fixture
def mixed(tmp_path, monkeypatch) -> str:
    """Three sources with tokens 10 to 19, 20 to 29 and 30 to 39, in shares of 5 : 3 : 2."""
    monkeypatch.chdir(tmp_path)
    for number, length in ((1, 2000), (2, 500), (3, 3000)):
        tokens = [10 * number + at % 10 for at in range(length)]
        write_llmc(tmp_path / f"{number}.bin", tokens)
    return "0.5:1.bin,0.3:2.bin,0.2:3.bin"


def batches_of(data: str, **changes: Any) -> StepBatches:
    corpus = load_corpora(data, 256)[0]
    usual = {"batch": 64, "context": 8, "seed": 7, "vocabulary": 256}
    return StepBatches(corpus, **usual | changes)


def counts_of(batches: torch.Tensor) -> list[int]:
    return torch.bincount(batches[..., 0].flatten() // 10, minlength=4).tolist()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_every_4096_rows_of_a_run_hold_the_sources_in_their_exact_shares(mixed, order):
    batches = batches_of(mixed, order=order)
    steps = BLOCK // 64
    for block in range(3):
        rows = torch.cat([batches[1 + step] for step in range(block * steps, (block + 1) * steps)])
        assert counts_of(rows) == [0, 2048, 1229, 819]


def test_rows_do_not_cross_from_one_source_into_another_however_they_are_cut_into_steps(mixed):
    rows = torch.cat([batches_of(mixed, batch=60)[step] for step in range(1, 5)])
    assert (rows // 10 == rows[:, :1] // 10).all()
    smaller_steps = [batches_of(mixed, batch=24)[step] for step in range(1, 11)]
    assert torch.equal(rows[:, 0] // 10, torch.cat(smaller_steps)[:, 0] // 10)


def test_sources_do_not_take_turns_in_a_pattern_that_repeats(mixed):
    counts = shares((5.0, 3.0, 2.0), BLOCK)
    rows = np.arange(3 * BLOCK)
    sources, _ = sources_of(rows, counts, seed=0)
    reseeded, _ = sources_of(rows, counts, seed=1)
    blocks = sources.reshape(3, BLOCK)
    for first, second in ((blocks[0], blocks[1]), (blocks[1], blocks[2]), (sources, reseeded)):
        assert 0.2 < (first == second).mean() < 0.6  # by chance 0.38
    # No stretch of a block is poor in a source: of 256 rows, 128, 77 and 51 are expected.
    stretches = sources.reshape(-1, 256)
    for source, share in enumerate((0.5, 0.3, 0.2)):
        counts_in_stretches = (stretches == source).sum(axis=1)
        assert abs(counts_in_stretches - 256 * share).max() < 5 * (256 * share) ** 0.5


def test_shares_are_whole_and_add_up():
    assert shares((0.7, 0.3), 4096) == (2867, 1229)
    assert shares((1.0, 1.0, 1.0), 4096) == (1366, 1365, 1365)
    assert shares((1e308, 1e308), 10) == (5, 5)
    assert shares((3.0, 1.0), 1) == (1, 0)


def test_the_fingerprint_follows_sources_and_shares(mixed):
    def fingerprint(data: str) -> str:
        return load_corpora(data, 256)[0].fingerprint()

    same = [mixed, "5:1.bin,3:2.bin,2:3.bin", " 0.5 : 1.bin , 0.3 : 2.bin , 0.2 : 3.bin"]
    different = ["0.5:1.bin,0.2:2.bin,0.3:3.bin", "0.5:1.bin,0.3:3.bin,0.2:2.bin"]
    assert len({fingerprint(data) for data in same}) == 1
    assert len({fingerprint(data) for data in [mixed, *different]}) == 3
    assert fingerprint("3:1.bin") == fingerprint("1.bin")  # a mixture of one is that one
    assert torch.equal(batches_of("1.bin")[5], batches_of("3:1.bin")[5])
    again = pickle.loads(pickle.dumps(load_corpora(mixed, 256)[0]))
    assert isinstance(again, Mixture)
    assert again.fingerprint() == fingerprint(mixed)


def test_validation_takes_windows_of_all_sources_by_weight(mixed):
    val = load_corpora(mixed, 256)[1]
    windows = validation_windows(val, count=10, context=8, vocabulary=256)
    assert counts_of(windows) == [0, 5, 3, 2]
    assert (windows // 10 == windows[:, :1] // 10).all()
    many = validation_windows(val, count=1000, context=8, vocabulary=256)
    assert counts_of(many) == [0, 24, 6, 37]  # as many as fit into 200, 50 and 300 tokens


def test_a_mixture_is_named_from_the_root_path_by_path(mixed, tmp_path):
    named = absolute(mixed)
    assert named == f"0.5:{tmp_path}/1.bin,0.3:{tmp_path}/2.bin,0.2:{tmp_path}/3.bin"
    assert absolute(named) == named
    # A link to a file keeps its name, and links to folders are followed.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "8f3a").write_bytes(bytes(100))
    (tmp_path / "train.bin").symlink_to(tmp_path / "blobs" / "8f3a")
    (tmp_path / "folder").symlink_to("blobs")
    assert absolute("train.bin") == str(tmp_path / "train.bin")
    assert absolute("folder/8f3a") == str(tmp_path / "blobs" / "8f3a")
    # A path may look like a mixture, and hold commas and colons.
    write_llmc(tmp_path / "0.5:a.bin,0.5:b.bin", [7] * 50)
    train = load_corpora("0.5:a.bin,0.5:b.bin", 256)[0]
    assert train.window(0, 3).tolist() == [7, 7, 7]
    assert not isinstance(train, Mixture)
    write_llmc(tmp_path / "a,b.bin", [7] * 50)
    write_llmc(tmp_path / "c:d.bin", [8] * 50)
    assert load_corpora("1:a,b.bin,1:c:d.bin", 256)[0].window(44, 2).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        ("0.5:1.bin,0.5:gone", "No data at 'gone'"),
        ("0.5:1.bin,0:2.bin", "'0:2.bin' in --data '0.5:1.bin,0:2.bin' is not a path with a"),
        ("1e999:1.bin,1:2.bin", "'1e999:1.bin' in --data"),
        ("1:,1:2.bin", "'1:' in --data"),
        ("1:1.bin,0.0001:2.bin", "The weight 0.0001 of 2.bin (training part) is less than one row"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(mixed, data, phrase):
    assert phrase in refusal(load_corpora, data, 256)


def test_a_source_that_holds_no_window_is_named(mixed):
    train, val = load_corpora(mixed, 256)
    sizes = {"batch": 1, "context": 460, "seed": 0, "vocabulary": 256}
    message = refusal(StepBatches, train, **sizes)
    assert message.startswith("2.bin (training part) has 450 tokens")
    message = refusal(validation_windows, val, count=9, context=60, vocabulary=256)
    assert message.startswith("2.bin (held-out part) has 50 tokens")


def test_sources_of_one_tokenizer_are_mixed_and_others_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text " * 99)
    write_llmc(tmp_path / "bin.bin", [7] * 99)
    write_llmc(tmp_path / "llama.bin", [7] * 99, llama=True)
    for name, word in (("a", "x"), ("b", "y"), ("c", "x")):
        write_prepared(tmp_path / name, [[[1] * 50]], tokenizer=json_of_tokenizer(word))
    of_bytes = load_tokenizer("bytes")
    write_prepared(tmp_path / "bytes", [[[1] * 50]], tokenizer=of_bytes.to_json())
    for data in ("1:a,1:c", "1:text,1:bytes"):
        assert isinstance(load_corpora(data, 256)[0], Mixture)
    tokenizer = tokenizer_of("1:text,1:bytes")
    assert tokenizer is not None
    assert tokenizer.sha256 == of_bytes.sha256
    for data, phrase in (
        ("1:a,1:c,1:b", "c is of the tokenizer made up ("),
        ("1:text,2:bin.bin", "text is of the tokenizer bytes ("),
        ("1:text,2:bin.bin", "and bin.bin is of a tokenizer that it does not name: they cannot"),
        ("1:bin.bin,2:llama.bin", "of bin.bin of 50257 and llama.bin of 128256 are not the same"),
    ):
        message = refusal(load_corpora, data, 256)
        assert "cannot be mixed" in message
        assert phrase in message
