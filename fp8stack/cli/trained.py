"""The commands on trained models: `fp8stack eval`, `generate` and `export`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import argument, option
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.terminal import say, show, warn

EVALUATED = argument("RUNS", options.TRAINED)
EVALUATED_RECIPES = option(
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


def evaluate(
    runs: Annotated[list[str], EVALUATED],
    recipes: Annotated[str | None, EVALUATED_RECIPES] = None,
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
            warn(f"{pair.run}: KL({p} || {q}) = {pair.kl:.3g} is above {limit:g}")
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
        show(*text_lines(results))


TEMPERATURE = option("Sampling temperature; 0 takes the likeliest token. [0.8]")
TOP_P = option("Sample from the likeliest tokens of this total probability. [all]")
GENERATION_RECIPE = option(
    "Precision recipe or TOML file. [bf16 if the machine has it, else fp32]",
    autocompletion=completion.RECIPES,
)


def generate(
    run: Annotated[str, options.RUN],
    prompt: Annotated[str | None, option("Prompt. [the start of a document]")] = None,
    prompt_file: Annotated[str | None, option("File with the prompt, in UTF-8.")] = None,
    tokens: Annotated[int, option("Tokens to generate at most. [256]")] = 256,
    seed: Annotated[int, option("Seed for sampling. [0]")] = 0,
    temperature: Annotated[float, TEMPERATURE] = 0.8,
    top_k: Annotated[int | None, option("Sample from the k likeliest tokens. [all]")] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    recipe: Annotated[str | None, GENERATION_RECIPE] = None,
    backend: Annotated[str, options.BACKEND] = "auto",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS_NOW] = None,
) -> None:
    """Generate text with a trained model: the text on stdout, figures on stderr."""
    if prompt is not None and prompt_file is not None:
        raise UserError("Give --prompt or --prompt-file, not both.")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    from fp8stack.model.sampling import Sampling
    from fp8stack.trained.generate import GenerationOptions, write

    request = GenerationOptions(
        run=run,
        prompt=prompt or "",
        tokens=tokens,
        seed=seed,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        recipe=recipe,
        tokenizer=tokenizer,
        device=device,
        backend=backend,
    )
    write(request)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt-file {quoted(name)} is not UTF-8 text: byte {error.start} is invalid. "
            "Give a file in UTF-8."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or "invalid path"
        raise UserError(f"Cannot read --prompt-file {quoted(name)}: {reason}.") from error


FORMAT = option(
    "Format: hf (transformers), fp8 (transformers, vLLM), safetensors. [hf]",
    autocompletion=completion.EXPORT_FORMATS,
)
SCHEME = option(
    "Weights: tensor, channel, block, deepseek, mxfp4, mxfp6 or nvfp4. [the run's]",
    autocompletion=completion.EXPORT_SCHEMES,
)
OVERWRITE = option("Delete an earlier export in --out first.", "--overwrite")
PUSH = option("Upload the folder to this repository of the Hugging Face Hub, owner/name.")
PRIVATE = option("With --push: make the repository private.", "--private")


def export(
    run: Annotated[str, options.RUN],
    out: Annotated[str, option("Folder to create.")],
    format: Annotated[str, FORMAT] = "hf",
    dtype: Annotated[str, option("Dtype of tensors not in FP8: fp32 or bf16. [fp32]")] = "fp32",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    scheme: Annotated[str | None, SCHEME] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    push: Annotated[str | None, PUSH] = None,
    private: Annotated[bool, PRIVATE] = False,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Export a trained model to a folder that transformers, vLLM or safetensors load."""
    from fp8stack.common import hub
    from fp8stack.trained.export import write_export

    if push is None and private:
        raise UserError("--private needs --push. Leave it out, or give --push owner/name.")
    if push is not None:
        if format == "safetensors":
            raise UserError("--push needs --format hf or fp8. Leave it out.")
        hub.require_pushable(push)
    more = {"tokenizer": tokenizer, "scheme": scheme, "repository": push}
    written = write_export(run, format, out, dtype=dtype, overwrite=overwrite, **more)
    for note in written.notes:
        warn(f"note: {note}")
    if not json:
        say(f"export: {written.line}")
    address = {}
    if push is not None:
        message = f"{written.title}, written by fp8stack export"
        address = {"url": hub.push(written.out, push, private=private, message=message)}
    if json:
        options.print_json(written.as_json() | address)
    elif address:
        say(f"pushed: {address['url']}")
