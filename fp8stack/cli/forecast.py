"""The commands `fp8stack forecast` and `fp8stack tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from fp8stack.cli import completion, options
from fp8stack.cli.options import argument, option
from fp8stack.common.errors import UserError
from fp8stack.common.terminal import show

TRAINED = argument("RUN", f"{options.TRAINED} Without it, --model.")
MODEL = option(
    "Model preset or TOML file, in place of a trained model.", autocompletion=completion.MODELS
)
RECIPES = option(
    "Precision recipes or TOML files, separated by commas. [eight of them, in FP8 to FP4]",
    autocompletion=completion.RECIPES,
)
CANDIDATES = option(
    "Recipes to choose from for each layer. [nvfp4,mxfp4,mxfp6_e2m3,mxfp8,bf16; on a GPU, those it "
    "runs natively]",
    autocompletion=completion.RECIPES,
)
DATA = option("Held-out text. [the run's own held-out part]")
WINDOWS = option("Windows to measure on. [128]")
TOKENS = option(
    "Number of training tokens, such as 160B. [recorded in the run; else 20 per parameter]"
)
BUDGET = option("Largest loss gap, in percent of the loss, interval included. Example: 0.5%")
BITS = option("Instead of --budget: bits of GEMMs on average. Example: 6")
TIME = option(
    "Instead of --budget: time of the linear layers, measured here, in percent of bf16's. "
    "Example: 80%"
)
OUT = option("File to write the recipe to. [tuned.toml]")
MEASURED = ("data", "windows", "tokenizer", "device")
"""The arguments of both commands that select the data and the machine."""


def forecast(
    run: Annotated[str | None, TRAINED] = None,
    model: Annotated[str | None, MODEL] = None,
    recipes: Annotated[str | None, RECIPES] = None,
    tokens: Annotated[str | None, TOKENS] = None,
    data: Annotated[str | None, DATA] = None,
    windows: Annotated[int | None, WINDOWS] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Forecast what training in each recipe would cost in loss.

    With --model, from published losses, in a second. With a trained model also which layers cause
    the gap, and recipes that nobody published; nothing is trained.
    """
    flags = _given(locals())
    from fp8stack.analysis.forecast.forecast import RECIPES, forecast_by_size, parse_tokens
    from fp8stack.common.presets import recipe_words

    chosen = RECIPES if recipes is None else recipe_words(recipes)
    trained_on = None if tokens is None else parse_tokens(tokens)
    path = None
    if run is None and model is not None:
        if flags:
            raise UserError(f"--{next(iter(flags))} is for a trained model. Leave it out.")
        result = forecast_by_size(model, trained_on, chosen)
    elif run is not None and model is None:
        from fp8stack.analysis.forecast import measured

        request = measured.ForecastOptions(run=run, recipes=chosen, tokens=trained_on, **flags)
        with _measuring() as tell:
            result = measured.forecast(request, tell).result
        path = measured.keep(result, run)
    else:
        raise UserError("Give one of RUN, a trained model, and --model, such as llama-8b.")
    if json:
        options.print_json(result.model_dump(mode="json"))
    else:
        show(*result.as_text())
        if path is not None:
            show("", f"written: {path}, which `fp8stack report` shows")


def tune(
    run: Annotated[str, options.RUN],
    budget: Annotated[str | None, BUDGET] = None,
    bits: Annotated[float | None, BITS] = None,
    time: Annotated[str | None, TIME] = None,
    out: Annotated[str, OUT] = "tuned.toml",
    recipes: Annotated[str | None, CANDIDATES] = None,
    data: Annotated[str | None, DATA] = None,
    windows: Annotated[int | None, WINDOWS] = None,
    tokens: Annotated[str | None, TOKENS] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write a recipe that is as cheap as a loss budget allows, layer by layer.

    Cheap is a short time, measured here, on a GPU, and few bits on a CPU. With --bits or --time,
    the recipe with the smallest gap at that cost.
    """
    flags = _given(locals())
    from fp8stack.analysis.forecast import measured, tune
    from fp8stack.analysis.forecast.forecast import parse_tokens
    from fp8stack.analysis.forecast.times import PLAIN, time_shares
    from fp8stack.common.presets import recipe_words
    from fp8stack.precision import probe

    target = tune.parse_target(budget, bits, time, out)
    hardware = probe(device or "auto")
    chosen = tune.default_candidates(hardware) if recipes is None else recipe_words(recipes)
    quantized = tune.candidates(chosen)
    tune.require_bits(target, quantized)
    request = measured.ForecastOptions(
        run=run,
        recipes=quantized,
        tokens=None if tokens is None else parse_tokens(tokens),
        **flags,
    )
    with _measuring() as tell:
        forecast = measured.forecast(request, tell)
        timed = partial(time_shares, forecast.trained, tell) if target.is_timed(hardware) else None
        choices = tune.Choices(forecast, plain=PLAIN in chosen, timed=timed)
    tuned = tune.tuned(choices, forecast, target)
    tune.write(tuned, forecast, target)
    if json:
        options.print_json({**vars(tuned), "gap": tuned.gap.model_dump()})
    else:
        show(*tune.as_text(tuned, choices, forecast))
        show("", f"written: {out}. Train in it:", f"  {tune.command(run, out)}")


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in `MEASURED` that the user gave."""
    return {key: arguments[key] for key in MEASURED if arguments[key] is not None}


@contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being measured."""
    from rich.text import Text

    from fp8stack.common.screen import Screen

    with Screen(stderr=True).status("measuring") as status:
        yield lambda name: status.update(Text(f"measured {name}"))
