"""`Plan`: the backend and precision of each layer, with reasons. Pure; no torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from fp8stack.common.errors import UserError
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision import plan_text
from fp8stack.precision.gpus import Gpu, find_gpus
from fp8stack.precision.hardware import Hardware
from fp8stack.precision.native_gemms import feature_multiple, plain_gemms, plain_in_words, unable
from fp8stack.precision.recipe import BlockIndex, ComputeDtype, Recipe
from fp8stack.precision.recipe_file import plain
from fp8stack.precision.step_time import StepTime, Workload, layer_doubt, step_time

BackendName = Literal["te", "torch", "emulate", "reference"]
WIDE = 256
"""The number of features from which a CPU with bf16 instructions computes faster in bf16: measured
on an EPYC and a Xeon with AMX. At 128, steps take 5 to 15 % longer than in fp32."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The decision for one linear, or one grouped linear, which has a weight matrix per group.

    Attributes:
        name: its module path.
        in_features: the number of input features.
        out_features: the number of output features.
        fp8: whether it is quantized.
        precision: the recipe's name, or a compute dtype.
        reason: the reason that it is not quantized.
        doubt: the reason that quantizing it may not be profitable.
        quantizers: the quantizers of its operands.
        backend: the backend that runs it, if not the plan's.
        why: the reason that another backend than the plan's runs it, or that some of its GEMMs run
            in high precision.
        active: the share of tokens that the layer processes, less than 1 in an expert; for a
            grouped linear, the mean share of a group.
        groups: the number of groups of a grouped linear, 0 for a linear. The numbers of features
            are for one group.
        plain_gemms: the GEMMs that its backend, te or torch, runs in high precision: in the compute
            dtype if that represents the values of their operands, else in float32.
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
        """The quantizers of the GEMMs in high precision; without any, the layer's quantizers."""
        assert self.quantizers is not None
        return self.quantizers.only(self.plain_gemms) if self.plain_gemms else self.quantizers

    @property
    def sentence(self) -> str:
        """The layer's precision, and the reason that it differs from the plan's."""
        return f"{self.name}: {self.precision}, {self.reason or self.why}"

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON data, without the quantizers, which the plan's recipe has."""
        left_out = {"quantizers"} if self.backend else {"quantizers", "backend", "why"}
        left_out |= {"active"} if self.active == 1 else set()
        left_out |= {name for name in ("groups", "plain_gemms") if not getattr(self, name)}
        values = vars(self) | {"plain_gemms": list(self.plain_gemms)}
        return {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The precision and backend of a model, decided before it is built.

    Attributes:
        asked: the name of the requested recipe, which may be "auto".
        recipe: the recipe that runs.
        backend: the backend that runs it.
        native: whether the hardware's tensor cores support the requested recipe and run it.
        hardware: the machine that it was decided for.
        device: the model's device, by default the hardware's device.
        compute_dtype: the precision of everything that is not quantized.
        wide_dtype: the compute dtype of models that do most of their work in layers of `WIDE` or
            more features; None if `compute_dtype` holds for all models.
        reasons: a sentence for each decision that differs from the request.
        strict: whether substitutions are errors.
        layers: the decisions for linear layers, see `for_layers`.
        times: the predicted time of a step, on each GPU that the machine may have.
        work_outside_linears: multiplications per token with weights outside linears.
        counted: "GEMM FLOPs"; "GEMM weights" if the shares of tokens of the experts are unknown, so
            that each expert counts as if it received all tokens.
        has_quantized_weights: whether the weights come from a quantized folder, so that a GEMM of
            the forward pass counts as FP8 if its input is quantized.
    """

    asked: str
    recipe: Recipe
    backend: BackendName
    native: bool
    hardware: Hardware
    device: str
    compute_dtype: ComputeDtype
    wide_dtype: ComputeDtype | None = None
    reasons: tuple[str, ...] = ()
    strict: bool = False
    layers: tuple[LayerPlan, ...] = ()
    times: tuple[StepTime, ...] = ()
    work_outside_linears: float = 0
    counted: Literal["GEMM FLOPs", "GEMM weights"] = "GEMM FLOPs"
    has_quantized_weights: bool = False

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
        """The argument of `Gpu.peak`: "fp8" or "fp4" if layers run natively in FP8 or FP4, else the
        compute dtype."""
        return f"fp{self.native_bits}" if self.runs_fp8 and self.native else self.compute_dtype

    @property
    def native_bits(self) -> int:
        """The fewest bits of an element in the GEMMs that run natively."""
        table = self.recipe.quantizers
        assert table is not None
        high_precision = plain_gemms(table, self.hardware) if self.backend == "torch" else {}
        native = [gemm for gemm in table.gemms if gemm not in high_precision]
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
        work: Workload | None = None,
        compute_dtype: ComputeDtype | None = None,
    ) -> Plan:
        """Return this plan with a decision for every linear; without FP8 if "auto" chose an FP8
        recipe and no layer runs in it.

        Args:
            shapes: (in features, out features) of each layer by module path, in the order of the
                forward pass.
            heads: the layers that compute logits; they run in FP8 only if the recipe enables it.
            left_out: layers that must not run in FP8, with the caller's reason.
            otherwise: the precision of layers that are not in FP8, by default the compute dtype.
            routers: the layers that choose the experts of a mixture; they run in FP8 only if the
                recipe enables it, else in `otherwise`, also in recipes without FP8.
            grouped: the number of groups of each grouped linear; `shapes` has the shape of one
                group. Grouped linears without a GEMM in the backend are emulated.
            work: a training step on one rank. If given, `times` predicts it, and `notes` names
                layers and models that native FP8 may not speed up on this GPU; if "auto" chose the
                recipe, they are not in FP8. Requires the GPU's data sheet in `GPUS`.
            compute_dtype: the compute dtype that an emulated recipe began with, unless the recipe
                sets it.

        Raises:
            UserError: an exclusion matches no layer; under `strict`, a layer cannot be served.
        """
        left_out, grouped = left_out or {}, grouped or {}
        plan = _with_dtype_for(self, shapes, {*heads, *routers}, grouped, compute_dtype)
        layers = _decide_layers(plan, shapes, heads, left_out, otherwise, routers, grouped, work)
        plan = replace(plan, layers=layers)
        plan = replace(plan, times=_step_times(plan, work))
        if plan.asked == "auto" and plan.is_fp8 and layers and (plan.doubt or not plan.runs_fp8):
            return _without_fp8(plan, left_out).for_layers(
                shapes, heads, left_out, otherwise, routers=routers, grouped=grouped, work=work
            )
        return _with_layer_reasons(plan)

    @property
    def doubt(self) -> str:
        """The reason that FP8 may not pay in the model: the least gain of all `times`; or ""."""
        if not self.runs_fp8 or not self.times:
            return ""
        slowest = max(self.times, key=lambda time: time.ratio.high)
        return "" if slowest.verdict == "FP8 pays" else slowest.comparison

    def backend_of(self, layer: LayerPlan) -> BackendName:
        """The backend that runs `layer`."""
        return layer.backend or self.backend

    @property
    def emulated_layers(self) -> list[LayerPlan]:
        """The layers in FP8 whose GEMMs are emulated."""
        return [la for la in self.layers if la.fp8 and self.backend_of(la) == "emulate"]

    def emulated_dtype(self, layer: LayerPlan) -> ComputeDtype:
        """The dtype of a quantized layer's operands in emulated GEMMs: the compute dtype if it
        represents their values exactly and, on a CPU, the GEMMs may round to it; else float32, as
        on GPUs of other makers, where torch may not multiply bfloat16 matrices to float32."""
        table = layer.emulated
        exact = table.by_bf16_gemms if self.device == "cpu" else table.exact_in_bf16
        return self.compute_dtype if exact and not self.hardware.other_gpu else "fp32"

    @property
    def fp8_share(self) -> float:
        """The share of FP8 in the multiplications of all GEMMs with weights, in both passes."""
        return plan_text.share(self, [layer.fp8_work for layer in self.layers])

    def layer(self, name: str) -> LayerPlan:
        """The decision for the layer `name`, or for the grouped linear of the group
        `<path>.<number>`."""
        path, _, number = name.rpartition(".")
        names = {name, path} if number.isdigit() else {name}
        return next(la for la in self.layers if la.name in names and (la.groups or la.name == name))

    @property
    def notes(self) -> list[str]:
        """See `plan_text.notes`."""
        return plan_text.notes(self)

    def __str__(self) -> str:
        return "\n".join(self.summary())

    def summary(self, *, forward: bool = False) -> list[str]:
        """See `plan_text.summary`."""
        return plan_text.summary(self, forward)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data, which is stored with every run and checkpoint."""
        names = ("asked", "backend", "native", "device", "compute_dtype", "loss_scaling", "notes")
        return {name: getattr(self, name) for name in names} | {
            "recipe": self.recipe.to_json(),
            "attention": self.attention_precision,
            "reasons": [*self.reasons, *plan_text.beside_layers(self)],
            "layers": [layer.to_json() for layer in self.layers],
        }


def _with_dtype_for(
    plan: Plan,
    shapes: Mapping[str, tuple[int, int]],
    left_out: Collection[str],
    grouped: Mapping[str, int],
    earlier_dtype: ComputeDtype | None,
) -> Plan:
    """Set the compute dtype for layers of these shapes, without the layers `left_out`. An emulated
    recipe on a CPU keeps `earlier_dtype`, unless the recipe sets the dtype."""
    dtype, reason = plan.compute_dtype, ""
    inner_shapes = {name: shape for name, shape in shapes.items() if name not in left_out}
    work = {name: prod(shape) * grouped.get(name, 1) for name, shape in inner_shapes.items()}
    wide_work = sum(work[name] for name, shape in inner_shapes.items() if min(shape) >= WIDE)
    if plan.wide_dtype is not None and work and 2 * wide_work >= sum(work.values()):
        dtype = plan.wide_dtype
        reason = f"computes in {dtype}: this CPU has instructions for it, layers are {WIDE} wide"
    may_keep = plan.backend == "emulate" and not plan.recipe.compute_dtype and plan.device == "cpu"
    if earlier_dtype not in (None, dtype) and may_keep:
        reason = f"computes in {earlier_dtype} as it began; {dtype} is faster here"
        dtype = earlier_dtype
    reasons = (*plan.reasons, *filter(None, [reason]))
    return replace(plan, compute_dtype=dtype, wide_dtype=None, reasons=reasons)


def _decide_layers(
    plan: Plan,
    shapes: Mapping[str, tuple[int, int]],
    heads: Collection[str],
    left_out: Mapping[str, str],
    otherwise: str | None,
    routers: Collection[str],
    grouped: Mapping[str, int],
    work: Workload | None,
) -> tuple[LayerPlan, ...]:
    """Decide the precision of each layer, see `Plan.for_layers`."""
    recipe, blocks = plan.recipe, block_indices(shapes)
    if recipe.quantizers is not None:
        recipe.check_layers(shapes, blocks, heads, routers)
    router_rules = recipe.rules_of_routers(shapes, routers)
    layers = []
    for name, (in_features, out_features) in shapes.items():
        quantizers, precision, reason = None, recipe.name, left_out.get(name, "")
        if recipe.quantizers is not None and not reason:
            location = blocks.get(name), name in heads, name in routers
            quantizers, precision, reason = recipe.for_layer(name, *location, router_rules)
        elif name in routers and not reason and plan.compute_dtype in ("bf16", "fp16"):
            reason = "a router, which stays in the model's own precision"
        layer = LayerPlan(
            name=name,
            in_features=in_features,
            out_features=out_features,
            fp8=quantizers is not None,
            precision=precision,
            reason=reason,
            quantizers=quantizers,
            groups=grouped.get(name, 0),
        )
        if layer.fp8:
            layer = _on_hardware(plan, layer, work)
        if not layer.fp8:
            layer_precision = otherwise if layer.reason else None
            layer = replace(layer, precision=layer_precision or plan.compute_dtype)
        layers.append(layer)
    return tuple(layers)


def _on_hardware(plan: Plan, layer: LayerPlan, work: Workload | None) -> LayerPlan:
    """Decide how a layer that the recipe quantizes runs; for `work` see `Plan.for_layers`."""
    assert layer.quantizers is not None
    backend, reason, high_precision = _backend_for(plan, layer.quantizers, layer.groups)
    problem, not_profitable = unserved(plan, layer), ""
    # Emulation is for the numerics, not for speed.
    if work is not None and not problem and not layer.groups and backend != "emulate":
        native = replace(layer, plain_gemms=high_precision)
        not_profitable = layer_doubt(native, work, _gpus_of(plan), plan.compute_dtype)
    if not_profitable and plan.asked == "auto":
        problem = f"FP8 may not pay for {not_profitable}"
    if problem:
        return replace(layer, fp8=False, quantizers=None, reason=problem)
    return replace(
        layer,
        doubt=not_profitable,
        backend=None if backend == plan.backend else backend,
        why=reason,
        plain_gemms=high_precision,
    )


def _backend_for(
    plan: Plan, quantizers: Quantizers, groups: int
) -> tuple[BackendName, str, tuple[str, ...]]:
    """The backend for a layer with these quantizers; the reason if it is not the plan's or if some
    GEMMs run in high precision; and these GEMMs. `groups` is the number of groups of a grouped
    linear."""
    backend, reasons = plan.backend, []
    is_recipe_table = quantizers == plan.recipe.quantizers
    if backend in ("te", "torch") and not is_recipe_table:
        if problem := unable("torch", quantizers, plan.hardware):
            return "emulate", f"{problem}: emulated", ()
        if backend == "te":
            backend, reasons = "torch", ["Transformer Engine runs one recipe in a model"]
    if backend != "torch":
        return backend, "", ()
    high_precision = plain_gemms(quantizers, plan.hardware, groups)
    if len(high_precision) == len(quantizers.gemms):
        problem = next(filter(None, high_precision.values()), "no GEMM is quantized")
        return "emulate", f"{problem}: emulated", ()
    # The plan's reasons already name the GEMMs of linears with the recipe's own quantizers.
    is_in_plan = is_recipe_table and high_precision == plain_gemms(quantizers, plan.hardware)
    if high_precision and not is_in_plan:
        reasons.append(plain_in_words(high_precision))
    return backend, "; ".join(reasons), tuple(high_precision)


def unserved(plan: Plan, layer: LayerPlan) -> str:
    """The reason that the hardware cannot run a quantized layer of this shape in FP8; "" if it can.

    Raises:
        UserError: it cannot, under `strict`.
    """
    assert layer.quantizers is not None
    backend, problem, high_precision = _backend_for(plan, layer.quantizers, layer.groups)
    if backend == "emulate":  # takes any shape
        if plan.strict and plan.backend != "emulate":
            raise UserError(f"--strict: {layer.name} does not run as asked: {problem}.")
        return ""
    gemms = [gemm for gemm in layer.quantizers.gemms if gemm not in high_precision]
    native = layer.quantizers.only(gemms)
    shape = layer.in_features, layer.out_features
    problem = plan_text.indivisible(shape, feature_multiple(native, backend))
    if problem and plan.strict:
        raise UserError(f"--strict: {layer.name} cannot run in FP8: {problem}.")
    return problem


def _gpus_of(plan: Plan) -> tuple[Gpu, ...]:
    """The GPUs with a data sheet that the plan's machine may have; none without CUDA."""
    return find_gpus(plan.hardware.name) if plan.device == "cuda" else ()


def _step_times(plan: Plan, work: Workload | None) -> tuple[StepTime, ...]:
    """The time of a step on each GPU that the plan's machine may have; none without `work`, and
    none of emulated layers."""
    if work is None or plan.emulated_layers:
        return ()
    dtypes = plan.compute_dtype, "fp8" if plan.recipe.fp8_attention else plan.attention
    return tuple(
        step_time(
            plan.layers, work, gpu, dtype=dtypes[0], attention=dtypes[1], by_te=plan.backend == "te"
        )
        for gpu in _gpus_of(plan)
    )


def _with_layer_reasons(plan: Plan) -> Plan:
    """Add the reasons of its layers to the plan."""
    reasons = plan.reasons if plan.runs_fp8 or not plan.is_fp8 else _machine_reasons(plan)
    layer_reasons = (layer.sentence for layer in plan.layers if layer.reason or layer.why)
    return replace(plan, reasons=tuple(dict.fromkeys((*reasons, *layer_reasons))))


def _machine_reasons(plan: Plan) -> tuple[str, ...]:
    """The plan's reasons that still hold if no layer is in FP8."""
    problem = plan.hardware.gpu_problem
    return tuple(reason for reason in plan.reasons if problem and reason.startswith(problem))


def _without_fp8(plan: Plan, left_out: Collection[str]) -> Plan:
    """The plan of "auto" if no layer can run in FP8, or if FP8 is not profitable in the model."""
    dtype, name, layers = plan.compute_dtype, plan.recipe.name, []
    reason = f"auto is {dtype} and not {name}, whose step takes {plan.doubt}"
    if not plan.doubt:
        reason = f"auto stands for {name} here, and no layer would run in it: {dtype}"
        layers = [replace(la, precision=dtype) for la in plan.layers if la.name not in left_out]
    return replace(
        plan,
        recipe=plain(dtype, plan.recipe),
        backend="reference",
        native=True,
        reasons=(*_machine_reasons(plan), reason, *plan_text.sentences(layers)),
        layers=(),
        times=(),
    )


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
