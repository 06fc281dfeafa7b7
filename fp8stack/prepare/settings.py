"""What is asked of a preparation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.errors import UserError

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One preparation.

    Attributes:
        inputs: files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order.
        tokenizer: "bytes", "gpt2" or the path of a `tokenizer.json`; without effect with
            `train_bpe`.
        train_bpe: how many tokens a tokenizer shall have that is trained on the inputs.
        text_key: the field of JSON lines and the column of parquet files that holds the text.
        held_out: the share of documents that is held out.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        workers: how many processes tokenize.
        out: the folder that is written.
        include: patterns of file names, or of paths in a folder that is an input; files of folders
            that match none are left out. Without any, all are read.
        exclude: those that match one of these are left out.
        skip_binary: whether files of folders that look binary are left out, not refused.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    train_bpe: int | None
    text_key: str
    held_out: float
    shard_tokens: int
    workers: int
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_binary: bool = False

    def check(self) -> None:
        """Raise a UserError unless the numbers make sense."""
        if not 0 <= self.held_out < 1:
            raise UserError(f"Cannot hold out {self.held_out} of the documents. Use 0 to 0.99.")
        if self.shard_tokens < 1:
            raise UserError(f"Shards of {self.shard_tokens} tokens hold nothing. Use 1 or more.")
        if self.workers < 1:
            raise UserError(f"{self.workers} workers do nothing. Use 1 or more.")
        if self.train_bpe is not None and not LEAST_BPE <= self.train_bpe <= MOST_BPE:
            raise UserError(
                f"Cannot train a tokenizer of {self.train_bpe} tokens. Use {LEAST_BPE} (every byte "
                f"and the end of a document) to {MOST_BPE:,}."
            )

    def of_output(self) -> dict[str, Any]:
        """What decides the output, beside the inputs' contents; as JSON has it."""
        return {
            "inputs": list(self.inputs),
            "tokenizer": None if self.train_bpe is not None else self.tokenizer,
            "train_bpe": self.train_bpe,
            "text_key": self.text_key,
            "held_out": self.held_out,
            "shard_tokens": self.shard_tokens,
            # None, as in folders that are older than these settings.
            "include": list(self.include) or None,
            "exclude": list(self.exclude) or None,
            "skip_binary": self.skip_binary or None,
        }
