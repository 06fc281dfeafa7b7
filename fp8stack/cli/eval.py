"""`fp8stack eval`: it parses, calls and prints."""

from typing import Annotated

import typer

from fp8stack.cli import options
from fp8stack.cli.options import option

RUNS = typer.Argument(help="Run or checkpoint folders.", show_default=False)
RECIPES = option("Precision recipes or TOML files, separated by commas. [the run's own]")
DATA = option("Data, as for `pretrain --data`. [the run's own held-out part]")


def evaluate(
    runs: Annotated[list[str], RUNS],
    recipes: Annotated[str | None, RECIPES] = None,
    data: Annotated[str | None, DATA] = None,
    windows: Annotated[int | None, option("Windows to evaluate. [the run's]")] = None,
    context: Annotated[int | None, option("Tokens per window. [the run's]")] = None,
    batch: Annotated[int | None, option("Windows per forward pass. [the run's]")] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    backend: Annotated[str, options.BACKEND] = "auto",
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Compute validation losses and bits per byte of trained models, in one recipe or several."""
    from fp8stack import evaluation
    from fp8stack.threads import use_threads

    use_threads(threads)
    request = evaluation.Request(
        runs=runs,
        recipes=options.words(recipes or ""),
        data=data,
        windows=windows,
        context=context,
        batch=batch,
        tokenizer=tokenizer,
        backend=backend,
        device=device,
    )
    scores = evaluation.evaluate(request)
    from rich.console import Console

    console = Console()
    if json:
        options.print_json(evaluation.as_json(scores))
    elif console.is_terminal:
        console.print(evaluation.rich_table(scores))
        console.print(*evaluation.notes(scores), sep="\n", markup=False, highlight=False)
    else:
        print(*evaluation.text_lines(scores), sep="\n")
