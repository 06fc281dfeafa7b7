"""Training steps of peers: a plain GPT, the same with torchao's linears, and transformers' GPT-2.

No layer of fp8stack runs here. torchao and transformers are imported only by the functions that
need them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers.plain_gpt import PlainGPT, Shape, optimizer_for
from fp8stack.analysis.benchmark.step_timing import StepWork, training_step
from fp8stack.layers.compiler import allow_many_compilations
from fp8stack.model.config import GPTConfig

Step = Callable[[], None]


def shape_of(config: GPTConfig, multiple: int = 1) -> Shape:
    """The shape of a model of fp8stack as plain values, the vocabulary padded to `multiple`."""
    return Shape(
        vocabulary=-(-config.vocabulary // multiple) * multiple,
        context=config.context,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.query_groups,
        hidden=config.hidden,
        llama=config.activation == "swiglu",
        tied=config.tied,
        qk_norm=config.qk_norm is True,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
    )


def linear(recipe: str, inputs: int, outputs: int) -> nn.Module:
    """A linear layer of torchao on a CPU."""
    from bench.peers.torchao import with_torchao

    return with_torchao(nn.Sequential(nn.Linear(inputs, outputs)), recipe, "cpu")


def step(work: StepWork, device: str, torchao: str = "", compiled: bool = True) -> Step:
    """A training step of the plain GPT, with torchao's linears if `torchao` names a recipe: bf16
    autocast on a GPU, float32 on a CPU."""
    # On a GPU the vocabulary is padded to a multiple of 64, as nanoGPT's is (50304).
    model: nn.Module = PlainGPT(shape_of(work.config, 64 if device == "cuda" else 1)).to(device)
    if torchao:
        from bench.peers.torchao import with_torchao

        model = with_torchao(model, torchao, device)
    optimizer = optimizer_for(model)
    called = _compiled(model) if compiled else model
    return training_step(autocast(called, device), optimizer, work.batches_of(device))


def _compiled(model: nn.Module) -> nn.Module:
    allow_many_compilations()
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))


def autocast(model: nn.Module, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The model; on a GPU, in bf16 autocast."""
    if device == "cpu":
        return model

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            mean_loss: Tensor = model(tokens, targets)
        return mean_loss

    return loss


def transformers_step(work: StepWork) -> Step:
    """A training step of transformers' GPT-2 of the same shape, eager, float32, on the CPU."""
    import transformers

    config = work.config
    sizes: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
    }
    no_dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    gpt2 = transformers.GPT2Config(  # gelu_new is GELU with tanh
        activation_function="gelu_new", use_cache=False, **sizes, **no_dropout, **tokens
    )
    model = transformers.GPT2LMHeadModel(gpt2)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return training_step(loss, optimizer_for(model), work.batches_of("cpu"))
