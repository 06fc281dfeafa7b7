"""`fp8stack prepare`: it parses and calls; it computes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8stack.cli.options import option


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Text, .jsonl and .parquet files (.gz and .zst too), folders of them, or datasets "
            "as hf:NAME[:CONFIG][@SPLIT].",
            show_default=False,
        ),
    ],
    out: Annotated[str, option("Folder of the shards.")],
    tokenizer: Annotated[
        str | None, option("bytes, gpt2, or the path of a tokenizer.json. [bytes]")
    ] = None,
    train_bpe: Annotated[
        int | None, option("Train a tokenizer of so many tokens on the inputs, and use it.")
    ] = None,
    text_key: Annotated[
        str, option("The field of JSON lines, or the column, that holds the text. [text]")
    ] = "text",
    held_out: Annotated[
        float, option("Share of the documents that is held out for validation. [0.01]")
    ] = 0.01,
    shard_tokens: Annotated[
        int, option("A shard ends with the document that brings it to so many. [100000000]")
    ] = 100_000_000,
    include: Annotated[
        list[str] | None,
        option("Of folders, read files of this name or path alone, such as '*.md'; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, option("Of folders, leave out files of this name or path; repeatable.")
    ] = None,
    skip_binary: Annotated[
        bool, option("Of folders, leave out files that look binary.", "--skip-binary")
    ] = False,
    workers: Annotated[int | None, option("Processes that tokenize. [as many as cores]")] = None,
    overwrite: Annotated[
        bool, option("Remove what an earlier prepare wrote to --out first.", "--overwrite")
    ] = False,
) -> None:
    """Turn documents into shards of tokens, to be trained on with pretrain --data.

    Called again after it was cut, it goes on where it was.
    """
    import os
    from pathlib import Path

    from fp8stack.errors import UserError
    from fp8stack.prepare.run import prepare
    from fp8stack.prepare.settings import Settings
    from fp8stack.training.signals import stop_requests

    if tokenizer is not None and train_bpe is not None:
        raise UserError("--tokenizer names one and --train-bpe makes one. Give one of them.")
    if not out:
        raise UserError("--out is empty. Give the folder that the shards go to.")
    settings = Settings(
        inputs=tuple(inputs),
        tokenizer=tokenizer or "bytes",
        train_bpe=train_bpe,
        text_key=text_key,
        held_out=held_out,
        shard_tokens=shard_tokens,
        workers=(os.cpu_count() or 1) if workers is None else workers,
        out=Path(out),
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        skip_binary=skip_binary,
    )
    with (
        stop_requests() as stop,
        stop.at_once("Stopped. What is done is kept; the same command goes on with it."),
    ):
        prepare(settings, overwrite)
