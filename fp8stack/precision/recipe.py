"""Recipes: what is asked of the numbers, as data. Nothing here knows what a machine can do.

A recipe is a table of quantizers: one for each operand of a linear's GEMMs, and others for layers
that it names. `recipes/*.toml` are recipes; a user's own file is one too (docs/recipes.md has its
keys). "auto" is a rule, not a recipe.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fp8stack import presets
from fp8stack.errors import UserError, quoted
from fp8stack.formats import (
    OPERANDS,
    AmaxAlgorithm,
    FormatName,
    Quantizer,
    Quantizers,
    ScaleFormat,
    ScaleRounding,
)
from fp8stack.precision.attention import FP8_ATTENTION

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPrecision = Literal["compute", "fp32", "mxfp8", "delayed", "current"]
ResidualDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Block:
    """A layer's block: its index, and how many blocks there are."""

    index: int
    count: int


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


class LayerRule(BaseModel):
    """What some layers run in instead of the recipe's own quantizers.

    Attributes:
        match: "head", "router", "first N blocks", "last N blocks", or a pattern of module paths.
        recipe: the name of what they run in.
        quantizers: None leaves them in the compute dtype.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str
    recipe: str = ""
    quantizers: Quantizers | None

    def matches(self, layer: str, block: Block | None, head: bool, router: bool = False) -> bool:
        """Whether this is the rule of a layer; the arguments are those of `Recipe.for_layer`."""
        if self.match == "head":
            return head
        if self.match == "router":
            return router
        if found := _IN_BLOCKS.fullmatch(self.match):
            count = int(found[2])
            if block is None:
                return False
            return (
                block.index < count if found[1] == "first" else block.index >= block.count - count
            )
        return fnmatch.fnmatchcase(layer, self.match)


_IN_BLOCKS = re.compile(r"(first|last) ([1-9]\d{0,5}) blocks?")


class Recipe(BaseModel):
    """A recipe as it was read, with nothing left to look up.

    Attributes:
        name: its file's.
        description: in a line.
        attention: what queries, keys and values are multiplied in: the compute dtype, float32, or
            FP8 with scales per block (mxfp8) or tensor (delayed, current), which Transformer Engine
            has on some GPUs.
        residual: what the residual stream and its gradient are held in; the norms that read it
            compute in float32.
        compute_dtype: of a recipe without quantizers, what every GEMM computes in.
        head: whether the layer that gives the logits is quantized.
        router: whether the layers that choose the experts of a mixture are quantized.
        exclude: patterns of the layers that stay in the compute dtype.
        exclude_first_blocks: how many blocks do at the start of the model.
        exclude_last_blocks: how many at its end.
        quantizers: of every layer that no rule names; None for a recipe without.
        layers: rules, of which the first that matches a layer holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    description: str = ""
    attention: AttentionPrecision = "compute"
    residual: ResidualDtype = "fp32"
    compute_dtype: ComputeDtype | None = None
    head: bool = False
    router: bool = False
    exclude: tuple[str, ...] = ()
    exclude_first_blocks: Annotated[int, Field(ge=0)] = 0
    exclude_last_blocks: Annotated[int, Field(ge=0)] = 0
    quantizers: Quantizers | None = None
    layers: tuple[LayerRule, ...] = ()

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM of this recipe takes quantized operands."""
        return self.quantizers is not None

    @property
    def beside_linears(self) -> dict[str, str]:
        """What it says of other parts of a model than its linear layers, by key."""
        return {"attention": self.attention, "residual": self.residual}

    @property
    def tables(self) -> tuple[Quantizers, ...]:
        """The different tables of quantizers that its layers may have, its own first."""
        found = (self.quantizers, *(rule.quantizers for rule in self.layers))
        return tuple(dict.fromkeys(table for table in found if table is not None))

    @property
    def delayed(self) -> bool:
        """Whether any scale comes from the amaxes of earlier passes."""
        return any(table.delayed for table in self.tables) or bool(self.attention_slots)

    @property
    def fp8_attention(self) -> bool:
        """Whether attention multiplies in FP8."""
        return self.attention in FP8_ATTENTION

    @property
    def attention_slots(self) -> dict[str, Quantizer]:
        """The quantizers of attention whose scales come from the amaxes of earlier passes, by
        operand, see `Fp8Attention.slots`.

        Their history, algorithm and margin are those of the recipe's delayed linears; if it has
        none, the newest amax counts, which is Transformer Engine's default.
        """
        if not self.fp8_attention:
            return {}
        kind = FP8_ATTENTION[self.attention]
        each = (quantizer for table in self.tables for quantizer in table.each.values())
        newest = Quantizer(amax="delayed", history_length=1, amax_algorithm="most_recent")
        like = next((quantizer for quantizer in each if quantizer.delayed), newest)
        return {
            operand: replace(like, format=kind.gradient_format if operand[0] == "d" else "e4m3")
            for operand in kind.slots
        }

    def for_layer(
        self,
        layer: str,
        block: Block | None,
        head: bool,
        router: bool = False,
        router_rules: Collection[LayerRule] = (),
    ) -> tuple[Quantizers | None, str, str]:
        """What this recipe asks for in one layer.

        Args:
            layer: its module path, such as `blocks.0.mlp.up`.
            block: its place among the blocks, if it is in one.
            head: whether it gives the logits.
            router: whether it chooses the experts of a mixture.
            router_rules: the rules that a router follows without `router = true`, see
                `rules_of_routers`.

        Returns:
            Its quantizers and what they are called, and a reason if it has none.
        """
        assert self.quantizers is not None
        rules = router_rules if router and not self.router else self.layers
        rule = next((rule for rule in rules if rule.matches(layer, block, head, router)), None)
        if rule is None and head and not self.head:
            why = "the recipe says head = false"
        elif rule is None and router and not self.router:
            why = "a router: the recipe says router = false"
        elif not (why := self._excluded(layer, block)) and rule is not None:
            if rule.quantizers is not None:
                return rule.quantizers, rule.recipe, ""
            why = f"the recipe does not quantize '{rule.match}'"
        return None if why else self.quantizers, self.name, why

    def rules_of_routers(
        self, layers: Iterable[str], routers: Collection[str]
    ) -> tuple[LayerRule, ...]:
        """The rules that are about routers alone: `match = "router"`, and patterns that match no
        other layer. A pattern such as "*.mlp.*" is not meant for the router in the MLP.

        Args:
            layers: the module paths of all layers.
            routers: the paths of the layers that choose experts.
        """
        others = [name for name in layers if name not in routers]
        return tuple(
            rule
            for rule in self.layers
            if rule.match != "head"
            and not _IN_BLOCKS.fullmatch(rule.match)
            and not fnmatch.filter(others, rule.match)
        )

    def _excluded(self, layer: str, block: Block | None) -> str:
        for pattern in self.exclude:
            if fnmatch.fnmatchcase(layer, pattern):
                return f"excluded by the pattern '{pattern}'"
        if block is not None:
            if block.index < self.exclude_first_blocks:
                return f"in the first {_blocks(self.exclude_first_blocks)}"
            if block.index >= block.count - self.exclude_last_blocks:
                return f"in the last {_blocks(self.exclude_last_blocks)}"
        return ""

    def check_layers(
        self,
        layers: Iterable[str],
        blocks: Mapping[str, Block],
        heads: Iterable[str],
        routers: Collection[str] = (),
    ) -> None:
        """See that every exclusion and every rule speaks of some layer of a model, and of no more
        blocks than it has.

        Raises:
            UserError: one does not.
        """
        names, heads = list(layers), set(heads)
        matches = [rule.match for rule in self.layers]
        asked = {f"'{m}'": int(found[2]) for m in matches if (found := _IN_BLOCKS.fullmatch(m))}
        for key in ("exclude_first_blocks", "exclude_last_blocks"):
            if count := getattr(self, key):
                asked[f"{key} = {count}"] = count
        most = max((block.count for block in blocks.values()), default=0)
        for what, count in asked.items():
            if not blocks:
                raise UserError(
                    f"recipe '{self.name}': {what} needs a model with numbered blocks, such as "
                    "'blocks.0.mlp.up'. Use exclude instead."
                )
            if count > most:
                raise UserError(
                    f"recipe '{self.name}': {what}, and the model has {_blocks(most)}. Give {most} "
                    "at most."
                )
        for pattern in self.exclude:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"recipe '{self.name}': the pattern '{pattern}' in exclude matches no "
                    f"layer. Layers: {', '.join(names)}."
                )
        for place, rule in enumerate(self.layers, 1):
            if not any(
                rule.matches(name, blocks.get(name), name in heads, name in routers)
                for name in names
            ):
                raise UserError(
                    f"recipe '{self.name}': layers entry {place}: '{rule.match}' matches no layer. "
                    f"Layers: {', '.join(names)}."
                )

    def to_json(self, *, words: bool = True) -> dict[str, Any]:
        """The recipe as JSON data, which `recipe_from_json` reads; without `words`, what its
        numbers depend on alone."""
        told = self.model_dump(mode="json", exclude=None if words else {"name", "description"})
        if not words:
            for rule in told["layers"]:
                del rule["recipe"]
        return told


class _Fields(BaseModel):
    """The keys of a quantizer that are short forms of a recipe as well: there, each sets that field
    of all quantizers that have it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    scale_rounding: ScaleRounding | None = None
    history_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    amax_algorithm: AmaxAlgorithm | None = None
    margin: Annotated[int, Field(ge=-64, le=64)] | None = None
    eps: Annotated[float, Field(ge=0)] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    hadamard: Literal[0, 16, 32] | None = None


class QuantizerFields(_Fields):
    """The keys of a quantizer that a table of a recipe's file may set."""

    format: FormatName | None = None
    block: Literal["tensor", "row"] | Annotated[tuple[int, int], Field(strict=False)] | None = None
    scale: ScaleFormat | None = None
    amax: Literal["current", "delayed"] | None = None

    @property
    def set(self) -> dict[str, Any]:
        """The fields of `Quantizer` that are set here."""
        names = set(QuantizerFields.model_fields) & self.model_fields_set
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


class _Tables(_Fields):
    """What a recipe's file and its entries for layers have in common: tables of quantizers, and
    short forms."""

    quantizer: QuantizerFields | None = None
    input: _Input | Literal["none"] | None = None
    weight: _Weight | Literal["none"] | None = None
    grad_output: _GradOutput | Literal["none"] | None = None
    backward: Annotated[str, Field(min_length=1)] | None = None
    forward_format: FormatName | None = None
    backward_format: FormatName | None = None
    power_of_two: bool | None = None


class _Entry(_Tables):
    """One entry of `[[layers]]`."""

    match: Annotated[str, Field(min_length=1)]
    recipe: str | None = None


class RecipeFile(_Tables):
    """A recipe as it is written."""

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
    """The recipe called `name`, or the one in the TOML file at the path `name`.

    Args:
        name: a name or a path.
        overrides: keys to change in it.

    Raises:
        UserError: no such recipe or file, "auto", an unknown key, a value out of range.
    """
    return _load(name, overrides, ())


def _load(name: str, overrides: Mapping[str, object] | None, above: tuple[str, ...]) -> Recipe:
    if name == "auto":
        raise UserError(
            "recipe 'auto' is chosen by machine, and a recipe must be named here; fp8stack doctor "
            "shows what auto stands for."
        )
    stem, table = presets.read("recipes", name)
    if name in above:
        raise UserError(f"recipe '{stem}': it is like itself, by way of {', '.join(above)}.")
    made = _expanded({"name": stem, **table}, f"recipe '{stem}'", (*above, name))
    # Overrides are a recipe of their own, like the one that is named: what they set comes last.
    if overrides:
        if "like" in overrides:
            raise UserError(f"recipe '{stem}': like cannot be overridden. Name that recipe.")
        made = _changed(made, {"name": made.name, **overrides}, f"recipe '{stem}'", (*above, name))
    return made


def recipe_from_json(data: Mapping[str, Any], where: str) -> Recipe:
    """The recipe that `Recipe.to_json` gave, or an older version of this program.

    Raises:
        UserError: `where` holds no recipe.
    """
    named = {"name": "", **data}
    if "quantizers" in data:
        recipe: Recipe = presets.parse(Recipe, named, where)
        plain = recipe.quantizers is None and recipe.compute_dtype is not None
        if not plain and (recipe.quantizers is None or not all(t.each for t in recipe.tables)):
            raise UserError(f"{where}: a table of quantizers has no quantizer.")
        return recipe
    if (base := named.pop("scaling", "none")) != "none":  # before recipes had quantizers
        named["like"] = base
    return _expanded(named, where, ())


def plain(compute_dtype: ComputeDtype, instead_of: Recipe) -> Recipe:
    """The recipe without quantizers that computes in `compute_dtype`, which ships as a preset, with
    what another recipe says beside linear layers."""
    return load_recipe(compute_dtype, instead_of.beside_linears)


_NO_RECIPE = Recipe(name="")
_CHANGED = ", changed"
# What a recipe's file sets as it is.
_PLAIN_KEYS = Recipe.model_fields.keys() - {"name", "quantizers", "layers"}


def _expanded(table: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Recipe:
    """A recipe's file with everything that it refers to."""
    base = table.get("like")
    start = _shipped(base, where, above) if isinstance(base, str) else _NO_RECIPE
    return _changed(start, table, where, above)


def _shipped(name: str, where: str, above: tuple[str, ...]) -> Recipe:
    """Another recipe that a file refers to: one that ships, or the file could not be moved."""
    if name.endswith(".toml") or "/" in name or "\\" in name:
        raise UserError(
            f"{where}: '{quoted(name)}' is a file. Name a recipe that ships, and change its keys."
        )
    return _load(name, None, above)


def _changed(start: Recipe, table: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Recipe:
    """The recipe `start` with what `table`, in the form of a file, sets otherwise."""
    file: RecipeFile = presets.parse(RecipeFile, dict(table), where)
    quantizers = _with_tables(start.quantizers, file, where, above)
    told = {key: getattr(file, key) for key in _PLAIN_KEYS if getattr(file, key) not in (None, "")}
    made = start.model_copy(update={**told, "name": file.name, "quantizers": quantizers})
    if file.layers:
        rules = tuple(
            _rule(entry, made, f"{where}: layers entry {place}", above)
            for place, entry in enumerate(file.layers, 1)
        )
        made = made.model_copy(update={"layers": rules})
    elif quantizers != start.quantizers and any(_CHANGED in rule.recipe for rule in start.layers):
        raise UserError(
            f"{where}: its layers have quantizers of their own. Write the recipe's layers again."
        )
    _require_sound(made, where)
    return made


def _rule(entry: _Entry, recipe: Recipe, where: str, above: tuple[str, ...]) -> LayerRule:
    """An entry of `[[layers]]` with its quantizers."""
    other = recipe if entry.recipe is None else _shipped(entry.recipe, where, above)
    if other.quantizers is None and other.compute_dtype not in ("bf16", None):
        raise UserError(
            f"{where}: layers are not in {other.name} by themselves. Use recipe = 'bf16', which "
            "leaves them in the compute dtype."
        )
    quantizers = _with_tables(other.quantizers, entry, where, above)
    changed = entry.recipe is None or quantizers != other.quantizers
    if entry.recipe is None and quantizers == recipe.quantizers:
        raise UserError(f"{where}: '{entry.match}' changes nothing. Give a recipe or a quantizer.")
    name = other.name + _CHANGED if changed else other.name
    return LayerRule(match=entry.match, recipe=name, quantizers=quantizers)


def _require_sound(recipe: Recipe, where: str) -> None:
    """Refuse a recipe that says two things at once, or nothing."""
    matches = [rule.match for rule in recipe.layers]
    for place, match in enumerate(matches, 1):
        if match in matches[: place - 1] or match in recipe.exclude:
            raise UserError(
                f"{where}: layers entry {place}: '{match}' is said twice. Keep one of the two."
            )
    if recipe.quantizers is None and recipe.compute_dtype is None:
        raise UserError(
            f'{where}: it has no quantizer. Begin with a key like = "delayed", or give '
            "[quantizer], or compute_dtype for a recipe without."
        )
    layer_keys = (recipe.layers, recipe.exclude, recipe.head, recipe.router)
    if recipe.quantizers is None and any(layer_keys):
        raise UserError(
            f"{where}: head, router, exclude and layers need quantizers, and it has none."
        )
    if recipe.quantizers is not None and recipe.compute_dtype is not None:
        raise UserError(
            f"{where}: compute_dtype is for recipes without quantizers. Leave it out: the plan "
            "chooses what the layers that are not quantized compute in."
        )
    # The switch for TF32 is torch's, for all matrices of a model.
    if recipe.compute_dtype == "tf32" and recipe.attention == "fp32":
        raise UserError(
            f"{where}: attention = 'fp32' is not possible in tf32, which rounds all products. "
            "Use fp32, bf16 or a recipe with quantizers."
        )


_PLACES = {
    "input": {"fprop": "input", "wgrad": "input_wgrad"},
    "weight": {"fprop": "weight", "dgrad": "weight_dgrad"},
    "grad_output": {"dgrad": "grad_output", "wgrad": "grad_output_wgrad"},
}
"""The fields of `Quantizers` that hold an operand's two copies, by the GEMM that takes them."""


def _with_tables(
    start: Quantizers | None, told: _Tables, where: str, above: tuple[str, ...]
) -> Quantizers | None:
    """The quantizers `start` with what the tables and short forms of `told` set otherwise."""
    short = {key: getattr(told, key) for key in _SHORT if getattr(told, key) is not None}
    operands = {name: getattr(told, name) for name in OPERANDS if getattr(told, name) is not None}
    if told.quantizer is None and not operands and told.backward is None and not short:
        return start
    found: dict[str, Any] = {field: None for of in _PLACES.values() for field in of.values()}
    if start is not None:
        found = {field: getattr(start, field) for field in found}
    elif told.quantizer is not None:
        found = dict.fromkeys(found, Quantizer())
    if told.backward is not None and any(
        name == "grad_output" or (table != "none" and table.model_fields_set & _SECOND)
        for name, table in operands.items()
    ):
        raise UserError(
            f"{where}: backward = '{told.backward}' stands for keys of the backward operands, "
            "which are given too. Leave one of the two out."
        )
    if told.quantizer is not None:
        for field, quantizer in found.items():
            if isinstance(quantizer, Quantizer):
                found[field] = _replaced(quantizer, told.quantizer.set, f"{where}: quantizer")
    for name, table in operands.items():
        _set_operand(found, name, table, f"{where}: {name}")
    if told.backward in ("dequantized", "high_precision"):
        copies = "forward" if told.backward == "dequantized" else None
        if any(isinstance(q, Quantizer) and q.delayed for q in found.values()):
            raise UserError(f"{where}: backward = '{told.backward}' is not for delayed scaling.")
        found |= {"grad_output": None, "grad_output_wgrad": None}
        found |= {"input_wgrad": copies, "weight_dgrad": copies}
    elif told.backward not in (None, "same"):
        found |= _backward_of(told.backward, where, above)
    for key, value in short.items():
        _set_short(found, key, value, where)
    try:
        return Quantizers(**found)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error


def _backward_of(name: str, where: str, above: tuple[str, ...]) -> dict[str, Any]:
    """Another recipe's quantizers of the backward pass's operands, by field."""
    try:
        other = _shipped(name, where, above).quantizers
    except UserError as error:
        raise UserError(f"{where}: backward = '{quoted(name)}': {error}") from error
    if other is None:
        raise UserError(
            f"{where}: backward = '{name}' has no quantizers. Use backward = 'high_precision'."
        )
    fields = ("grad_output", "grad_output_wgrad", "input_wgrad", "weight_dgrad")
    return {field: getattr(other, field) for field in fields}


def _set_operand(found: dict[str, Any], name: str, table: Any, where: str) -> None:
    """Change both copies of an operand by its table, then each by the table within for its GEMM."""
    for gemm, field in _PLACES[name].items():
        own = None if table == "none" else getattr(table, gemm)
        for told, place in ((table, where), (own, f"{where}.{gemm}")):
            if isinstance(told, str):
                found[field] = None if told == "none" else told
            elif told is not None and told.set:
                given = found[field] if isinstance(found[field], Quantizer) else Quantizer()
                found[field] = _replaced(given, told.set, place)


_SECOND = {"wgrad", "dgrad"}

_Place = Callable[[str, Quantizer], bool]
_DELAYED: tuple[str, _Place] = ("has amax = 'delayed'", lambda _, q: q.delayed)
_FLOAT: tuple[str, _Place] = (
    "has amax = 'current' and a scale in float32",
    lambda _, q: not q.delayed and q.scale in ("float32", "power_of_two"),
)
_SHORT: dict[str, tuple[str, str, _Place]] = {
    "forward_format": (
        *("format", "of input or weight is there"),
        lambda field, _: not field.startswith("grad_output"),
    ),
    "backward_format": (
        *("format", "of grad_output is there"),
        lambda field, _: field.startswith("grad_output"),
    ),
    "history_length": ("history_length", *_DELAYED),
    "amax_algorithm": ("amax_algorithm", *_DELAYED),
    "margin": ("margin", *_DELAYED),
    "power_of_two": ("scale", *_FLOAT),
    "eps": ("eps", *_FLOAT),
    "scale_rounding": ("scale_rounding", "has scale = 'e8m0'", lambda _, q: q.scale == "e8m0"),
    # Gradients alone, as published: NVIDIA's recipe for NVFP4, and OCP MXFP4 training.
    "rounding": ("rounding", "is there", lambda field, _: field.startswith("grad_output")),
    "hadamard": ("hadamard", "has a copy for wgrad", lambda field, _: field.endswith("_wgrad")),
}
"""The short forms: the field that each sets, what no quantizer has where there is none to set it
in, and whether it speaks of the quantizer at a place."""


def _set_short(found: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one field of all quantizers that have it."""
    name, lacks, speaks_of = _SHORT[key]
    if key == "power_of_two":
        value = "power_of_two" if value else "float32"
    having = [f for f, q in found.items() if isinstance(q, Quantizer) and speaks_of(f, q)]
    if not having:
        raise UserError(f"{where}: {key} changes nothing: no quantizer {lacks}.")
    for field in having:
        found[field] = _replaced(found[field], {name: value}, f"{where}: {key}")


def _replaced(quantizer: Quantizer, fields: Mapping[str, Any], where: str) -> Quantizer:
    try:
        return replace(quantizer, **fields)
    except ValueError as error:
        raise UserError(f"{where}: {str(error).rstrip('.')}.") from error
