"""What runs, layer by layer, and why: a `Plan`, made by `resolve`. Pure; no torch here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fp8stack.errors import UserError
from fp8stack.precision.recipe import Block, ComputeDtype, PlainRecipe, Recipe

BackendName = Literal["te", "torch", "emulate", "reference"]


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """How one linear layer runs: `precision` is the recipe's name or a compute dtype."""

    name: str
    in_features: int
    out_features: int
    fp8: bool
    precision: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """How the layer runs and why, where that is not in FP8."""
        return f"{self.name}: {self.precision}, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs, decided before the model is built.

    `asked` is the recipe's name as given ("auto" included), `recipe` the one that runs. `native`
    says whether the recipe as asked runs on the hardware's own units. `layers` is filled by
    `for_layers`.
    """

    asked: str
    recipe: Recipe
    backend: BackendName
    native: bool
    device: str
    compute_dtype: ComputeDtype
    reasons: tuple[str, ...] = ()
    strict: bool = False
    layers: tuple[LayerPlan, ...] = field(default=())

    @property
    def scaling(self) -> str:
        """How FP8 operands are scaled: delayed, current, block, mxfp8, or none."""
        return self.recipe.scaling

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM takes FP8 operands."""
        return self.recipe.is_fp8

    @property
    def loss_scaling(self) -> bool:
        """Whether gradients need a scaled loss: in fp16 alone, never in bf16 or FP8."""
        return self.compute_dtype == "fp16"

    @property
    def precision(self) -> str:
        """The active precision in a word, for the log line."""
        return f"{self.recipe.name}-emulated" if self.backend == "emulate" else self.recipe.name

    @property
    def vocabulary_multiple(self) -> int:
        """What the vocabulary is padded to a multiple of, so that the head's GEMM is aligned."""
        if self.is_fp8:
            return self._multiple
        return 8 if self.compute_dtype in ("bf16", "fp16") else 1

    def for_layers(
        self,
        shapes: Mapping[str, tuple[int, int]],
        heads: Collection[str] = ("lm_head",),
        left_out: Mapping[str, str] | None = None,
        otherwise: str | None = None,
    ) -> Plan:
        """This plan with a decision for every linear layer, `{module path: (in, out)}`.

        Args:
            shapes: the layers of a model, in the order of its forward pass.
            heads: which of them give logits; they run in FP8 only if the recipe says so.
            left_out: those that stay out of it for a reason of the caller's.
            otherwise: how a layer runs that is not in FP8, if not in the compute dtype.

        Raises:
            UserError: an exclusion matches no layer; under `strict`, a layer that the hardware
                cannot serve.
        """
        if isinstance(self.recipe, PlainRecipe):
            return replace(self, layers=tuple(self._plain_layer(n, s) for n, s in shapes.items()))
        blocks = block_indices(shapes)
        self._check_exclusions(shapes, blocks)
        layers = []
        for name, shape in shapes.items():
            requested = (left_out or {}).get(name) or self.recipe.excluded(
                name, blocks.get(name), name in heads
            )
            unserved = None if requested else self._unserved(shape)
            if unserved and self.strict:
                raise UserError(f"--strict: {name} cannot run in FP8: {unserved}.")
            layer = self._plain_layer(name, shape, requested or unserved or "")
            if not layer.reason:
                layer = replace(layer, fp8=True, precision=self.recipe.name)
            elif otherwise is not None:
                layer = replace(layer, precision=otherwise)
            layers.append(layer)
        said = set(self.reasons)
        new = [layer.sentence for layer in layers if layer.reason and layer.sentence not in said]
        return replace(self, layers=tuple(layers), reasons=(*self.reasons, *new))

    def _plain_layer(self, name: str, shape: tuple[int, int], reason: str = "") -> LayerPlan:
        return LayerPlan(
            name=name,
            in_features=shape[0],
            out_features=shape[1],
            fp8=False,
            precision=self.compute_dtype,
            reason=reason,
        )

    def _check_exclusions(
        self, shapes: Mapping[str, tuple[int, int]], blocks: Mapping[str, Block]
    ) -> None:
        assert not isinstance(self.recipe, PlainRecipe)
        if not blocks and (self.recipe.exclude_first_blocks or self.recipe.exclude_last_blocks):
            raise UserError(
                f"recipe '{self.recipe.name}': exclude_first_blocks and exclude_last_blocks need a "
                "model with numbered blocks, such as 'blocks.0.mlp.up'. Use exclude instead."
            )
        for pattern in self.recipe.exclude:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
                raise UserError(
                    f"recipe '{self.recipe.name}': the pattern '{pattern}' in exclude matches no "
                    f"layer. Layers: {', '.join(shapes)}."
                )

    @property
    def _multiple(self) -> int:
        """What both sizes of a layer must be divisible by, for the FP8 GEMMs of the backend."""
        if self.scaling == "block" and self.backend == "torch":
            return 128
        return 32 if self.scaling == "mxfp8" else 16

    def _unserved(self, shape: tuple[int, int]) -> str | None:
        """Why the hardware cannot run a layer of this shape in FP8, or None."""
        if self.backend == "emulate":
            return None  # it pads
        for what, size in zip(("in", "out"), shape, strict=True):
            if size % self._multiple:
                return f"{size} {what} features, not divisible by {self._multiple}"
        return None

    def layer(self, name: str) -> LayerPlan:
        """The decision for the layer called `name`."""
        return next(layer for layer in self.layers if layer.name == name)

    def summary(self) -> list[str]:
        """The plan in a few lines, as it is printed at start."""
        how = {
            "reference": "plain torch",
            "emulate": f"emulated by {self.compute_dtype} GEMMs on the exact operands",
            "torch": "FP8 GEMMs by torch's scaled_mm",
            "te": "FP8 GEMMs by Transformer Engine",
        }[self.backend]
        asked = f"{self.asked} -> " if self.asked != self.recipe.name else ""
        lines = [f"plan: {asked}{self.recipe.name}, {how}, on {self.device}"]
        others = [layer for layer in self.layers if layer.reason]
        of_layers = {layer.sentence for layer in others}
        lines += [f"  because {reason}" for reason in self.reasons if reason not in of_layers]
        if self.is_fp8 and self.layers:
            why = "; ".join(layer.sentence for layer in others)
            count = len(self.layers) - len(others)
            lines.append(f"FP8 layers {count}/{len(self.layers)}" + (f" ({why})" if why else ""))
        return lines

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data: it is stored with every run and checkpoint."""
        return {
            "asked": self.asked,
            "recipe": self.recipe.model_dump(mode="json"),
            "backend": self.backend,
            "native": self.native,
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "loss_scaling": self.loss_scaling,
            "reasons": list(self.reasons),
            "layers": [asdict(layer) for layer in self.layers],
        }


def block_indices(names: Iterable[str]) -> dict[str, Block]:
    """The place of each layer in its list of blocks, for the layers that are in one.

    A list is what two or more blocks have before their number: `blocks` in `blocks.3.mlp.up`,
    `transformer.h` in GPT-2's `transformer.h.3.attn.c_attn`. An encoder and a decoder are two.
    """
    found = {name: match for name in names if (match := re.match(r"(.*?)(?:^|\.)(\d+)\.", name))}
    lists: dict[str, set[int]] = {}
    for match in found.values():
        lists.setdefault(match[1], set()).add(int(match[2]))
    return {
        name: Block(int(match[2]), max(lists[match[1]]) + 1)
        for name, match in found.items()
        if len(lists[match[1]]) > 1 or len(lists) == 1
    }
