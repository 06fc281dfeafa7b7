"""Recipes: the requested numerics as data, independent of hardware.

A recipe has a quantizer for each operand of a linear's GEMMs, and may have rules that give other
quantizers to some layers. `precision.recipe_file` reads recipes. "auto" is not a recipe.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision.fp8_attention import FP8_ATTENTION

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionPrecision = Literal["compute", "fp32", "mxfp8", "delayed", "current"]
ResidualDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class BlockIndex:
    """The index of a layer's block, and the number of blocks."""

    index: int
    count: int


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


class LayerRule(BaseModel):
    """Quantizers that replace the recipe's in some layers.

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
        compute_dtype: without quantizers, the precision of all GEMMs; with quantizers, the
            precision of everything else: bf16, fp32, or None for a choice by machine.
        head: whether the layer that computes the logits is quantized.
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
        quantizers = (quantizer for table in self.tables for quantizer in table.each.values())
        newest = Quantizer(amax="delayed", history_length=1, amax_algorithm="most_recent")
        base = next((quantizer for quantizer in quantizers if quantizer.delayed), newest)
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
            block: its block, if it is in one.
            head: whether it computes the logits.
            router: whether it chooses the experts of a mixture.
            router_rules: the rules for routers of a recipe without `router = true`, see
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
        other layer. A pattern such as "*.mlp.*" does not apply to the router in an MLP.

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
        if block is not None and block.index < self.exclude_first_blocks:
            return f"in the first {_blocks(self.exclude_first_blocks)}"
        if block is not None and block.index >= block.count - self.exclude_last_blocks:
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
                has = f"{setting}, and the model has {_blocks(most)}"
                raise UserError(f"recipe '{self.name}': {has}. Give {most} at most.")
        unmatched = [
            f"the pattern '{pattern}' in exclude"
            for pattern in self.exclude
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        for position, rule in enumerate(self.layers, 1):
            if not any(rule.matches(n, blocks.get(n), n in heads, n in routers) for n in names):
                unmatched.append(f"layers entry {position}: '{rule.match}'")
        if unmatched:
            raise UserError(
                f"recipe '{self.name}': {unmatched[0]} matches no layer. Layers: "
                f"{', '.join(names)}."
            )

    def to_json(self, *, words: bool = True) -> dict[str, Any]:
        """The recipe as JSON data, which `recipe_from_json` reads. Without `words` it has only the
        keys that affect numbers."""
        data = self.model_dump(mode="json", exclude=None if words else {"name", "description"})
        if not words:
            for rule in data["layers"]:
                del rule["recipe"]
        return data
