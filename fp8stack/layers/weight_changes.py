"""Detect changes of weights: between two optimizer steps, micro-batches share a quantized weight.

Steps of torch's optimizers and in-place operations on a weight are detected by a hook and by the
tensor's version. Other changes (through `weight.data`, in a gradient hook, in compiled code) are
not, so a training pass compares checksums of the values. On a CPU, it does so before weights
are quantized. On a GPU, reading the result would synchronize: there, weights are quantized again in
each training pass that follows a backward pass, and the device decides whether their amaxes are
recorded.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8stack.layers.fsdp import is_dtensor
from fp8stack.numerics.fused import needs_operator

Version = tuple[object, ...]


def weight_matrix(layer: nn.Module) -> Tensor | None:
    """The weight of a linear if it is stored as a matrix; None if it is computed at each call
    (pruning, parametrizations) or flattened into a shard (FSDP1 between its calls)."""
    weight: Any = layer.stored_weight
    return weight if weight is not None and weight.ndim >= 2 else None


def version_of(weight: Tensor | None) -> Version:
    """A value to compare, which changes if `weight` is changed in place, replaced, or moved; for
    None it never changes."""
    if weight is None:
        return ()
    if weight.is_inference():
        return (object(),)  # inference tensors have no version: it may have changed
    if isinstance(weight._base, nn.Parameter):  # FSDP1 creates a view for each pass
        return (id(weight._base), weight._base._version)
    # In-place operations increment `_version`, except those on `weight.data`.
    address = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
    return (id(weight), weight.device, address, weight._version)


@dataclass
class CachedWeight:
    """Copies of a weight that are used until the weight changes.

    Attributes:
        copies: the rowwise and the columnwise copy, as `GemmBackend.cast` returns them, or the
            weight in a compute dtype.
        version: `version_of` the weight that was copied; None before.
    """

    copies: Any = None
    version: Version | None = None

    def get(self, weight: Tensor | None, copy: Callable[[], Any]) -> Any:
        """The copies of the weight as it is, which `copy` makes if there are none."""
        version = version_of(weight)
        if self.version != version:
            self.copies = None  # free the memory
            self.copies, self.version = copy(), version
        return self.copies


_WATCHES: weakref.WeakSet[WeightChanges] = weakref.WeakSet()


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _sum_of(weight: Tensor) -> Tensor:
    """A checksum of the values of `weight`: int64, 0-dim."""
    if not weight.is_cpu:
        bits = weight.detach().view(_BITS[weight.element_size()])
        return bits.sum(dtype=torch.int64)
    rows = weight.detach().contiguous()
    # Not through `numpy()`, after which FSDP could no longer free the memory.
    memory = (ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr()) if rows.nbytes else b""
    return torch.tensor(zlib.crc32(memory))


def _values_changed(weights: Sequence[Tensor], sums: Tensor) -> Tensor:
    """Whether values of `weights` changed since the last call with `sums`, the checksums, int64
    [weights], which are updated: bool, 0-dim."""
    fresh = torch.stack([_sum_of(weight) for weight in weights])
    changed = (fresh != sums).any()
    sums.copy_(fresh)
    return changed


# A custom operator, which torch.compile does not trace into. Eager code calls the function, see
# `delayed._update_scales_op`.
_values_changed_op = torch.library.custom_op(
    "fp8stack::values_changed", _values_changed, mutates_args=("sums",)
)
_values_changed_op.register_fake(lambda weights, sums: sums.new_empty((), dtype=torch.bool))


class WeightChanges:
    """Detects whether the weights of some layers changed since the last training pass.

    Attributes:
        first: whether the running pass is a training pass that quantizes weights again.
        generation: the number of such passes.
        copied: whether cached copies of quantized weights are valid. In training, they are valid
            until the weights change; each evaluation quantizes the weights again.
        fresh: whether no layer's backward pass ran since weights were quantized or a training pass
            began.
        versions: `version_of` the watched weights at the last pass.
        flag: the device's flag that weights changed: bool, 0-dim.
        certain: whether the change that made a pass `first` is certain, not only possible.
        has_amaxes: whether amaxes of weights are recorded, once per change.
        any_rank: returns whether a flag is true on any rank, for ranks that shard weights.
        only_tracked_changes: whether only torch's optimizers and in-place operations change the
            weights, so that checksums are not needed.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.first = self.certain = self.copied = False
        self.has_amaxes = self.only_tracked_changes = False
        self.any_rank: Callable[[Tensor], Tensor] | None = None
        with torch.inference_mode(False):  # optimizer steps write to it in any mode
            self.flag = torch.ones((), dtype=torch.bool)
            self._sums = torch.zeros(0, dtype=torch.int64)
        self._changed = True
        self._compiled = False
        self._backward_count = self._trained_at = 0  # now, and at the last training pass
        self.fresh = True
        self._layers: list[nn.Module] = []
        self.versions: dict[nn.Module, Version] = {}
        _WATCHES.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _WATCHES.add(self)
        self.mark_changed()  # a copy has no quantized weights yet

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Watch the weight of each of `layers`. Without layers, only steps of torch's
        optimizers are detected."""
        self._layers, self.versions = list(layers), {}

    def attach(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Watch the weights of `layers` and detect their changes before each pass of `model`."""
        self.watch(layers)
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        self.begin_pass(model.training and torch.is_grad_enabled())

    def mark_changed(self) -> None:
        """Note that weights changed."""
        self._changed = True
        self.copied = False
        self.flag.fill_(True)

    def backward_ran(self) -> None:
        """Called at the end of a layer's backward pass: a gradient hook may change the weights."""
        if not torch.compiler.is_compiling():  # else see `note_compiled_call`
            self._backward_count += 1
            self.fresh = False

    def note_compiled_call(self) -> None:
        """Called by each compiled layer, which does not call `backward_ran`."""
        self._compiled = True

    def mark_copied(self) -> None:
        """Called after all weights were quantized and cached."""
        self.copied = self.fresh = True

    @property
    def copies_are_current(self) -> bool:
        """Whether cached copies are valid for a layer that is called now, in a pass of the model or
        alone."""
        # In a backward pass, activation checkpointing recomputes blocks.
        in_backward = torch._C._current_graph_task_id() != -1
        return in_backward or self.fresh

    def begin_pass(self, trains: bool) -> None:
        """Detect changes before a pass of the model; a pass that `trains` resets them."""
        if torch.compiler.is_compiling():
            self.copied = False  # versions cannot be read, so weights are quantized in the graph
            sharded = any(_is_sharded(layer) for layer in self._layers)
            if trains and self.has_amaxes and not self.only_tracked_changes and not sharded:
                self._compare_sums()
            return
        versions = {layer: version_of(weight_matrix(layer)) for layer in self._layers}
        if versions != self.versions:
            self.versions = versions
            self.mark_changed()
        if not trains:
            self.first = self.copied = False
            return
        self.first = self._may_have_changed() or self._changed
        self.certain = self._changed
        if self.first:
            self.generation += 1
            self.copied = False
        self._changed = False
        self._trained_at, self.fresh = self._backward_count, True

    def _may_have_changed(self) -> bool:
        """Whether weights may have changed undetected. If all are on the CPU, checksums decide: a
        change calls `mark_changed`, and the result is False."""
        if self.only_tracked_changes:
            return False
        on_cpu = [_is_plain_on_cpu(weight_matrix(layer)) for layer in self._layers]
        is_certain = bool(on_cpu) and all(on_cpu)
        if is_certain or self.has_amaxes:
            changed = self._compare_sums()
            if is_certain and changed is not None and bool(changed):
                self.mark_changed()
        ran = self._compiled or self._backward_count != self._trained_at
        return ran and not is_certain

    def _compare_sums(self) -> Tensor | None:
        """Set `flag` if checksums of the values changed. Returns whether they did: bool, 0-dim."""
        weights = [value for layer in self._layers for value in _values_of(layer)]
        plain = [weight for weight in weights if type(weight) in (Tensor, nn.Parameter)]
        if not plain or plain[0].is_meta:
            return None
        if len(plain) != len(self._sums) or self._sums.device != plain[0].device:
            with torch.inference_mode(False):
                self._sums = torch.zeros(len(plain), dtype=torch.int64, device=plain[0].device)
        compare = _values_changed_op if needs_operator(self._sums) else _values_changed
        changed: Tensor = compare(plain, self._sums)
        if self.any_rank is not None and any(_is_sharded(layer) for layer in self._layers):
            changed = self.any_rank(changed)
        self.flag.logical_or_(changed)
        return changed


def _is_plain_on_cpu(weight: Tensor | None) -> bool:
    return weight is not None and weight.is_cpu and type(weight) in (Tensor, nn.Parameter)


def _values_of(layer: nn.Module) -> list[Tensor]:
    """The tensors on this rank that the layer's weight is stored in or computed from."""
    weight = weight_matrix(layer)
    if weight is None:
        return list(layer.parameters())
    return [weight.to_local() if is_dtensor(weight) else weight]


def _is_sharded(layer: nn.Module) -> bool:
    """Whether this rank has only a shard of the weight."""
    weight: Any = layer.stored_weight
    return weight is not None and (weight.ndim == 1 or is_dtensor(weight))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_WATCHES):
        watch.mark_changed()


register_optimizer_step_post_hook(_after_step)
