"""When weights changed: between two optimizer steps, micro-batches share one quantized weight.

No GEMM here. A change is noticed by itself: any torch optimizer's step, or an operation on the
weight in place. (Not noticed: a hand-written update through `weight.data` without an optimizer.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_WATCHES: weakref.WeakSet[WeightChanges] = weakref.WeakSet()


class WeightChanges:
    """Whether the weights of some layers may have changed since both marks were last cleared."""

    def __init__(self) -> None:
        self.changed = True
        # The same for compiled code, which cannot ask Python: bool, 0-dim.
        with torch.inference_mode(False):  # optimizers' steps write to it, wherever it was made
            self.flag = torch.ones((), dtype=torch.bool)
        self._layers: list[nn.Module] = []
        self._versions: list[tuple[int, int]] = []
        _WATCHES.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _WATCHES.add(self)  # a copy watches for itself, and has quantized nothing yet
        self.mark()

    def watch(self, layers: list[nn.Module]) -> None:
        """Watch the parameter `weight` of each of `layers`."""
        self._layers = layers

    def mark(self) -> None:
        """Note that weights changed."""
        self.changed = True
        self.flag.fill_(True)

    def look(self) -> None:
        """Compare the weights' versions, which torch counts up at each operation in place."""
        weights = [layer.get_parameter("weight") for layer in self._layers]
        # An inference tensor has no version.
        versions = [(id(w), 0 if w.is_inference() else w._version) for w in weights]
        if versions != self._versions:
            self._versions = versions
            self.mark()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_WATCHES):
        watch.mark()


register_optimizer_step_post_hook(_after_step)
