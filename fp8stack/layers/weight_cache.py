"""A cache of the FP8 copies of weights, valid until the weights change."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.kernels.weight_casts import KeptWeights
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.layers.weight_changes import Version, WeightChanges, version_of
from fp8stack.numerics.cast import record_amax


@dataclass
class CachedWeight:
    """The row copy and the column copy of a weight, as `GemmBackend.cast` returns them, and the
    version of the weight."""

    copies: tuple[Any, Any]
    version: Version


class WeightCache:
    """The copies of the weights of many layers, which one kernel casts."""

    def __init__(self) -> None:
        self._groups: list[tuple[KeptWeights, bool]] = []  # with whether scaling is delayed
        self._addresses: list[tuple[int, int, torch.dtype]] = []  # of the weights
        self._versions: list[Version] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(WeightCache())  # the weights of a copy have other addresses

    def cast(
        self,
        layers: list[tuple[QuantizedLinear, Tensor]],
        delayed: DelayedScaling | None,
        changes: WeightChanges,
    ) -> None:
        """Cast the current weights of the layers, and record their amaxes if they changed."""
        record = changes.first
        addresses = [(id(weight), weight.data_ptr(), weight.dtype) for _, weight in layers]
        if addresses != self._addresses:
            self._allocate(layers)
            self._addresses = addresses
        for group, is_delayed in self._groups:
            if is_delayed:
                assert delayed is not None
                recorded = delayed.history.all_recorded
                # Unless the change is certain, the device decides whether to record amaxes.
                amaxes = recorded if changes.certain else torch.zeros_like(recorded)
                group.cast(delayed.weight_scales, amaxes if record else None)
                if record and not changes.certain:
                    record_amax(recorded, amaxes, delayed.unrecorded)
            else:
                group.cast()
        weights: list[CachedWeight] = []
        for layer, weight in layers:
            cached = layer.quantizers["weight"].cached
            cached.version = changes.versions.get(layer) or version_of(weight)
            weights.append(cached)
        versions = [cached.version for cached in weights]
        if versions != self._versions:  # copies that autograd saved were overwritten
            tensors = [copy.data for cached in weights for copy in cached.copies]
            torch.autograd.graph.increment_version(tensors)
            self._versions = versions

    def _allocate(self, layers: list[tuple[QuantizedLinear, Tensor]]) -> None:
        self._groups = []
        groups: dict[Any, list[tuple[QuantizedLinear, Tensor]]] = defaultdict(list)
        for layer, weight in layers:
            quantizers = layer.quantizers["weight"]
            quantizers.cached = None  # free the memory before new copies are allocated
            groups[quantizers.quantizer, weight.dtype, weight.device].append((layer, weight))
        for (quantizer, *_), members in groups.items():
            slots = [layer.operands.slots for layer, _ in members if quantizer.delayed]
            columns = [of_layer["weight", False].column for of_layer in slots]
            group = KeptWeights([weight.detach() for _, weight in members], quantizer, columns)
            self._groups.append((group, quantizer.delayed))
            for (layer, _), (rows, turned) in zip(members, group.copies, strict=True):
                copies = (turned, rows) if layer.transposed else (rows, turned)
                layer.quantizers["weight"].cached = CachedWeight(copies, ())
