"""NVIDIA's own model: Transformer Engine's fused TransformerLayer, between embedding and head.

Checked against the Python source of TE 2.20. Each function needs a TE that can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers import shape_of
from bench.peers.plain_gpt import Shape, optimizer_for
from fp8stack.benchmark.step import Work, training_step
from fp8stack.conform import te as te_raw


def layer_options(shape: Shape, number: int) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "ffn_hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_gqa_groups": shape.kv_heads,
        "layernorm_epsilon": shape.norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layer_number": number,
        "self_attn_mask_type": "causal",
        "params_dtype": torch.float32,
        "fuse_qkv_params": True,
        "bias": not shape.llama,
        "activation": "swiglu" if shape.llama else "gelu",
        "normalization": "RMSNorm" if shape.llama else "LayerNorm",
        "attn_input_format": "bshd",
        "device": "cuda",
    }


class TEGPT(nn.Module):
    """A GPT of TransformerLayers; float32 parameters, bf16 by autocast, FP8 by TE's."""

    def __init__(self, shape: Shape, scaling: str | None) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.shape = shape
        self.recipe = te_raw.recipe(scaling) if scaling else None
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        if not shape.llama:
            self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(
            te.TransformerLayer(**layer_options(shape, i + 1)) for i in range(shape.layers)
        )
        self.final_norm: nn.Module = (nn.RMSNorm if shape.llama else nn.LayerNorm)(
            shape.width, eps=shape.norm_eps
        )
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight
        self.to("cuda")
        self.rotation: Tensor | None = None
        if shape.llama:
            rope = te.RotaryPositionEmbedding(
                shape.width // shape.heads, rotary_base=shape.rope_theta
            )
            self.rotation = rope(shape.context).to("cuda")

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross-entropy in nats per token, 0-dim."""
        import transformer_engine.pytorch as te

        T = tokens_BT.shape[1]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.embedding(tokens_BT)
            if not self.shape.llama:
                x = x + self.position_embedding.weight[:T]
            x = x.bfloat16()
            rotation = None if self.rotation is None else self.rotation[:T]
            with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                for layer in self.layers:
                    x = layer(x, rotary_pos_emb=rotation)
            logits = self.lm_head(self.final_norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def step(work: Work, scaling: str | None) -> Callable[[], None]:
    """A training step of it, in bf16 or in an FP8 recipe of TE's."""
    model = TEGPT(shape_of(work.config, 64), scaling)
    return training_step(model, optimizer_for(model), work.batch_of("cuda"))
