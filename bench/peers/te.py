"""A GPT of Transformer Engine's fused TransformerLayers, with the plain GPT's embedding and head.

Checked against the Python source of TE 2.20. All functions need TE to be importable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu import te_modules
from bench.peers import autocast, shape_of
from bench.peers.plain_gpt import PlainGPT, Shape, optimizer_for
from fp8stack.analysis.benchmark.step_timing import StepWork, training_step
from fp8stack.layers.cudnn import load_cudnn


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


class TEGPT(PlainGPT):
    """The plain GPT with TransformerLayers as blocks; FP8 by TE's autocast."""

    def __init__(self, shape: Shape, scaling: str | None) -> None:
        super().__init__(shape)
        import transformer_engine.pytorch as te

        self.recipe = te_modules.recipe(scaling) if scaling else None
        self.to("cuda")
        self.rotation: Tensor | None = None
        if shape.llama:
            rope = te.RotaryPositionEmbedding(
                shape.width // shape.heads, rotary_base=shape.rope_theta
            )
            self.rotation = rope(shape.context).to("cuda")

    def block(self, number: int) -> nn.Module:
        import transformer_engine.pytorch as te

        layer: nn.Module = te.TransformerLayer(**layer_options(self.shape, number + 1))
        return layer

    def through_blocks(self, x_BTD: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        x_BTD = x_BTD.bfloat16()
        rotation = None if self.rotation is None else self.rotation[: x_BTD.shape[1]]
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for layer in self.blocks:
                x_BTD = layer(x_BTD, rotary_pos_emb=rotation)
        return x_BTD


def step(work: StepWork, scaling: str | None) -> Callable[[], None]:
    """A training step of the TEGPT, in bf16 or in an FP8 recipe of TE."""
    load_cudnn()
    model = TEGPT(shape_of(work.config, 64), scaling)
    return training_step(autocast(model, "cuda"), optimizer_for(model), work.batches_of("cuda"))
