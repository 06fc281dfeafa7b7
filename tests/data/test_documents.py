"""Windows with the document of each token."""

from __future__ import annotations

import itertools
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8stack.data import Corpus, StepBatches, load_corpora, validation_windows
from tests.conftest import refusal
from tests.support.data_writers import write_llmc, write_megatron, write_prepared

END = 0
LENGTHS = [3, 1, 5, 2, 9, 1, 1, 4, 30, 2, 6, 7]
"""The lengths of some documents, the separating token included."""


def documents() -> list[list[int]]:
    """Each document's tokens are its number, from 1 on, and END at the end."""
    return [[number] * (length - 1) + [END] for number, length in enumerate(LENGTHS, 1)]


def as_llmc(folder: Path) -> str:
    tokens = [token for document in documents() for token in (50256, *document[:-1])]
    return str(write_llmc(folder / "a.bin", tokens))


def as_megatron(folder: Path) -> str:
    # Two sequences a document, the second of them possibly empty.
    return str(
        write_megatron(folder / "a", [[document[:2], document[2:]] for document in documents()])
    )


def as_prepared(folder: Path) -> str:
    return str(write_prepared(folder / "p", [documents()[:4], documents()[4:5], documents()[5:]]))


def as_nanogpt(folder: Path) -> str:
    tokens = [token for document in documents() for token in document]
    for name, file_tokens in (("a", tokens[:20]), ("b", tokens[20:])):  # cut within a document
        np.array(file_tokens, dtype="<u2").tofile(folder / f"{name}.bin")
    return str(folder)


FORMATS = [as_llmc, as_megatron, as_prepared, as_nanogpt]


def load(data: str) -> tuple[Corpus, Corpus]:
    return load_corpora(data, 60_000, held_out=0.2, end_of_text=END)


def expected(start: int, length: int) -> list[int]:
    """The document of each token of a window, counted from 0, by the lengths alone."""
    of_token = [number for number, count in enumerate(LENGTHS) for _ in range(count)]
    window = of_token[start : start + length]
    return [number - window[0] for number in window]


@pytest.mark.parametrize("form", FORMATS)
def test_every_window_knows_the_document_of_each_token(form, tmp_path):
    train, val = load(form(tmp_path))
    assert len(train) + len(val) == sum(LENGTHS)
    for split, before in ((train, 0), (val, len(train))):
        assert split.has_documents
        for start, length in itertools.product(range(len(split) - 16), (1, 2, 16)):
            numbers = split.documents(start, split.window(start, length))
            assert numbers.dtype == np.int64
            assert numbers.tolist() == expected(before + start, length), (start, length)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("order", ["random", "epochs"])
def test_batches_hold_tokens_and_documents(form, order, tmp_path):
    train, val = load(form(tmp_path))
    usual = partial(StepBatches, train, batch=6, context=10, seed=3, vocabulary=60_000, order=order)
    plain, batches = usual(), usual(documents=True)
    for step in range(1, 4):
        batch = batches[step]
        assert batch.shape == (6, 2, 11)
        assert batch.dtype == torch.int64
        assert torch.equal(batch[:, 0], plain[step])
        starts = batches._starts(step).tolist()
        assert batch[:, 1].tolist() == [expected(start, 11) for start in starts]
    windows = validation_windows(val, count=2, context=6, vocabulary=60_000, documents=True)
    first, last = sum(LENGTHS) - len(val), sum(LENGTHS) - 7
    assert windows[:, 1].tolist() == [expected(first, 7), expected(last, 7)]


@pytest.mark.parametrize("form", FORMATS)
def test_corpora_reach_workers_as_paths(form, tmp_path):
    train, val = load(form(tmp_path))
    pickled = pickle.dumps((train, val))
    assert len(pickled) < 3000
    again, held = pickle.loads(pickled)
    assert all(segment.mapped for segment in (*again.segments, *held.segments))
    assert again.fingerprint() == train.fingerprint()
    assert (held.fingerprint(), held.locate(3)) == (val.fingerprint(), val.locate(3))
    window = again.window(5, 40)
    assert window.tolist() == train.window(5, 40).tolist()
    assert again.documents(5, window).tolist() == expected(5, 40)


def test_a_mixture_has_the_documents_of_its_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_llmc(tmp_path)
    (tmp_path / "m").mkdir()
    as_megatron(tmp_path / "m")
    train, _ = load("1:a.bin,2:m/a")
    batches = StepBatches(train, batch=30, context=8, seed=0, vocabulary=60_000, documents=True)
    batch, starts = batches[1], batches._starts(1)
    length = len(train) // 2
    assert {start >= length for start in starts.tolist()} == {False, True}
    for row, start in zip(batch, starts.tolist(), strict=True):
        assert row[1].tolist() == expected(start % length, 9)


def test_data_without_documents_are_refused_and_the_remedy_named(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99)
    np.arange(99, dtype="<u2").tofile(tmp_path / "b.bin")
    # Text has no documents even if its tokenizer has an end token, and llm.c's files have theirs.
    assert not load_corpora(str(tmp_path / "a.txt"), 256, end_of_text=255)[0].has_documents
    for data, phrase in (
        (None, "does not say where its documents end"),
        ("a.txt", "a.txt does not say where its documents end, which document_mask needs"),
        ("b.bin", "name its tokenizer with --tokenizer"),
    ):
        path = None if data is None else str(tmp_path / data)
        train, val = load_corpora(path, 256, end_of_text=None)
        assert not train.has_documents
        usual = {"context": 4, "vocabulary": 256, "documents": True}
        for message in (
            refusal(StepBatches, train, batch=1, seed=0, **usual),
            refusal(validation_windows, val, count=1, **usual),
        ):
            assert "fp8stack prepare" in message
            assert phrase in message
