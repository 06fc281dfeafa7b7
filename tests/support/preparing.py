"""Preparations in this process, and the documents of a plain loop to compare them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fp8stack.common.presets import parse
from fp8stack.data.prepare.inputs import Settings
from fp8stack.data.prepare.pipeline import prepare
from tests.conftest import refusal as refused_by

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
    """JSON lines."""
    return "".join(json.dumps({"n": 1, key: text}) + "\n" for text in texts).encode()


def written(path: Path, content: bytes) -> Path:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def prepared(*paths: object, out: Path, overwrite: bool = False, **changes: Any) -> dict[str, Any]:
    """The manifest of a preparation in this process."""
    keys = {"inputs": [str(path) for path in paths], "out": out, "held_out": 0.1, **changes}
    return prepare(parse(Settings, keys, "prepare"), overwrite)


def refusal(*paths: object, out: Path, **changes: Any) -> str:
    """The message that refuses a preparation."""
    return refused_by(prepared, *paths, out=out, **changes)


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
    """The tokens of a text in bytes."""
    return list(text.encode())


def require(out: Path, texts: list[str], encode: Any = by_bytes, share: float = 0.1) -> None:
    """Check that the folder holds the documents as a plain loop tokenizes and splits them."""
    expected: dict[str, list[list[int]]] = {"train": [], "val": []}
    for place, text in enumerate(texts):
        expected["val" if is_held_out(place, share) else "train"].append(encode(text))
    assert {split: shards(out, split)[1] for split in expected} == expected
