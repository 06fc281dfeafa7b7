"""`fp8stack eval`: it parses, calls and prints; it computes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8stack.cli.options import THREADS, option, words


def evaluate(
    runs: Annotated[
        list[str], typer.Argument(help="Run or checkpoint folders.", show_default=False)
    ],
    recipes: Annotated[
        str | None,
        option("Precision recipes or TOML files, separated by commas. [what the run trained in]"),
    ] = None,
    data: Annotated[
        str | None, option("Data, as of pretrain. [what the run held out of its own]")
    ] = None,
    windows: Annotated[int | None, option("How many windows. [as in the run]")] = None,
    context: Annotated[int | None, option("Tokens of each window. [as in the run]")] = None,
    batch: Annotated[int | None, option("Windows at a time. [as in the run]")] = None,
    tokenizer: Annotated[
        str | None, option("Of a run that does not know it: bytes, gpt2, or a tokenizer.json.")
    ] = None,
    backend: Annotated[
        str, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = "auto",
    device: Annotated[str, option("auto, cpu or cuda. [auto]")] = "auto",
    threads: Annotated[int | None, THREADS] = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
) -> None:
    """Validation losses and bits per byte of trained models, in one recipe or several."""
    from fp8stack import evaluation
    from fp8stack.threads import use_threads

    use_threads(threads)
    request = evaluation.Request(
        runs=runs,
        recipes=words(recipes or ""),
        data=data,
        windows=windows,
        context=context,
        batch=batch,
        tokenizer=tokenizer,
        backend=backend,
        device=device,
    )
    scores = evaluation.evaluate(request)
    if json:
        import json as encoder

        print(encoder.dumps(evaluation.as_json(scores), indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        print(*evaluation.text_lines(scores), sep="\n")
        return
    console.print(evaluation.rich_table(scores))
    console.print(*evaluation.notes(scores), sep="\n", markup=False, highlight=False)
