"""When weights changed: between two optimizer steps, micro-batches share one quantized weight.

A change is noticed by itself: any torch optimizer's step, or an operation on the weight in place.
(Not noticed between two training passes: values copied into `weight.data`.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Version = tuple[object, ...]


def own_weight(layer: nn.Module) -> Tensor | None:
    """The weight that a linear owns, as it is outside its call; None where it is computed at each
    call (pruning, parametrizations), or is a part of it (FSDP1 between its calls)."""
    weight = layer._parameters.get("weight")
    return weight if weight is not None and weight.ndim == 2 else None


def version_of(weight: Tensor | None) -> Version:
    """What differs once `weight` was changed in place, replaced, or moved; None never differs."""
    if weight is None:
        return ()
    if weight.is_inference():
        return (object(),)  # torch counts no operations on it: it may have changed
    if isinstance(weight._base, nn.Parameter):  # FSDP1 makes a new view of it for each pass
        return (id(weight._base), weight._base._version)
    # torch counts up at each operation in place, but not at one on `weight.data`.
    address = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
    return (id(weight), weight.device, address, weight._version)


_WATCHES: weakref.WeakSet[WeightChanges] = weakref.WeakSet()


class WeightChanges:
    """Whether the weights of some layers changed since a pass last trained with them.

    `generation` counts the states of the weights that passes have trained with; `first` says that
    the pass under way is the first to train with this state, and `copied` that quantized copies of
    the weights are to be used. Those serve until the weights change, within training: an evaluation
    makes its own, so that it sees values that were put into `weight.data`. `versions` are those of
    the weights that are watched, at the last pass; `flag`, bool and 0-dim, tells compiled code,
    which cannot ask Python, that they changed.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.first = False
        self.copied = False
        with torch.inference_mode(False):  # optimizers' steps write to it, wherever it was made
            self.flag = torch.ones((), dtype=torch.bool)
        self._changed = True
        self._layers: list[nn.Module] = []
        self.versions: dict[nn.Module, Version] = {}
        _WATCHES.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _WATCHES.add(self)  # a copy watches for itself, and has quantized nothing yet
        self.mark()  # what happens to its weights before its first pass is not noticed

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Watch the `own_weight` of each of `layers`; of others, optimizers' steps tell."""
        self._layers = list(layers)

    def mark(self) -> None:
        """Note that weights changed."""
        self._changed = True
        self.copied = False
        self.flag.fill_(True)

    def begin_pass(self, trains: bool) -> None:
        """Look for changes before a pass of the model; one that `trains` uses them up."""
        if torch.compiler.is_compiling():
            self.copied = False  # it cannot look, so it quantizes in its graph
            return
        versions = {layer: version_of(own_weight(layer)) for layer in self._layers}
        if versions != self.versions:
            self.versions = versions
            self.mark()
        self.first = trains and self._changed
        if self.first:
            self.generation += 1
            self._changed = False
        if self.first or not trains:
            self.copied = False


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_WATCHES):
        watch.mark()


register_optimizer_step_post_hook(_after_step)
