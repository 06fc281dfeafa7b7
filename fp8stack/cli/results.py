"""The commands `fp8stack list`, `show`, `report` and `eval`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import argument, option
from fp8stack.common import terminal
from fp8stack.common.errors import UserError, unknown

KINDS = ("models", "recipes", "runs")
KIND = argument("KIND", "models, recipes or runs.", autocompletion=completion.values(lambda: KINDS))
FOLDER = argument("FOLDER", "Of runs: the folder to look in. [runs]")
RUN = argument("RUN", "Run folder.")
OUT = option("HTML file. [report.html in the run, or beside several runs]")
RUNS = argument("RUNS", "Run folders.")
EVALUATED = argument("RUNS", options.TRAINED)
RECIPES = option(
    "Precision recipes, TOML files or folders of transformers, which are run as a server does, "
    "separated by commas. [the run's own]",
    autocompletion=completion.RECIPES,
)
AGREE = option(
    "Compare the first recipe with each other one, token by token: KL, log probabilities, top-1, "
    "and the layers at fault.",
    "--agree",
)
LIMIT = option("With --agree: exit code 1 if a KL is above it, in nats per token. Example: 0.001")
DATA = option(
    "Data, as for `pretrain --data`; any other single file whole. [the run's own held-out part]"
)


def list_(
    kind: Annotated[str, KIND],
    folder: Annotated[Path | None, FOLDER] = None,
    capability: Annotated[str | None, options.CAPABILITY] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """List models, recipes or runs, with the main facts of each."""
    if kind not in KINDS:
        raise unknown("kind to list", kind, KINDS)
    for name, value, of in (("FOLDER", folder, "runs"), ("--capability", capability, "recipes")):
        if value is not None and kind != of:
            raise UserError(f"{name} is for `list {of}`. Leave it out.")
    from fp8stack.analysis.report import listing

    if kind == "models":
        rows = listing.models()
    elif kind == "runs":
        rows = listing.runs(folder or Path("runs"))
    else:
        from fp8stack.precision.hardware import machine_for

        rows = listing.recipes(machine_for(capability, None))
    if json:
        options.print_json(rows)
    elif not rows:
        terminal.show(f"No runs in {folder or 'runs'}.")
    else:
        options.print_rows(rows)


def show(run: Annotated[Path, RUN]) -> None:
    """Show the report on a run on the terminal, and what to do next."""
    from fp8stack.analysis import report
    from fp8stack.training.run_folder import RunFolder

    report.show(run)
    terminal.show(*RunFolder(run).next_commands())


def report(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[str | None, OUT] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Report on runs in one HTML page: losses, speed, FP8, and what needs attention."""
    from fp8stack.analysis import report as reports

    page = reports.report(runs, out, json)
    if page is not None:
        (terminal.warn if json else terminal.say)(f"report: {page}")


def evaluate(
    runs: Annotated[list[str], EVALUATED],
    recipes: Annotated[str | None, RECIPES] = None,
    agree: Annotated[bool, AGREE] = False,
    limit: Annotated[float | None, LIMIT] = None,
    data: Annotated[str | None, DATA] = None,
    windows: Annotated[int | None, option("Windows to evaluate. [the run's]")] = None,
    context: Annotated[int | None, option("Tokens per window. [the run's]")] = None,
    batch: Annotated[int | None, option("Windows per forward pass. [the run's]")] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    backend: Annotated[str, options.BACKEND] = "auto",
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Compute validation losses and bits per byte of trained models, in one recipe or several.

    With --agree, compare the recipes token by token instead.
    """
    from fp8stack.common.presets import recipe_words
    from fp8stack.trained import evaluate as evaluation

    if limit is not None and not agree:
        raise UserError("--limit is of --agree. Give both.")
    if limit is not None and not 0 <= limit < math.inf:
        raise UserError(f"--limit {limit} is no KL. Give 0 or more nats per token.")
    options_of_both: dict[str, Any] = {
        "data": data,
        "windows": windows,
        "context": context,
        "batch": batch,
        "tokenizer": tokenizer,
        "backend": backend,
        "device": device,
    }
    words = [] if recipes is None else recipe_words(recipes)
    layouts: tuple[Callable[[Any], Any], ...]
    if not agree:
        scores = evaluation.evaluate(runs, *words, **options_of_both)
        layouts = (evaluation.rich_table, evaluation.notes, evaluation.text_lines)
        _show_results(scores, json, evaluation.as_json, *layouts)
        return
    pairs = evaluation.agreements(runs, *words, **options_of_both)
    layouts = (
        evaluation.agreement_rich_table,
        evaluation.agreement_notes,
        evaluation.agreement_lines,
    )
    _show_results(pairs, json, evaluation.agreements_as_json, *layouts)
    if limit is not None:
        beyond = [pair for pair in pairs if not pair.kl <= limit]
        for pair in beyond:
            p, q = pair.recipes
            terminal.warn(f"{pair.run}: KL({p} || {q}) = {pair.kl:.3g} is above {limit:g}")
        if beyond:
            raise typer.Exit(1)


def _show_results(
    results: list[Any],
    json: bool,
    as_json: Callable[[Any], Any],
    rich_table: Callable[[Any], Any],
    notes: Callable[[Any], list[str]],
    text_lines: Callable[[Any], list[str]],
) -> None:
    """Print results as JSON, as a table on a terminal, or as text."""
    from fp8stack.common.screen import Screen

    console = Screen()
    if json:
        options.print_json(as_json(results))
    elif console.is_terminal:
        console.print(rich_table(results))
        console.print(*notes(results), sep="\n")
    else:
        terminal.show(*text_lines(results))
