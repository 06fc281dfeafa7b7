"""The severity of a recipe for a model, layer by layer, without a trained model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fp8stack.analysis.forecast.law import Law
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.precision import Hardware, Recipe, load_recipe

HEAD = "lm_head"
PLAIN_BITS = 16.0
PASSES = "the share of each pass is NVFP4's, from forward-only runs of Quartet II"


@dataclass(frozen=True, kw_only=True)
class RecipeSeverity:
    """The severity of a recipe for a model.

    Attributes:
        value: relative to NVFP4 in all linears of the blocks; None if no source trains with the
            forward pass of a layer.
        share: the share of the blocks' linear work that takes quantized operands.
        head: the work of the head, if it is quantized, relative to the blocks'.
        recipes: the shipped recipes whose severities `value` is made of.
        notes: assumptions.
    """

    value: float | None
    share: float
    head: float
    recipes: tuple[str, ...]
    notes: tuple[str, ...]


def severity_of(recipe: Recipe, config: GPTConfig, law: Law) -> RecipeSeverity:
    """The severity of a recipe for a model of this shape: the mean of the layers' severities,
    weighted by their work. The head's is added, by its work times `law.head`."""
    recipe = recipe.model_copy(update=Recipe(name="").beside_linears)  # of linears alone
    # Emulation quantizes all layers of a recipe, whatever the hardware.
    plan = plan_for(config, recipe, Hardware("cpu"))
    blocks = sum(layer.work for layer in plan.layers if layer.name != HEAD)
    total: float | None = 0.0
    work = {True: 0.0, False: 0.0}  # quantized, by whether it is the head's
    recipes: dict[str, None] = {}
    notes: dict[str, None] = {}
    for layer in plan.layers:
        if layer.fp8 and layer.quantizers is not None:
            work[layer.name == HEAD] += layer.fp8_work / blocks
            severity = table_severity(layer.quantizers, law)
            if total is None or severity is None:
                total = None
                continue
            factor = law.head if layer.name == HEAD else 1.0
            total += factor * severity.value * layer.work / blocks
            recipes |= dict.fromkeys(severity.recipes)
            notes |= dict.fromkeys(severity.notes)
    return RecipeSeverity(
        value=total,
        share=work[False],
        head=work[True],
        recipes=tuple(recipes),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class TableSeverity:
    """The severity of the same quantizers in all linears of the blocks; for the attributes see
    `RecipeSeverity`."""

    value: float
    recipes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def table_severity(table: Quantizers, law: Law) -> TableSeverity | None:
    """The severity of a linear's quantizers: a shipped recipe's, or the sum over its GEMMs. A GEMM
    of the backward pass that is in no shipped recipe counts as the worst of its bits, or of the
    fewest bits that shipped recipes have. Returns None
    if the operands of the forward pass are quantized as in no shipped recipe."""
    shipped = _shipped(tuple(law.severities))
    table = _comparable(table)
    for name, shipped_table in shipped.items():
        if table == shipped_table:
            return TableSeverity(value=law.severities[name], recipes=(name,))
    bits = bits_of(table)
    backward = (1 - law.forward) / 2
    total, names, notes = 0.0, [], []
    for gemm, share in (("fprop", law.forward), ("dgrad", backward), ("wgrad", backward)):
        operands = table.values(gemm)
        if operands == (None, None):
            continue
        same = [name for name in shipped if shipped[name].values(gemm) == operands]
        if not same and gemm != "fprop":
            allowed = {name: bits_of(shipped[name])[gemm] for name in shipped}
            least = min(allowed.values())
            most = max((width for width in allowed.values() if width <= bits[gemm]), default=least)
            worst_first = sorted(shipped, key=lambda name: -law.severities[name])
            same = [name for name in worst_first if allowed[name] == most]
            notes.append(f"no source has its backward pass, which counts as {same[0]}'s")
        if not same:
            return None
        total += share * law.severities[same[0]]
        names.append(same[0])
    if set(names) != {"nvfp4"}:
        notes.append(PASSES)
    return TableSeverity(
        value=total, recipes=tuple(dict.fromkeys(names)), notes=tuple(dict.fromkeys(notes))
    )


def bits_of(table: Quantizers | None) -> dict[str, float]:
    """The bits of a linear's GEMMs, by name. A GEMM has the bits of its wider operand, which
    determines the rate of tensor cores. None is a linear that is not quantized."""

    def operand_bits(quantizer: Quantizer | None) -> float:
        return PLAIN_BITS if quantizer is None else float(quantizer.element.bits)

    gemms = Quantizers() if table is None else table
    return {gemm: max(map(operand_bits, gemms.values(gemm))) for gemm in gemms.gemms}


@cache
def _shipped(names: tuple[str, ...]) -> dict[str, Quantizers]:
    """The quantizers of recipes, recipes in both passes first."""
    tables = {name: load_recipe(name).quantizers for name in names}
    quantizers = {name: _comparable(table) for name, table in tables.items() if table is not None}
    return dict(sorted(quantizers.items(), key=lambda item: len(item[1].each), reverse=True))


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
