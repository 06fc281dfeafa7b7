"""Copies of weights that are used until the weights change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.emulate import EmulatedOperand
from fp8stack.layers.kernels.variants import has_kernel
from fp8stack.layers.kernels.weight_casts import BatchedCast
from fp8stack.layers.linear import Call, LowPrecisionLayer, QuantizedLayer
from fp8stack.layers.weight_changes import CachedWeight, Version, WeightChanges, version_of
from fp8stack.numerics.cast import record_amax


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """A context in which emulated linears, in passes without gradients, round a weight once until
    it changes, and linears without FP8 use weights that were cast when the context began. These
    take memory. In this context, weights must not change through `weight.data`, which `version_of`
    cannot see, and code that a change should affect must not be compiled."""
    layers = [layer for layer in model.modules() if isinstance(layer, LowPrecisionLayer)]
    before = {layer: (layer.casts, layer.weight_changes) for layer in layers if not layer.in_fp8}
    weights: list[Any] = [getattr(layer, "quantizers", {}).get("weight") for layer in layers]
    emulated = [operand for operand in weights if type(operand) is EmulatedOperand]
    for layer in before:
        weight = layer._parameters.get("weight")
        if type(weight) is nn.Parameter:  # else it is computed at each call
            cast = CachedWeight(weight.detach().to(layer.compute_dtype), version_of(weight))
            layer.casts, layer.weight_changes = {"weight": cast}, None
    for operand in emulated:
        vars(operand)["cast"] = partial(_cast_once, operand, CachedWeight())
    try:
        yield
    finally:
        for layer, state in before.items():
            layer.casts, layer.weight_changes = state
        for operand in emulated:
            del vars(operand)["cast"]


def _cast_once(
    operand: EmulatedOperand,
    cached: CachedWeight,
    weight: Tensor,
    with_columnwise: bool,
    call: Call,
) -> Any:
    """Call `operand.cast`; in passes without gradients, only if the weight changed."""
    cast = partial(EmulatedOperand.cast, operand, weight, with_columnwise, call)
    return cast() if with_columnwise or call.record else cached.get(weight, cast)


def is_castable_in_batch(weight: Tensor) -> bool:
    """Whether the kernel that casts many weights can read this one."""
    is_plain_tensor = type(weight) in (Tensor, nn.Parameter) and weight._base is None
    return is_plain_tensor and weight.is_contiguous() and has_kernel(weight.device)


class BatchedCasts:
    """Caches copies of the weights of many layers, which one kernel casts."""

    def __init__(self) -> None:
        self._groups: list[tuple[BatchedCast, bool]] = []  # (cast, is scaling delayed)
        self._addresses: list[tuple[int, int, torch.dtype]] = []  # of the weights
        self._versions: list[Version] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(BatchedCasts())  # the weights of a copy have other addresses

    def cast(
        self,
        layers: list[tuple[QuantizedLayer, Tensor]],
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
            cached = layer.quantizers["weight"].cached_weight
            cached.version = changes.versions.get(layer) or version_of(weight)
            weights.append(cached)
        versions = [cached.version or () for cached in weights]
        if versions != self._versions:  # copies that autograd saved were overwritten
            tensors = [copy.data for cached in weights for copy in cached.copies]
            torch.autograd.graph.increment_version(tensors)
            self._versions = versions

    def _allocate(self, layers: list[tuple[QuantizedLayer, Tensor]]) -> None:
        self._groups = []
        groups: dict[Any, list[tuple[QuantizedLayer, Tensor]]] = defaultdict(list)
        for layer, weight in layers:
            quantizers = layer.quantizers["weight"]
            quantizers.cached_weight = None  # free the memory before new copies are allocated
            groups[quantizers.joint_cast.quantizer, weight.dtype, weight.device].append(
                (layer, weight)
            )
        for (quantizer, *_), members in groups.items():
            slots = [layer.operands.slots for layer, _ in members if quantizer.delayed]
            columns = [layer_slots["weight", False].column for layer_slots in slots]
            group = BatchedCast([weight.detach() for _, weight in members], quantizer, columns)
            self._groups.append((group, quantizer.delayed))
            for (layer, _), (rowwise, columnwise) in zip(members, group.copies, strict=True):
                copies = (columnwise, rowwise) if layer.transposed else (rowwise, columnwise)
                layer.quantizers["weight"].cached_weight = CachedWeight(copies, ())
