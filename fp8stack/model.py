"""The GPT: one class, one configuration. It must not know which precision its layers run in.

B batch, T tokens, D width, H query heads, G key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, overload

import torch
from einops import rearrange
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack import presets
from fp8stack.backends import Backend, build_backend
from fp8stack.backends.activations import ACTIVATIONS
from fp8stack.backends.selective import contexts
from fp8stack.errors import UserError
from fp8stack.head import head_loss
from fp8stack.precision import Hardware, Plan, Recipe, resolve
from fp8stack.precision.shapes import load_measured

Size = Annotated[int, Field(ge=1, le=2**31)]
Recompute = Literal["none", "selective", "block"]
SELECTIVE_COMPILED = (
    "activation_checkpointing selective does not work with --compile: compiled code chooses by "
    "itself what it keeps. Use none, block for less memory, or leave --compile out."
)


class GPTConfig(BaseModel):
    """The shape of a GPT: `models/*.toml`. GPT-2's choices are the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocabulary: Size
    context: Size
    layers: Size
    width: Size
    heads: Size
    kv_heads: Size | None = None
    """Fewer than `heads` is grouped-query attention; None is as many."""
    mlp_width: Size | None = None
    """None is 4 x width."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu2"] = "gelu_tanh"
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
        return self

    @property
    def query_groups(self) -> int:
        """G: how many heads keys and values have."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """E."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """The MLP's inner width."""
        return self.mlp_width or 4 * self.width

    def linear_shapes(self, vocabulary: int | None = None) -> dict[str, tuple[int, int]]:
        """`{module path: (in, out)}` of every linear layer, in the order of the forward pass."""
        qkv = (self.heads + 2 * self.query_groups) * self.head_width
        up = self.hidden * (2 if self.activation == "swiglu" else 1)
        shapes = {}
        for i in range(self.layers):
            shapes[f"blocks.{i}.attention.qkv"] = (self.width, qkv)
            shapes[f"blocks.{i}.attention.output"] = (self.width, self.width)
            shapes[f"blocks.{i}.mlp.up"] = (self.width, up)
            shapes[f"blocks.{i}.mlp.down"] = (self.hidden, self.width)
        shapes["lm_head"] = (self.width, vocabulary or self.vocabulary)
        return shapes

    def parameter_shapes(self, vocabulary: int | None = None) -> dict[str, tuple[int, ...]]:
        """`{name: shape}` of every parameter of a `GPT`, tied ones once; all of them are float32.

        Args:
            vocabulary: as it is padded; the model's own if left out.
        """
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
        """How many parameters the model has; tied ones count once, padding does not."""
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
    config: GPTConfig = presets.parse(GPTConfig, table | dict(overrides or {}), f"model '{stem}'")
    return config


class Attention(nn.Module):
    """Causal self-attention, with grouped queries, RoPE and QK-norm where configured."""

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        shapes = config.linear_shapes()
        qkv, output = f"{path}.qkv", f"{path}.output"
        self.qkv = backend.linear(qkv, *shapes[qkv], config.bias)
        self.output = backend.linear(output, *shapes[output], config.bias)
        if config.qk_norm:
            self.query_norm = backend.norm("rmsnorm", config.head_width, config.norm_eps, False)
            self.key_norm = backend.norm("rmsnorm", config.head_width, config.norm_eps, False)

    def forward(self, qkv_BTF: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """What `qkv` gave, [B, T, (H + 2 G) E] -> [B, T, D] in the compute dtype."""
        config = self.config
        groups = config.query_groups
        heads_BHTE = rearrange(qkv_BTF, "b t (h e) -> b h t e", e=config.head_width)
        q_BHTE, k_BGTE, v_BGTE = torch.split(heads_BHTE, [config.heads, groups, groups], dim=1)
        if config.qk_norm:
            q_BHTE, k_BGTE = self.query_norm(q_BHTE.float()), self.key_norm(k_BGTE.float())
        if rotation is not None:
            q_BHTE, k_BGTE = rotate(q_BHTE, *rotation), rotate(k_BGTE, *rotation)
        y_BHTE = self.backend.attention(
            q_BHTE,
            k_BGTE,
            v_BGTE,
            dropout=config.dropout if self.training else 0.0,
            grouped=groups != config.heads,
        )
        y: Tensor = self.output(rearrange(y_BHTE, "b h t e -> b t (h e)"))
        return y


class MLP(nn.Module):
    """Two linears around an activation; SwiGLU's gate and value are one GEMM, gate first."""

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.activation = config.activation
        shapes = config.linear_shapes()
        up, down = f"{path}.up", f"{path}.down"
        self.up = backend.linear(up, *shapes[up], config.bias)
        self.down = backend.linear(down, *shapes[down], config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] float32 -> [B, T, D] in the compute dtype."""
        y: Tensor = self.down(ACTIVATIONS[self.activation](self.up(x_BTD)))
        return y


class Compilable(nn.Module):
    """A module whose forward pass can be compiled; a copy of it is not."""

    def compile_forward(self, backend: str | Callable[..., Any]) -> None:
        """Compile `forward` alone: hooks on the module, such as FSDP2's, stay outside."""
        options: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": False}
        self.forward = torch.compile(self.forward, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "forward"}


class Block(Compilable):
    """Pre-norm attention and MLP on a float32 residual stream."""

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.backend = backend
        norm = (config.norm, config.width, config.norm_eps, config.bias)
        self.attention_norm = backend.norm(*norm)
        self.attention = Attention(config, backend, f"{path}.attention")
        self.mlp_norm = backend.norm(*norm)
        self.mlp = MLP(config, backend, f"{path}.mlp")
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, T, D] float32 -> [B, T, D] float32."""
        qkv_BTF = self.backend.norm_linear(x_BTD, self.attention_norm, self.attention.qkv)
        x_BTD = x_BTD + self.dropout(self.attention(qkv_BTF, rotation)).float()
        expanded = self.backend.norm_mlp(x_BTD, self.mlp_norm, self.mlp)
        x_BTD = x_BTD + self.dropout(expanded).float()
        return x_BTD


class Loss(Compilable):
    """The end of the model, from the last block to the loss; it borrows its two layers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(
        self, norm: nn.Module, head: nn.Module, x_BTD: Tensor, targets_BT: Tensor
    ) -> Tensor:
        """The mean cross-entropy of `head(norm(x))` in nats per token: float32, 0-dim."""
        return head_loss(head, norm(x_BTD), targets_BT, self.vocabulary)


class GPT(nn.Module):
    """A decoder-only transformer, built of a backend's layers.

    Args:
        config: its shape.
        backend: who computes; plain float32 torch if left out.
        seed: of the initial weights, which depend on it and on `config` alone: every recipe and
            every device starts from the same.

    Attributes:
        recompute: what blocks keep for the backward pass, and run again in it (activation
            checkpointing): "none" keeps all, "selective" their inputs and what GEMMs and attention
            gave, "block" their inputs alone. The gradients are the same to the bit.
    """

    def __init__(self, config: GPTConfig, backend: Backend | None = None, *, seed: int = 0) -> None:
        super().__init__()
        if backend is None:
            backend = build_backend(plan_for(config, "fp32", Hardware("cpu")))
        self.config = config
        self.recompute: Recompute = "none"
        padded = padded_vocabulary(config, backend.vocabulary_multiple)
        self.embedding = nn.Embedding(padded, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, backend, f"blocks.{i}") for i in range(config.layers)
        )
        self.final_norm = backend.norm(config.norm, config.width, config.norm_eps, config.bias)
        self.lm_head = backend.linear("lm_head", config.width, padded, False)
        self.loss = Loss(config.vocabulary)
        if config.tied:
            self.lm_head.weight = self.embedding.weight
        self._rotations: dict[torch.device, tuple[Tensor, Tensor]] = {}
        initialize(self, seed)
        backend.attach(self)
        backend.set_matmul_precision(self)

    @overload
    def forward(self, tokens_BT: Tensor) -> Tensor: ...
    @overload
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor: ...

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits, or the loss if there are targets.

        Args:
            tokens_BT: int64 [B, T], each below the vocabulary, T at most the context.
            targets_BT: int64 [B, T], the next tokens; -100 is left out of the mean.

        Returns:
            float32 [B, T, V], or the mean cross-entropy in nats per token, 0-dim.

        Raises:
            ValueError: T is more than the context.
        """
        T = tokens_BT.shape[1]
        if self.config.context < T:
            raise ValueError(
                f"{T} tokens are more than the model's context, {self.config.context}."
            )
        x_BTD = self.embedding(tokens_BT)
        rotation = None
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.position_embedding.weight[:T]
        else:
            cosine, sine = self._rotation(x_BTD.device)
            rotation = (cosine[:T], sine[:T])
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            if self.recompute == "none" or not torch.is_grad_enabled():
                x_BTD = block(x_BTD, rotation)
            elif self.recompute == "block":
                x_BTD = checkpoint(block, x_BTD, rotation, use_reentrant=False)
            else:
                x_BTD = checkpoint(block, x_BTD, rotation, use_reentrant=False, context_fn=contexts)
        if targets_BT is not None:
            loss: Tensor = self.loss(self.final_norm, self.lm_head, x_BTD, targets_BT)
            return loss
        logits_BTV: Tensor = self.lm_head(self.final_norm(x_BTD)).float()
        return logits_BTV[..., : self.config.vocabulary]  # the padding is no token

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the model in place, without graph breaks: each block by itself, so that one
        compilation serves all that are alike, and the loss. `backend` is torch.compile's.

        Raises:
            UserError: `recompute` is "selective".
        """
        if self.recompute == "selective":
            # What a compiled block's operators give may lie in memory that it uses again.
            raise UserError(SELECTIVE_COMPILED)
        allow_many_compilations()
        for part in self.modules():
            if isinstance(part, Compilable):
                part.compile_forward(backend)

    def _rotation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """RoPE's tables, made once per device; no buffer, which `model.bfloat16()` would round."""
        if device not in self._rotations:
            with torch.inference_mode(False):  # else no later pass could be trained
                self._rotations[device] = rope_tables(self.config, device)
        return self._rotations[device]


def allow_many_compilations() -> None:
    """Let torch.compile hold more of a class than the 8 at which it would stop: blocks of several
    kinds, trained and evaluated, or several models in one process, are soon more."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


def rope_tables(config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosines and sines of RoPE (arXiv 2104.09864): float32 [context, E / 2] each."""
    half = config.head_width // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = torch.outer(
        torch.arange(config.context, dtype=torch.float64), config.rope_theta**-exponents
    )
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x_BHTE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head in float32, as Llama does."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


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
) -> Plan:
    """The plan for a GPT of this shape, layer by layer. Raises what `resolve` raises.

    Args:
        config: the shape.
        recipe: see `resolve`.
        hardware: see `resolve`.
        backend: see `resolve`.
        strict: see `resolve`.
        tokens: of a micro-batch; if known, layers in which FP8 does not pay are left out.
        left_out: layers to leave out, with the reason.
        vocabulary_multiple: what the vocabulary is padded to at least.
    """
    plan = resolve(recipe, hardware, backend, strict)
    measured = load_measured(hardware, plan.backend, plan.scaling) if tokens else None
    multiple = max(plan.vocabulary_multiple, vocabulary_multiple)
    vocabulary = padded_vocabulary(config, multiple)
    made = plan.for_layers(
        config.linear_shapes(vocabulary), left_out=left_out, tokens=tokens, measured=measured
    )
    needed = max(made.vocabulary_multiple, vocabulary_multiple)
    if needed == multiple:
        return made
    vocabulary = padded_vocabulary(config, needed)  # it is FP8 no more
    return made.for_layers(config.linear_shapes(vocabulary))


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """GPT-2's initialisation: normal, residual projections scaled by 1 / sqrt(2 x layers), biases
    zero, norms one. Drawn on the CPU, unpadded, so that every recipe starts from the same."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = config.init_std / (math.sqrt(2 * config.layers) if residual else 1.0)
            rows = parameter.shape[0]
            if name in PADDED:
                rows = config.vocabulary
                parameter.zero_()
            parameter[:rows] = torch.empty(rows, *parameter.shape[1:]).normal_(
                0.0, std, generator=generator
            )


PADDED = ("embedding.weight", "lm_head.weight")
"""The parameters whose rows are padded to `Backend.vocabulary_multiple`."""
