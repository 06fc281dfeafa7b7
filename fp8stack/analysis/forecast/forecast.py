"""`fp8stack forecast`: predicts the loss gap of training a model in each recipe, by its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fp8stack.analysis.forecast.law import RATIO, Law, fitted
from fp8stack.analysis.forecast.published import published
from fp8stack.analysis.forecast.result import Expected, ForecastResult, Gap, quantity, shares
from fp8stack.analysis.forecast.severity import RecipeSeverity, severity_of
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
beyond 100 all published gaps are below the law's."""
LEAST_PARAMETERS, LEAST_TOKENS, LEAST_VOCABULARY = 4e7, 5e8, 10_000
"""`chinchilla_loss` is of models, training tokens and vocabularies from these on."""
STUDY = "fp8stack's study"


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """The loss in nats per token of a model after training, by Chinchilla's law with the parameters
    of Besiroglu et al. (arXiv 2404.10102). It is of MassiveText; other texts and tokenizers have
    other losses, by a tenth or so."""
    return float(1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658)


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
    config, recipes, law = load_config(model), load_recipes(names), fitted()
    return forecast_of_shape(model, config, recipes, tokens, law)


def forecast_of_shape(
    name: str, config: GPTConfig, recipes: dict[str, Recipe], tokens: int | None, law: Law
) -> ForecastResult:
    """Predict the loss gaps of a model of this shape; for the arguments see `forecast_by_size`."""
    active = config.active_parameters()
    trained_on = tokens or round(RATIO * active)
    size, least = (
        (active, trained_on, config.vocabulary),
        (LEAST_PARAMETERS, LEAST_TOKENS, LEAST_VOCABULARY),
    )
    is_covered = all(value >= minimum for value, minimum in zip(size, least, strict=True))
    loss = chinchilla_loss(active, trained_on) if is_covered else None
    expectations = []
    for recipe_name, recipe in recipes.items():
        severity = severity_of(recipe, config, law)
        expectations.append(expectation(recipe_name, severity, law, trained_on / active, loss))
    return ForecastResult(
        model=name,
        parameters=config.parameters(),
        active_parameters=active,
        tokens=trained_on,
        loss=loss,
        loss_source="by Chinchilla's law (arXiv 2404.10102)",
        recipes=tuple(expectations),
        remarks=tuple(remarks(config, tokens, trained_on, expectations, law)),
    )


def expected_cost(run: Run) -> str | None:
    """A line on what the recipe of a finished run costs in loss; None if the run changed its
    recipe, quantized nothing or has experts, or if no source says anything of its recipe."""
    plan, config = run.main_plan, run.model.config
    if len(run.plans) > 1 or not plan.runs_fp8 or config.experts is not None:
        return None
    law, name = fitted(), plan.recipe.name
    tokens = run.step * run.config.batch * run.context
    severity = severity_of(plan.recipe, config, law)
    expected = expectation(name, severity, law, tokens / config.active_parameters(), None)
    if expected.percent is None:
        return None
    mean, interval = shares(expected.percent)
    return (
        f"cost of {name} to expect: {mean} of the loss (90 % interval {interval}), by "
        "`fp8stack forecast`; `fp8stack compare` measures it"
    )


def expectation(
    name: str, severity: RecipeSeverity, law: Law, ratio: float, loss: float | None
) -> Expected:
    """The forecast for a recipe.

    Args:
        name: the recipe's name.
        severity: its severity for the model.
        law: the law.
        ratio: training tokens per active parameter.
        loss: the baseline's loss in nats per token, if it is known.
    """
    if severity.value is None:
        return Expected(
            recipe=name,
            severity=None,
            percent=None,
            nats=None,
            extra_tokens=None,
            sources=(),
            reason="no source trains with its forward pass; `fp8stack compare` measures it",
        )
    notes = list(severity.notes)
    if severity.share < 0.99:
        notes.append(f"quantizes {severity.share:.0%} of the blocks' linear work")
    if severity.head:
        notes.append(
            f"quantizes the head, whose work is {severity.head:.0%} of the blocks'; it counts "
            f"{law.head:.1f} times as much as the same work in them, as in one small model of our "
            "study: no published gap has it quantized"
        )
    percent = law.gap(ratio, severity.value)
    extra = None
    if EXTRA_RATIOS[0] <= ratio <= EXTRA_RATIOS[1]:
        values = percent.model_dump().items()
        tokens = {key: law.extra_tokens(ratio, value) for key, value in values}
        extra = Gap(**tokens)
    sources = (source for recipe in severity.recipes for source in law.sources[recipe])
    return Expected(
        recipe=name,
        severity=severity.value,
        percent=percent,
        nats=None if loss is None else percent.scaled(loss / 100),
        extra_tokens=extra,
        sources=tuple(dict.fromkeys(sources)),
        notes=tuple(notes),
    )


def remarks(
    config: GPTConfig,
    tokens: int | None,
    trained_on: int,
    expectations: Iterable[Expected],
    law: Law,
) -> Iterator[str]:
    """Yield sentences on the sources, and on what is extrapolated.

    Args:
        config: the model's shape.
        tokens: the training tokens that are known; None or 0 if 20 per parameter are assumed.
        trained_on: the training tokens of the forecast.
        expectations: the recipes.
        law: the law.
    """
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
            "growth with tokens comes from models of 30M to 200M parameters, where it weakens with "
            f"size; larger models show none beyond {RATIO:.0f} tokens per parameter"
        )
    if config.experts is not None:
        yield (
            "extrapolated: the law is of models without experts, and this counts the active "
            "parameters. Of mixtures, DeepSeek-V3's authors report less than 0.25 % in FP8 (arXiv "
            "2412.19437), and docs/experts.md has the gaps of a small one"
        )
    listed = list(expectations)
    from_study = [expected.recipe for expected in listed if expected.sources == (STUDY,)]
    if from_study:
        yield (
            f"{', '.join(from_study)}: relative to NVFP4 in models of 0.1M to 0.9M parameters "
            f"alone ({STUDY}, bench/results/cpu/study.md)"
        )
    named = {source for expected in listed for source in expected.sources}
    rows = {row.training: row.source for row in published() if row.training in named}
    for name, source in rows.items():
        yield f"{name}: {source}"
