"""The command `fp8stack prepare`."""

from typing import Annotated

from fp8stack.cli import leave_while_importing, options
from fp8stack.cli.options import argument, option

INPUTS = argument(
    "INPUTS",
    "Files of text, JSON lines, JSON, CSV, parquet or arrow, packed or not, folders of them, or "
    "datasets as hf:NAME[:CONFIG][@SPLIT].",
)
TOKENIZER = option("Tokenizer: bytes, gpt2, a tokenizer.json, or hf:owner/name. [bytes]")
END_OF_TEXT = option("Token after each document. [the tokenizer's eos_token]")
TRAIN_BPE = option("Train a BPE tokenizer with this vocabulary size on the inputs.")
TEXT_KEY = option("Field or column that holds the text. [text]")
HELD_OUT = option("Fraction of documents to hold out for validation. [0.01]")
SHARD_TOKENS = option("Tokens per shard; documents are not split. [100000000]")
INCLUDE = option("In folders, read only files that match, such as '*.md'; repeatable.")
EXCLUDE = option("In folders, skip files that match; repeatable.")
OVERWRITE = option("Delete what an earlier prepare wrote to --out first.", "--overwrite")


def prepare(
    inputs: Annotated[list[str], INPUTS],
    out: Annotated[str, option("Folder for the shards.")],
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    train_bpe: Annotated[int | None, TRAIN_BPE] = None,
    end_of_text: Annotated[str | None, END_OF_TEXT] = None,
    text_key: Annotated[str, TEXT_KEY] = "text",
    held_out: Annotated[float, HELD_OUT] = 0.01,
    shard_tokens: Annotated[int, SHARD_TOKENS] = 100_000_000,
    include: Annotated[list[str] | None, INCLUDE] = None,
    exclude: Annotated[list[str] | None, EXCLUDE] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Tokenize documents into shards for pretrain --data.

    Run again, it continues from its last whole shard.
    """
    import contextlib
    import sys

    from fp8stack.common.errors import UserError
    from fp8stack.common.presets import parse
    from fp8stack.data.prepare.inputs import Settings
    from fp8stack.data.prepare.output_folder import as_json
    from fp8stack.data.prepare.pipeline import SAVED, prepare
    from fp8stack.training.signals import stop_requests

    if tokenizer is not None and train_bpe is not None:
        raise UserError("Give --tokenizer or --train-bpe, not both.")
    if not out:
        raise UserError("--out is empty. Give the folder that the shards go to.")
    keys = {
        "inputs": inputs,
        "out": out,
        "tokenizer": "bytes" if tokenizer is None else tokenizer,
        "train_bpe": train_bpe,
        "text_key": text_key,
        "held_out": held_out,
        "shard_tokens": shard_tokens,
        "include": include or (),
        "exclude": exclude or (),
        "end_of_text": end_of_text,
    }
    settings = parse(Settings, keys, "prepare")
    with (
        contextlib.redirect_stdout(sys.stderr if json else sys.stdout),  # progress
        stop_requests(leave_while_importing) as stop,
        stop.at_once(SAVED),
    ):
        manifest = prepare(settings, overwrite)
    if json:
        options.print_json(as_json(settings, manifest))
