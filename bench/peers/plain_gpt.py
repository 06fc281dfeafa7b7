"""A GPT in standard PyTorch, in the style of nanoGPT: a peer of fp8stack in `step`.

It imports nothing from fp8stack and takes its shape as plain values. Its parameters have the same
names as fp8stack's, so that a test can give both models the same weights.

B batch, T tokens, D width, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model like GPT-2 (LayerNorm, GELU, learned positions, biases), or like Llama
    if `llama` is true (RMSNorm, SwiGLU, RoPE, no biases); `qk_norm` normalizes queries and keys."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    llama: bool = False
    tied: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0


def _norm(shape: Shape) -> nn.Module:
    kind = nn.RMSNorm if shape.llama else nn.LayerNorm
    return kind(shape.width, eps=shape.norm_eps)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.kv_heads
        self.head_width = shape.width // shape.heads
        qkv = (self.heads + 2 * self.groups) * self.head_width
        self.qkv = nn.Linear(shape.width, qkv, bias=not shape.llama)
        self.output = nn.Linear(shape.width, shape.width, bias=not shape.llama)
        if shape.qk_norm:
            self.query_norm = nn.RMSNorm(self.head_width, eps=shape.norm_eps)
            self.key_norm = nn.RMSNorm(self.head_width, eps=shape.norm_eps)
        self.qk_norm = shape.qk_norm

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        B, T, D = x_BTD.shape
        heads = self.qkv(x_BTD).view(B, T, -1, self.head_width).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=1)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = _rotate(q, *rotation).to(v.dtype), _rotate(k, *rotation).to(v.dtype)
        gqa = self.groups != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        out: Tensor = self.output(y.transpose(1, 2).reshape(B, T, D))
        return out


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.llama = shape.llama
        up = shape.hidden * (2 if shape.llama else 1)
        self.up = nn.Linear(shape.width, up, bias=not shape.llama)
        self.down = nn.Linear(shape.hidden, shape.width, bias=not shape.llama)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.llama:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        y: Tensor = self.down(hidden)
        return y


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), _Attention(shape)
        self.mlp_norm, self.mlp = _norm(shape), _MLP(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class PlainGPT(nn.Module):
    """The model, with float32 parameters; autocast decides which operators run in bf16."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        if shape.llama:
            half = shape.width // shape.heads // 2
            rates = shape.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
            angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), rates)
            self.register_buffer("cosine", angles.cos().float(), persistent=False)
            self.register_buffer("sine", angles.sin().float(), persistent=False)
        else:
            self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(self.block(number) for number in range(shape.layers))
        self.final_norm = _norm(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight

    def block(self, number: int) -> nn.Module:
        """The block `number`, from 0."""
        return _Block(self.shape)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross-entropy in nats per token, 0-dim."""
        x = self.embedding(tokens_BT)
        if not self.shape.llama:
            x = x + self.position_embedding.weight[: tokens_BT.shape[1]]
        logits = self.lm_head(self.final_norm(self.through_blocks(x))).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

    def through_blocks(self, x_BTD: Tensor) -> Tensor:
        T = x_BTD.shape[1]
        rotation = (self.cosine[:T], self.sine[:T]) if self.shape.llama else None
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation)
        return x_BTD


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW with weight decay for matrices and embeddings, not for vectors."""
    decaying = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
