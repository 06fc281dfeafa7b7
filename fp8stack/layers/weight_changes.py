"""When weights changed: between two optimizer steps, micro-batches share one quantized weight.

A change is noticed by itself. Any torch optimizer's step and an operation on the weight in place
tell of it. Nothing tells of other changes, as by `weight.data`, by a gradient hook or by compiled
code, so a training pass compares the values: with sums over all of them. On a CPU the outcome is
known before weights are quantized. On a GPU that would mean to wait for it: there weights are
quantized again in each training pass that follows a backward pass, and the device decides whether
their amaxes count.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Version = tuple[object, ...]


def own_weight(layer: nn.Module) -> Tensor | None:
    """The weight that a linear owns, as it is outside its call; None where it is computed at each
    call (pruning, parametrizations), or is a part of it (FSDP1 between its calls)."""
    weight: Any = layer.stored_weight
    return weight if weight is not None and weight.ndim >= 2 else None


def version_of(weight: Tensor | None) -> Version:
    """A value that differs once `weight` was changed in place, replaced, or moved; None never
    differs."""
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


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _sum_of(weight: Tensor) -> Tensor:
    """A number that is another, int64, once values of `weight` are others."""
    if not weight.is_cpu:
        bits = weight.detach().view(_BITS[weight.element_size()])
        return bits.sum(dtype=torch.int64)
    rows = weight.detach().contiguous()
    # Not by `numpy`, after which FSDP could no longer free the memory.
    memory = (ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr()) if rows.nbytes else b""
    return torch.tensor(zlib.crc32(memory))


# An operator of its own, which the compiler leaves as it is.
@torch.library.custom_op("fp8stack::values_changed", mutates_args=("sums",))
def _values_changed(weights: Sequence[Tensor], sums: Tensor) -> Tensor:
    """Whether values of `weights` changed since the last call with `sums`, int64 [weights]: bool,
    0-dim."""
    fresh = torch.stack([_sum_of(weight) for weight in weights])
    changed = (fresh != sums).any()
    sums.copy_(fresh)
    return changed


_values_changed.register_fake(lambda weights, sums: sums.new_empty((), dtype=torch.bool))


class WeightChanges:
    """Whether the weights of some layers changed since a pass last trained with them.

    Attributes:
        first: whether the pass under way trains and quantizes weights again.
        generation: the number of such passes.
        copied: whether the pass uses quantized copies of the weights: they serve until the weights
            change, within training. An evaluation makes its own.
        fresh: whether no layer's backward pass ran since copies were made or a training pass began.
        versions: versions of the watched weights at the last pass.
        flag: bool and 0-dim, tells the device that weights changed.
        certain: whether they are known to have changed, where `first` says so.
        has_amaxes: whether amaxes of weights are recorded, once per change.
        agree: combines the findings of ranks that shard weights.
        only_told: whether the weights change by torch's optimizers and operations in place alone,
            so that no values need be compared.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.first = self.certain = self.copied = False
        self.has_amaxes = self.only_told = False
        self.agree: Callable[[Tensor], Tensor] | None = None
        with torch.inference_mode(False):  # optimizers' steps write to it, wherever it was made
            self.flag = torch.ones((), dtype=torch.bool)
            self._sums = torch.zeros(0, dtype=torch.int64)
        self._changed = True
        self._compiled = False
        self._backwards = self._trained_at = 0  # layers' backward passes now, at the last pass
        self.fresh = True
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

    def backward_ran(self) -> None:
        """Note, from inside a backward pass, that gradients are known: weights may change."""
        if not torch.compiler.is_compiling():  # else `layer_runs` told
            self._backwards += 1
            self.fresh = False

    def layer_runs(self) -> None:
        """Note that a layer is called: if its code is compiled, it tells of no backward pass."""
        if torch.compiler.is_compiling():
            self._compiled = True

    def made_copies(self) -> None:
        """Note that copies of the weights were made."""
        self.copied = self.fresh = True

    @property
    def copies_serve(self) -> bool:
        """Whether copies that were made serve a layer that is called now, maybe by itself."""
        # Blocks run again in a backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        return in_backward or self.fresh

    def begin_pass(self, trains: bool) -> None:
        """Look for changes before a pass of the model; one that `trains` uses them up."""
        if torch.compiler.is_compiling():
            self.copied = False  # it cannot look, so it quantizes in its graph
            shared_out = any(_is_shared_out(layer) for layer in self._layers)
            if trains and self.has_amaxes and not self.only_told and not shared_out:
                self._compare()
            return
        versions = {layer: version_of(own_weight(layer)) for layer in self._layers}
        if versions != self.versions:
            self.versions = versions
            self.mark()
        if not trains:
            self.first = self.copied = False
            return
        self.first = self._may_have_changed() or self._changed
        self.certain = self._changed
        if self.first:
            self.generation += 1
            self.copied = False
        self._changed = False
        self._trained_at, self.fresh = self._backwards, True

    def _may_have_changed(self) -> bool:
        """Whether weights may have changed that nobody told of; if that is known, whether they
        did."""
        if self.only_told:
            return False
        on_cpu = [_is_plain_on_cpu(own_weight(layer)) for layer in self._layers]
        is_certain = bool(on_cpu) and all(on_cpu)
        if is_certain or self.has_amaxes:
            changed = self._compare()
            if is_certain and changed is not None and bool(changed):
                self.mark()
        ran = self._compiled or self._backwards != self._trained_at
        return ran and not is_certain

    def _compare(self) -> Tensor | None:
        """Note on the device whether values changed, and give it: bool, 0-dim."""
        weights = [value for layer in self._layers for value in _values_of(layer)]
        plain = [weight for weight in weights if type(weight) in (Tensor, nn.Parameter)]
        if not plain or plain[0].is_meta:
            return None
        if len(plain) != len(self._sums) or self._sums.device != plain[0].device:
            with torch.inference_mode(False):
                self._sums = torch.zeros(len(plain), dtype=torch.int64, device=plain[0].device)
        changed: Tensor = _values_changed(plain, self._sums)
        if self.agree is not None and any(_is_shared_out(layer) for layer in self._layers):
            changed = self.agree(changed)
        self.flag.logical_or_(changed)
        return changed


def _is_plain_on_cpu(weight: Tensor | None) -> bool:
    return weight is not None and weight.is_cpu and type(weight) in (Tensor, nn.Parameter)


def _values_of(layer: nn.Module) -> list[Tensor]:
    """The tensors that a layer's weight comes from, as far as they are on this rank."""
    weight = own_weight(layer)
    if weight is None:
        return list(layer.parameters())
    return [weight.to_local() if isinstance(weight, DTensor) else weight]


def _is_shared_out(layer: nn.Module) -> bool:
    """Whether FSDP left this rank a part of the weight."""
    weight: Any = layer.stored_weight
    return weight is not None and (weight.ndim == 1 or isinstance(weight, DTensor))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_WATCHES):
        watch.mark()


register_optimizer_step_post_hook(_after_step)
