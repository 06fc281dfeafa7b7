"""The severity of a recipe for a model, layer by layer, without a trained model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fp8stack.analysis.forecast.law import Law
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.precision import Hardware, Recipe, load_recipe


@dataclass(frozen=True, kw_only=True)
class RecipeSeverity:
    """The severity of a recipe for a model.

    Attributes:
        value: relative to NVFP4 in all linears of the blocks; None for `reason`.
        share: the share of the blocks' linear work that takes quantized operands.
        recipes: the shipped recipes whose severities `value` is made of.
        reason: why the severity is not known.
    """

    value: float | None
    share: float = 0.0
    recipes: tuple[str, ...] = ()
    reason: str = ""


def severity_of(recipe: Recipe, config: GPTConfig, law: Law) -> RecipeSeverity:
    """The severity of a recipe for a model of this shape: the mean of the severities of the blocks'
    linears, weighted by their work. A linear has the severity of the shipped recipe with the same
    quantizers."""
    recipe = recipe.model_copy(update=Recipe(name="").beside_linears)  # of linears alone
    # Emulation quantizes all layers of a recipe, whatever the hardware.
    plan = plan_for(config, recipe, Hardware("cpu"))
    shipped = _shipped(tuple(law.severities))
    blocks = sum(layer.work for layer in plan.layers if layer.name != "lm_head")
    total = share = 0.0
    recipes: dict[str, None] = {}
    for layer in plan.layers:
        if not layer.fp8 or layer.quantizers is None:
            continue
        if layer.name == "lm_head":
            return RecipeSeverity(value=None, reason="no source quantizes the head")
        table = _comparable(layer.quantizers)
        name = next((name for name in shipped if shipped[name] == table), None)
        if name is None:
            return RecipeSeverity(value=None, reason="no source trains with its quantizers")
        total += law.severities[name] * layer.work / blocks
        share += layer.fp8_work / blocks
        recipes[name] = None
    return RecipeSeverity(value=total, share=share, recipes=tuple(recipes))


@cache
def _shipped(names: tuple[str, ...]) -> dict[str, Quantizers]:
    """The quantizers of shipped recipes."""
    tables = {name: load_recipe(name).quantizers for name in names}
    return {name: _comparable(table) for name, table in tables.items() if table is not None}


def _comparable(table: Quantizers) -> Quantizers:
    """The quantizers without the details of an amax history, which severities do not depend on as
    far as is known."""
    usual = Quantizer()
    fields = {
        name: replace(
            quantizer, history_length=usual.history_length, amax_algorithm=usual.amax_algorithm
        )
        if isinstance(quantizer, Quantizer)
        else quantizer
        for name, quantizer in vars(table).items()
    }
    return Quantizers(**fields)
