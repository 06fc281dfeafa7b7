"""What is asked of a preparation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.errors import UserError

LEAST_BPE = 257  # the bytes, and the token that ends a document
MOST_BPE = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One preparation.

    Files of folders that are inputs are left out if they match none of the patterns `include`,
    where there are some, or one of `exclude`; patterns are of names, or of paths in the folder.
    """

    inputs: tuple[str, ...]  # files, folders, and `hf:NAME[:CONFIG][@SPLIT]`, in this order
    tokenizer: str  # "bytes", "gpt2" or a `tokenizer.json`; without effect with `train_bpe`
    train_bpe: int | None  # tokens of a tokenizer that is trained on the inputs
    text_key: str  # the field of JSON lines and the column of parquet files that holds the text
    held_out: float  # the share of documents that is held out
    shard_tokens: int  # a shard ends with the document that brings it to so many
    workers: int  # how many processes tokenize
    out: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_binary: bool = False  # whether files of folders that look binary are not refused

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
