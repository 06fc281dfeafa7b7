"""Recipes: what is asked of the numbers, as data. Nothing here knows what a machine can do.

`recipes/*.toml` are recipes; a user's own file is one too. "auto" is a rule, not a recipe.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fp8stack import presets
from fp8stack.formats import AmaxAlgorithm, Fp8Name, ScaleRounding

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionDtype = Literal["compute", "fp32"]


@dataclass(frozen=True)
class Block:
    """A layer's block: its index, and how many blocks there are."""

    index: int
    count: int


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


class _Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    description: str = ""
    attention: AttentionDtype = "compute"
    """What queries, keys and values are multiplied in: the compute dtype, or float32."""

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM of this recipe takes FP8 operands."""
        return True


class _Fp8(_Base):
    """What every FP8 recipe may leave out of FP8; such layers run in the compute dtype."""

    head: bool = False
    exclude: Annotated[tuple[str, ...], Field(strict=False)] = ()
    exclude_first_blocks: Annotated[int, Field(ge=0)] = 0
    exclude_last_blocks: Annotated[int, Field(ge=0)] = 0

    @field_validator("exclude", mode="before")
    @classmethod
    def _listed(cls, exclude: object) -> object:
        return (exclude,) if isinstance(exclude, str) else exclude

    def excluded(self, layer: str, block: Block | None, head: bool) -> str | None:
        """Why `layer` is not in FP8 by this recipe's own choice, or None.

        `layer` is a module path, such as `blocks.0.mlp.up`; `block` its place among the blocks, if
        it is in one; `head` whether it gives the logits.
        """
        if head and not self.head:
            return "the recipe says head = false"
        for pattern in self.exclude:
            if fnmatch.fnmatchcase(layer, pattern):
                return f"excluded by the pattern '{pattern}'"
        if block is not None:
            if block.index < self.exclude_first_blocks:
                return f"in the first {_blocks(self.exclude_first_blocks)}"
            if block.index >= block.count - self.exclude_last_blocks:
                return f"in the last {_blocks(self.exclude_last_blocks)}"
        return None


class _PerTensor(_Fp8):
    """One scale per tensor. HYBRID by default: E4M3 for x and w, E5M2 for gradients."""

    forward_format: Fp8Name = "e4m3"
    backward_format: Fp8Name = "e5m2"


class DelayedRecipe(_PerTensor):
    """The scale comes from the amaxes of earlier passes."""

    scaling: Literal["delayed"]
    margin: Annotated[int, Field(ge=-64, le=64)] = 0
    history_length: Annotated[int, Field(ge=1, le=2**20)] = 1024
    amax_algorithm: AmaxAlgorithm = "max"


class CurrentRecipe(_PerTensor):
    """The scale comes from the amax of the tensor itself."""

    scaling: Literal["current"]
    power_of_two: bool = False
    eps: Annotated[float, Field(ge=0)] = 0.0


class BlockRecipe(_Fp8):
    """One scale per 1x128 block of x and dy, and per 128x128 block of w; E4M3 throughout."""

    scaling: Literal["block"]
    power_of_two: bool = True


class Mxfp8Recipe(_Fp8):
    """One power-of-two scale per 32 elements along the reduction; E4M3 throughout."""

    scaling: Literal["mxfp8"]
    scale_rounding: ScaleRounding = "rceil"


class PlainRecipe(_Base):
    """No FP8: every GEMM in `compute_dtype`, with float32 master weights."""

    scaling: Literal["none"]
    compute_dtype: ComputeDtype

    @model_validator(mode="after")
    def _attention_can_be_exact(self) -> PlainRecipe:
        # The switch for TF32 is torch's, for all matrices of a model.
        if self.compute_dtype == "tf32" and self.attention == "fp32":
            raise ValueError(
                "attention = 'fp32' is not possible in tf32, which rounds all products. "
                "Use fp32, bf16 or an FP8 recipe."
            )
        return self

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM of this recipe takes FP8 operands."""
        return False


Fp8Recipe = DelayedRecipe | CurrentRecipe | BlockRecipe | Mxfp8Recipe
Recipe = Annotated[Fp8Recipe | PlainRecipe, Field(discriminator="scaling")]


def load_recipe(name: str, overrides: Mapping[str, object] | None = None) -> Recipe:
    """The recipe called `name`, or the one in the TOML file at the path `name`.

    Args:
        name: a name or a path.
        overrides: keys to change in it.

    Raises:
        UserError: no such recipe or file, an unknown key, a value out of range.
    """
    stem, table = presets.read("recipes", name)
    table = {"name": stem, **table, **(overrides or {})}
    recipe: Recipe = presets.parse(Recipe, table, f"recipe '{stem}'")
    return recipe


def plain(compute_dtype: ComputeDtype, attention: AttentionDtype = "compute") -> PlainRecipe:
    """The recipe without FP8 that computes in `compute_dtype`, which ships as a preset, with
    `attention` as another recipe asked for it."""
    recipe = load_recipe(compute_dtype, {"attention": attention})
    assert isinstance(recipe, PlainRecipe)
    return recipe
