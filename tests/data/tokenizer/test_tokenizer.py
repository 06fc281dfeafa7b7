"""Tokenizers: text to ids and back, alike for the `tokenizers` library and for tiktoken."""

from __future__ import annotations

import json
import os
import pickle
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from fp8stack.data.tokenizer import (
    Tokenizer,
    alike,
    file,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_json,
)
from fp8stack.data.tokenizer.gpt2 import merges_of
from tests.conftest import refusal
from tests.support.small_tokenizers import (
    CORPUS,
    metaspace,
    small_encoding,
    trained,
)

TEXTS = [*CORPUS[:3], "", " ", "x", "<|endoftext|>", "a<|endoftext|>b", "\n\n \t "]
TEXTS += ["\x00\x7f\u0085"]


class Stop(BaseException):
    """Stands for what a handler of signals raises."""


def of_characters(text: str) -> str:
    """A tokenizer.json in which each character of a text is a token, and there are no others."""
    vocabulary = {character: number for number, character in enumerate(text)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps({"version": "1.0", "model": model})


@pytest.fixture
def gpt2(monkeypatch) -> Tokenizer:
    encoding = small_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": encoding}[name])
    return load_tokenizer("gpt2")


@pytest.fixture(params=["bytes", "gpt2", "file", "metaspace"])
def tokenizer(request, tmp_path) -> Tokenizer:
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    if request.param == "bytes":
        return load_tokenizer("bytes")
    library = trained() if request.param == "file" else metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path))


# Encoding


def test_bytes_are_those_of_utf8_and_gpt2_encodes_as_tiktoken_does(gpt2):
    encoding, bytes_ = small_encoding(), load_tokenizer("bytes")
    for text in TEXTS:
        assert gpt2.encode(text) == encoding.encode_ordinary(text)
        assert bytes_.encode(text) == list(text.encode())
    assert (gpt2.vocabulary, gpt2.end_of_text) == (encoding.n_vocab, encoding.eot_token)
    assert (bytes_.vocabulary, bytes_.end_of_text, bytes_.name) == (256, 255, "bytes")
    with pytest.raises(ValueError, match="made of 3"):
        merges_of({b"a": 0, b"b": 1, b"aba": 2})


def test_a_special_token_in_a_text_is_ordinary_and_a_batch_is_its_texts_one_by_one(tokenizer):
    for text in ("<|endoftext|>", "<s>", "</s>"):
        assert tokenizer.end_of_text not in tokenizer.encode(text)
    batch = tokenizer.encode_batch(TEXTS)
    assert all(tokens.dtype == np.uint32 for tokens in batch)
    assert [tokens.tolist() for tokens in batch] == [tokenizer.encode(text) for text in TEXTS]


def test_no_special_tokens_are_added_and_nothing_is_cut_or_padded():
    library = trained()
    end = library.token_to_id("<|endoftext|>")
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    plain = trained().encode(CORPUS[0]).ids
    library.enable_truncation(5)
    library.enable_padding(length=2000)
    mine = tokenizer_from_json(library.to_str())
    assert mine.encode(CORPUS[0]) == plain
    reloaded = tokenizers.Tokenizer.from_str(mine.to_json())
    assert reloaded.encode(CORPUS[0], add_special_tokens=False).ids == plain


def test_a_text_that_tiktoken_cannot_encode_is_one_line(gpt2, monkeypatch):
    def stuck(text: str, **options: object) -> None:
        raise ValueError("Error executing regex: Max stack size exceeded")

    monkeypatch.setattr(gpt2._encoding, "encode_to_numpy", stuck)
    message = refusal(gpt2.encode, "\t" * 99)
    assert "Error executing regex: Max stack size exceeded. Shorten its runs of white" in message


def test_only_a_tokenizer_without_tokens_for_all_characters_leaves_some_out(tokenizer):
    assert not tokenizer.leaves_out
    assert tokenizer.encode("€")
    few = of_characters("ab")
    assert tokenizer_from_json(few).leaves_out
    assert tokenizer_from_json(few).encode("a€b") == [0, 1]
    with_unknown = json.loads(of_characters("ab?"))
    with_unknown["model"]["unk_token"] = "?"
    assert not tokenizer_from_json(json.dumps(with_unknown)).leaves_out
    without_a_byte = json.loads(trained().to_str())
    del without_a_byte["model"]["vocab"]["!"]
    assert tokenizer_from_json(json.dumps(without_a_byte)).leaves_out


# Back again


_FILE = tokenizer_from_json(trained().to_str())


def test_texts_come_back_without_special_tokens_and_ids_that_are_not_known(tokenizer):
    assert tokenizer.end_of_text is not None
    for text in ("Hello there, hello world.", "Grüße 😀 x"):
        more = [tokenizer.end_of_text, tokenizer.vocabulary, 10**6, -1]
        assert tokenizer.decode([*tokenizer.encode(text), *more]) == text


def test_a_stream_gives_whole_characters_that_join_to_the_text(tokenizer):
    text = "Hello there 😀 Grüße, hello world."
    stream = tokenizer.stream()
    pieces = [stream.step(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert stream.finish() == ""
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 3  # not all of it at the end
    stream = load_tokenizer("bytes").stream()  # a character that is cut ends as a replacement
    assert [stream.step(token) for token in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\ufffd"


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), ids=st.lists(st.integers(0, 419), max_size=30))
@pytest.mark.full
def test_any_text_comes_back_and_any_ids_decode_as_the_library_decodes_them(text, ids):
    for mine in (load_tokenizer("bytes"), _FILE):
        assert mine.decode(mine.encode(text)) == text
    ids = [id for id in ids if id < _FILE.vocabulary]
    library = tokenizers.Tokenizer.from_str(_FILE.to_json())
    assert _FILE.decode(ids) == library.decode(ids, skip_special_tokens=True)
    stream = _FILE.stream()
    assert "".join(map(stream.step, ids)) + stream.finish() == _FILE.decode(ids)


# Bytes of tokens


def test_byte_lengths_add_up_to_the_text(tokenizer):
    lengths = tokenizer.byte_lengths()
    if lengths is None:  # Metaspace: a space before a word depends on where the word is
        assert "Metaspace" in tokenizer.to_json()
        return
    assert lengths.shape == (tokenizer.vocabulary,)
    assert lengths[tokenizer.end_of_text] == 0
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


# tokenizer.json


def test_the_json_is_loaded_by_the_library_and_encodes_alike(tokenizer):
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.encode_special_tokens = True
    for text in TEXTS:
        assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert library.get_vocab_size() == tokenizer.vocabulary
    end = "</s>" if "Metaspace" in tokenizer.to_json() else "<|endoftext|>"
    assert library.token_to_id(end) == tokenizer.end_of_text
    again = tokenizer_from_json(tokenizer.to_json())
    assert again.name == ("bytes" if tokenizer.name == "bytes" else "tokenizer.json")
    # tiktoken pickles an encoding that it knows by name as the name, others with their contents.
    pickled = pickle.loads(pickle.dumps(tokenizer))
    for copy in (again, pickled):
        assert (copy.sha256, copy.end_of_text) == (tokenizer.sha256, tokenizer.end_of_text)
    assert pickled.encode("a <|endoftext|> b") == tokenizer.encode("a <|endoftext|> b")


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_tokenizers_are_alike_if_their_added_tokens_are_too(kind):
    def added(token: str) -> Tokenizer:
        unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0), ("b", -2.0)], 0))
        library = unigram if kind == "Unigram" else trained()
        library.add_special_tokens([token])
        return tokenizer_from_json(library.to_str())

    assert not alike(added("<one>"), added("<two>"))
    reformatted = tokenizer_from_json(added("<one>").to_json() + "\n")
    assert reformatted.sha256 != added("<one>").sha256
    assert alike(reformatted, added("<one>"))


# The special token that ends a text


@pytest.mark.parametrize(
    ("name", "end"),
    [("</s>", 1), ("<|end_of_text|>", 1), ("<pad>", None)],
)
def test_the_end_of_text_is_found_by_its_usual_names_and_need_not_be(name, end):
    library = trained(special_tokens=["<unk>", name])
    assert tokenizer_from_json(library.to_str()).end_of_text == end


# Refusals


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", ["<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["])
def test_the_end_of_text_is_the_eos_token_beside_the_file_and_is_saved_along(token, file, tmp_path):
    """As the tokenizer_config.json of DeepSeek-V3 and of MiniMax-M2 have it."""
    eos = token if token == "[e~[" else {"__type": "AddedToken", "content": token}
    library = trained(special_tokens=["</s>", "<bos>", token])
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).end_token == "</s>"
    (tmp_path / file).write_text(json.dumps({"bos_token": "<bos>", "eos_token": eos}))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(name))
        assert loaded.end_token == token
        assert loaded.end_of_text == library.token_to_id(token)
    again = pickle.loads(pickle.dumps(loaded))
    save_tokenizer(again, tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).end_of_text == loaded.end_of_text
    assert load_tokenizer(str(tmp_path / "copy")).sha256 == loaded.sha256
    save_tokenizer(tokenizer_from_json(library.to_str()), tmp_path / "copy")  # without its files
    assert load_tokenizer(str(tmp_path / "copy")).end_token == "</s>"


@pytest.mark.parametrize("content", ["", "[]", '{"eos_token": 5}', '{"eos_token": "<no>"}'])
def test_an_eos_token_that_is_not_there_changes_nothing(content, tmp_path):
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert load_tokenizer(str(tmp_path)).end_token == "<|endoftext|>"


def test_the_end_of_text_may_be_asked_for(tmp_path):
    trained(special_tokens=["</s>", "<end>"]).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path), "<end>").end_token == "<end>"
    assert load_tokenizer("bytes", "<|endoftext|>").end_of_text == 255
    message = refusal(load_tokenizer, str(tmp_path), "<endd>")
    assert f"No token in tokenizer {tmp_path} is '<endd>'. Did you mean '<end>'?" in message
    assert "'</s>'" in refusal(load_tokenizer, "bytes", "</s>")
    bare = tmp_path / "bare.json"
    bare.write_text(of_characters("ab"))  # it has no added_tokens
    assert f"No token in tokenizer {bare} is '<end>'" in refusal(load_tokenizer, str(bare), "<end>")


@pytest.mark.parametrize("name", ["gpt-2", "nowhere/tokenizer.json", "a\0b", "x" * 5000])
def test_an_unknown_name_is_refused_with_what_there_is(name):
    assert "Give bytes, gpt2, or the path" in refusal(load_tokenizer, name)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"model": 3}', b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100000],
)
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    message = refusal(load_tokenizer, str(tmp_path / "tokenizer.json"))
    assert "is not a tokenizer.json" in message
    assert "saved." in message


def test_what_the_library_panics_at_is_one_line(capfd):
    def changed(**changes: object) -> str:
        return json.dumps(json.loads(trained().to_str()) | changes)

    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    words = {"type": "WordLevel", "vocab": {"a" * 100 + "b": 0}, "unk_token": "x"}
    for content in (changed(normalizer=replace), changed(model=words | {"vocab": {"a": 0}})):
        message = refusal(tokenizer_from_json(content).encode, "a" * 100 + "b")
        assert message.startswith("Tokenizer tokenizer.json cannot encode a text: ")
    message = refusal(tokenizer_from_json(changed(decoder=replace, model=words)).decode, [0])
    assert message.startswith("Tokenizer tokenizer.json cannot decode tokens: ")
    content = changed(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]})
    assert "is not a tokenizer.json that can be read" in refusal(tokenizer_from_json, content)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_what_a_signal_raises_passes_and_text_printed_meanwhile_is_not_lost(error, capfd):
    def interrupted() -> None:
        with file._library_errors("x"):
            os.write(2, b"a line")
            raise error

    with pytest.raises(error):
        interrupted()
    assert capfd.readouterr().err == "a line"


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as stream:
        stream.truncate(2**40)  # sparse: it takes no space on the disk
    assert "is too large" in refusal(load_tokenizer, str(tmp_path))


def test_ids_beyond_reason_and_a_folder_without_a_tokenizer_are_refused(tmp_path):
    message = refusal(load_tokenizer, str(tmp_path))
    assert f"folder {tmp_path} has no tokenizer.json" in message
    content = json.loads(trained().to_str())
    content["model"]["vocab"]["far"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert "2147483648" in refusal(load_tokenizer, str(tmp_path))


def test_gpt2_without_a_network_or_tiktoken_says_what_to_do(monkeypatch):
    def offline(name: str):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    message = refusal(load_tokenizer, "gpt2")
    assert "TIKTOKEN_CACHE_DIR" in message
    assert "tokenizer.json" in message
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "pip install tiktoken" in refusal(load_tokenizer, "gpt2")
