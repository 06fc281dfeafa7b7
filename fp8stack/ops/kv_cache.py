"""The keys and values of tokens that a model has seen, so that each new token is one step.

B sequences, G key/value heads, T tokens, E head width. It must not know how attention uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer: room for a number of tokens, allocated once.

    Args:
        shape: B, G, that number, E.
        dtype: what attention computes in.
        device: the model's.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys_BGTE = torch.zeros(shape, dtype=dtype, device=device)
        self.values_BGTE = torch.zeros(shape, dtype=dtype, device=device)

    def extended(self, start: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Put in the keys and values of the tokens from place `start` on, in any dtype: those of
        all tokens up to the last of them, [B, G, T, E] in the cache's dtype."""
        end = start + k_BGTE.shape[2]
        self.keys_BGTE[:, :, start:end] = k_BGTE
        self.values_BGTE[:, :, start:end] = v_BGTE
        return self.keys_BGTE[:, :, :end], self.values_BGTE[:, :, :end]


class KVCache:
    """What a model keeps of the tokens that it has seen.

    Attributes:
        layers: one for each block.
        room: how many tokens it can hold.
        length: how many it holds; set to 0, it forgets them.
    """

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.room = layers[0].keys_BGTE.shape[2]
        self.length = 0
