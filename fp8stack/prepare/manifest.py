"""What a finished folder says of itself, and what the user is told of it."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import fp8stack
from fp8stack.prepare.folder import FORMAT, Counts
from fp8stack.prepare.inputs import Source
from fp8stack.prepare.settings import Settings
from fp8stack.prepare.shards import SplitState
from fp8stack.tokenizer import Tokenizer

GPT2_IDS = 50257
ROUNDED_TO = 16  # FP8 GEMMs want sizes that 16 divides
NOTES = {
    "empty": "{:,} empty documents, an end token each",
    "replaced": "{:,} pieces that are not Unicode became U+FFFD",
    "cut_words": "{:,} cuts within a text without spaces; tokens there may differ",
}


def listing_of(sources: Sequence[Source]) -> str:
    """The SHA-256 of the paths and sizes of these sources, in hexadecimal."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.size} {source.path}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def describe_inputs(inputs: Sequence[str], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Each input as the manifest has it: its files, their bytes, and `listing_of` them."""
    found = []
    for number, name in enumerate(inputs):
        own = [source for source in sources if source.given == number]
        size = sum(source.size for source in own)
        listing = listing_of(own)
        found.append({"input": name, "files": len(own), "bytes": size, "listing_sha256": listing})
    return found


def manifest_of(
    settings: Settings,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    counts: Counts,
    splits: Mapping[str, SplitState],
) -> dict[str, Any]:
    """The manifest of a finished folder; it depends on the inputs and the settings alone."""
    return {
        "format": FORMAT,
        "made_by": f"fp8stack {fp8stack.__version__}",
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocabulary": tokenizer.vocabulary,
            "end_of_text": tokenizer.end_of_text,
        },
        "dtype": tokenizer.dtype.name,
        "splits": {
            name: {
                "tokens": sum(shard.tokens for shard in state.shards),
                "documents": sum(shard.documents for shard in state.shards),
                "bytes": state.bytes,
                "shards": [shard.model_dump() for shard in state.shards],
            }
            for name, state in splits.items()
        },
        "documents": counts.model_dump(),
        "inputs": describe_inputs(settings.inputs, sources),
        "settings": settings.of_output(),
    }


def summary(settings: Settings, manifest: Mapping[str, Any], speed: str = "") -> list[str]:
    """What was made, in some lines, and the command that trains on it; `speed` ends the first."""
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    documents = train["documents"] + val["documents"]
    tokens = train["tokens"] + val["tokens"]
    per_token = (train["bytes"] + val["bytes"]) / max(1, tokens - documents)
    held = (
        f"{val['documents']:,} of them held out ({val['tokens']:,} tokens)"
        if val["documents"]
        else "none of them held out: training will hold out the last tokens"
    )
    tokenizer, counts = manifest["tokenizer"], manifest["documents"]
    return [
        f"{settings.out}: {tokens:,} tokens of {tokenizer['name']}, {per_token:.2f} bytes per token"
        f"{speed}",
        f"documents: {documents:,}, {held}",
        *(f"note: {note.format(counts[key])}" for key, note in NOTES.items() if counts[key]),
        f"next: {_next_command(settings, tokenizer['vocabulary'])}",
    ]


def _next_command(settings: Settings, vocabulary: int) -> str:
    """The command that trains on the folder: with a model whose vocabulary fits, or is made to."""
    words = ["fp8stack", "pretrain", "--data", str(settings.out)]
    if vocabulary == GPT2_IDS:
        words += ["--model", "gpt2-124m"]
    elif vocabulary > 256:  # gpt-nano's
        rounded = -(-vocabulary // ROUNDED_TO) * ROUNDED_TO
        words += ["--set", f"model_overrides.vocabulary={rounded}"]
    return shlex.join(words)
