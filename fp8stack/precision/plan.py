"""What runs, layer by layer, and why: a `Plan`, made by `resolve`. Pure; no torch here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fp8stack.errors import UserError
from fp8stack.precision.gpus import find_gpu
from fp8stack.precision.profit import Shape, doubt
from fp8stack.precision.recipe import Block, ComputeDtype, PlainRecipe, Recipe, plain

BackendName = Literal["te", "torch", "emulate", "reference"]


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """How one linear layer runs: `precision` is the recipe's name or a compute dtype, `reason` says
    why it is not in FP8, `doubt` why one that is may gain nothing by it."""

    name: str
    in_features: int
    out_features: int
    fp8: bool
    precision: str
    reason: str = ""
    doubt: str = ""

    @property
    def sentence(self) -> str:
        """How the layer runs and why, where that is not in FP8."""
        return f"{self.name}: {self.precision}, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs, decided before the model is built.

    `asked` is the recipe's name as given ("auto" included), `recipe` the one that runs. `native`
    says whether the recipe as asked runs on the hardware's own units. `gpu` is the name of the GPU,
    whose rates say where FP8 pays. `layers` is filled by `for_layers`.
    """

    asked: str
    recipe: Recipe
    backend: BackendName
    native: bool
    device: str
    compute_dtype: ComputeDtype
    reasons: tuple[str, ...] = ()
    strict: bool = False
    gpu: str = ""
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
    def attention(self) -> ComputeDtype:
        """What queries, keys and values are multiplied in."""
        return "fp32" if self.recipe.attention == "fp32" else self.compute_dtype

    @property
    def loss_scaling(self) -> bool:
        """Whether gradients need a scaled loss: in fp16 alone, never in bf16 or FP8."""
        return self.compute_dtype == "fp16"

    @property
    def runs_fp8(self) -> bool:
        """Whether any layer is in FP8; before `for_layers`, whether the recipe is."""
        return self.is_fp8 and (not self.layers or any(layer.fp8 for layer in self.layers))

    @property
    def precision(self) -> str:
        """The active precision in a word, for the log line."""
        if not self.runs_fp8:
            return self.compute_dtype if self.is_fp8 else self.recipe.name
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
        *,
        tokens: int | None = None,
        measured: Mapping[Shape, float] | None = None,
    ) -> Plan:
        """This plan with a decision for every linear layer, `{module path: (in, out)}`.

        If "auto" chose an FP8 recipe and no layer is to run in it, the plan is the one without FP8.

        Args:
            shapes: the layers of a model, in the order of its forward pass.
            heads: which of them give logits; they run in FP8 only if the recipe says so.
            left_out: those that stay out of it for a reason of the caller's.
            otherwise: how a layer runs that is not in FP8, if not in the compute dtype.
            tokens: the rows of the GEMMs: tokens per micro-batch and rank. If given, `notes` names
                the layers in which native FP8 does not seem to pay on this GPU; where "auto" chose
                the recipe, they are not in FP8.
            measured: bf16's time / FP8's time on this machine, by the shape of the forward GEMM;
                what is not in it goes by the GPU's data sheet, if that is known.

        Raises:
            UserError: an exclusion matches no layer; under `strict`, a layer that the hardware
                cannot serve.
        """
        recipe = self.recipe
        blocks = block_indices(shapes)
        if not isinstance(recipe, PlainRecipe):
            self._check_exclusions(shapes, blocks)
        layers = []
        for name, shape in shapes.items():
            reason, doubted = (left_out or {}).get(name) or "", ""
            if not isinstance(recipe, PlainRecipe):
                reason = reason or recipe.excluded(name, blocks.get(name), name in heads) or ""
                reason = reason or self.unserved(name, shape)
                if tokens is not None and not reason:
                    doubted = self._doubt((tokens, *shape), measured or {})
            if doubted and self.asked == "auto":
                reason, doubted = f"FP8 does not pay for {doubted}", ""
            fp8 = self.is_fp8 and not reason
            without = otherwise if reason and otherwise is not None else self.compute_dtype
            layers.append(
                LayerPlan(
                    name=name,
                    in_features=shape[0],
                    out_features=shape[1],
                    fp8=fp8,
                    precision=recipe.name if fp8 else without,
                    reason=reason,
                    doubt=doubted,
                )
            )
        made = replace(self, layers=tuple(layers))
        if self.asked == "auto" and self.is_fp8 and layers and not made.runs_fp8:
            return made._without_fp8(left_out or {}).for_layers(shapes, heads, left_out, otherwise)
        said = set(self.reasons)
        new = [layer.sentence for layer in layers if layer.reason and layer.sentence not in said]
        return replace(made, reasons=(*self.reasons, *new))

    def _without_fp8(self, left_out: Collection[str]) -> Plan:
        """What "auto" would have chosen if it had known that no layer is to run in FP8."""
        dtype = self.compute_dtype
        why = f"auto stands for {self.recipe.name} here, and no layer would run in it: {dtype}"
        layers = (replace(la, precision=dtype) for la in self.layers if la.name not in left_out)
        return replace(
            self,
            recipe=plain(dtype, self.recipe.attention),
            backend="reference",
            native=True,
            reasons=(*self.reasons, why, *_grouped(layers)),
            layers=(),
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

    def unserved(self, name: str, shape: tuple[int, int]) -> str:
        """Why the hardware cannot run a layer of this shape in FP8; "" if it can.

        Raises:
            UserError: it cannot, under `strict`.
        """
        if self.backend == "emulate":
            return ""  # it pads
        for what, size in zip(("in", "out"), shape, strict=True):
            if size % self._multiple:
                why = f"{size} {what} features, not divisible by {self._multiple}"
                if self.strict:
                    raise UserError(f"--strict: {name} cannot run in FP8: {why}.")
                return why
        return ""

    def _doubt(self, shape: Shape, measured: Mapping[Shape, float]) -> str:
        """Why native FP8 does not seem to pay for a GEMM of this shape; "" if it does."""
        if self.device != "cuda" or self.backend not in ("te", "torch"):
            return ""  # emulated: it is for the numerics, not for speed
        return doubt(shape, self.scaling, find_gpu(self.gpu), measured)

    @property
    def notes(self) -> list[str]:
        """Where FP8 runs as asked and may gain nothing; what is the same in many blocks once."""
        count = sum(bool(layer.doubt) for layer in self.layers)
        kinds = "; ".join(f"{what}, {ones[0].doubt}" for what, ones in _alike(self.layers, "doubt"))
        return [f"FP8 may not pay in {count}/{len(self.layers)} layers: {kinds}"] if kinds else []

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
        if self.is_fp8 and not self.runs_fp8:
            how = "with no layer in FP8"
        asked = f"{self.asked} -> " if self.asked != self.recipe.name else ""
        lines = [f"plan: {asked}{self.recipe.name}, {how}, on {self.device}"]
        of_layers = {layer.sentence for layer in self.layers if layer.reason}
        lines += [f"  because {reason}" for reason in self.reasons if reason not in of_layers]
        why = _grouped(self.layers)
        if self.is_fp8 and self.layers:
            count = sum(layer.fp8 for layer in self.layers)
            told = f" ({'; '.join(why)})" if why else ""
            lines.append(f"FP8 layers {count}/{len(self.layers)}{told}")
        else:
            lines += [f"  {sentence}" for sentence in why]
        lines += [f"note: {note}" for note in self.notes]
        if self.attention != self.compute_dtype:
            lines.append(f"attention: {self.attention}, the recipe says so")
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
            "attention": self.attention,
            "loss_scaling": self.loss_scaling,
            "reasons": list(self.reasons),
            "notes": self.notes,
            "layers": [asdict(layer) for layer in self.layers],
        }


def _alike(layers: Iterable[LayerPlan], word: str) -> Iterator[tuple[str, list[LayerPlan]]]:
    """The layers that have a `word`, "reason" or "doubt", those that are the same in many blocks
    together, and how these are called."""
    same: dict[tuple[str, str, str], list[LayerPlan]] = {}
    for layer in layers:
        if why := getattr(layer, word):
            pattern = re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", layer.name)
            same.setdefault((pattern, layer.precision, why), []).append(layer)
    for (pattern, *_), group in same.items():
        yield (group[0].name if len(group) == 1 else f"{len(group)} layers {pattern}"), group


def _grouped(layers: Iterable[LayerPlan]) -> list[str]:
    """Why layers are not in FP8; what is the same in many blocks is said once."""
    return [replace(group[0], name=what).sentence for what, group in _alike(layers, "reason")]


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
