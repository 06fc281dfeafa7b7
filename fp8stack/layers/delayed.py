"""Delayed scaling: the slots of a model, and the hooks that record amaxes and update scales.

A training pass is a forward pass of the model in training mode with gradients enabled, and its
backward pass. Its casts use the scales that it began with and record amaxes. The next training pass
begins with an update, which moves these amaxes into the history and computes the scales, in eager
and in compiled code. No other pass records or updates anything, and nothing runs after a backward
pass. A block that activation checkpointing recomputes casts with the same scales as before. If
another training pass began meanwhile, it raises an error.

A weight is cast with the scale of the first training pass after it changed, and its amax is
recorded once, when its layer first runs: the micro-batches of an optimizer step share one quantized
weight.

Ranks that train one model share one history: before each update, the recorded amaxes are reduced to
their maximum over the ranks (`shared_amaxes.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.layers.shared_amaxes import SharedAmaxes, reduce_amaxes
from fp8stack.layers.weight_changes import WeightChanges
from fp8stack.numerics import AmaxHistory
from fp8stack.numerics.amax_history import moved
from fp8stack.numerics.cast import record_amax
from fp8stack.numerics.fused import needs_operator


class Slot:
    """The scale and the recorded amax of one operand of one layer: 0-dim or, for the groups of a
    grouped linear, a vector (see `AmaxHistory`).

    Compiled code refers to a slot by its tensors and not by its name, so that code compiled for one
    layer is reused for all layers like it.
    """

    def __init__(self, delayed: AmaxSlots, name: str, operand: Operand) -> None:
        self.name = name
        self.operand = operand
        self._delayed = delayed
        self._column_indices = torch.zeros(1, dtype=torch.int64)
        self.column: Any = 0  # the index in the history; for a vector, a slice
        self._shape: tuple[int, ...] = ()
        self._recorded = torch.zeros((), dtype=torch.float32)

    def bind(self) -> None:
        """Look up the slot's column after the history was created or moved to another device."""
        history = self._delayed.history
        self._recorded = history.recorded(self.name)
        self.column = history.column(self.name)
        column, self._shape = self.column, tuple(self._recorded.shape)
        columns = [column] if isinstance(column, int) else range(column.start, column.stop)
        self._column_indices = torch.tensor(columns, device=self._recorded.device)

    def scale(self) -> Tensor:
        """The current scale: float32, 0-dim."""
        delayed = self._delayed
        is_weight = self.operand == "weight"
        return self._entry(delayed.weight_scales if is_weight else delayed.history.scales)

    def cast_arguments(self, record: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The arguments `scale`, `recorded` and `is_counted` of a cast.

        Returns:
            The current scale, float32 and 0-dim; the tensor that records the amax, float32 and
            0-dim, None without `record`; and whether to record it, bool and 0-dim, false for a
            weight that has not changed since its amax was recorded; None: always.
        """
        delayed, is_weight = self._delayed, self.operand == "weight"
        scales = delayed.weight_scales if is_weight else delayed.history.scales
        unrecorded = delayed.unrecorded if record and is_weight else None
        recorded = self._recorded if record else None
        if torch.compiler.is_compiling():
            is_counted = None if unrecorded is None else self._entry(unrecorded)
            return self._entry(scales), recorded, is_counted
        column = self.column  # in place of `_entry`: a linear calls this for each operand
        return scales[column], recorded, None if unrecorded is None else unrecorded[column]

    def record(self, amax: Tensor) -> None:
        """Record the amax of a tensor that was cast: float32, 0-dim."""
        _, recorded, is_counted = self.cast_arguments(record=True)
        assert recorded is not None
        record_amax(recorded, amax, is_counted)

    def _entry(self, values: Tensor) -> Tensor:
        """This slot's entry of `values` [slots]."""
        if torch.compiler.is_compiling():
            return values.index_select(0, self._column_indices).view(self._shape)
        return values[self.column]


Slots = dict[tuple[Operand, bool], Slot]
"""A layer's slots. Keys are the operand and whether the slot is the columnwise copy's."""


class AmaxSlots:
    """The slots of one model, and the tensors that hold their state.

    Attributes:
        history: the amaxes and scales.
        weight_scales: the scales at the first training pass with the current weights, float32
            [slots]; only the entries of weights are read.
        unrecorded: whether the amax of a weight has not been recorded since the weight changed,
            bool [slots]; only the entries of weights are read.
        quantizers, slots: the quantizer and the slot of each operand, by name.
        vectors: the slots of grouped linears, by name.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):  # inference tensors could not be updated later
            self.history = AmaxHistory()
            self.weight_scales = torch.ones(0, dtype=torch.float32)
            self.unrecorded = torch.ones(0, dtype=torch.bool)
        self.quantizers: dict[str, Quantizer] = {}
        self.slots: dict[str, Slot] = {}
        self.vectors: dict[str, Slot] = {}
        self._members: dict[str, list[str]] = {}  # the slots of each vector

    def add_layer(self, path: str, quantizers: Quantizers, groups: int = 0) -> Slots:
        """Add a slot for each delayed quantizer of the linear layer at the module path `path`. The
        two copies of an operand share a slot if they have the same quantizer. A grouped linear has
        a slot `<path>.<group>.<operand>` for each of its `groups`; together they form the vector
        `<path>.<operand>`."""
        slots: Slots = {}
        for key, quantizer in quantizers.each.items():
            operand: Any
            operand, _, gemm = key.partition(".")
            if quantizer.delayed and key in quantizers.casts:
                name = f"{path}.{key}"
                if groups:
                    members = [f"{path}.{group}.{key}" for group in range(groups)]
                    slot = self._add_vector(name, members, quantizer, operand)
                else:
                    slot = self._add(name, quantizer, operand)
                slots[operand, bool(gemm)] = slot
            elif quantizer.delayed:
                slots[operand, True] = slots[operand, False]
        return slots

    def add_attention(self, path: str, quantizers: Mapping[str, Quantizer]) -> None:
        """Add slots for attention at the module path `path`; `quantizers` are the recipe's
        `attention_slots`."""
        for operand, quantizer in quantizers.items():
            layer_operand: Operand = "grad_output" if operand[0] == "d" else "input"
            self._add(f"{path}.{operand}", quantizer, layer_operand)

    def slots_of(self, path: str, operand: str) -> list[str]:
        """The names of the slots, up to two, of an operand of the layer at `path`."""
        slot = f"{path}.{operand}"
        return [
            name for name in (slot, f"{slot}.dgrad", f"{slot}.wgrad") if name in self.quantizers
        ]

    def _add(self, name: str, quantizer: Quantizer, operand: Operand) -> Slot:
        self.quantizers[name] = quantizer
        self.slots[name] = Slot(self, name, operand)
        return self.slots[name]

    def _add_vector(
        self, name: str, members: list[str], quantizer: Quantizer, operand: Operand
    ) -> Slot:
        for member in members:
            self._add(member, quantizer, operand)
        self._members[name] = members
        self.vectors[name] = Slot(self, name, operand)
        return self.vectors[name]

    def allocate(self) -> None:
        """Allocate the tensors of the slots that were added. The same slots of another model keep
        their tensors."""
        with torch.inference_mode(False):
            if not self.history.slots:
                self.history.extend(self.quantizers, self._members)
                self.weight_scales = torch.ones_like(self.history.scales)
                self.unrecorded = torch.ones_like(self.weight_scales, dtype=torch.bool)
            self._bind()

    def _bind(self) -> None:
        for slot in (*self.slots.values(), *self.vectors.values()):
            slot.bind()

    def move(self, device: torch.device) -> None:
        """Move the state to `device`. It moves to meta only while it has no amaxes, and is reset
        when it moves from meta."""
        if self.history.history.device == device:
            return
        if device.type == "meta" and not self.history.is_new:
            return
        with torch.inference_mode(False):
            self.history.to(device)
            self.weight_scales = moved(self.weight_scales, device, 1)
            self.unrecorded = moved(self.unrecorded, device, 1)
            self._bind()

    def scale(self, slot: str) -> Tensor:
        """The current scale of `slot`: float32, 0-dim, a view that is updated in place."""
        return self.slots[slot].scale()

    def amaxes(self, passes: int, window: int) -> tuple[Tensor, Tensor]:
        """The largest amax of each slot in the last `passes` passes, float32 [slots], and the
        `window` amaxes before them, float32 [window or fewer, slots]. 0 stands for no amax."""
        rows = self.history.history[1:]  # row 0 is not in use
        split = max(0, len(rows) - passes)
        newest = torch.cat([rows[split:], self.history.all_recorded[None]])
        return newest.amax(dim=0), rows[max(0, split - window) : split]

    def step_state(self) -> list[Tensor]:
        """The tensors that a training step changes in place, which hold the state."""
        history = self.history
        return [history.history, history.scales, history.all_recorded, self.weight_scales]

    def snapshot(self) -> list[Tensor]:
        """Copies of the tensors that a training step changes, to pass to `restore`."""
        return [tensor.clone() for tensor in self.step_state()]

    def restore(self, snapshot: list[Tensor], where: Tensor) -> None:
        """Restore a `snapshot` if `where`, bool and 0-dim, is true; does not synchronize with the
        device."""
        for tensor, before in zip(self.step_state(), snapshot, strict=True):
            tensor.copy_(torch.where(where, before, tensor))


class DelayedScaling(AmaxSlots):
    """Records the amaxes of one model and updates its scales, by hooks on its forward pass.

    Attributes:
        sharing: reduces the amaxes over ranks.
        weights: detects changes of the weights.
        is_pending: whether a pass has recorded amaxes since the last update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharing = SharedAmaxes()
        self.weights = WeightChanges()
        self.weights.has_amaxes, self.weights.any_rank = True, self.sharing.any_rank
        # Whether the current pass records amaxes; between passes, whether the last one did.
        self._records = False
        self._outer: list[bool] = []  # `_records` before each of the nested passes that run
        self.is_pending = False
        self._passes = 0  # the number of training passes that have begun
        # Whether a training pass has begun since the forward pass of the current backward pass.
        self._outdated = False
        self._replayed_update = Replayed(self._move_amaxes)
        self._replayed_scales = Replayed(self._update_weight_scales)

    def attach(self, model: nn.Module) -> None:
        """Move the state to the device of `model` and register hooks on it that update the history.
        The training loop needs no further call. The state of another model with the same slots
        continues in `model`."""
        self.allocate()
        self.sharing.slots = list(self.quantizers)
        device = next(model.parameters()).device
        if device.type != "meta":
            self.move(device)
        self.weights.watch([m for m in model.modules() if getattr(m, "delayed", None) is self])
        model.delayed_scaling = self  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward, always_call=True)

    def move(self, device: torch.device) -> None:
        """See `AmaxSlots.move`."""
        super().move(device)
        if self.weights.flag.device != self.weight_scales.device:
            with torch.inference_mode(False):
                self.weights.flag = moved(self.weights.flag, self.weight_scales.device, 1)

    def records(self, trains: bool) -> bool:
        """Whether a layer records amaxes in the call that begins.

        Args:
            trains: whether the layer is in training mode and gradients are enabled.

        Raises:
            UserError: the layer trains outside a forward pass of the model, so that no update would
                follow; or it runs again for a backward pass, and its scales have changed.
        """
        if not (torch.compiler.is_compiling() or self._outer or _in_backward()):
            if trains:
                raise UserError(
                    "Delayed scaling: a layer was trained outside a forward pass of the model that "
                    "it belongs to, so its scales would never change. Call the module that was "
                    "converted, convert the module that your loop calls instead, or use current "
                    "scaling."
                )
            return False
        if self._outdated:
            raise UserError(
                "Delayed scaling: activation checkpointing runs a layer again after another "
                "training pass of the model began. Call backward() before that, leave activation "
                "checkpointing out, or use current scaling."
            )
        return self._records

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass that records amaxes is running."""
        return bool(self._outer) and self._records

    def copy_amaxes_in(self) -> None:
        """Copy the amaxes that a library recorded in its own buffers into the history."""

    def copy_scales_out(self) -> None:
        """Copy scales to the buffers of a library that casts with them."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of `fp8_state` after the pending update. It is made in a copy, because a
        backward pass may follow, and without the amaxes of other ranks."""
        self.copy_amaxes_in()
        history = copy.deepcopy(self.history)
        history.update()
        return history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`. Raises what `AmaxHistory.load_state_dict` raises."""
        self.copy_amaxes_in()  # empties the buffers; the state overwrites these amaxes
        self.history.load_state_dict(state_dict)
        self.is_pending = False
        self.weights.mark_changed()

    def apply_pending_update(self) -> None:
        """Make the pending update after a backward pass instead of in the next training pass: for
        an evaluation with the newest scales, or before a checkpoint of several ranks. All ranks
        must call this."""
        if torch.compiler.is_compiling() or self.is_pending:
            self.is_pending = False
            self.copy_amaxes_in()
            if self.sharing.active:
                self.history.write(reduce_amaxes(self.history.read(), self.sharing.key))
            self._replayed_update(self.history.history.device, self.history.history.data_ptr())
            self.copy_scales_out()

    def note_replayed_pass(self) -> None:
        """Called after the kernels of a training pass were replayed without its Python code."""
        self.is_pending = True
        self._passes += 1

    @torch.no_grad()
    def calibrate(self, amaxes: Mapping[str, Tensor]) -> None:
        """Update the history with the amaxes, by slot, that the same layers recorded in another
        precision: float32, 0-dim. All ranks must call this."""
        for slot, amax in amaxes.items():
            record_amax(self.history.recorded(slot), amax)
        self.is_pending = True
        self.apply_pending_update()
        self.weights.mark_changed()  # so that their scales are updated too

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        trains = model.training and torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._outer.append(self._records)
            if _in_backward():
                self._require_original(trains)
                return
            self._outdated = False
        device = device_of(model, (args, kwargs), self.weight_scales.device)
        self.move(device)
        on_meta = device.type == "meta" and not self.weight_scales.is_meta  # computes no amaxes
        self._records = trains and not on_meta
        if self._records:
            self.apply_pending_update()
            self.is_pending = True
            if not compiling:
                self._passes += 1
                self.sharing.publish_slots()
        self.weights.begin_pass(self._records)
        if self._records and not compiling:
            self._replayed_scales(self.weight_scales.device, self.weight_scales.data_ptr())
        else:
            self._update_weight_scales()
        self.copy_scales_out()

    def _require_original(self, trains: bool) -> None:
        """Raise a UserError if the full model trains when it runs again in a backward pass, but its
        first forward pass was not a training pass."""
        if trains and not self._records:
            raise UserError(
                "Delayed scaling: reentrant activation checkpointing of the full model runs it "
                "without gradients first, and would not update its scales. Pass checkpoint() "
                "use_reentrant=False, or checkpoint the model's blocks."
            )

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._outer:  # empty if the hook before failed
            return
        records, outer = self._records, self._outer.pop()
        if self._outer:
            self._records = outer
        if _in_backward():
            return
        for y in tree_leaves(output):
            if isinstance(y, Tensor) and y.requires_grad:
                hook = partial(self._begin_backward, self._passes, records)
                y.register_hook(hook)  # type: ignore[no-untyped-call]

    def _begin_backward(self, passes: int, records: bool, gradient: Tensor) -> None:
        """Called when a backward pass begins. `passes` is the number of training passes that had
        begun by the end of its forward pass, `records` whether it recorded amaxes."""
        self._outdated, self._records = passes != self._passes, records

    def _move_amaxes(self) -> None:
        """Move the recorded amaxes into the history and compute the scales."""
        self.unrecorded.logical_and_(self.history.read() == 0)
        self.history.update()

    def _update_weight_scales(self) -> None:
        """Update the scales of weights that changed. A pass that records resets the flag."""
        scales = self.weight_scales, self.unrecorded, self.weights.flag, self.history.scales
        run = _update_scales_op if needs_operator(self.weight_scales) else _update_scales
        run(*scales, self._records)


def _in_backward() -> bool:
    """Whether a backward pass runs, in which activation checkpointing recomputes layers."""
    return torch._C._current_graph_task_id() != -1


def device_of(model: nn.Module, inputs: object, state: torch.device) -> torch.device:
    """The device on which a forward pass of `model` runs. Offloaded weights are on meta until their
    layer is called: then it is the inputs' device or, if all inputs are still on the CPU, `state`,
    the device of the FP8 state."""
    device = next(model.parameters()).device
    if device.type == "meta":
        devices = [x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        return next((device for device in devices if device.type != "cpu"), state)
    return device


def _update_scales(
    weight_scales: Tensor, unrecorded: Tensor, changed: Tensor, scales: Tensor, records: bool
) -> None:
    weight_scales.copy_(torch.where(changed, scales, weight_scales))
    if records:
        unrecorded.logical_or_(changed)
        changed.fill_(False)


# A custom operator, because on a CPU inductor 2.13 may fuse the copy of a flag with its clearing in
# the wrong order. Replace it by plain code once tests/layers/test_torch.py passes without it. Eager
# code calls the function: the operator takes 0.3 ms more.
_update_scales_op = torch.library.custom_op(
    "fp8stack::take_scales", _update_scales, mutates_args=("weight_scales", "unrecorded", "changed")
)
