"""`fp8stack export`: it parses, calls and prints."""

import sys
from typing import Annotated

import typer

from fp8stack.cli import options
from fp8stack.cli.options import option

RUN = typer.Argument(help="Run folder or checkpoint.", show_default=False, metavar="RUN")
FORMAT = option("Format: hf (transformers), fp8 (compressed-tensors, vLLM), safetensors. [hf]")
STRATEGY = option("One scale per tensor, channel or block of FP8 weights. [the run's]")
OVERWRITE = option("Delete an earlier export in --out first.", "--overwrite")


def export(
    run: Annotated[str, RUN],
    out: Annotated[str, option("Folder to create.")],
    format: Annotated[str, FORMAT] = "hf",
    dtype: Annotated[str, option("Dtype of tensors not in FP8: fp32 or bf16. [fp32]")] = "fp32",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    strategy: Annotated[str | None, STRATEGY] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """Write a trained model as a folder that transformers, vLLM or safetensors load."""
    from fp8stack.export import export as write

    more = {"tokenizer": tokenizer, "strategy": strategy}
    line, notes = write(run, format, out, dtype=dtype, overwrite=overwrite, **more)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"export: {line}")
