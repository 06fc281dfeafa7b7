"""The keys and values of tokens that a model has seen, so that each new token is one step.

B sequences, G key/value heads, T tokens, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Keys and values of past tokens for every layer, allocated once.

    Args:
        layers: how many layers keep keys and values.
        shape: B, G, how many tokens there is room for, E.
        dtype: what attention computes in.
        device: the model's.

    Attributes:
        room: how many tokens it can hold.
        length: how many it holds; set to 0, it forgets them.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        options: Any = {"dtype": dtype, "device": device}
        self.keys_BGTE = [torch.zeros(shape, **options) for _ in range(layers)]
        self.values_BGTE = [torch.zeros(shape, **options) for _ in range(layers)]
        self.room = shape[2]
        self.length = 0

    def extended(self, layer: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of the next tokens, in any dtype, and return the keys and
        values of all tokens up to the last one, [B, G, T, E] in the cache's dtype. `length` does
        not change."""
        end = self.length + k_BGTE.shape[2]
        keys, values = self.keys_BGTE[layer], self.values_BGTE[layer]
        keys[:, :, self.length : end] = k_BGTE
        values[:, :, self.length : end] = v_BGTE
        return keys[:, :, :end], values[:, :, :end]
