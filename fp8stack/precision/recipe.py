"""Recipes: the requested numerics as data, independent of hardware.

A recipe has a quantizer for each operand of a linear's GEMMs, and may name layers that have other
quantizers. Recipes are read from `recipes/*.toml` or a user's file (docs/recipes.md lists the
keys). "auto" is a rule, not a recipe.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
from fp8stack.common.quantizer_table import OPERANDS, Quantizers
from fp8stack.precision.fp8_attention import FP8_ATTENTION

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPrecision = Literal["compute", "fp32", "mxfp8", "delayed", "current"]
ResidualDtype = Literal["fp32", "bf16"]
ElementFormat = Annotated[str, AfterValidator(lambda name: quantized_format(name).name)]
"""The name of a format of `ELEMENT_FORMATS`."""


@dataclass(frozen=True)
class BlockIndex:
    """A layer's block: its index, and the number of blocks."""

    index: int
    count: int


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


class LayerRule(BaseModel):
    """Quantizers for some layers, in place of the recipe's.

    Attributes:
        match: "head", "router", "first N blocks", "last N blocks", or a pattern of module paths.
        recipe: the name of these quantizers for messages.
        quantizers: None leaves the layers in the compute dtype.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str
    recipe: str = ""
    quantizers: Quantizers | None

    def matches(
        self, layer: str, block: BlockIndex | None, head: bool, router: bool = False
    ) -> bool:
        """Whether the rule applies to a layer; for the arguments see `Recipe.for_layer`."""
        if self.match == "head":
            return head
        if self.match == "router":
            return router
        if match := _IN_BLOCKS.fullmatch(self.match):
            count = int(match[2])
            if block is None:
                return False
            return (
                block.index < count if match[1] == "first" else block.index >= block.count - count
            )
        return fnmatch.fnmatchcase(layer, self.match)


_IN_BLOCKS = re.compile(r"(first|last) ([1-9]\d{0,5}) blocks?")


class Recipe(BaseModel):
    """A recipe with all references resolved.

    Attributes:
        name: the name of its file.
        description: one line.
        attention: the precision in which attention multiplies queries, keys and values: the compute
            dtype, float32, or FP8 with scales per block (mxfp8) or per tensor (delayed, current),
            which Transformer Engine supports on some GPUs.
        residual: the dtype of the residual stream and its gradient; the norms that read it compute
            in float32.
        compute_dtype: the precision of all GEMMs in a recipe without quantizers; with quantizers,
            of everything else, bf16 or fp32, None for what suits the machine.
        head: whether the layer that gives the logits is quantized.
        router: whether the layers that choose the experts of a mixture are quantized.
        exclude: patterns of the layers that stay in the compute dtype.
        exclude_first_blocks: the number of blocks at the start that stay in the compute dtype.
        exclude_last_blocks: the number of blocks at the end that stay in the compute dtype.
        quantizers: quantizers for layers without a rule; None in a recipe without FP8.
        layers: rules for layers; the first that matches a layer applies.
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
        """The settings for attention and the residual stream, by key."""
        return {"attention": self.attention, "residual": self.residual}

    @property
    def tables(self) -> tuple[Quantizers, ...]:
        """The distinct `Quantizers` that layers may have, beginning with the recipe's."""
        tables = (self.quantizers, *(rule.quantizers for rule in self.layers))
        return tuple(dict.fromkeys(table for table in tables if table is not None))

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
        """Attention's quantizers with scales from the amaxes of earlier passes, by operand (see
        `Fp8Attention.slots`).

        They take the history length, amax algorithm and margin of the recipe's delayed linears;
        without delayed linears only the newest amax counts, which is Transformer Engine's default.
        """
        if not self.fp8_attention:
            return {}
        kind = FP8_ATTENTION[self.attention]
        of_linears = (quantizer for table in self.tables for quantizer in table.each.values())
        newest = Quantizer(amax="delayed", history_length=1, amax_algorithm="most_recent")
        base = next((quantizer for quantizer in of_linears if quantizer.delayed), newest)
        return {
            operand: replace(base, format=kind.gradient_format if operand[0] == "d" else "e4m3")
            for operand in kind.slots
        }

    def for_layer(
        self,
        layer: str,
        block: BlockIndex | None,
        head: bool,
        router: bool = False,
        router_rules: Collection[LayerRule] = (),
    ) -> tuple[Quantizers | None, str, str]:
        """The quantizers that this recipe requests for a layer.

        Args:
            layer: the layer's module path, such as `blocks.0.mlp.up`.
            block: its place among the blocks, if it is in one.
            head: whether it gives the logits.
            router: whether it chooses the experts of a mixture.
            router_rules: the rules that a router follows without `router = true`, see
                `rules_of_routers`.

        Returns:
            The quantizers, their name for messages, and the reason if they are None.
        """
        assert self.quantizers is not None
        rules = router_rules if router and not self.router else self.layers
        rule = next((rule for rule in rules if rule.matches(layer, block, head, router)), None)
        if rule is None and head and not self.head:
            reason = "the recipe says head = false"
        elif rule is None and router and not self.router:
            reason = "a router: the recipe says router = false"
        elif not (reason := self._excluded(layer, block)) and rule is not None:
            if rule.quantizers is not None:
                return rule.quantizers, rule.recipe, ""
            reason = f"the recipe does not quantize '{rule.match}'"
        return None if reason else self.quantizers, self.name, reason

    def rules_of_routers(
        self, layers: Iterable[str], routers: Collection[str]
    ) -> tuple[LayerRule, ...]:
        """The rules that apply only to routers: `match = "router"`, and patterns that match no
        other layer. A pattern such as "*.mlp.*" is not meant for the router in the MLP.

        Args:
            layers: the module paths of all layers.
            routers: the paths of the layers that choose experts.
        """
        not_routers = [name for name in layers if name not in routers]
        return tuple(
            rule
            for rule in self.layers
            if rule.match != "head"
            and not _IN_BLOCKS.fullmatch(rule.match)
            and not fnmatch.filter(not_routers, rule.match)
        )

    def _excluded(self, layer: str, block: BlockIndex | None) -> str:
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
        blocks: Mapping[str, BlockIndex],
        heads: Iterable[str],
        routers: Collection[str] = (),
    ) -> None:
        """Check that every exclusion and every rule matches a layer of a model.

        Raises:
            UserError: a pattern or rule matches no layer, or names more blocks than there are.
        """
        names, heads = list(layers), set(heads)
        block_counts = {
            f"'{rule.match}'": int(match[2])
            for rule in self.layers
            if (match := _IN_BLOCKS.fullmatch(rule.match))
        }
        for key in ("exclude_first_blocks", "exclude_last_blocks"):
            if count := getattr(self, key):
                block_counts[f"{key} = {count}"] = count
        most = max((block.count for block in blocks.values()), default=0)
        for setting, count in block_counts.items():
            if not blocks:
                raise UserError(
                    f"recipe '{self.name}': {setting} needs a model with numbered blocks, such as "
                    "'blocks.0.mlp.up'. Use exclude instead."
                )
            if count > most:
                raise UserError(
                    f"recipe '{self.name}': {setting}, and the model has {_blocks(most)}. Give "
                    f"{most} at most."
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
        """The recipe as JSON data, which `recipe_from_json` reads. Without `words` it has only the
        keys that affect numbers."""
        data = self.model_dump(mode="json", exclude=None if words else {"name", "description"})
        if not words:
            for rule in data["layers"]:
                del rule["recipe"]
        return data


class _Fields(BaseModel):
    """The keys of a quantizer that are short forms of a recipe too: in a recipe, a key sets the
    field of all quantizers that have it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    scale_rounding: ScaleRounding | None = None
    history_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    amax_algorithm: AmaxAlgorithm | None = None
    margin: Annotated[int, Field(ge=-64, le=64)] | None = None
    eps: Annotated[float, Field(ge=0)] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    hadamard: Literal[0, 16, 32] | None = None


class QuantizerFields(_Fields):
    """The keys of a quantizer in a recipe's file."""

    format: ElementFormat | None = None
    block: Annotated[BlockSize | None, PlainValidator(known_block)] = None
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
    """The keys that a recipe's file shares with its `[[layers]]`: tables of quantizers, and short
    forms."""

    quantizer: QuantizerFields | None = None
    input: _Input | Literal["none"] | None = None
    weight: _Weight | Literal["none"] | None = None
    grad_output: _GradOutput | Literal["none"] | None = None
    backward: Annotated[str, Field(min_length=1)] | None = None
    forward_format: ElementFormat | None = None
    backward_format: ElementFormat | None = None
    power_of_two: bool | None = None


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
    where, above = f"recipe '{stem}'", (*above, name)
    recipe = _expanded({"name": stem, **table}, where, above)
    # Overrides act as a file that is `like` the recipe, so they apply after all of its keys.
    if overrides:
        if "like" in overrides:
            raise UserError(f"recipe '{stem}': like cannot be overridden. Name that recipe.")
        recipe = _changed(recipe, {"name": recipe.name, **overrides}, where, above)
    return recipe


def recipe_from_json(data: Mapping[str, Any], where: str) -> Recipe:
    """The recipe in the JSON data from `Recipe.to_json`, also of older versions.

    Raises:
        UserError: `data` is no recipe; the message names `where` it was read.
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
    """The shipped recipe that computes in `compute_dtype`, with the settings of `instead_of` for
    attention and the residual stream."""
    return load_recipe(compute_dtype, instead_of.beside_linears)


_NO_RECIPE = Recipe(name="")
_CHANGED = ", changed"
# The keys of a file that are copied unchanged.
_PLAIN_KEYS = Recipe.model_fields.keys() - {"name", "quantizers", "layers"}


def _expanded(table: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Recipe:
    """The recipe of a file's `table`, with the recipes that it refers to."""
    base = table.get("like")
    start = _shipped(base, where, above) if isinstance(base, str) else _NO_RECIPE
    return _changed(start, table, where, above)


def _shipped(name: str, where: str, above: tuple[str, ...]) -> Recipe:
    """A shipped recipe that a file refers to. References to other files are errors, so that a file
    can be moved."""
    if name.endswith(".toml") or "/" in name or "\\" in name:
        raise UserError(
            f"{where}: '{quoted(name)}' is a file. Name a recipe that ships, and change its keys."
        )
    try:
        return _load(name, None, above)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _changed(start: Recipe, table: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Recipe:
    """The recipe `start` with the keys of `table`, which has the form of a file, applied."""
    file: RecipeFile = presets.parse(RecipeFile, dict(table), where)
    quantizers = _with_tables(start.quantizers, file, where, above)
    values = {key: getattr(file, key) for key in _PLAIN_KEYS}
    values = {key: value for key, value in values.items() if value not in (None, "")}
    recipe = start.model_copy(update={**values, "name": file.name, "quantizers": quantizers})
    if "layers" in file.model_fields_set:
        rules = tuple(
            _rule(entry, recipe, f"{where}: layers entry {place}", above)
            for place, entry in enumerate(file.layers, 1)
        )
        recipe = recipe.model_copy(update={"layers": rules})
    elif quantizers != start.quantizers and any(_CHANGED in rule.recipe for rule in start.layers):
        raise UserError(
            f"{where}: its layers have quantizers of their own. Write the recipe's layers again."
        )
    _require_sound(recipe, where)
    return recipe


def _rule(entry: _Entry, recipe: Recipe, where: str, above: tuple[str, ...]) -> LayerRule:
    """The rule of an entry of `[[layers]]` in a file whose other keys give `recipe`."""
    base = recipe if entry.recipe is None else _shipped(entry.recipe, where, above)
    if base.quantizers is None and base.compute_dtype not in ("bf16", None):
        raise UserError(
            f"{where}: layers are not in {base.name} by themselves. Use recipe = 'bf16', which "
            "leaves them in the compute dtype."
        )
    quantizers = _with_tables(base.quantizers, entry, where, above)
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
    for place, match in enumerate(matches, 1):
        if match in matches[: place - 1] or match in recipe.exclude:
            raise UserError(
                f"{where}: layers entry {place}: '{match}' is said twice. Keep one of the two."
            )
    no_quantizer = recipe.quantizers is not None and not recipe.quantizers.each
    if no_quantizer or (recipe.quantizers is None and recipe.compute_dtype is None):
        raise UserError(
            f'{where}: it has no quantizer. Begin with a key like = "delayed", or give '
            "[quantizer], or compute_dtype for a recipe without."
        )
    of_blocks = recipe.exclude_first_blocks, recipe.exclude_last_blocks
    layer_keys = (recipe.layers, recipe.exclude, recipe.head, recipe.router, *of_blocks)
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


_PLACES = {
    "input": {"fprop": "input", "wgrad": "input_wgrad"},
    "weight": {"fprop": "weight", "dgrad": "weight_dgrad"},
    "grad_output": {"dgrad": "grad_output", "wgrad": "grad_output_wgrad"},
}
"""The fields of `Quantizers` that hold an operand's two copies, by the GEMM that takes them."""


def _with_tables(
    start: Quantizers | None, keys: _Tables, where: str, above: tuple[str, ...]
) -> Quantizers | None:
    """The quantizers `start` with the tables and short forms of `keys` applied."""
    short = {key: getattr(keys, key) for key in _SHORT if getattr(keys, key) is not None}
    operands = {name: getattr(keys, name) for name in OPERANDS if getattr(keys, name) is not None}
    if keys.quantizer is None and not operands and keys.backward is None and not short:
        return start
    copies: dict[str, Any] = {field: None for of in _PLACES.values() for field in of.values()}
    if start is not None:
        copies = {field: getattr(start, field) for field in copies}
    elif keys.quantizer is not None:
        copies = dict.fromkeys(copies, Quantizer())
    if keys.backward is not None and any(
        name == "grad_output" or (table != "none" and table.model_fields_set & _SECOND)
        for name, table in operands.items()
    ):
        raise UserError(
            f"{where}: backward = '{keys.backward}' stands for keys of the backward operands, "
            "which are given too. Leave one of the two out."
        )
    if keys.quantizer is not None:
        for field, quantizer in copies.items():
            if isinstance(quantizer, Quantizer):
                copies[field] = _replaced(quantizer, keys.quantizer.set, f"{where}: quantizer")
    for name, table in operands.items():
        _set_operand(copies, name, table, f"{where}: {name}")
    if keys.quantizer is not None:
        _require_use(keys.quantizer.set, copies, f"{where}: quantizer")
    for name, table in operands.items():
        if table != "none":
            of_operand = {field: copies[field] for field in _PLACES[name].values()}
            _require_use(table.set, of_operand, f"{where}: {name}")
            for gemm, field in _PLACES[name].items():
                nested = getattr(table, gemm)
                if nested is not None and not isinstance(nested, str):
                    _require_use(nested.set, {field: copies[field]}, f"{where}: {name}.{gemm}")
    if keys.backward in ("dequantized", "high_precision"):
        backward = "forward" if keys.backward == "dequantized" else None
        if any(isinstance(q, Quantizer) and q.delayed for q in copies.values()):
            raise UserError(f"{where}: backward = '{keys.backward}' is not for delayed scaling.")
        copies |= {"grad_output": None, "grad_output_wgrad": None}
        copies |= {"input_wgrad": backward, "weight_dgrad": backward}
    elif keys.backward not in (None, "same"):
        copies |= _backward_of(keys.backward, where, above)
    for key, value in short.items():
        _set_short(copies, key, value, where)
    try:
        return Quantizers(**copies)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error


def _backward_of(name: str, where: str, above: tuple[str, ...]) -> dict[str, Any]:
    """The quantizers of the recipe `name` for the backward pass, by field of `Quantizers`."""
    try:
        quantizers = _shipped(name, where, above).quantizers
    except UserError as error:
        raise UserError(
            f"{where}: backward = '{quoted(name)}': {error} Or high_precision, dequantized, same."
        ) from error
    if quantizers is None:
        raise UserError(
            f"{where}: backward = '{name}' has no quantizers. Use backward = 'high_precision'."
        )
    fields = ("grad_output", "grad_output_wgrad", "input_wgrad", "weight_dgrad")
    return {field: getattr(quantizers, field) for field in fields}


def _set_operand(copies: dict[str, Any], name: str, table: Any, where: str) -> None:
    """Apply an operand's table to both of its copies, then the nested table of each GEMM."""
    for gemm, field in _PLACES[name].items():
        nested = None if table == "none" else getattr(table, gemm)
        for fields, place in ((table, where), (nested, f"{where}.{gemm}")):
            if isinstance(fields, str):
                copies[field] = None if fields == "none" else fields
            elif fields is not None and fields.set:
                start = copies[field] if isinstance(copies[field], Quantizer) else Quantizer()
                copies[field] = _replaced(start, fields.set, place)


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
    # Only gradients, as in NVIDIA's recipe for NVFP4 and OCP MXFP4 training.
    "rounding": ("rounding", "is there", lambda field, _: field.startswith("grad_output")),
    "hadamard": ("hadamard", "has a copy for wgrad", lambda field, _: field.endswith("_wgrad")),
}
"""The short forms: the field of `Quantizer`, the condition on quantizers in words, for the error
that none satisfies it, and the condition on (field of `Quantizers`, quantizer)."""


_USED_WHERE = ("history_length", "amax_algorithm", "margin", "eps", "scale_rounding")


def _require_use(fields: Mapping[str, Any], copies: Mapping[str, Any], where: str) -> None:
    """Raise a UserError if one of the `fields` that a table sets is used by none of `copies`."""
    for key in (key for key in _USED_WHERE if key in fields):
        _, condition, applies = _SHORT[key]
        used = any(applies(field, q) for field, q in copies.items() if isinstance(q, Quantizer))
        if not used and fields[key] != getattr(Quantizer(), key):
            raise UserError(f"{where}: {key} changes nothing: no quantizer {condition}.")


def _set_short(copies: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the field of a short form in all quantizers that satisfy its condition."""
    name, condition, applies = _SHORT[key]
    if key == "power_of_two":
        value = "power_of_two" if value else "float32"
    fields = [f for f, q in copies.items() if isinstance(q, Quantizer) and applies(f, q)]
    if not fields:
        raise UserError(f"{where}: {key} changes nothing: no quantizer {condition}.")
    for field in fields:
        copies[field] = _replaced(copies[field], {name: value}, f"{where}: {key}")


def _replaced(quantizer: Quantizer, fields: Mapping[str, Any], where: str) -> Quantizer:
    try:
        return replace(quantizer, **fields)
    except ValueError as error:
        raise UserError(f"{where}: {str(error).rstrip('.')}.") from error
