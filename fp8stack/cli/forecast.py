"""The command `fp8stack forecast`."""

from __future__ import annotations

from typing import Annotated

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.terminal import show

MODEL = option("Model preset or TOML file.", autocompletion=completion.MODELS)
RECIPES = option(
    "Precision recipes or TOML files, separated by commas. [eight of them, in FP8 to FP4]",
    autocompletion=completion.RECIPES,
)
TOKENS = option("Number of training tokens, such as 160B. [20 per parameter]")


def forecast(
    model: Annotated[str, MODEL],
    recipes: Annotated[str | None, RECIPES] = None,
    tokens: Annotated[str | None, TOKENS] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Forecast what training in each recipe would cost in loss, from published losses."""
    from fp8stack.analysis.forecast.forecast import RECIPES, forecast_by_size, parse_tokens
    from fp8stack.common.presets import recipe_words

    chosen = RECIPES if recipes is None else recipe_words(recipes)
    trained_on = None if tokens is None else parse_tokens(tokens)
    result = forecast_by_size(model, trained_on, chosen)
    if json:
        options.print_json(result.model_dump(mode="json"))
    else:
        show(*result.as_text())
