"""nanoGPT's `meta.pkl`, which is never unpickled."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from fp8stack.data.nanogpt import characters_beside
from tests.conftest import refusal

CHARACTERS = "\n !'abcdeé😀"
IDS = {character: number for number, character in enumerate(CHARACTERS)}
META = {"vocab_size": len(IDS), "itos": dict(enumerate(CHARACTERS)), "stoi": IDS}


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_characters_are_read_from_every_protocol(protocol, tmp_path):
    assert characters_beside(tmp_path / "train.bin") is None
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(META, protocol))
    characters = characters_beside(tmp_path / "train.bin")
    assert characters is not None
    assert characters.vocabulary == characters.tokenizer.vocabulary == len(CHARACTERS)
    text = "abc é\n!😀 'e"
    assert characters.tokenizer.encode(text) == [IDS[character] for character in text]
    assert characters.tokenizer.decode(characters.tokenizer.encode(text)) == text
    assert characters.tokenizer.encode("aZb") == [IDS["a"], IDS["b"]]


def test_a_size_alone_is_a_vocabulary(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 70}))
    assert characters_beside(tmp_path / "train.bin") == (70, None)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(META | {"more": Runs()}),
        pickle.dumps(META | {"more": [1]}),
        pickle.dumps({"vocab_size": 3, "itos": {9: "a"}}),
        pickle.dumps({"vocab_size": 0}),
        pickle.dumps("text"),
        pickle.dumps(META)[:-9],
        b"no pickle",
        b"s.",
        b"(.",
        b"h\x05.",
    ],
    ids=range(10),
)
def test_anything_else_is_refused_by_name_and_nothing_runs(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(content)
    message = refusal(characters_beside, tmp_path / "train.bin")
    assert message.startswith(f"{tmp_path / 'meta.pkl'} is not nanoGPT's meta.pkl of characters")
    assert not Path("ran").exists()
