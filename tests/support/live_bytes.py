"""The bytes that operators allocate and a forward pass keeps for the backward pass.

Every storage that is allocated in the forward pass and still alive at its end counts once:
activations, saved quantized operands, casts of weights. Parameters and buffers do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.model.gpt import GPT


class Live(TorchDispatchMode):
    """Counts the live bytes of storages that operators allocated in this mode, and their peak.
    Views of parameters allocate nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for place, storage in _storages(out).items():
            if place not in before:
                reference: Any = StorageWeakRef(storage)
                self._held[place] = reference, storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}


def kept_bytes(model: GPT, tokens: Tensor) -> int:
    """The bytes that a forward pass keeps, without the loss; `tokens` is int64 [B, T + 1]. A first
    pass, which makes one-time allocations, is not counted."""
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    live = Live()
    with live:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        return live.now() - int(loss.nbytes)
