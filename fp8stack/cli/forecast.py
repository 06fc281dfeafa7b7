"""The commands `fp8stack forecast` and `fp8stack tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from fp8stack.cli import options
from fp8stack.cli.options import option
from fp8stack.common.terminal import show

RECIPES = option(
    "Precision recipes or TOML files, separated by commas. [eight of them, in FP8 to FP4]"
)
CANDIDATES = option(
    "Recipes to choose from for each layer. [nvfp4,mxfp4,mxfp6_e2m3,mxfp8,bf16; on a GPU, those it "
    "runs natively]"
)
DATA = option("Held-out text. [the run's own held-out part]")
WINDOWS = option("Windows to measure on. [128]")
TOKENS = option("Number of training tokens. [recorded in the run]")
BUDGET = option("Largest loss gap, in percent of the loss. Example: 0.2%")
BITS = option("Instead of --budget: bits of GEMMs on average. Example: 6")
TIME = option(
    "Instead of --budget: time of the linear layers, measured here, in percent of bf16's. "
    "Example: 80%"
)
OUT = option("File to write the recipe to. [tuned.toml]")
MEASURED = ("run", "data", "windows", "tokens", "tokenizer", "device")
"""The arguments of both commands that select the model and the data."""


def forecast(
    run: Annotated[str, options.RUN],
    recipes: Annotated[str | None, RECIPES] = None,
    data: Annotated[str | None, DATA] = None,
    windows: Annotated[int, WINDOWS] = 128,
    tokens: Annotated[int | None, TOKENS] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Forecast what training in each recipe would cost in loss, and which layers cause it.

    One trained model is enough, in any precision; nothing is trained.
    """
    flags = {key: value for key, value in locals().items() if key in MEASURED}
    from fp8stack.analysis.forecast import forecast as forecasts
    from fp8stack.common.presets import recipe_words

    chosen = forecasts.RECIPES if recipes is None else recipe_words(recipes)
    request = forecasts.ForecastOptions(recipes=chosen, **flags)
    with _measuring() as tell:
        result = forecasts.forecast(request, tell).result()
    path = forecasts.keep(result, run)
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
    windows: Annotated[int, WINDOWS] = 128,
    tokens: Annotated[int | None, TOKENS] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS_NOW] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write a recipe that is as cheap as a loss budget allows, layer by layer.

    Cheap is a short time, measured here, on a GPU, and few bits on a CPU.
    """
    flags = {key: value for key, value in locals().items() if key in MEASURED}
    from fp8stack.analysis.forecast import forecast as forecasts
    from fp8stack.analysis.forecast import tune
    from fp8stack.analysis.forecast.times import PLAIN, time_shares
    from fp8stack.common.presets import recipe_words
    from fp8stack.precision import probe

    target = tune.parse_target(budget, bits, time, out)
    hardware = probe(device)
    chosen = tune.default_candidates(hardware) if recipes is None else recipe_words(recipes)
    request = forecasts.ForecastOptions(recipes=tune.candidates(chosen), **flags)
    with _measuring() as tell:
        forecast = forecasts.forecast(request, tell, require_covered=True)
        timed = partial(time_shares, forecast.trained, tell) if target.is_timed(hardware) else None
        choices = tune.Choices(forecast, plain=PLAIN in chosen, timed=timed)
    tuned = tune.tuned(choices, forecast, target)
    tune.write(tuned, forecast, target)
    if json:
        options.print_json({**vars(tuned), "gap": vars(tuned.gap)})
    else:
        show(*tune.as_text(tuned, choices, forecast))
        show("", f"written: {out}. Train in it:", f"  {tune.command(run, out)}")


@contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being measured."""
    from rich.text import Text

    from fp8stack.common.screen import Screen

    with Screen(stderr=True).status("measuring") as status:
        yield lambda name: status.update(Text(f"measured {name}"))
