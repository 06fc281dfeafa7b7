"""When delayed scaling records amaxes and updates scales.

The amaxes that a pass recorded are moved into the history at the end of the backward pass. In
compiled code, and if there is no backward pass, they are moved at the start of the next forward
pass. A block that activation checkpointing recomputes casts with the scales of its original forward
pass, even if other passes ran since then (`passes.py`). A pass in eval mode or without gradients
records nothing; a training pass records amaxes in frozen layers too.

The amax of a weight is recorded once per change of the weight: later micro-batches of the same
optimizer step use the scale of the first one and record nothing.

Ranks that train one model share one history: before each update, the recorded amaxes are reduced to
their maximum over the ranks (`shared_amaxes.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.layers.passes import Pass, Passes, device_of
from fp8stack.layers.shared_amaxes import (
    SharedAmaxes,
    _reduce_amaxes,
    begin_pass,
    several_ranks,
)
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

    def __init__(self, delayed: DelayedScaling, name: str, operand: Operand) -> None:
        self.name = name
        self.operand = operand
        self._delayed = delayed
        self._column = torch.zeros(1, dtype=torch.int64)
        self.column: Any = 0  # the index in the history; for a vector, a slice
        self._shape: tuple[int, ...] = ()
        self._recorded = torch.zeros((), dtype=torch.float32)

    def bind(self) -> None:
        """Look up the slot's column again, after the history was created or moved to another
        device."""
        history = self._delayed.history
        self._recorded = history.recorded(self.name)
        self.column = history.column(self.name)
        column, self._shape = self.column, tuple(self._recorded.shape)
        columns = [column] if isinstance(column, int) else range(column.start, column.stop)
        self._column = torch.tensor(columns, device=self._recorded.device)

    def scale(self) -> Tensor:
        """The current scale: float32, 0-dim."""
        if not torch.compiler.is_compiling():
            return self.scale_of(self._delayed.recomputed_pass)
        return self._scales().index_select(0, self._column).view(self._shape)

    def cast_arguments(self, record: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The arguments `scale`, `recorded` and `counts` for a cast.

        In a recomputed pass, the scale is the one of the original pass, and the amax is discarded
        if an update has moved the original amax into the history.

        Returns:
            The current scale, float32 and 0-dim; the tensor to record the amax in, float32 and
            0-dim, None without `record`; and whether to record it, bool and 0-dim: false for a
            weight that has not changed since its amax was recorded, None stands for true.
        """
        delayed = self._delayed
        of_weight = self.operand == "weight"
        counts = delayed.first if of_weight else None
        recorded = self._recorded if record else None
        if torch.compiler.is_compiling():
            return self.scale(), recorded, counts
        scales = delayed.weight_scales if of_weight else delayed.history.scales
        if self.operand != "grad_output" and torch._C._current_graph_task_id() != -1:
            recomputed = delayed.recomputed_pass
            if recomputed is not None:
                scales = recomputed.weight_scales if of_weight else recomputed.scales
                if record and recomputed.moved:
                    recorded = delayed.discarded
        return scales[self.column], recorded, counts

    def scale_of(self, recomputed: Pass | None) -> Tensor:
        """The current scale or, for an input or weight in a `recomputed` pass, the scale of the
        original pass: float32, 0-dim."""
        if recomputed is None or self.operand == "grad_output":
            return self._scales()[self.column]
        # The number of operators must equal the original pass's: selective checkpointing counts
        # them.
        scales = recomputed.weight_scales if self.operand == "weight" else recomputed.scales
        return scales[self.column]

    def _scales(self) -> Tensor:
        delayed = self._delayed
        return delayed.weight_scales if self.operand == "weight" else delayed.history.scales

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass that records amaxes is running."""
        return self._delayed.is_recording

    def record(self, amax: Tensor) -> None:
        """Record the amax of a tensor that was cast: float32, 0-dim."""
        _, recorded, counts = self.cast_arguments(record=True)
        assert recorded is not None
        record_amax(recorded, amax, counts)


Slots = dict[tuple[Operand, bool], Slot]
"""A layer's slots. Keys are the operand and whether the slot is the column copy's."""


class DelayedScaling:
    """The amax history of one model, and the hooks that update it."""

    def __init__(self) -> None:
        self.sharing = SharedAmaxes()
        with torch.inference_mode(False):  # inference tensors could not be updated later
            self.history = AmaxHistory()
            # Bool, 0-dim: whether this pass is the first one with the current weights.
            self.first = torch.ones((), dtype=torch.bool)
            # Takes amaxes that must not be recorded twice; never read.
            self.discarded = torch.zeros((), dtype=torch.float32)
            # The scales at the first pass with the current weights, float32 [slots]; only the
            # entries of weights are read.
            self.weight_scales = torch.ones(0, dtype=torch.float32)
        self.weights = WeightChanges()
        self.weights.has_amaxes, self.weights.any_rank = True, self.sharing.any_rank
        self._passes = Passes()
        self._copied_pass: Pass | None = None  # whose scales `copy_scales_out` copied last
        # The current scales and amaxes, while those of an earlier pass are in use.
        self._saved_state: list[Tensor] | None = None
        self._forward_due = False  # whether a forward pass recorded and no backward pass ended
        self._pending = False  # whether recorded amaxes wait for an update
        self._pending_applied = False  # whether `apply_pending_update` updated after the last pass
        self._records = False  # whether the running pass records
        self._running: list[Pass] = []  # the running passes, outer before inner
        self._compiled = False
        self._backward_task: int | None = None  # the backward pass that will update at its end
        self._update_requested = False  # by a recomputed pass, for the end of the outer backward
        self.quantizers: dict[str, Quantizer] = {}
        self.slots: dict[str, Slot] = {}
        self.vectors: dict[str, Slot] = {}
        self._members: dict[str, list[str]] = {}  # the slots of each vector
        # Called before an update, while `history` still has the recorded amaxes and old scales.
        self.before_update: Callable[[], None] | None = None
        self._replayed_update = Replayed(self.history.update)
        self._replayed_scales = Replayed(self._update_weight_scales)

    def add_layer(self, path: str, quantizers: Quantizers, groups: int = 0) -> Slots:
        """Add a slot for each delayed quantizer of the linear layer at the module path `path`. The
        two copies of an operand share a slot if they have the same quantizer. A grouped linear has
        a slot `<path>.<group>.<operand>` for each of its `groups`, all of which form the vector
        `<path>.<operand>`."""
        slots: Slots = {}
        for place, quantizer in quantizers.each.items():
            operand: Any
            operand, _, gemm = place.partition(".")
            if quantizer.delayed and place in quantizers.casts:
                name = f"{path}.{place}"
                if groups:
                    members = [f"{path}.{group}.{place}" for group in range(groups)]
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
            kind: Operand = "grad_output" if operand[0] == "d" else "input"
            self._add(f"{path}.{operand}", quantizer, kind)

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

    def attach(self, model: nn.Module) -> None:
        """Move the state to the device of `model` and register hooks on it, which update the
        history. The training loop needs no further call."""
        with torch.inference_mode(False):
            self.history.extend(self.quantizers, self._members)
            self.sharing.slots = list(self.quantizers)
            self._passes.reserve(self.history.scales)
            self.weight_scales = torch.ones_like(self.history.scales)
            self._bind()
        device = next(model.parameters()).device
        if device.type != "meta":
            self.move(device)
        self.weights.watch([m for m in model.modules() if getattr(m, "delayed", None) is self])
        model.delayed_scaling = self  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward, always_call=True)

    def _bind(self) -> None:
        for slot in (*self.slots.values(), *self.vectors.values()):
            slot.bind()

    def scale(self, slot: str) -> Tensor:
        """The current scale of `slot`: float32, 0-dim, a view that is updated in place."""
        return self.slots[slot].scale()

    def records(self, trains: bool) -> bool:
        """Whether a layer records amaxes in the call that begins.

        Args:
            trains: whether the layer is in training mode and gradients are enabled.

        Raises:
            UserError: the layer trains outside a forward pass of the model, so that no update would
                follow.
        """
        if torch.compiler.is_compiling():
            self.note_compiled_call()
            return self._records
        recomputed = None if torch._C._current_graph_task_id() == -1 else self.recomputed_pass
        if recomputed is not None:
            if recomputed.records and not self._update_requested:
                self.backward_ran()
                self._update_requested = True
            if recomputed is not self._copied_pass:
                self.copy_scales_out(recomputed)
                self._copied_pass = recomputed
            return recomputed.records
        if self._running:
            return self._records
        if trains:
            raise UserError(
                "Delayed scaling: a layer was trained outside a forward pass of the model that it "
                "belongs to, so its scales would never change. Call the module that was converted, "
                "convert the module that your loop calls instead, or use current scaling."
            )
        return False

    def note_compiled_call(self) -> None:
        """Called by each compiled layer, whose backward pass runs no callback."""
        self._compiled = True

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass that records amaxes is running."""
        return bool(self._running) and self._records

    @property
    def recomputed_pass(self) -> Pass | None:
        """The forward pass that the running backward pass recomputes, fully or in part, or None."""
        return self._passes.recomputed()

    @property
    def counts_forward_amaxes(self) -> bool:
        """Whether to record amaxes of inputs and weights: not in a recomputed pass whose original
        amaxes an update has moved into the history."""
        recomputed = self.recomputed_pass
        return recomputed is None or not recomputed.moved

    def backward_ran(self) -> None:
        """Request an update at the end of the running backward pass."""
        if torch.compiler.is_compiling():  # no callback is possible: the next pass updates
            return
        # Reentrant checkpointing runs a backward pass within the one that ends in the update.
        if self._update_requested:
            return
        task = torch._C._current_graph_task_id()
        if self._backward_task != task:
            self._backward_task = task
            Variable._execution_engine.queue_callback(self._after_backward)

    def copy_amaxes_in(self) -> None:
        """Copy amaxes into the history that a library recorded in buffers of its own."""

    def copy_scales_out(self, recomputed: Pass | None = None) -> None:
        """Copy scales to the buffers of a library that casts with them: the current scales, or the
        scales of a `recomputed` pass."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of `fp8_state`, as they are after the pending update. The update is made in a
        copy, because a backward pass may follow."""
        self.copy_amaxes_in()
        history = copy.deepcopy(self.history)
        history.update(self._due_slots())
        return history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`. Raises what `AmaxHistory.load_state_dict` raises."""
        self.copy_amaxes_in()  # empties the buffers; the state overwrites these amaxes
        self.history.load_state_dict(state_dict)
        self._forward_due = self._pending = False
        self.weights.mark_changed()

    def apply_pending_update(self) -> None:
        """Update the scales after a step's last backward pass, if that did not: compiled backward
        passes do not. On several ranks, all of them must call this."""
        if self._pending:
            self.copy_amaxes_in()
            self._update(self._due_slots(), replayed=True)
            self._pending_applied = True
            self.copy_scales_out()
        self._forward_due = False

    @torch.no_grad()
    def calibrate(self, amaxes: Mapping[str, Tensor]) -> None:
        """Update the history with amaxes, by slot, that a pass of the same layers in another
        precision recorded: float32, 0-dim. On several ranks, all of them must call this."""
        self.copy_amaxes_in()
        for slot, amax in amaxes.items():
            record_amax(self.history.recorded(slot), amax)
        self._pending = True
        self._update(None)
        self.copy_scales_out()
        self.weights.mark_changed()  # so that their scales are updated too

    def _step_state(self) -> list[Tensor]:
        """The tensors that a training step changes in place."""
        history = self.history
        return [history.history, history.scales, self.weight_scales, history.all_recorded]

    def snapshot(self) -> list[Tensor]:
        """Copies of the tensors that a training step changes, to pass to `restore`."""
        return [tensor.clone() for tensor in self._step_state()]

    def restore(self, snapshot: list[Tensor], where: Tensor) -> None:
        """Restore a `snapshot` if `where`, bool and 0-dim, is true; does not synchronize with the
        device."""
        for tensor, before in zip(self._step_state(), snapshot, strict=True):
            tensor.copy_(torch.where(where, before, tensor))

    def amaxes(self, passes: int, window: int) -> tuple[Tensor, Tensor]:
        """The largest amax of each slot in the last `passes` passes, float32 [slots], and the
        `window` amaxes before them, float32 [window or fewer, slots]. 0 stands for no amax."""
        rows = self.history.history[1:]  # row 0 is not in use
        split = max(0, len(rows) - passes)
        newest = torch.cat([rows[split:], self.history.all_recorded[None]])
        return newest.amax(dim=0), rows[max(0, split - window) : split]

    def _due_slots(self) -> list[str] | None:
        """The slots whose recorded amaxes wait for an update; None stands for all slots."""
        if torch.compiler.is_compiling() or self._compiled:
            # Compiled backward passes run no callback, so all slots are due.
            return [] if self._pending_applied and not torch.compiler.is_compiling() else None
        if not self._forward_due:
            return []
        return [name for name, slot in self.slots.items() if slot.operand != "grad_output"]

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling and (recomputed := self.recomputed_pass) is not None:
            self._begin_recompute(recomputed, model.training and torch.is_grad_enabled())
            return
        if not compiling:
            self._restore_scales()  # still to do if a backward pass failed
        device = device_of(model, (args, kwargs), self.first.device)
        self.move(device)
        self.copy_amaxes_in()
        if self._due_slots() != []:
            self._update(self._due_slots())
        self._forward_due = self._update_requested = False
        on_meta = device.type == "meta" and not self.first.is_meta  # computes no amaxes
        self._records = model.training and torch.is_grad_enabled() and not on_meta
        self._pending = self._records or self._pending
        self._pending_applied = self._pending_applied and not self._records
        if self._records and not compiling:
            self._begin_shared_pass()
        # Weights that changed take new scales; a pass that records resets the flag.
        self.weights.begin_pass(self._records)
        if self._records and not compiling:
            self._replayed_scales(self.first.device, self.weight_scales.data_ptr())
        else:
            self._update_weight_scales(
                self.sharing.key if compiling and self.sharing.active else ""
            )
        self.copy_scales_out()
        if not compiling:
            scales = self.history.scales, self.weight_scales
            begun = self._copied_pass = self._passes.begin(*scales, self._records)
            self._running.append(begun)

    def _begin_shared_pass(self) -> None:
        """Tell the other ranks that a training pass begins."""
        self.sharing.begin_pass()

    def _begin_recompute(self, recomputed: Pass, trains: bool) -> None:
        """Begin to recompute a forward pass of the full model, in a backward pass."""
        if trains and not recomputed.records:  # the original pass ran without gradients
            recomputed.records, recomputed.moved = True, False
            self._pending = self._records = True
            self.weights.begin_pass(True)
            self._update_weight_scales()
        self._running.append(recomputed)

    def _update_weight_scales(self, sharing: str = "") -> None:
        changing = self.weight_scales, self.first, self.weights.flag
        take = _take_scales_op if needs_operator(self.first) else _take_scales
        take(*changing, self.history.scales, self._records, sharing)

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        begun = self._running.pop() if self._running else None  # None: the pre-hook failed
        if self.recomputed_pass is not None:
            return
        if begun is not None:
            self._passes.end(begun)
            if self._compiled and torch.is_grad_enabled():
                for y in tree_leaves(output):
                    if isinstance(y, Tensor) and y.requires_grad:
                        hook = partial(self._use_scales_of, begun)
                        y.register_hook(hook)  # type: ignore[no-untyped-call]
        # The output of a pass that failed is None.
        self._forward_due = begun is not None and begun.records and output is not None
        if self._running:  # the outer pass continues
            self._records = self._running[-1].records

    def _use_scales_of(self, begun: Pass, gradient: Tensor) -> None:
        """Set the scales of the forward pass whose backward pass begins. Compiled layers, which may
        be recomputed in it, cannot look up their pass."""
        if not begun.moved:
            return
        if self._saved_state is None:
            history = self.history
            changing = (history.scales, self.weight_scales, history.all_recorded)
            self._saved_state = [tensor.clone() for tensor in changing]
            Variable._execution_engine.queue_callback(self._restore_scales)
        self._set_forward_scales(begun.scales, begun.weight_scales)

    def _restore_scales(self) -> None:
        """Undo `_use_scales_of`, and discard the amaxes that recomputed layers recorded."""
        if self._saved_state is not None:
            scales, weight_scales, recorded = self._saved_state
            self._set_forward_scales(scales, weight_scales)
            self.history.write(torch.where(self._is_gradient_slot(), self.history.read(), recorded))
            self._saved_state = None

    def _set_forward_scales(self, scales: Tensor, weight_scales: Tensor) -> None:
        """Set the scales of inputs and weights, float32 [slots]; the scales of gradients stay."""
        now = self.history.scales
        now.copy_(torch.where(self._is_gradient_slot(), now, scales))
        self.weight_scales.copy_(weight_scales)

    def _is_gradient_slot(self) -> Tensor:
        """Whether each slot belongs to a gradient: bool [slots]."""
        of_gradients = [slot.operand == "grad_output" for slot in self.slots.values()]
        return torch.tensor(of_gradients, device=self.first.device)

    def _after_backward(self) -> None:
        # All slots are updated: reentrant checkpointing alternates forward and backward passes.
        self._forward_due = self._update_requested = False
        self._backward_task = None
        self.copy_amaxes_in()
        self._update(None)
        self.copy_scales_out()
        self._copied_pass = None

    def _update(self, slots: list[str] | None, *, replayed: bool = False) -> None:
        """Move the amaxes of `slots`, reduced over ranks, into the history and update the scales.
        None stands for all slots. `replayed` uses a CUDA graph where possible."""
        # Ranks reduce only after a training pass, which all of them ran: a single rank may
        # evaluate.
        if self.sharing.group is not None and several_ranks() and self._pending:
            self.history.write(_reduce_amaxes(self.history.read(), self.sharing.key))
        self._pending = False
        if not torch.compiler.is_compiling():
            self._passes.mark_moved()
        if self.before_update is not None:
            self.before_update()
        if replayed and slots is None:
            self._replayed_update(self.history.history.device, self.history.history.data_ptr())
        else:
            self.history.update(slots)

    def move(self, device: torch.device) -> None:
        """Move the state to `device`. It moves to meta only while it has no amaxes, and is
        reset when it moves from meta."""
        if self.history.history.device == device:
            return
        if device.type == "meta" and not self.history.is_new:
            return
        with torch.inference_mode(False):
            self.history.to(device)
            self._passes.reserve(self.history.scales)
            self.weights.flag = moved(self.weights.flag, device, 1)
            self.first = moved(self.first, device, 1)
            self.discarded = moved(self.discarded, device, 0)
            self.weight_scales = moved(self.weight_scales, device, 1)
            self._bind()


def _take_scales(
    used: Tensor, first: Tensor, changed: Tensor, scales: Tensor, records: bool, sharing: str
) -> None:
    if records and sharing:  # compiled code calls it here, since it cannot call Python otherwise
        begin_pass(sharing)
    used.copy_(torch.where(changed, scales, used))
    if records:
        first.copy_(changed)
        changed.fill_(False)


# A custom operator, because on a CPU inductor 2.13 may fuse the copy of a flag with its clearing in
# the wrong order. Replace it by plain code once tests/layers/test_torch.py passes without it. Eager
# code calls the function: the operator takes 0.3 ms more.
_take_scales_op = torch.library.custom_op(
    "fp8stack::take_scales", _take_scales, mutates_args=("used", "first", "changed")
)
