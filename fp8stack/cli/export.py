"""`fp8stack export`: it parses, calls and prints; it computes nothing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fp8stack.cli.options import option


def export(
    run: Annotated[
        str, typer.Argument(help="Run folder or checkpoint.", show_default=False, metavar="RUN")
    ],
    out: Annotated[str, option("Folder to make.")],
    format: Annotated[
        str,
        option("hf (transformers), fp8 (compressed-tensors, vLLM) or safetensors. [hf]"),
    ] = "hf",
    dtype: Annotated[str, option("Of what is not FP8: fp32 or bf16. [fp32]")] = "fp32",
    tokenizer: Annotated[
        str | None, option("Of a run that does not know its own: bytes, gpt2 or a tokenizer.json.")
    ] = None,
    strategy: Annotated[
        str | None,
        option("FP8 weights have a scale per tensor, channel or block. [as in the run]"),
    ] = None,
    overwrite: Annotated[
        bool, option("Replace what an export wrote there before.", "--overwrite")
    ] = False,
) -> None:
    """Write a trained model as a folder that transformers, vLLM or safetensors load."""
    from fp8stack.export import export as write

    flags = {"tokenizer": tokenizer, "strategy": strategy}
    line, notes = write(run, format, out, dtype=dtype, overwrite=overwrite, **flags)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"export: {line}")
