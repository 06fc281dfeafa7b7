"""`GPTConfig`, the shape of a GPT, and the plan for its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveFloat, model_validator

from fp8stack.common import presets
from fp8stack.common.errors import UnservedAttention, UserError
from fp8stack.precision import Hardware, Plan, Recipe, resolve
from fp8stack.precision.fp8_attention import FP8_ATTENTION

ActivationName = Literal["gelu", "gelu_tanh", "swiglu", "relu2"]
"""Activations of the MLP. Each has entries in `ops.activations`, the Triton kernel of
`ops.triton_kernels` and `hf.layouts`."""
GATED_ACTIVATIONS: frozenset[ActivationName] = frozenset({"swiglu"})
"""Activations that multiply a gate by a value; `mlp.up` computes both, the gate's rows first."""

Size = Annotated[int, Field(ge=1, le=2**31)]
Layers = Annotated[int, Field(ge=1, le=2048)]
"""Limited because every layer has a plan; the deepest published transformer has 1,000."""
MOST_PARAMETERS = 10**14
"""100 times the largest dense model; the bytes of parameters and optimizer fit into 64 bits."""


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
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    activation: ActivationName = "gelu_tanh"
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: PositiveFloat = 10_000.0
    qk_norm: bool = False
    bias: bool = True
    tied: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _sizes_divide(self) -> GPTConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.heads % self.query_groups:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(f"RoPE needs an even head width, this is {self.head_width}")
        block = self.width * (4 * self.width + 3 * self.hidden)  # at most
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
    def head_width(self) -> int:
        """E, the width of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """The MLP's inner width."""
        return self.mlp_width or 4 * self.width

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in GATED_ACTIVATIONS

    def linear_shapes(self, vocabulary: int | None = None) -> dict[str, tuple[int, int]]:
        """`{module path: (in, out)}` of every linear layer, in the order of the forward pass."""
        qkv = (self.heads + 2 * self.query_groups) * self.head_width
        up = self.hidden * (2 if self.gated else 1)
        shapes = {}
        for i in range(self.layers):
            shapes[f"blocks.{i}.attention.qkv"] = (self.width, qkv)
            shapes[f"blocks.{i}.attention.output"] = (self.width, self.width)
            shapes[f"blocks.{i}.mlp.up"] = (self.width, up)
            shapes[f"blocks.{i}.mlp.down"] = (self.hidden, self.width)
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
                for name in ("query_norm", "key_norm"):
                    shapes[f"blocks.{i}.attention.{name}.weight"] = (self.head_width,)
        for norm in norms:
            shapes[f"{norm}.weight"] = (self.width,)
            if self.norm == "layernorm" and self.bias:
                shapes[f"{norm}.bias"] = (self.width,)
        for name, (inputs, outputs) in self.linear_shapes(rows).items():
            if name != "lm_head" or not self.tied:
                shapes[f"{name}.weight"] = (outputs, inputs)
            if self.bias and name != "lm_head":
                shapes[f"{name}.bias"] = (outputs,)
        return shapes

    def parameters(self) -> int:
        """The number of parameters; tied ones count once, padding does not count."""
        return sum(map(math.prod, self.parameter_shapes().values()))

    def flops_per_token(self, context: int | None = None) -> int:
        """Floating-point operations of forward and backward per token, causal attention counted
        as half: `6 x matmul parameters + 6 x layers x width x context`."""
        matmul = sum(inputs * outputs for inputs, outputs in self.linear_shapes().values())
        return 6 * matmul + 6 * self.layers * self.width * (context or self.context)


def load_config(name: str, overrides: Mapping[str, object] | None = None) -> GPTConfig:
    """The configuration called `name`, or the one in the TOML file at the path `name`.

    Raises:
        UserError: no such model or file, an unknown key, sizes that do not divide.
    """
    stem, table = presets.read("models", name)
    table.pop("training", None)  # defaults of a run, read in fp8stack/planning/run_config.py
    config: GPTConfig = presets.parse(GPTConfig, table | dict(overrides or {}), f"model '{stem}'")
    return config


def padded_vocabulary(config: GPTConfig, multiple: int) -> int:
    """The vocabulary rounded up to a multiple; the rows beyond it are zero and stay zero."""
    return -(-config.vocabulary // multiple) * multiple


def plan_for(
    config: GPTConfig,
    recipe: str | Recipe,
    hardware: Hardware,
    backend: str = "auto",
    strict: bool = False,
    tokens: int | None = None,
    left_out: Mapping[str, str] | None = None,
    vocabulary_multiple: int = 1,
    without: Mapping[str, str] | None = None,
) -> Plan:
    """The plan for a GPT of this shape, layer by layer. Raises what `resolve` raises.

    Args:
        config: the shape.
        recipe, hardware, backend, strict, without: as for `resolve`.
        tokens: the tokens of a micro-batch; if given, the plan notes where FP8 may not pay.
        left_out: layers that must not run in FP8, with the reason.
        vocabulary_multiple: the vocabulary is padded to a multiple of at least this.
    """
    plan = resolve(recipe, hardware, backend, strict, without=without)
    if plan.recipe.fp8_attention:
        _require_fp8_attention(config, plan.recipe.attention, hardware)
    multiple = max(plan.vocabulary_multiple, vocabulary_multiple)
    shapes = config.linear_shapes(padded_vocabulary(config, multiple))
    plan = plan.for_layers(shapes, left_out=left_out, tokens=tokens)
    needed = max(plan.vocabulary_multiple, vocabulary_multiple)
    if needed == multiple:
        return plan
    # "auto" gave up FP8, so the vocabulary needs less padding.
    return plan.for_layers(config.linear_shapes(padded_vocabulary(config, needed)))


def _require_fp8_attention(config: GPTConfig, attention: str, hardware: Hardware) -> None:
    """Raise a UserError if the FP8 attention kernels do not support a GPT's shape."""
    multiple, widths = FP8_ATTENTION[attention].widths_on(hardware.capability)
    width = config.head_width
    if width % multiple or width > 128:
        raise UnservedAttention(f"attention = '{attention}' needs heads of {widths}, not {width}")
    if config.dropout:
        raise UserError(f"attention = '{attention}' has no dropout. Set dropout = 0.")
