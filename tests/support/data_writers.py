"""Writers of data formats by their published layouts, without any code of fp8stack."""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_llmc(path: Path, tokens: Sequence[int], *, llama: bool = False) -> Path:
    """Write tokens as `write_datafile` of llm.c's dev/data/data_common.py does."""
    magic, version, code = (20240801, 7, "I") if llama else (20240520, 1, "H")
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{code}", *tokens))
    return path


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """Write documents as `IndexedDatasetBuilder` of megatron/core/datasets/indexed_dataset.py.

    `documents` are lists of sequences, which are lists of tokens.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    sequences = [sequence for document in documents for sequence in document]
    arrays = [np.array(sequence, dtype=f"<{np.dtype(dtype).str[1:]}") for sequence in sequences]
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(a.tobytes() for a in arrays))
    width = np.dtype(dtype).itemsize
    positions, documents_end, at = [], [0], 0
    for array in arrays:
        positions.append(at)
        at += len(array) * width
    for document in documents:
        documents_end.append(documents_end[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, MEGATRON_CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(documents_end))
    index += struct.pack(f"<{len(sequences)}i", *(len(array) for array in arrays))
    index += struct.pack(f"<{len(sequences)}q", *positions)
    index += struct.pack(f"<{len(documents_end)}q", *documents_end)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    return prefix


def json_of_tokenizer(*words: str) -> str:
    """A tokenizer.json that knows a few words, made by the tokenizers library."""
    vocabulary = {word: number for number, word in enumerate(("<|endoftext|>", *words))}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).to_str()


def write_prepared(
    folder: Path,
    train: Sequence[Sequence[Sequence[int]]],
    val: Sequence[Sequence[Sequence[int]]] = (),
    *,
    tokenizer: str | None = None,
    vocabulary: int = 256,
    dtype: str = "uint16",
) -> Path:
    """A folder like `fp8stack prepare`'s: shards are lists of documents, documents of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json_of_tokenizer() if tokenizer is None else tokenizer
    (folder / "tokenizer.json").write_text(text)
    splits = {}
    for name, shards in (("train", train), ("val", val)):
        entries: list[dict[str, Any]] = []
        for number, documents in enumerate(shards):
            file = f"{name}-{number:05d}.bin"
            tokens = [token for document in documents for token in document]
            np.array(tokens, dtype=dtype).tofile(folder / file)
            ends = np.cumsum([len(document) for document in documents], dtype="<u8")
            ends.tofile(folder / file.replace(".bin", ".ends"))
            entries.append(
                {"file": file, "tokens": len(tokens), "documents": len(documents), "sha256": "0"}
            )
        splits[name] = {"tokens": sum(e["tokens"] for e in entries), "shards": entries}
    manifest = {
        "format": 1,
        "tokenizer": {
            "name": "made up",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "vocabulary": vocabulary,
            "end_of_text": 0,
        },
        "dtype": dtype,
        "splits": splits,
        "inputs": [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
