"""What runs, layer by layer, and why: a `Plan`, made by `resolve`. Pure; no torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8stack.errors import UserError
from fp8stack.formats import Quantizers
from fp8stack.precision.gpus import find_gpu
from fp8stack.precision.kernels import KERNELS, feature_multiple, kernel_of
from fp8stack.precision.profit import Shape, doubt
from fp8stack.precision.recipe import Block, ComputeDtype, Recipe, plain

BackendName = Literal["te", "torch", "emulate", "reference"]


class OfBackend(str):
    """A reason of a plan that says why a backend runs FP8, or how: moot without layers in FP8."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """How one linear layer runs: `precision` is the recipe's name or a compute dtype, `reason` says
    why it is not quantized, `doubt` why one that is may gain nothing by it. `fp8` says whether it
    is, `quantizers` by what, `backend` who multiplies it, if not the plan's, and `why` not.
    `active` is the share of tokens that the layer multiplies, less than 1 for an expert's."""

    name: str
    in_features: int
    out_features: int
    fp8: bool
    precision: str
    reason: str = ""
    doubt: str = ""
    quantizers: Quantizers | None = None
    backend: BackendName | None = None
    why: str = ""
    active: float = 1.0

    @property
    def work(self) -> float:
        """Multiplications per token in each of the layer's three GEMMs."""
        return self.in_features * self.out_features * self.active

    @property
    def fp8_work(self) -> float:
        """`work` times the share of the three GEMMs that take quantized operands."""
        gemms = {} if self.quantizers is None else self.quantizers.gemms
        return self.work * sum(None not in operands for operands in gemms.values()) / 3

    @property
    def sentence(self) -> str:
        """How the layer runs and why, where that is not as the plan has it."""
        return f"{self.name}: {self.precision}, {self.reason or self.why}"

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON data; the quantizers are in the plan's recipe."""
        left_out = {"quantizers"} if self.backend else {"quantizers", "backend", "why"}
        left_out |= {"active"} if self.active == 1 else set()
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs, decided before the model is built.

    `asked` is the recipe's name as given ("auto" included), `recipe` the one that runs. `native`
    says whether the recipe as asked runs on the hardware's own units. `gpu` is the name of the GPU,
    whose rates say where FP8 pays. `others` are tables of quantizers that some layers have and
    `backend` does not serve, each with who does and why. `layers` is filled by `for_layers`.
    `beside_work` counts multiplications per token with weights outside linears, such as experts in
    one tensor; `counted` says whether experts count by the tokens that they get (GEMM FLOPs), or,
    where that is not known, as if each got all tokens (GEMM weights).
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
    others: tuple[tuple[Quantizers, BackendName, str], ...] = ()
    layers: tuple[LayerPlan, ...] = field(default=())
    beside_work: float = 0
    counted: Literal["GEMM FLOPs", "GEMM weights"] = "GEMM FLOPs"

    @property
    def kernel(self) -> str | None:
        """The name in `KERNELS` of what multiplies the recipe's quantizers on some hardware."""
        return None if self.recipe.quantizers is None else kernel_of(self.recipe.quantizers)

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM takes quantized operands."""
        return self.recipe.is_fp8

    @property
    def tables(self) -> tuple[Quantizers, ...]:
        """The different tables of quantizers that layers have; before `for_layers`, may have."""
        if not self.layers:
            return self.recipe.tables
        return tuple(dict.fromkeys(la.quantizers for la in self.layers if la.quantizers))

    @property
    def delayed(self) -> bool:
        """Whether any scales of a layer or of attention come from the amaxes of earlier passes."""
        return any(table.delayed for table in self.tables) or bool(self.recipe.attention_slots)

    @property
    def attention(self) -> ComputeDtype:
        """The dtype of the queries, keys and values that attention is given."""
        return "fp32" if self.recipe.attention == "fp32" else self.compute_dtype

    @property
    def attention_precision(self) -> str:
        """What queries, keys and values are multiplied in."""
        return self.recipe.attention if self.recipe.fp8_attention else self.attention

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
    def units(self) -> str:
        """What its GEMMs take, as `Gpu.peak` has it: "fp8" or "fp4" where layers run natively in
        FP8 or FP4, else the compute dtype."""
        table = self.recipe.quantizers if self.runs_fp8 and self.native else None
        return f"fp{table.bits}" if table else self.compute_dtype

    @property
    def vocabulary_multiple(self) -> int:
        """What the vocabulary is padded to a multiple of, so that the head's GEMM is aligned."""
        if self.recipe.quantizers is not None:
            return feature_multiple(self.recipe.quantizers, self.backend)
        return 8 if self.compute_dtype in ("bf16", "fp16") else 1

    def for_layers(
        self,
        shapes: Mapping[str, tuple[int, int]],
        heads: Collection[str] = ("lm_head",),
        left_out: Mapping[str, str] | None = None,
        otherwise: str | None = None,
        *,
        routers: Collection[str] = (),
        tokens: int | None = None,
    ) -> Plan:
        """This plan with a decision for every linear layer, `{module path: (in, out)}`.

        If "auto" chose an FP8 recipe and no layer is to run in it, the plan is the one without FP8.

        Args:
            shapes: the layers of a model, in the order of its forward pass.
            heads: which of them give logits; they run in FP8 only if the recipe says so.
            left_out: those that stay out of it for a reason of the caller's.
            otherwise: how a layer runs that is not in FP8, if not in the compute dtype.
            routers: the layers that choose the experts of a mixture; they run in FP8 only if the
                recipe says so, and else as `otherwise` says, in recipes without FP8 too.
            tokens: the rows of the GEMMs: tokens per micro-batch and rank. If given, `notes` names
                the layers in which native FP8 does not seem to pay on this GPU; where "auto" chose
                the recipe, they are not in FP8. GPUs whose data sheet is not known are not judged.

        Raises:
            UserError: an exclusion matches no layer; under `strict`, a layer that the hardware
                cannot serve.
        """
        recipe = self.recipe
        blocks = block_indices(shapes)
        if recipe.quantizers is not None:
            recipe.check_layers(shapes, blocks, heads, routers)
        router_rules = recipe.rules_of_routers(shapes, routers)
        layers = []
        for name, shape in shapes.items():
            reason, doubted = (left_out or {}).get(name) or "", ""
            quantizers, called = None, recipe.name
            if recipe.quantizers is not None and not reason:
                place = blocks.get(name), name in heads, name in routers
                quantizers, called, reason = recipe.for_layer(name, *place, router_rules)
            elif name in routers and not reason and self.compute_dtype in ("bf16", "fp16"):
                reason = "a router, which stays in the model's own precision"
            if quantizers is not None:
                reason = self.unserved(name, shape, quantizers)
                if tokens is not None and not reason:
                    doubted = self._doubt((tokens, *shape), quantizers)
            if doubted and self.asked == "auto":
                reason, doubted = f"FP8 does not pay for {doubted}", ""
            if reason:
                quantizers = None
            without = otherwise if reason and otherwise is not None else self.compute_dtype
            backend, why = self._served_by(quantizers)
            layers.append(
                LayerPlan(
                    name=name,
                    in_features=shape[0],
                    out_features=shape[1],
                    fp8=quantizers is not None,
                    precision=called if quantizers is not None else without,
                    reason=reason,
                    doubt=doubted,
                    quantizers=quantizers,
                    backend=backend,
                    why=why,
                )
            )
        made = replace(self, layers=tuple(layers))
        if self.asked == "auto" and self.is_fp8 and layers and not made.runs_fp8:
            return made._without_fp8(left_out or {}).for_layers(
                shapes, heads, left_out, otherwise, routers=routers
            )
        said = [one for one in self.reasons if made.runs_fp8 or not isinstance(one, OfBackend)]
        told = [layer.sentence for layer in layers if layer.reason or layer.why]
        new = [sentence for sentence in told if sentence not in said]
        return replace(made, reasons=(*said, *new))

    def _served_by(self, quantizers: Quantizers | None) -> tuple[BackendName | None, str]:
        """Who multiplies a layer of these quantizers, if not the plan's backend, and why."""
        return next(
            ((who, why) for table, who, why in self.others if table == quantizers), (None, "")
        )

    def _without_fp8(self, left_out: Collection[str]) -> Plan:
        """What "auto" would have chosen if it had known that no layer is to run in FP8."""
        dtype = self.compute_dtype
        why = f"auto stands for {self.recipe.name} here, and no layer would run in it: {dtype}"
        layers = (replace(la, precision=dtype) for la in self.layers if la.name not in left_out)
        return replace(
            self,
            recipe=plain(dtype, self.recipe),
            backend="reference",
            native=True,
            reasons=(*self.reasons, why, *_grouped(layers)),
            layers=(),
        )

    def unserved(self, name: str, shape: tuple[int, int], quantizers: Quantizers) -> str:
        """Why the hardware cannot run a layer of this shape in FP8; "" if it can.

        Raises:
            UserError: it cannot, under `strict`.
        """
        other, problem = self._served_by(quantizers)
        if other == "emulate" and self.strict:
            raise UserError(f"--strict: {name} does not run as asked: {problem}.")
        backend = other or self.backend
        if backend == "emulate":
            return ""  # it pads
        multiple = feature_multiple(quantizers, backend)
        for what, size in zip(("in", "out"), shape, strict=True):
            if size % multiple:
                why = f"{size} {what} features, not divisible by {multiple}"
                if self.strict:
                    raise UserError(f"--strict: {name} cannot run in FP8: {why}.")
                return why
        return ""

    def _doubt(self, shape: Shape, quantizers: Quantizers) -> str:
        """Why native FP8 does not seem to pay for a GEMM of this shape; "" if it does."""
        kernel = kernel_of(quantizers)
        backend = self._served_by(quantizers)[0] or self.backend
        if self.device != "cuda" or backend not in ("te", "torch") or kernel not in KERNELS:
            return ""  # emulated: it is for the numerics, not for speed
        return doubt(shape, quantizers, find_gpu(self.gpu))

    def runs(self, layer: LayerPlan) -> BackendName:
        """Who multiplies a layer."""
        return layer.backend or self.backend

    def holds(self, layer: LayerPlan) -> ComputeDtype:
        """What the emulator holds the operands of a quantized layer in: the compute dtype if their
        values are exact in it, on a GPU; else float32."""
        assert layer.quantizers is not None
        exact = layer.quantizers.exact_in_bf16
        return self.compute_dtype if exact and self.device != "cpu" else "fp32"

    @property
    def notes(self) -> list[str]:
        """Where FP8 runs as asked and may gain nothing; what is the same in many blocks once."""
        count = sum(bool(layer.doubt) for layer in self.layers)
        by_doubt: dict[str, list[str]] = {}
        for what, ones in _alike(self.layers, "doubt"):
            by_doubt.setdefault(ones[0].doubt, []).append(what)
        kinds = "; ".join(f"{', '.join(found)}, {why}" for why, found in by_doubt.items())
        return [f"FP8 may not pay in {count}/{len(self.layers)} layers: {kinds}"] if kinds else []

    def layer(self, name: str) -> LayerPlan:
        """The decision for the layer called `name`."""
        return next(layer for layer in self.layers if layer.name == name)

    def summary(self) -> list[str]:
        """The plan in a few lines, as it is printed at start."""
        bits = self.recipe.quantizers.bits if self.recipe.quantizers else 8
        how = {
            "reference": "plain torch",
            "emulate": f"emulated by {self.compute_dtype} GEMMs on the exact operands",
            "torch": f"FP{bits} GEMMs by torch's scaled_mm",
            "te": f"FP{bits} GEMMs by Transformer Engine",
        }[self.backend]
        if self.is_fp8 and not self.runs_fp8:
            how = "with no layer in FP8"
        asked = f"{self.asked} -> " if self.asked != self.recipe.name else ""
        lines = [f"plan: {asked}{self.recipe.name}, {how}, on {self.device}"]
        of_layers = {layer.sentence for layer in self.layers if layer.reason}
        lines += [f"  because {reason}" for reason in self.reasons if reason not in of_layers]
        why = _grouped(self.layers)
        if self.is_fp8 and self.layers:
            lines.append("; ".join([self._headline(), *why]))
        else:
            lines += [f"  {sentence}" for sentence in why]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, *self._beside_layers()]

    @property
    def fp8_share(self) -> float:
        """The share of the multiplications in GEMMs with weights that is in FP8: forward, and for
        the gradients of inputs and weights. Attention has no weights and does not count."""
        total = sum(layer.work for layer in self.layers) + self.beside_work
        return sum(layer.fp8_work for layer in self.layers) / total if total else 0.0

    def _headline(self) -> str:
        percent = f"{100 * self.fp8_share:.0f}"
        if percent == "100" and self.fp8_share < 1:
            percent = ">99"
        if percent == "0" and self.fp8_share > 0:
            percent = "<1"
        count = sum(layer.fp8 for layer in self.layers)
        linears = f"{count} of {len(self.layers)} linear{'s' * (len(self.layers) != 1)}"
        return f"FP8: {percent} % of {self.counted} ({linears})"

    def _beside_layers(self) -> Iterator[str]:
        """What the recipe has in another precision than usual, beside linear layers."""
        if self.attention_precision != self.compute_dtype:
            yield f"attention: {self.attention_precision}, the recipe says so"
        if self.recipe.residual != "fp32":
            yield f"residual stream: {self.recipe.residual}, the recipe says so"

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data: it is stored with every run and checkpoint."""
        return {
            "asked": self.asked,
            "recipe": self.recipe.to_json(),
            "backend": self.backend,
            "native": self.native,
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "attention": self.attention_precision,
            "loss_scaling": self.loss_scaling,
            "reasons": [*self.reasons, *self._beside_layers()],
            "notes": self.notes,
            "layers": [layer.to_json() for layer in self.layers],
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
    counts = {before: max(numbers) + 1 for before, numbers in lists.items()}
    return {
        name: Block(int(match[2]), counts[match[1]])
        for name, match in found.items()
        if len(lists[match[1]]) > 1 or len(lists) == 1
    }
