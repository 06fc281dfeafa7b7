"""AdamW with decay groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

from fp8stack.training.config import RunConfig


def build_optimizer(model: nn.Module, config: RunConfig) -> AdamW:
    """Fused AdamW; matrices and embeddings decay, vectors (norms, biases) do not.

    Weights, moments and the update are float32 in every recipe.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )


def learning_rate(step: int, config: RunConfig) -> float:
    """The learning rate of `step` (1 is the first), a function of it alone: nothing to save.

    Linear warm-up, then a cosine to `min_lr x lr` at the last step, or, for "wsd" (warm-up, stable,
    decay), the full rate and a linear fall over the last `decay_fraction` of the steps.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        done = _share(step, config.warmup_steps, config.steps)
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        stable_until = round(config.steps * (1 - config.decay_fraction))
        left = 1 - _share(step, max(config.warmup_steps, stable_until), config.steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * left)


def _share(step: int, start: int, end: int) -> float:
    """How much of the way from `start` to `end` is behind `step`: 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
