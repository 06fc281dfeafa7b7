"""datatrove's `.ds` and `.ds.index`, as `TokenizedFile` of its tokens/tokenizer.py writes them."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fp8stack.data import holds_text, load_corpora
from tests.conftest import refusal

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [0], [9, 9, 0]]


def write_ds(path: Path, documents: Sequence[Sequence[int]], token_size: int = 2) -> Path:
    tokens = [token for document in documents for token in document]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f"<{len(tokens)}{'I' if token_size == 4 else 'H'}", *tokens))
    ends = np.cumsum([len(document) for document in documents]).tolist()
    index = path.with_name(f"{path.name}.index")
    index.write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.with_name(f"{path.name}.metadata").write_text(f"gpt2|{token_size}\n{len(tokens)}\n10 T")
    return path


@pytest.mark.parametrize("token_size", [2, 4])
def test_tokens_and_documents_are_read(token_size, tmp_path):
    documents = [[70000 if token == 9 and token_size == 4 else token for token in document]
                 for document in DOCUMENTS]  # fmt: skip
    path = write_ds(tmp_path / "00000_shuffled.ds", documents, token_size)
    train, val = load_corpora(str(path), 80000, held_out=0.35)
    tokens = [*train.window(0, len(train)).tolist(), *val.window(0, len(val)).tolist()]
    assert tokens == [token for document in documents for token in document]
    assert not holds_text(str(path))
    assert train.documents(0, train.window(0, 7)).tolist() == [0, 0, 0, 0, 1, 1, 2]


def test_a_folder_of_tasks_is_read_in_order(tmp_path):
    write_ds(tmp_path / "b" / "00001_shuffled.ds", DOCUMENTS[2:])
    write_ds(tmp_path / "a" / "00000_shuffled.ds", DOCUMENTS[:2])
    write_ds(tmp_path / "a" / "00002_shuffled.ds", [])  # a task without documents
    (tmp_path / "merged.ds.metadata").write_text("gpt2|2\n10\n10 T")
    train, val = load_corpora(str(tmp_path), 300, held_out=0.1)
    tokens = [*train.window(0, len(train)).tolist(), *val.window(0, len(val)).tolist()]
    assert tokens == [token for document in DOCUMENTS for token in document]
    assert train.has_documents
    (tmp_path / "notes.txt").write_text("notes")
    assert "with others (notes.txt)" in refusal(load_corpora, str(tmp_path), 300)


@pytest.mark.parametrize(
    ("index", "phrase"),
    [
        (None, "has no a.ds.index beside it"),
        (b"", "is empty"),
        (struct.pack("<4Q", 4, 3, 7, 10), "does not fit them"),
        (b"123", "does not fit them"),
    ],
)
def test_an_index_that_is_missing_or_does_not_fit_is_refused(index, phrase, tmp_path):
    path = write_ds(tmp_path / "a.ds", DOCUMENTS)
    index_file = path.with_name("a.ds.index")
    index_file.unlink()
    if index is not None:
        index_file.write_bytes(index)
    message = refusal(load_corpora, str(path), 300)
    assert phrase in message
    assert str(path) in message
