"""`GPTConfig`, the shape of a GPT, and the plan for its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fp8stack.common import presets
from fp8stack.common.errors import UnservedAttention, UserError, described
from fp8stack.precision import Hardware, Plan, Recipe, resolve
from fp8stack.precision.fp8_attention import FP8_ATTENTION
from fp8stack.precision.recipe import ComputeDtype
from fp8stack.precision.step_time import Workload

ActivationName = Literal["gelu", "gelu_tanh", "swiglu", "relu2"]
"""Activations of the MLP. docs/adding.md lists what each has in other files."""
GATED_ACTIVATIONS: frozenset[ActivationName] = frozenset({"swiglu"})
"""Activations that multiply a gate by a value; `mlp.up` computes both, the gate's rows first."""

Size = Annotated[int, Field(ge=1, le=2**31)]
Layers = Annotated[int, Field(ge=1, le=2048)]
"""Limited because every layer has a plan; the deepest published transformer has 1,000."""
MOST_PARAMETERS = 10**14
"""100 times the largest dense model; the bytes of parameters and optimizer fit into 64 bits."""


QKNorm = Annotated[bool | Literal["head", "width"], AfterValidator(lambda of: of == "head" or of)]
"""The extent of the norm of queries and keys: each head, which is also written as true, or the full
width; false is no norm."""


class Experts(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """The table `[experts]` of a model: the MLP of a block is a mixture of experts.

    A router chooses `per_token` of the `count` experts for each token, and weights their outputs.
    """

    count: Annotated[int, Field(ge=1, le=65536)]
    per_token: Size
    width: Size
    """The inner width of each expert's MLP."""
    shared: Annotated[int, Field(ge=0, le=65536)] = 0
    """Experts that see every token, without a routing weight: an MLP of inner width shared x
    width."""
    first_dense: Annotated[int, Field(ge=0)] = 0
    """Blocks at the start that have the MLP of a model without experts."""
    normalize: bool = True
    """Whether the routing weights of a token's experts are divided by their sum."""
    balance: NonNegativeFloat | None = None
    """The coefficient of the load balancing loss; None: 0.01, or 0 with `bias`."""
    bias: PositiveFloat | None = None
    """The rate of the biases that balance the load without a loss (arXiv 2408.15664)."""
    router_z: NonNegativeFloat = 0.0
    """The coefficient of the router z-loss (arXiv 2202.08906)."""

    @model_validator(mode="after")
    def _is_possible(self) -> Experts:
        if self.per_token > self.count:
            raise ValueError(
                f"per_token {self.per_token} is more than the {self.count} experts. Set per_token "
                f"to {self.count} or less"
            )
        if self.balance is not None and self.bias is not None:
            raise ValueError(
                "balance and bias are two ways to balance the load. Leave one of them out"
            )
        return self

    @property
    def balance_coefficient(self) -> float:
        """The coefficient of the load balancing loss."""
        default = 0.01 if self.bias is None else 0.0
        return default if self.balance is None else self.balance


class GPTConfig(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """The shape of a GPT, as in `models/*.toml`. The defaults are GPT-2's."""

    vocabulary: Size
    context: Size
    layers: Layers
    width: Size
    heads: Size
    kv_heads: Size | None = None
    """Key and value heads, fewer than `heads` for grouped-query attention; None: `heads`."""
    mlp_width: Size | None = None
    """None is 4 x width."""
    head_width: Size | None = None
    """None is width / heads."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    activation: ActivationName = "gelu_tanh"
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: PositiveFloat = 10_000.0
    qk_norm: QKNorm = False
    bias: bool = True
    tied: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: PositiveFloat = 0.02
    experts: Experts | None = None
    """The mixture of experts; None: none."""

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Checkpoints from before these keys existed compare equal.
        values: dict[str, Any] = handler(self)
        unused = {key for key in ("head_width", "experts") if getattr(self, key) is None}
        return {key: value for key, value in values.items() if key not in unused}

    @model_validator(mode="after")
    def _sizes_divide(self) -> GPTConfig:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.heads % self.query_groups:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, this is {self.head_dim}")
        experts = self.experts
        if experts is not None and experts.first_dense >= self.layers:
            raise ValueError(
                f"experts.first_dense {experts.first_dense} leaves none of the {self.layers} "
                "layers with experts. Lower it, or leave out [experts]"
            )
        hidden = self.hidden
        if experts is not None:
            hidden = max(hidden, (experts.count + experts.shared) * experts.width + experts.count)
        block = self.width * (4 * self.heads * self.head_dim + 3 * hidden)  # at most
        tables = self.width * (2 * self.vocabulary + self.context)
        if (most := self.layers * block + tables) > MOST_PARAMETERS:
            raise ValueError(
                f"these sizes make up to {most:.1e} parameters, {4 * most / 2**30:.1e} GiB; "
                f"{MOST_PARAMETERS:.0e} parameters are the most"
            )
        return self

    @property
    def query_groups(self) -> int:
        """G, the number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """E, the width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def norm_widths(self) -> tuple[int, int]:
        """The widths of the norms of queries and of keys, if `qk_norm` says that there are any."""
        queries, keys = (self.heads, self.query_groups) if self.qk_norm == "width" else (1, 1)
        return queries * self.head_dim, keys * self.head_dim

    @property
    def hidden(self) -> int:
        """The MLP's inner width."""
        return self.mlp_width or 4 * self.width

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in GATED_ACTIVATIONS

    def has_experts(self, block: int) -> bool:
        """Whether the MLP of this block is a mixture of experts."""
        return self.experts is not None and block >= self.experts.first_dense

    @property
    def routers(self) -> list[str]:
        """The module paths of the linears that choose experts."""
        return [f"blocks.{i}.mlp.router" for i in range(self.layers) if self.has_experts(i)]

    @property
    def grouped(self) -> dict[str, int]:
        """The number of experts of each grouped linear, by module path."""
        count = 0 if self.experts is None else self.experts.count
        blocks = filter(self.has_experts, range(self.layers))
        return {f"blocks.{i}.mlp.experts.{name}": count for i in blocks for name in ("up", "down")}

    def linear_shapes(self, vocabulary: int | None = None) -> dict[str, tuple[int, int]]:
        """`{module path: (in, out)}` of every linear layer, in the order of the forward pass. For
        grouped linears this is the shape of one expert's matrix."""
        queries = self.heads * self.head_dim
        qkv = queries + 2 * self.query_groups * self.head_dim
        shapes = {}
        for i in range(self.layers):
            shapes[f"blocks.{i}.attention.qkv"] = (self.width, qkv)
            shapes[f"blocks.{i}.attention.output"] = (queries, self.width)
            mlps = {"mlp": self.hidden}
            if self.experts is not None and self.has_experts(i):
                shapes[f"blocks.{i}.mlp.router"] = (self.width, self.experts.count)
                mlps = {"mlp.experts": self.experts.width}
                if self.experts.shared:
                    mlps["mlp.shared"] = self.experts.shared * self.experts.width
            for path, hidden in mlps.items():
                up = hidden * (2 if self.gated else 1)
                shapes[f"blocks.{i}.{path}.up"] = (self.width, up)
                shapes[f"blocks.{i}.{path}.down"] = (hidden, self.width)
        shapes["lm_head"] = (self.width, vocabulary or self.vocabulary)
        return shapes

    def parameter_shapes(self, vocabulary: int | None = None) -> dict[str, tuple[int, ...]]:
        """`{name: shape}` of every parameter of a `GPT`, tied ones once; all are float32. A padded
        `vocabulary` replaces the configured one."""
        rows = vocabulary or self.vocabulary
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, self.width)}
        if self.positions == "learned":
            shapes["position_embedding.weight"] = (self.context, self.width)
        norms = ["final_norm"]
        for i in range(self.layers):
            norms += [f"blocks.{i}.attention_norm", f"blocks.{i}.mlp_norm"]
            if self.qk_norm:
                for name, width in zip(("query_norm", "key_norm"), self.norm_widths, strict=True):
                    shapes[f"blocks.{i}.attention.{name}.weight"] = (width,)
        for norm in norms:
            shapes[f"{norm}.weight"] = (self.width,)
            if self.norm == "layernorm" and self.bias:
                shapes[f"{norm}.bias"] = (self.width,)
        without_bias = {"lm_head", *self.routers}
        groups = {name: (count,) for name, count in self.grouped.items()}
        for name, (inputs, outputs) in self.linear_shapes(rows).items():
            group = groups.get(name, ())
            if name != "lm_head" or not self.tied:
                shapes[f"{name}.weight"] = (*group, outputs, inputs)
            if self.bias and name not in without_bias:
                shapes[f"{name}.bias"] = (*group, outputs)
        return shapes

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """`{name: shape}` of every buffer of a `GPT` that is saved with its parameters: float32."""
        if self.experts is None or self.experts.bias is None:
            return {}
        return {
            f"{router.removesuffix('router')}balance_bias": (self.experts.count,)
            for router in self.routers
        }

    def parameters(self) -> int:
        """The number of parameters; tied ones count once, padding does not count."""
        return sum(map(math.prod, self.parameter_shapes().values()))

    def active_parameters(self) -> int:
        """The number of parameters that a token meets: all but the experts' that its router does
        not choose."""
        idle = 0
        if self.experts is not None:
            shapes = self.parameter_shapes()
            names = [f"{path}.{kind}" for path in self.grouped for kind in ("weight", "bias")]
            sizes = (math.prod(shapes[name][1:]) for name in names if name in shapes)
            idle = (self.experts.count - self.experts.per_token) * sum(sizes)
        return self.parameters() - idle

    def flops_per_token(self, context: int | None = None) -> int:
        """Floating-point operations of forward and backward per token, causal attention counted
        as half: `6 x active matmul parameters + 6 x layers x heads x head width x context`."""
        shapes, grouped = self.linear_shapes(), self.grouped
        chosen = 1 if self.experts is None else self.experts.per_token
        matmul = sum(
            inputs * outputs * (chosen if name in grouped else 1)
            for name, (inputs, outputs) in shapes.items()
        )
        attention = self.layers * self.heads * self.head_dim * (context or self.context)
        return 6 * matmul + 6 * attention


def load_config(name: str, overrides: Mapping[str, object] | None = None) -> GPTConfig:
    """The configuration called `name`, or the one in the TOML file at the path `name`.

    Raises:
        UserError: no such model or file, an unknown key, sizes that do not divide.
    """
    stem, table = presets.read("models", name)
    table.pop("training", None)  # defaults of a run, read in fp8stack/planning/run_config.py
    changes = dict(overrides or {})
    if isinstance(experts := changes.get("experts"), Mapping):
        changes["experts"] = _changed_experts(table.get("experts"), experts)
    config: GPTConfig = presets.parse(GPTConfig, table | changes, f"model '{stem}'")
    return config


def _changed_experts(preset: object, changes: Mapping[str, object]) -> dict[str, object]:
    """The table `[experts]` of a preset with the keys that a run changes; `balance` replaces
    `bias`, and `bias` replaces `balance`."""
    values = dict(preset) if isinstance(preset, Mapping) else {}
    for key, replaced in (("balance", "bias"), ("bias", "balance")):
        if key in changes:
            values.pop(replaced, None)
    return values | dict(changes)


PADDED = ("embedding.weight", "lm_head.weight")
"""The parameters whose rows are padded to `Backend.vocabulary_multiple`."""


def padded_vocabulary(config: GPTConfig, multiple: int) -> int:
    """The vocabulary rounded up to a multiple; the rows beyond it are zero and stay zero."""
    return -(-config.vocabulary // multiple) * multiple


def plan_for(
    config: GPTConfig,
    recipe: str | Recipe,
    hardware: Hardware,
    backend: str = "auto",
    strict: bool = False,
    work: Workload | None = None,
    left_out: Mapping[str, str] | None = None,
    vocabulary_multiple: int = 1,
    without: Mapping[str, str] | None = None,
    compute_dtype: ComputeDtype | None = None,
) -> Plan:
    """The plan for a GPT of this shape, layer by layer. Raises what `resolve` raises, and a
    UserError if `config` is of another type.

    Args:
        config: the shape.
        recipe, hardware, backend, strict, without: as for `resolve`.
        work: a training step, from `workload`; if given, the plan predicts its time, and notes
            where FP8 may not pay.
        left_out: layers that must not run in FP8, with the reason.
        vocabulary_multiple: the vocabulary is padded to a multiple of at least this.
        compute_dtype: the compute dtype that a run in emulated FP8 began with and keeps.
    """
    if not isinstance(config, GPTConfig):
        raise UserError(
            f"plan_for needs a GPTConfig, such as load_config('gpt-nano'), not {described(config)}."
        )
    plan = resolve(recipe, hardware, backend, strict, without=without)
    if plan.recipe.fp8_attention:
        _require_fp8_attention(config, plan.recipe.attention, hardware)
    multiple = max(plan.vocabulary_multiple, vocabulary_multiple)
    shapes = config.linear_shapes(padded_vocabulary(config, multiple))
    reasons = {**dict.fromkeys(config.routers, ROUTER), **(left_out or {})}
    plan = plan.for_layers(
        shapes, left_out=reasons, work=work, grouped=config.grouped, compute_dtype=compute_dtype
    )
    needed = max(plan.vocabulary_multiple, vocabulary_multiple)
    if needed != multiple:
        # "auto" gave up FP8, so the vocabulary needs less padding.
        shapes = config.linear_shapes(padded_vocabulary(config, needed))
        plan = plan.for_layers(shapes, left_out=reasons, work=work, grouped=config.grouped)
    return plan if config.experts is None else _with_experts(plan, config, config.experts)


def workload(
    config: GPTConfig,
    tokens: int,
    *,
    context: int | None = None,
    accumulate: int = 1,
    recompute: Literal["none", "selective", "block"] = "none",
    shards: int = 1,
) -> Workload:
    """A training step of a GPT on one GPU.

    Args:
        config: the shape.
        tokens: tokens of a micro-batch on this GPU.
        context: tokens of a sequence, by default the model's.
        accumulate: micro-batches of a step.
        recompute: the activation checkpointing.
        shards: the number of GPUs that share gradients and optimizer (FSDP2).
    """
    width, experts = config.width, config.experts
    # Bytes per token. The stream and its gradient are float32, all else is bf16. A norm with the
    # residual sum reads x and y and writes x and its output; its backward pass reads two gradients
    # and x, and writes the gradients of x and of y.
    norms = 2 * ((4 + 2 + 4 + 2) + (2 + 4 + 4 + 4 + 2)) * width
    # An activation reads its one or two inputs and writes its output; its backward pass reads the
    # inputs and a gradient, and writes the inputs' gradients.
    activation = 16 if config.gated else 10
    hidden = config.layers * config.hidden
    if experts is not None:
        mixtures = config.layers - experts.first_dense
        mixture = (experts.per_token + experts.shared) * experts.width
        hidden = experts.first_dense * config.hidden + mixtures * mixture
    queries = config.heads * config.head_dim
    rotated = queries + config.query_groups * config.head_dim
    passes = 8 * ((config.positions == "rope") + bool(config.qk_norm))
    moved = config.layers * (norms + passes * rotated) + activation * hidden
    if config.bias:  # sums the gradients of the outputs of all linears
        outputs = queries + 2 * config.query_groups * config.head_dim + 2 * width
        moved += 2 * (config.layers * outputs + hidden)
    moved += 6 * config.vocabulary  # logits are read twice, their gradient is written
    attention = 7 * config.layers * queries * (context or config.context)
    return Workload(
        tokens=tokens,
        accumulate=accumulate,
        attention_flops=attention * tokens,
        head_width=config.head_dim,
        moved_bytes=moved * tokens,
        parameters=config.parameters() / shards,
        active=1.0 if experts is None else experts.per_token / experts.count,
        recompute=recompute,
    )


ROUTER = "a router, which computes in float32"
"""The reason that routers are not in FP8."""


def _with_experts(plan: Plan, config: GPTConfig, experts: Experts) -> Plan:
    """The plan with the share of tokens that each expert gets, and routers in float32."""
    chosen = experts.per_token / experts.count
    routers, grouped = set(config.routers), config.grouped
    differs = plan.is_fp8 or plan.compute_dtype in ("bf16", "fp16")
    layers, sentences = [], {reason: reason for reason in plan.reasons}
    for layer in plan.layers:
        if layer.name in routers:
            precision = "tf32" if plan.compute_dtype == "tf32" else "fp32"
            router = replace(layer, precision=precision, reason=ROUTER if differs else "")
            sentences[layer.sentence] = router.sentence if differs else ""
            layer = router
        layers.append(replace(layer, active=chosen) if layer.name in grouped else layer)
    reasons = tuple(filter(None, (sentences[reason] for reason in plan.reasons)))
    return replace(plan, layers=tuple(layers), reasons=reasons)


def _require_fp8_attention(config: GPTConfig, attention: str, hardware: Hardware) -> None:
    """Raise a UserError if the FP8 attention kernels do not support a GPT's shape."""
    multiple, widths = FP8_ATTENTION[attention].widths_on(hardware.capability)
    width = config.head_dim
    if width % multiple or width > 128:
        raise UnservedAttention(f"attention = '{attention}' needs heads of {widths}, not {width}")
    if config.dropout:
        raise UserError(f"attention = '{attention}' has no dropout. Set dropout = 0.")
