"""The model and the data of the tests: small enough that a training step takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp8stack

RECIPES = ["delayed", "nvfp4"]  # an amax history; counters of stochastic rounding
BATCH, CONTEXT = 4, 16


def gpt2(recipe: str | None, seed: int = 0) -> Any:
    """A GPT-2 of transformers, converted if there is a recipe. The seed of all that follows."""
    import transformers

    transformers.set_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": CONTEXT, "n_embd": 32}
    sizes |= {"n_layer": 1, "n_head": 2}
    still: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still, **ends))
    return converted(model, recipe) if recipe else model


def converted(model: nn.Module, recipe: str, **options: Any) -> nn.Module:
    """The model, in the recipe as this machine's CPU runs it."""
    plan = fp8stack.resolve(recipe, fp8stack.probe("cpu"))
    return fp8stack.convert(model, plan, **options)


def tokens(step: int) -> Tensor:
    """The batch of a step, [B, T], int64."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (BATCH, CONTEXT), generator=generator)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def language_loss(model: nn.Module, step: int) -> Tensor:
    """The loss of a step's batch, by a model of transformers."""
    loss: Tensor = model(input_ids=tokens(step), labels=tokens(step)).loss
    return loss


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    loss_of: Callable[[nn.Module, int], Tensor] = language_loss,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> list[float]:
    """A plain loop: the loss of each step."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
