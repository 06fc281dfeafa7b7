"""The initial weights of a GPT."""

import math

import torch
from torch import nn

from fp8stack.model.config import PADDED, GPTConfig

RESIDUAL = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.experts.down.weight",
    "mlp.shared.down.weight",
)
"""The endings of the names of weights whose products join the residual stream."""


@torch.no_grad()
def initialize(model: nn.Module, config: GPTConfig, seed: int) -> None:
    """GPT-2's initialisation: normal, residual projections scaled by 1 / sqrt(2 x layers), biases
    zero, norms one. Drawn on the CPU, without padding, so that every recipe starts from the same
    weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(RESIDUAL)
            std = config.init_std / (math.sqrt(2 * config.layers) if residual else 1.0)
            rows = config.vocabulary if name in PADDED else len(parameter)
            weights = torch.empty(rows, *parameter.shape[1:])
            weights.normal_(0.0, std, generator=generator)
            parameter.zero_()
            parameter[:rows] = weights
