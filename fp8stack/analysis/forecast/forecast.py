"""`fp8stack forecast`: predicts the loss gap of training a model in each recipe, by its size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fp8stack.analysis.forecast.law import LARGE, RATIO, SMALL, Law, fitted
from fp8stack.analysis.forecast.result import Expected, ForecastResult, Gap, quantity, shares
from fp8stack.analysis.forecast.severity import severity_of
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.terminal import warn
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import Recipe, load_recipe

if TYPE_CHECKING:  # a forecast by size does without torch
    from fp8stack.training.run import Run

RECIPES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "rowwise", "block", "current", "delayed")
RATIOS = (0.01, 1000.0)
"""Training tokens per parameter within which the law's uncertainty is known."""
EXTRA_RATIOS = (5.0, 100.0)
"""Training tokens per parameter for which extra tokens are told. Baselines are known from 24 on;
beyond 100 all published gaps are below a law that grows."""
LEAST_PARAMETERS, LEAST_TOKENS, LEAST_VOCABULARY = 4e7, 5e8, 10_000
"""`baseline_loss` is of models, training tokens and vocabularies from these on."""
STUDY = "fp8stack's study"


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """The loss in nats per token of a model after training, by Chinchilla's law with the parameters
    of Besiroglu et al. (arXiv 2404.10102). It is of MassiveText; other texts and tokenizers have
    other losses, by a tenth or so."""
    return float(1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658)


def baseline_loss(config: GPTConfig, tokens: int) -> float | None:
    """The `chinchilla_loss` of a model of this shape; None outside of what that law is of."""
    active = config.active_parameters()
    size = active / LEAST_PARAMETERS, tokens / LEAST_TOKENS, config.vocabulary / LEAST_VOCABULARY
    return chinchilla_loss(active, tokens) if min(size) >= 1 else None


def load_recipes(names: Sequence[str]) -> dict[str, Recipe]:
    """The recipes of a forecast by name. Prints what the forecast leaves out.

    Raises:
        UserError: a recipe does not exist or quantizes nothing.
    """
    recipes = {name: load_recipe(name) for name in names}
    unquantized = [name for name, recipe in recipes.items() if not recipe.is_fp8]
    if unquantized:
        raise UserError(f"{', '.join(unquantized)}: nothing is quantized. Name other --recipes.")
    defaults = Recipe(name="").beside_linears
    for name, recipe in recipes.items():
        for key, value in recipe.beside_linears.items():
            if value != defaults[key]:
                warn(f"{name}: the forecast is of linear layers, without {key} = '{value}'")
    return recipes


def parse_tokens(text: str) -> int:
    """A number of training tokens, such as "160B", "1.5T" or "2000000"."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    number, unit = text.strip(), 1.0
    if number[-1:].upper() in units:
        number, unit = number[:-1], units[number[-1].upper()]
    try:
        tokens = float(number) * unit
    except ValueError:
        tokens = math.nan
    if not 1 <= tokens < 1e18:
        raise UserError(
            f"--tokens {quoted(text)} is no number of training tokens. Example: 160B, or 20M"
        )
    return round(tokens)


def forecast_by_size(model: str, tokens: int | None, names: Sequence[str]) -> ForecastResult:
    """Predict the loss gaps of a model that need not exist.

    Args:
        model: the name or the file of a model.
        tokens: the number of training tokens; None or 0: 20 per active parameter.
        names: recipes.

    Raises:
        UserError: no such model or recipe.
    """
    return forecast_of_shape(model, load_config(model), load_recipes(names), tokens)


def forecast_of_shape(
    name: str, config: GPTConfig, recipes: dict[str, Recipe], tokens: int | None
) -> ForecastResult:
    """Predict the loss gaps of a model of this shape; for the arguments see `forecast_by_size`."""
    law, active = fitted(), config.active_parameters()
    trained_on = tokens or round(RATIO * active)
    loss = baseline_loss(config, trained_on)
    expected = [
        _expected(recipe_name, recipe, config, trained_on, loss)
        for recipe_name, recipe in recipes.items()
    ]
    sources = {source for gap in expected for source in gap.sources}
    return ForecastResult(
        model=name,
        parameters=config.parameters(),
        active_parameters=active,
        tokens=trained_on,
        loss=loss,
        recipes=tuple(expected),
        remarks=(
            *_remarks(config, tokens, trained_on, law),
            *(f"{name}: {law.addresses[name]}" for name in law.addresses if name in sources),
        ),
    )


def expected_cost(run: Run) -> str | None:
    """A line on what the recipe of a finished run costs in loss; None if the run changed its
    recipe, quantized nothing, or no source says anything of its recipe."""
    plan, config = run.main_plan, run.model.config
    if len(run.plans) > 1 or not plan.runs_fp8:
        return None
    tokens = run.step * run.config.batch * run.context
    expected = _expected(plan.recipe.name, plan.recipe, config, tokens, None)
    if expected.percent is None:
        return None
    mean, interval = shares(expected.percent)
    return (
        f"cost of {plan.recipe.name} to expect: {mean} of the loss (90 % interval {interval}), by "
        "`fp8stack forecast`; `fp8stack compare` measures it"
    )


def _expected(
    name: str, recipe: Recipe, config: GPTConfig, tokens: int, loss: float | None
) -> Expected:
    """The forecast for a recipe; `loss` is the baseline's in nats per token, if it is known."""
    law, active = fitted(), config.active_parameters()
    severity = severity_of(recipe, config, law)
    if severity.value is None:
        return Expected(recipe=name, note=f"{severity.reason}; `fp8stack compare` measures it")
    ratio, notes = tokens / active, []
    if severity.share < 0.99:
        notes.append(f"quantizes {severity.share:.0%} of the blocks' linear work")
    sources = {source: None for shipped in severity.recipes for source in law.sources[shipped]}
    if set(sources) == {STUDY}:
        notes.append("known from models of 0.1M to 0.9M parameters alone")
    percent = law.gap(active, ratio, severity.value)
    extra = None
    if EXTRA_RATIOS[0] <= ratio <= EXTRA_RATIOS[1]:
        values = percent.model_dump().items()
        extra = Gap(**{key: law.extra_tokens(ratio, value) for key, value in values})
    return Expected(
        recipe=name,
        severity=severity.value,
        percent=percent,
        nats=None if loss is None else percent.scaled(loss / 100),
        extra_tokens=extra,
        sources=tuple(sources),
        note="; ".join(notes),
    )


def _remarks(config: GPTConfig, tokens: int | None, trained_on: int, law: Law) -> Iterator[str]:
    """Yield sentences on what is extrapolated; without `tokens`, `trained_on` is assumed."""
    active = config.active_parameters()
    ratio = trained_on / active
    if not tokens:
        yield f"--tokens is not given: {RATIO:.0f} per parameter are assumed"
    least, most = law.parameters
    if not least / 2 <= active <= most * 2:
        yield (
            f"extrapolated: published gaps are of models of {quantity(least)} to {quantity(most)} "
            f"parameters, and this has {quantity(active)}"
        )
    if not RATIOS[0] <= ratio <= RATIOS[1]:
        yield (
            f"extrapolated, with a wider interval: published gaps are of {law.ratio[0]:.2g} to "
            f"{law.ratio[1]:.0f} training tokens per parameter, and this has {ratio:.2g}"
        )
    if ratio > RATIO:
        yield (
            f"growth with tokens beyond {RATIO:.0f} per parameter is of models of up to "
            f"{quantity(SMALL)} parameters; from {quantity(LARGE)} on there is none"
        )
    if config.experts is not None:
        yield (
            "extrapolated: the law is of models without experts, and this counts the active "
            "parameters (docs/experts.md has the gaps of a small mixture)"
        )
