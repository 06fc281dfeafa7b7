"""Recipe files: their keys, and reading a `Recipe` from them (docs/configuration.md).

A file begins with a shipped recipe (`like`) or with nothing. Its tables set fields of quantizers:
`[quantizer]` of all, `[input.wgrad]` of a single one. Short keys, such as `margin`, set a field of
every quantizer that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, field_validator

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.formats import (
    AmaxAlgorithm,
    BlockSize,
    Quantizer,
    ScaleFormat,
    ScaleRounding,
    known_block,
    quantized_format,
)
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision.recipe import (
    AttentionPrecision,
    ComputeDtype,
    LayerRule,
    Recipe,
    ResidualDtype,
)

ElementFormat = Annotated[str, AfterValidator(lambda name: quantized_format(name).name)]
"""The name of a format of `ELEMENT_FORMATS`."""


class _Shared(BaseModel):
    """The keys of a quantizer that are also short keys of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    scale_rounding: ScaleRounding | None = None
    history_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    amax_algorithm: AmaxAlgorithm | None = None
    margin: Annotated[int, Field(ge=-64, le=64)] | None = None


class QuantizerFields(_Shared):
    """The keys of a quantizer in a recipe's file."""

    format: ElementFormat | None = None
    block: Annotated[BlockSize | None, PlainValidator(known_block)] = None
    scale: ScaleFormat | None = None
    amax: Literal["current", "delayed"] | None = None
    eps: Annotated[float, Field(ge=0)] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    hadamard: Literal[0, 16, 32] | None = None

    @property
    def set(self) -> dict[str, Any]:
        """The fields of `Quantizer` that are set here."""
        names = (name for name in QuantizerFields.model_fields if name in self.model_fields_set)
        return {name: getattr(self, name) for name in names}


class _Input(QuantizerFields):
    fprop: QuantizerFields | Literal["none"] | None = None
    wgrad: QuantizerFields | Literal["none", "forward"] | None = None


class _Weight(QuantizerFields):
    fprop: QuantizerFields | Literal["none"] | None = None
    dgrad: QuantizerFields | Literal["none", "forward"] | None = None


class _GradOutput(QuantizerFields):
    dgrad: QuantizerFields | Literal["none"] | None = None
    wgrad: QuantizerFields | Literal["none"] | None = None


class _Tables(_Shared):
    """The keys that a recipe's file shares with its `[[layers]]`: tables of quantizers, and short
    keys."""

    quantizer: QuantizerFields | None = None
    input: _Input | Literal["none"] | None = None
    weight: _Weight | Literal["none"] | None = None
    grad_output: _GradOutput | Literal["none"] | None = None
    backward: Annotated[str, Field(min_length=1)] | None = None
    forward_format: ElementFormat | None = None
    backward_format: ElementFormat | None = None
    power_of_two: bool | None = None

    @property
    def tables(self) -> dict[str, Any]:
        """The tables of the file in the order in which they apply: general tables first."""
        tables = {}
        for path in _COPIES:
            name, _, gemm = path.partition(".")
            table = getattr(self, name)
            tables[path] = getattr(table, gemm, None) if gemm else table  # "none" has no GEMMs
        return {path: table for path, table in tables.items() if table is not None}

    @property
    def short(self) -> dict[str, Any]:
        """The short keys of the file."""
        return {key: getattr(self, key) for key in _SHORT if getattr(self, key) is not None}


class _Entry(_Tables):
    """An entry of `[[layers]]`."""

    match: Annotated[str, Field(min_length=1)]
    recipe: str | None = None


class RecipeFile(_Tables):
    """The keys of a recipe's file."""

    name: str
    description: str = ""
    like: str | None = None
    compute_dtype: ComputeDtype | None = None
    attention: AttentionPrecision | None = None
    residual: ResidualDtype | None = None
    head: bool | None = None
    router: bool | None = None
    exclude: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    exclude_first_blocks: Annotated[int, Field(ge=0)] | None = None
    exclude_last_blocks: Annotated[int, Field(ge=0)] | None = None
    layers: Annotated[tuple[_Entry, ...], Field(strict=False)] = ()

    @field_validator("exclude", mode="before")
    @classmethod
    def _listed(cls, exclude: object) -> object:
        return (exclude,) if isinstance(exclude, str) else exclude


def load_recipe(name: str, overrides: Mapping[str, object] | None = None) -> Recipe:
    """Load the recipe called `name`, or the TOML file at the path `name`.

    Args:
        name: a name or a path.
        overrides: keys that replace the recipe's.

    Raises:
        UserError: no such recipe or file, "auto", an unknown key, a value out of range.
    """
    if name == "auto":
        raise UserError(
            "recipe 'auto' is chosen by machine, and a recipe must be named here; fp8stack doctor "
            "shows what auto stands for."
        )
    stem, table = presets.read("recipes", name)
    where = f"recipe '{stem}'"
    recipe = _expanded({"name": stem, **table}, where)
    # Overrides act as a file that is `like` the recipe, so they apply after all of its keys.
    if overrides:
        if "like" in overrides:
            raise UserError(f"{where}: like cannot be overridden. Name that recipe.")
        recipe = _changed(recipe, {"name": recipe.name, **overrides}, where)
    return recipe


def recipe_from_json(data: Mapping[str, Any], where: str) -> Recipe:
    """Read a recipe from the JSON data of `Recipe.to_json`, also of older versions.

    Raises:
        UserError: `data` is no recipe; the message begins with `where`, the source of the data.
    """
    named = {"name": "", **data}
    if "quantizers" in data:
        recipe: Recipe = presets.parse(Recipe, named, where)
        unquantized = recipe.quantizers is None and recipe.compute_dtype is not None
        if not unquantized and (
            recipe.quantizers is None or not all(t.each for t in recipe.tables)
        ):
            raise UserError(f"{where}: a table of quantizers has no quantizer.")
        return recipe
    if (base := named.pop("scaling", "none")) != "none":  # before recipes had quantizers
        named["like"] = base
    if "eps" in named:
        named["quantizer"] = {"eps": named.pop("eps")}
    return _expanded(named, where)


def plain(compute_dtype: ComputeDtype, instead_of: Recipe) -> Recipe:
    """The shipped recipe that computes in `compute_dtype`, with the settings of `instead_of` for
    attention and the residual stream."""
    return load_recipe(compute_dtype, instead_of.beside_linears)


_NO_RECIPE = Recipe(name="")
_CHANGED = ", changed"
# The keys of a file that are copied unchanged.
_PLAIN_KEYS = Recipe.model_fields.keys() - {"name", "quantizers", "layers"}


def _expanded(table: Mapping[str, Any], where: str) -> Recipe:
    """The recipe of a file's `table`, with the recipes that it refers to."""
    base = table.get("like")
    start = _shipped(base, where) if isinstance(base, str) else _NO_RECIPE
    return _changed(start, table, where)


def _shipped(name: str, where: str) -> Recipe:
    """A shipped recipe that a file refers to. References to other files are errors, so that a file
    can be moved."""
    if name.endswith(".toml") or "/" in name or "\\" in name:
        raise UserError(
            f"{where}: '{quoted(name)}' is a file. Name a recipe that ships, and change its keys."
        )
    try:
        return load_recipe(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _changed(start: Recipe, table: Mapping[str, Any], where: str) -> Recipe:
    """Apply the keys of `table`, in the format of a file, to the recipe `start`."""
    file: RecipeFile = presets.parse(RecipeFile, dict(table), where)
    quantizers = _with_tables(start.quantizers, file, where)
    values = {key: getattr(file, key) for key in _PLAIN_KEYS}
    values = {key: value for key, value in values.items() if value not in (None, "")}
    recipe = start.model_copy(update={**values, "name": file.name, "quantizers": quantizers})
    if "layers" in file.model_fields_set:
        rules = tuple(
            _rule(entry, recipe, f"{where}: layers entry {position}")
            for position, entry in enumerate(file.layers, 1)
        )
        recipe = recipe.model_copy(update={"layers": rules})
    elif quantizers != start.quantizers and any(_CHANGED in rule.recipe for rule in start.layers):
        raise UserError(
            f"{where}: its layers have quantizers of their own. Write the recipe's layers again."
        )
    _require_sound(recipe, where)
    return recipe


def _rule(entry: _Entry, recipe: Recipe, where: str) -> LayerRule:
    """The rule for an entry of `[[layers]]` in a file whose other keys define `recipe`."""
    base = recipe if entry.recipe is None else _shipped(entry.recipe, where)
    if base.quantizers is None and base.compute_dtype not in ("bf16", None):
        raise UserError(
            f"{where}: layers are not in {base.name} by themselves. Use recipe = 'bf16', which "
            "leaves them in the compute dtype."
        )
    quantizers = _with_tables(base.quantizers, entry, where)
    changed = entry.recipe is None or quantizers != base.quantizers
    if entry.recipe is None and quantizers == recipe.quantizers:
        raise UserError(f"{where}: '{entry.match}' changes nothing. Give a recipe or a quantizer.")
    name = base.name + _CHANGED if changed else base.name
    if quantizers is not None and not quantizers.each:
        quantizers = None  # in the compute dtype
    return LayerRule(match=entry.match, recipe=name, quantizers=quantizers)


def _require_sound(recipe: Recipe, where: str) -> None:
    """Raise a UserError if keys of a recipe contradict each other or a required key is missing."""
    matches = [rule.match for rule in recipe.layers]
    for position, match in enumerate(matches, 1):
        if match in matches[: position - 1] or match in recipe.exclude:
            raise UserError(
                f"{where}: layers entry {position}: '{match}' is said twice. Keep one of the two."
            )
    no_quantizer = recipe.quantizers is not None and not recipe.quantizers.each
    if no_quantizer or (recipe.quantizers is None and recipe.compute_dtype is None):
        raise UserError(
            f'{where}: it has no quantizer. Begin with a key like = "delayed", or give '
            "[quantizer], or compute_dtype for a recipe without."
        )
    excluded_blocks = recipe.exclude_first_blocks, recipe.exclude_last_blocks
    layer_keys = (recipe.layers, recipe.exclude, recipe.head, recipe.router, *excluded_blocks)
    if recipe.quantizers is None and any(layer_keys):
        raise UserError(
            f"{where}: head, router, exclude, exclude_first_blocks, exclude_last_blocks and layers "
            "need quantizers, and it has none."
        )
    if recipe.quantizers is not None and recipe.compute_dtype not in (None, "bf16", "fp32"):
        raise UserError(
            f"{where}: beside quantizers, compute_dtype is bf16 or fp32, not "
            f"{recipe.compute_dtype}. Leave it out, and the plan chooses."
        )
    # torch has a single switch for TF32, which applies to all matrix products.
    if recipe.compute_dtype == "tf32" and recipe.attention == "fp32":
        raise UserError(
            f"{where}: attention = 'fp32' is not possible in tf32, which rounds all products. "
            "Use fp32, bf16 or a recipe with quantizers."
        )


_ALL = tuple(field.name for field in fields(Quantizers))
_COPIES: dict[str, tuple[str, ...]] = {
    "quantizer": _ALL,
    "input": ("input", "input_wgrad"),
    "input.fprop": ("input",),
    "input.wgrad": ("input_wgrad",),
    "weight": ("weight", "weight_dgrad"),
    "weight.fprop": ("weight",),
    "weight.dgrad": ("weight_dgrad",),
    "grad_output": ("grad_output", "grad_output_wgrad"),
    "grad_output.dgrad": ("grad_output",),
    "grad_output.wgrad": ("grad_output_wgrad",),
}
"""The fields of `Quantizers` that each table sets, in the order in which tables apply."""
_BACKWARD = ("input_wgrad", "weight_dgrad", *_COPIES["grad_output"])
_SHORT = {
    "forward_format": ("format", (*_COPIES["input"], *_COPIES["weight"])),
    "backward_format": ("format", _COPIES["grad_output"]),
    "power_of_two": ("scale", _ALL),
    **{key: (key, _ALL) for key in _Shared.model_fields},
}
"""For each short key, the field of a `Quantizer` that it sets, and the fields of `Quantizers` in
which it sets it."""


def _with_tables(start: Quantizers | None, keys: _Tables, where: str) -> Quantizers | None:
    """Apply the tables and short keys of `keys` to the quantizers `start`."""
    tables = keys.tables
    if not tables and keys.backward is None and not keys.short:
        return start
    new = Quantizer() if "quantizer" in tables else None
    copies: dict[str, Any] = {field: getattr(start, field, new) for field in _ALL}
    for path, table in tables.items():
        for field in _COPIES[path]:
            if path != "quantizer" or isinstance(copies[field], Quantizer):
                copies[field] = _with_table(copies[field], table, f"{where}: {path}")
    for path, table in tables.items():
        for key, value in getattr(table, "set", {}).items():
            if value != getattr(Quantizer(), key):
                _users(key, _COPIES[path], copies, f"{where}: {path}")
    if keys.backward is not None:
        if any(set(_COPIES[path]) <= set(_BACKWARD) for path in tables):
            raise UserError(
                f"{where}: backward = '{keys.backward}' stands for keys of the backward operands, "
                "which are given too. Leave one of the two out."
            )
        copies |= _backward(keys.backward, copies, where)
    for key, value in keys.short.items():
        name, copy_names = _SHORT[key]
        if key == "power_of_two":
            value = "power_of_two" if value else "float32"
        for field in _users(key, copy_names, copies, where):
            copies[field] = _replaced(copies[field], {name: value}, f"{where}: {key}")
    try:
        return Quantizers(**copies)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error


def _with_table(copy: Any, table: Any, where: str) -> Any:
    """Apply a table, "none" or "forward" to a field of `Quantizers`."""
    if isinstance(table, str):
        return None if table == "none" else table
    if not table.set:  # only tables of single GEMMs
        return copy
    return _replaced(copy if isinstance(copy, Quantizer) else Quantizer(), table.set, where)


def _users(key: str, copy_names: Iterable[str], copies: Mapping[str, Any], where: str) -> list[str]:
    """The `copy_names` whose quantizers a key affects. Raises a UserError if there are none."""
    users = [p for p in copy_names if isinstance(copies[p], Quantizer) and _uses(copies[p], key)]
    if not users:
        raise UserError(f"{where}: {key} changes nothing: no quantizer uses it. Leave it out.")
    return users


def _uses(quantizer: Quantizer, key: str) -> bool:
    """Whether a key affects a quantizer."""
    if key in ("history_length", "amax_algorithm", "margin"):
        return quantizer.delayed
    if key in ("eps", "power_of_two"):
        return not quantizer.delayed and quantizer.scale in ("float32", "power_of_two")
    return key != "scale_rounding" or quantizer.scale == "e8m0"


def _backward(name: str, copies: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The quantizers that `backward = name` sets, by field of `Quantizers`."""
    if name == "same":
        return {}
    if name in ("dequantized", "high_precision"):
        if any(isinstance(copy, Quantizer) and copy.delayed for copy in copies.values()):
            raise UserError(f"{where}: backward = '{name}' is not for delayed scaling.")
        values = "forward" if name == "dequantized" else None
        return dict.fromkeys(_BACKWARD) | {"input_wgrad": values, "weight_dgrad": values}
    try:
        quantizers = _shipped(name, where).quantizers
    except UserError as error:
        raise UserError(
            f"{where}: backward = '{quoted(name)}': {error} Or high_precision, dequantized, same."
        ) from error
    if quantizers is None:
        raise UserError(
            f"{where}: backward = '{name}' has no quantizers. Use backward = 'high_precision'."
        )
    return {field: getattr(quantizers, field) for field in _BACKWARD}


def _replaced(quantizer: Quantizer, changes: Mapping[str, Any], where: str) -> Quantizer:
    try:
        return replace(quantizer, **changes)
    except ValueError as error:
        raise UserError(f"{where}: {str(error).rstrip('.')}.") from error
