"""`Plan`: the backend and precision of each layer, with reasons. Pure; no torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from fp8stack.common.errors import UserError
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision.gpus import find_gpu
from fp8stack.precision.native_gemms import (
    feature_multiple,
    kernel_of,
    plain_grouped_gemms,
    plain_in_words,
    too_many_groups,
)
from fp8stack.precision.profit import Shape, doubt, host_doubt
from fp8stack.precision.recipe import BlockIndex, ComputeDtype, Recipe
from fp8stack.precision.recipe_file import plain

BackendName = Literal["te", "torch", "emulate", "reference"]
WIDE = 256
"""The number of features from which a CPU with bf16 instructions computes faster in bf16: measured
on an EPYC and a Xeon with AMX. At 128, steps take 5 to 15 % longer than in fp32."""


class OfBackend(str):
    """A reason for the choice of the FP8 backend, dropped from a plan without FP8 layers."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The decision for one linear layer, or a grouped one, which has a matrix for each group.

    Attributes:
        name: its module path.
        in_features: the number of input features.
        out_features: the number of output features.
        fp8: whether it is quantized.
        precision: the recipe's name, or a compute dtype.
        reason: why it is not quantized.
        doubt: why quantizing it may not pay.
        quantizers: the quantizers of its operands.
        backend: the backend that runs it, if not the plan's.
        why: why that backend and not the plan's, or why some of its GEMMs are emulated.
        active: the share of tokens that the layer processes, less than 1 in an expert; for a
            grouped linear, the mean share of a group.
        groups: the number of groups of a grouped linear, whose features are those of one group; 0
            for a linear.
        plain_gemms: the GEMMs that its backend, te or torch, does not multiply in FP8 or FP4, but
            in the compute dtype if that represents the values of their operands, else in float32.
    """

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
    groups: int = 0
    plain_gemms: tuple[str, ...] = ()

    @property
    def work(self) -> float:
        """Multiplications per token in each of the layer's three GEMMs, for all groups."""
        return self.in_features * self.out_features * self.active * (self.groups or 1)

    @property
    def fp8_work(self) -> float:
        """`work` times the share of the three GEMMs that take quantized operands."""
        gemms = {} if self.quantizers is None else self.quantizers.gemms
        return self.work * sum(None not in operands for operands in gemms.values()) / 3

    @property
    def emulated(self) -> Quantizers:
        """The quantizers of the GEMMs that are emulated, if any are."""
        assert self.quantizers is not None
        return self.quantizers.only(self.plain_gemms) if self.plain_gemms else self.quantizers

    @property
    def sentence(self) -> str:
        """The layer's precision and the reason that it differs from the plan's."""
        return f"{self.name}: {self.precision}, {self.reason or self.why}"

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON data; the quantizers are in the plan's recipe."""
        left_out = {"quantizers"} if self.backend else {"quantizers", "backend", "why"}
        left_out |= {"active"} if self.active == 1 else set()
        left_out |= {name for name in ("groups", "plain_gemms") if not getattr(self, name)}
        values = vars(self) | {"plain_gemms": list(self.plain_gemms)}
        return {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The precision and backend of a model, decided before it is built.

    Attributes:
        asked: the requested recipe's name, "auto" included.
        recipe: the recipe that runs.
        backend: the backend that runs it.
        native: whether the hardware's tensor cores support the requested recipe and run it.
        device: see `Hardware.device`.
        compute_dtype: the precision of everything that is not quantized.
        wide_dtype: the compute dtype, if most of the work is in wide layers, see `for_layers`; None
            if `compute_dtype` holds for all models.
        reasons: a sentence for each decision that differs from the request.
        strict: whether substitutions are errors.
        gpu: the name of the GPU, whose rates decide where FP8 pays.
        delegated: quantizers of layers that `backend` cannot run, each with the backend that runs
            these layers and the reason.
        ungrouped: quantizers whose grouped linears are emulated, each with the reason.
        plain_gemms: quantizers that torch runs, each with the GEMMs that are in no FP8 or FP4 and
            the reason, or "" if not both operands are quantized.
        slow_scaled_mm: whether float32 GEMMs replace torch's scaled ones that are slow on this CPU,
            see `Hardware.slow_scaled_mm`.
        float32_gemms: whether emulated GEMMs take float32 operands: on a GPU, torch multiplies
            bfloat16 matrices to float32 for certain on NVIDIA's alone.
        layers: the decisions for linear layers, see `for_layers`.
        doubt: why FP8 may not pay in the model.
        work_outside_linears: multiplications per token with weights outside linears, such as
            experts in one tensor.
        counted: "GEMM FLOPs" if experts are weighted by the tokens that they receive; "GEMM
            weights" if that number is unknown and each counts as if it received all tokens.
        has_quantized_weights: whether weights are those of a quantized folder, so that a GEMM of
            the forward pass counts as FP8 if its input is quantized.
    """

    asked: str
    recipe: Recipe
    backend: BackendName
    native: bool
    device: str
    compute_dtype: ComputeDtype
    wide_dtype: ComputeDtype | None = None
    reasons: tuple[str, ...] = ()
    strict: bool = False
    gpu: str = ""
    delegated: tuple[tuple[Quantizers, BackendName, str], ...] = ()
    ungrouped: tuple[tuple[Quantizers, str], ...] = ()
    plain_gemms: tuple[tuple[Quantizers, tuple[tuple[str, str], ...]], ...] = ()
    slow_scaled_mm: bool = False
    float32_gemms: bool = False
    layers: tuple[LayerPlan, ...] = field(default=())
    doubt: str = ""
    work_outside_linears: float = 0
    counted: Literal["GEMM FLOPs", "GEMM weights"] = "GEMM FLOPs"
    has_quantized_weights: bool = False

    @property
    def kernel(self) -> str | None:
        """The name in `KERNELS` of the GEMM for the recipe's quantizers; None without one."""
        return None if self.recipe.quantizers is None else kernel_of(self.recipe.quantizers)

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM takes quantized operands."""
        return self.recipe.is_fp8

    @property
    def tables(self) -> tuple[Quantizers, ...]:
        """The distinct `Quantizers` of the layers; before `for_layers`, the recipe's."""
        if not self.layers:
            return self.recipe.tables
        return tuple(dict.fromkeys(la.quantizers for la in self.layers if la.quantizers))

    @property
    def delayed(self) -> bool:
        """Whether a layer or attention derives scales from the amaxes of earlier passes."""
        return any(table.delayed for table in self.tables) or bool(self.recipe.attention_slots)

    @property
    def attention(self) -> ComputeDtype:
        """The dtype of the queries, keys and values that are passed to attention."""
        return "fp32" if self.recipe.attention == "fp32" else self.compute_dtype

    @property
    def attention_precision(self) -> str:
        """The precision in which attention multiplies queries, keys and values."""
        return self.recipe.attention if self.recipe.fp8_attention else self.attention

    @property
    def loss_scaling(self) -> bool:
        """Whether gradients need loss scaling: only in fp16."""
        return self.compute_dtype == "fp16"

    @property
    def runs_fp8(self) -> bool:
        """Whether any layer is in FP8; before `for_layers`, whether the recipe is."""
        return self.is_fp8 and (not self.layers or any(layer.fp8 for layer in self.layers))

    @property
    def precision(self) -> str:
        """The active precision as one word, for the log line."""
        if not self.runs_fp8:
            return self.compute_dtype if self.is_fp8 else self.recipe.name
        return f"{self.recipe.name}-emulated" if self.backend == "emulate" else self.recipe.name

    @property
    def units(self) -> str:
        """The operands of the GEMMs as an argument of `Gpu.peak`: "fp8" or "fp4" where layers run
        natively in FP8 or FP4, else the compute dtype."""
        table = self.recipe.quantizers if self.runs_fp8 and self.native else None
        return f"fp{self._native_bits(table)}" if table else self.compute_dtype

    def _native_bits(self, table: Quantizers) -> int:
        """The fewest bits of an element in the GEMMs that the backend multiplies as they are."""
        plain = dict(dict(self.plain_gemms).get(table, ()))
        native = [gemm for gemm in table.gemms if gemm not in plain]
        return (table.only(native) if native else table).bits

    @property
    def vocabulary_multiple(self) -> int:
        """The vocabulary is padded to a multiple of this, which aligns the head's GEMM."""
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
        grouped: Mapping[str, int] | None = None,
        tokens: int | None = None,
        compute_dtype: ComputeDtype | None = None,
    ) -> Plan:
        """This plan with a decision for every linear layer.

        If "auto" chose an FP8 recipe and no layer runs in it, returns the plan without FP8.

        Args:
            shapes: (in features, out features) of each layer by module path, in the order of the
                forward pass.
            heads: the layers that give logits; they run in FP8 only if the recipe enables it.
            left_out: layers that must not run in FP8, with the caller's reason.
            otherwise: the precision of layers that are not in FP8, by default the compute dtype.
            routers: the layers that choose the experts of a mixture; they run in FP8 only if the
                recipe enables it, else in `otherwise`, in recipes without FP8 too.
            grouped: the number of groups of each grouped linear, whose shape is one group's; they
                run in backends that have GEMMs for them, else they are emulated.
            tokens: the rows of the GEMMs: tokens per micro-batch and rank. If given, `notes` names
                the layers that native FP8 probably does not speed up on this GPU, or the model, if
                the host would launch torch's FP8 layers more slowly than the GPU computes; if
                "auto" chose the recipe, these layers are not in FP8. Requires the GPU's data sheet
                in `GPUS`.
            compute_dtype: the compute dtype of an emulated recipe, if it was decided before and
                the recipe does not set it.

        Raises:
            UserError: an exclusion matches no layer; under `strict`, the hardware cannot serve a
                layer.
        """
        if self.wide_dtype is not None or compute_dtype is not None:
            inner = {name: shapes[name] for name in shapes if name not in {*heads, *routers}}
            return self._with_dtype_for(inner, grouped or {}, compute_dtype).for_layers(
                shapes, heads, left_out, otherwise, routers=routers, grouped=grouped, tokens=tokens
            )
        recipe = self.recipe
        blocks = block_indices(shapes)
        if recipe.quantizers is not None:
            recipe.check_layers(shapes, blocks, heads, routers)
        router_rules = recipe.rules_of_routers(shapes, routers)
        layers = []
        for name, shape in shapes.items():
            reason, doubted = (left_out or {}).get(name) or "", ""
            quantizers, recipe_name = None, recipe.name
            if recipe.quantizers is not None and not reason:
                place = blocks.get(name), name in heads, name in routers
                quantizers, recipe_name, reason = recipe.for_layer(name, *place, router_rules)
            elif name in routers and not reason and self.compute_dtype in ("bf16", "fp16"):
                reason = "a router, which stays in the model's own precision"
            groups = (grouped or {}).get(name, 0)
            if quantizers is not None:
                reason = self.unserved(name, shape, quantizers, groups)
                if tokens is not None and not reason and not groups:
                    doubted = self._doubt((tokens, *shape), quantizers)
            if doubted and self.asked == "auto":
                reason, doubted = f"FP8 does not pay for {doubted}", ""
            if reason:
                quantizers = None
            without = otherwise if reason and otherwise is not None else self.compute_dtype
            backend, backend_reason, plain = self._served_by(quantizers, groups)
            layers.append(
                LayerPlan(
                    name=name,
                    in_features=shape[0],
                    out_features=shape[1],
                    fp8=quantizers is not None,
                    precision=recipe_name if quantizers is not None else without,
                    reason=reason,
                    doubt=doubted,
                    quantizers=quantizers,
                    backend=backend,
                    why=backend_reason,
                    groups=groups,
                    plain_gemms=plain,
                )
            )
        plan = replace(self, layers=tuple(layers), doubt="")
        if tokens is not None:
            plan = replace(plan, doubt=plan._host_doubt(tokens))
        serves = plan.runs_fp8 and not plan.doubt
        if self.asked == "auto" and self.is_fp8 and layers and not serves:
            return plan._without_fp8(left_out or {}).for_layers(
                shapes, heads, left_out, otherwise, routers=routers, grouped=grouped
            )
        reasons = [
            reason for reason in self.reasons if plan.runs_fp8 or not isinstance(reason, OfBackend)
        ]
        sentences = [layer.sentence for layer in layers if layer.reason or layer.why]
        new = [sentence for sentence in sentences if sentence not in reasons]
        return replace(plan, reasons=(*reasons, *new))

    def _with_dtype_for(
        self,
        shapes: Mapping[str, tuple[int, int]],
        grouped: Mapping[str, int],
        before: ComputeDtype | None,
    ) -> Plan:
        """The plan with the compute dtype for layers of these shapes, or with the one that was
        decided `before`, if it is free."""
        dtype, reason = self.compute_dtype, ""
        work = {name: prod(shape) * grouped.get(name, 1) for name, shape in shapes.items()}
        wide = sum(work[name] for name, shape in shapes.items() if min(shape) >= WIDE)
        if self.wide_dtype is not None and work and 2 * wide >= sum(work.values()):
            dtype = self.wide_dtype
            reason = f"for which this CPU has instructions: layers are {WIDE} wide or more"
            reason = f"computes in {dtype}, {reason}"
        free = self.backend == "emulate" and not self.recipe.compute_dtype and self.device == "cpu"
        if before not in (None, dtype) and free:
            dtype, reason = before, f"computes in {before} as it began; {dtype} is faster here"
        reasons = (*self.reasons, *([OfBackend(reason)] if reason else []))
        return replace(self, compute_dtype=dtype, wide_dtype=None, reasons=reasons)

    def _served_by(
        self, quantizers: Quantizers | None, groups: int = 0
    ) -> tuple[BackendName | None, str, tuple[str, ...]]:
        """The backend for a layer with these quantizers, None for the plan's backend; the reason
        for it, or for the GEMMs that are in no FP8; and these GEMMs. `groups` is the number of
        groups of a grouped linear."""
        if quantizers is None:
            return None, "", ()
        delegates = {table: (backend, reason) for table, backend, reason in self.delegated}
        backend, reason = delegates.get(quantizers, (None, ""))
        plain = of_linears = dict(dict(self.plain_gemms).get(quantizers, ()))
        if groups:
            problem = dict(self.ungrouped).get(quantizers, "")
            problem = problem or too_many_groups(backend or self.backend, groups)
            if problem:
                return "emulate", f"{problem}: emulated", ()
            plain = plain_grouped_gemms(backend or self.backend, quantizers)
        # The plan's reasons name those of linears with the recipe's own quantizers.
        if plain and not (quantizers == self.recipe.quantizers and plain == of_linears):
            words = plain_in_words(plain, self.compute_dtype)
            reason = "; ".join(filter(None, (reason, words)))
        return backend, reason, tuple(plain)

    def _without_fp8(self, left_out: Collection[str]) -> Plan:
        """The plan that "auto" gives if no layer can run in FP8, or if FP8 does not pay in the
        model."""
        dtype = self.compute_dtype
        reason = f"auto stands for {self.recipe.name} here, and no layer would run in it: {dtype}"
        layers = [replace(la, precision=dtype) for la in self.layers if la.name not in left_out]
        if self.doubt:
            name = self.recipe.name
            reason = f"auto is {dtype} and not {name}, which does not pay for {self.doubt}"
            layers = []
        return replace(
            self,
            recipe=plain(dtype, self.recipe),
            backend="reference",
            native=True,
            reasons=(*self.reasons, reason, *_grouped(layers)),
            layers=(),
            doubt="",
        )

    def unserved(
        self, name: str, shape: tuple[int, int], quantizers: Quantizers, groups: int = 0
    ) -> str:
        """The reason that the hardware cannot run a layer of this shape in FP8; "" if it can.
        `groups` is the number of groups of a grouped linear.

        Raises:
            UserError: it cannot, under `strict`.
        """
        delegate, problem, plain = self._served_by(quantizers, groups)
        if delegate == "emulate" and self.strict:
            raise UserError(f"--strict: {name} does not run as asked: {problem}.")
        backend = delegate or self.backend
        if backend == "emulate":
            return ""  # the emulator pads
        scaled = quantizers.only([gemm for gemm in quantizers.gemms if gemm not in plain])
        multiple = feature_multiple(scaled, backend)
        for side, size in zip(("in", "out"), shape, strict=True):
            if size % multiple:
                problem = f"{size} {side} features, not divisible by {multiple}"
                if self.strict:
                    raise UserError(f"--strict: {name} cannot run in FP8: {problem}.")
                return problem
        return ""

    def _doubt(self, shape: Shape, quantizers: Quantizers) -> str:
        """The reason that native FP8 probably does not speed up a GEMM of this shape, or ""."""
        backend, _, plain = self._served_by(quantizers)
        if self.device != "cuda" or (backend or self.backend) == "emulate":
            return ""  # emulation is for the numerics, not for speed
        gemms = len(quantizers.gemms) - len(plain)
        return doubt(shape, quantizers, find_gpu(self.gpu), gemms)

    def _host_doubt(self, tokens: int) -> str:
        """The reason that the host probably delays passes of so many tokens, or "". It counts the
        layers that torch multiplies in FP8 on a GPU."""
        by_torch = [la for la in self.layers if la.fp8 and self.backend_of(la) == "torch"]
        work = tokens * sum(layer.work for layer in self.layers)
        gpu = find_gpu(self.gpu) if self.device == "cuda" else None
        return host_doubt(work, len(self.layers), len(by_torch), gpu)

    def backend_of(self, layer: LayerPlan) -> BackendName:
        """The backend that runs `layer`."""
        return layer.backend or self.backend

    @property
    def emulated_layers(self) -> list[LayerPlan]:
        """The layers in FP8 whose GEMMs are emulated."""
        return [la for la in self.layers if la.fp8 and self.backend_of(la) == "emulate"]

    def emulated_dtype(self, layer: LayerPlan) -> ComputeDtype:
        """The dtype of a quantized layer's operands in emulated GEMMs: the compute dtype if it
        represents their values exactly and, on a CPU, the GEMMs may round to it; else float32."""
        quantizers = layer.emulated
        on_cpu = self.device == "cpu"
        exact = quantizers.by_bf16_gemms if on_cpu else quantizers.exact_in_bf16
        return self.compute_dtype if exact and not self.float32_gemms else "fp32"

    @property
    def notes(self) -> list[str]:
        """Notes on models and layers that run in FP8 although it may not be faster, and on emulated
        layers of sizes that a GPU's FP8 GEMMs do not take; layers that differ only in their block
        are listed once."""
        notes = [f"FP8 may not pay for {self.doubt}"] if self.doubt else []
        if kinds := _doubts(self.layers):
            count = sum(bool(layer.doubt) for layer in self.layers)
            notes.append(f"FP8 may not pay in {count}/{len(self.layers)} layers: {kinds}")
        odd = [replace(la, doubt=self._odd_size(la)) for la in self.layers]
        if kinds := _doubts(odd):
            notes.append(f"emulated here, but on a GPU not in {self.recipe.name}: {kinds}")
        return notes

    def _odd_size(self, layer: LayerPlan) -> str:
        """The reason that no GPU runs this layer, which a CPU emulates, in FP8; "" if one does."""
        quantizers = layer.quantizers
        emulated = self.device == "cpu" and self.backend_of(layer) == "emulate" and layer.fp8
        if not emulated or quantizers is None or layer.groups or kernel_of(quantizers) is None:
            return ""
        multiple = feature_multiple(quantizers, "te")
        sides = (("in", layer.in_features), ("out", layer.out_features))
        odd = [f"{size} {side} features" for side, size in sides if size % multiple]
        return f"{' and '.join(odd)}, not divisible by {multiple}" if odd else ""

    def layer(self, name: str) -> LayerPlan:
        """The decision for the layer `name`, or for the grouped linear of the group
        `<path>.<number>`."""
        path, _, number = name.rpartition(".")
        group_of = path if number.isdigit() else None
        return next(
            layer
            for layer in self.layers
            if layer.name == name or (layer.groups and layer.name == group_of)
        )

    def __str__(self) -> str:
        return "\n".join(self.summary())

    def summary(self, *, forward: bool = False) -> list[str]:
        """The plan in a few lines, as printed at the start of a run. With `forward`, the share of
        FP8 counts the GEMMs of a forward pass alone."""
        bits = self._native_bits(self.recipe.quantizers) if self.recipe.quantizers else 8
        emulated = "fp32" if self.float32_gemms else self.compute_dtype
        method = {
            "reference": "plain torch",
            "emulate": f"emulated by {emulated} GEMMs on the exact operands",
            "torch": f"FP{bits} GEMMs by torch's scaled_mm",
            "te": f"FP{bits} GEMMs by Transformer Engine",
        }[self.backend]
        if self.is_fp8 and not self.runs_fp8:
            method = f"with no layer in {self._formats}"
        request = f"{self.asked} -> " if self.asked != self.recipe.name else ""
        lines = [f"plan: {request}{self.recipe.name}, {method}, on {self.device}"]
        of_layers = {layer.sentence for layer in self.layers if layer.reason or layer.why}
        delegated = _grouped(self.layers, "why")
        reasons = [reason for reason in self.reasons if reason not in of_layers]
        lines += [f"  because {reason}" for reason in (*reasons, *delegated)]
        sentences = _grouped(self.layers)
        if self.is_fp8 and self.layers:
            lines.append("; ".join([self._headline(forward), *sentences]))
        else:
            lines += [f"  {sentence}" for sentence in sentences]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, *self._beside_layers()]

    @property
    def fp8_share(self) -> float:
        """The share of FP8 in the multiplications of all GEMMs with weights, in the forward and
        backward pass. Attention has no weights and does not count."""
        return self._share_of(sum(layer.fp8_work for layer in self.layers))

    @property
    def forward_share(self) -> float:
        """The share of FP8 in the forward pass alone, see `fp8_share`."""
        in_fp8 = 0.0
        for layer in self.layers:
            table = layer.quantizers
            if table and table.input and (table.weight or self.has_quantized_weights):
                in_fp8 += layer.work
        return self._share_of(in_fp8)

    def _share_of(self, work: float) -> float:
        total = sum(layer.work for layer in self.layers) + self.work_outside_linears
        return work / total if total else 0.0

    @property
    def _formats(self) -> str:
        """The formats of the quantized operands in words, such as "FP8", "FP4 and FP8", "e3m4"."""
        tables = self.tables or self.recipe.tables
        names = {name for table in tables for name in table.own_formats or (f"FP{table.bits}",)}
        return " and ".join(sorted(names))

    def _headline(self, forward: bool) -> str:
        share = self.forward_share if forward else self.fp8_share
        percent = f"{100 * share:.0f}"
        if percent == "100" and share < 1:
            percent = ">99"
        if percent == "0" and share > 0:
            percent = "<1"
        linears = [layer.fp8 for layer in self.layers if not layer.groups]
        groups = [layer.fp8 for layer in self.layers if layer.groups]
        kinds = [
            f"{sum(in_fp8)} of {len(in_fp8)} {noun}{'s' * (len(in_fp8) != 1)}"
            for noun, in_fp8 in (("linear", linears), ("expert group", groups))
            if in_fp8
        ]
        return f"{self._formats}: {percent} % of {self.counted} ({', '.join(kinds)})"

    def _beside_layers(self) -> Iterator[str]:
        """Sentences about attention and the residual stream, if the recipe sets their precision."""
        if self.attention_precision != self.compute_dtype:
            yield f"attention: {self.attention_precision}, the recipe says so"
        if self.recipe.residual != "fp32":
            yield f"residual stream: {self.recipe.residual}, the recipe says so"

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data, which is stored with every run and checkpoint."""
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


def _groups(
    layers: Iterable[LayerPlan], attribute: Literal["reason", "doubt", "why"]
) -> Iterator[tuple[str, list[LayerPlan]]]:
    """Group the layers whose `attribute` is set; layers that differ only in their block's number
    are in one group. Yields the group's name for messages and its layers."""
    groups: dict[tuple[str, str, str], list[LayerPlan]] = {}
    for layer in layers:
        if sentence := getattr(layer, attribute):
            pattern = re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", layer.name)
            groups.setdefault((pattern, layer.precision, sentence), []).append(layer)
    for (pattern, *_), group in groups.items():
        yield (group[0].name if len(group) == 1 else f"{len(group)} layers {pattern}"), group


def _doubts(layers: Iterable[LayerPlan]) -> str:
    """The doubts about layers, each after the names of its layers."""
    names: dict[str, list[str]] = {}
    for name, group in _groups(layers, "doubt"):
        names.setdefault(group[0].doubt, []).append(name)
    return "; ".join(f"{', '.join(of_doubt)}, {doubt}" for doubt, of_doubt in names.items())


def _grouped(
    layers: Iterable[LayerPlan], attribute: Literal["reason", "why"] = "reason"
) -> list[str]:
    """The reasons for layers without FP8, or for layers of another backend than the plan's; a
    sentence for each group of equal layers."""
    return [replace(group[0], name=name).sentence for name, group in _groups(layers, attribute)]


def block_indices(names: Iterable[str]) -> dict[str, BlockIndex]:
    """The `BlockIndex` of each layer that is in a list of blocks, by the layer's name.

    A list is the path before the number of two or more blocks: `blocks` in `blocks.3.mlp.up`,
    `transformer.h` in GPT-2's `transformer.h.3.attn.c_attn`. An encoder and a decoder have two.
    """
    matches = {name: match for name in names if (match := re.match(r"(.*?)(?:^|\.)(\d+)\.", name))}
    lists: dict[str, set[int]] = {}
    for match in matches.values():
        lists.setdefault(match[1], set()).add(int(match[2]))
    counts = {path: max(numbers) + 1 for path, numbers in lists.items()}
    return {
        name: BlockIndex(int(match[2]), counts[match[1]])
        for name, match in matches.items()
        if len(lists[match[1]]) > 1 or len(lists) == 1
    }
