"""Rotary position embeddings. B batch, T tokens, H heads, E head width."""

import torch
from torch import Tensor

from fp8stack.model.config import GPTConfig


def rope_tables(config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosines and sines of RoPE (arXiv 2104.09864): float32 [context, E] each. Both halves of E
    hold the same angles; the sines in the first half are negated."""
    half = config.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    places = torch.arange(config.context, dtype=torch.float64)
    angles = torch.outer(places, config.rope_theta**-exponents)
    cosine, sine = angles.cos().float(), angles.sin().float()
    return torch.cat([cosine, cosine], -1).to(device), torch.cat([-sine, sine], -1).to(device)


def rotate(x_BHTE: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head in float32, as Llama does."""
    x_BTHE = x_BHTE.float().transpose(1, 2)  # the layout in memory
    swapped_BTHE = x_BTHE.roll(x_BTHE.shape[-1] // 2, dims=-1)
    return (x_BTHE * cosine_T1E + swapped_BTHE * sine_T1E).transpose(1, 2)
