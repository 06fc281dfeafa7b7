"""When delayed scaling records amaxes and updates scales.

What a pass recorded is moved into the history at the end of the backward pass or, in compiled code
and where there is none, at the start of the next forward pass. A block that activation
checkpointing runs again casts with the scales of its own forward pass, whatever passes came in
between (`passes.py`). A pass of the
model in eval mode or without gradients records nothing; in one that trains, frozen parts record
too.

Between two changes of a weight it counts as cast once: later micro-batches of the same optimizer
step use the scale of the first and record nothing.

Several ranks that train one model have one history: before each update, what they recorded is
reduced to its maximum over them (`shared_amaxes.py`).
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
from fp8stack.common.formats import Operand, Quantizer, Quantizers
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.layers.passes import Pass, Passes
from fp8stack.layers.shared_amaxes import (
    SharedAmaxes,
    _reduce_amaxes,
    begin_pass,
    several_ranks,
)
from fp8stack.layers.weight_changes import WeightChanges
from fp8stack.numerics import AmaxHistory
from fp8stack.numerics.cast import record_amax


class Slot:
    """The scale and the amax of the casts of one operand of one layer: 0-dim or, of the groups of
    a grouped linear, a vector (see `AmaxHistory`).

    Compiled code knows it by its tensors, not by its name, so that the code of one layer serves all
    layers that are like it.
    """

    def __init__(self, delayed: DelayedScaling, name: str, operand: Operand) -> None:
        self.name = name
        self.operand = operand
        self._delayed = delayed
        self._column = torch.zeros(1, dtype=torch.int64)
        self.column: Any = 0  # its place in the history; of a vector, a slice
        self._shape: tuple[int, ...] = ()
        self._recorded = torch.zeros((), dtype=torch.float32)

    def bind(self) -> None:
        """Find the slot's place in the history, which was made or moved to another device."""
        history = self._delayed.history
        self._recorded = history.recorded(self.name)
        self.column = history.column(self.name)
        column, self._shape = self.column, tuple(self._recorded.shape)
        columns = [column] if isinstance(column, int) else range(column.start, column.stop)
        self._column = torch.tensor(columns, device=self._recorded.device)

    def scale(self) -> Tensor:
        """The scale to cast with now: float32, 0-dim."""
        if not torch.compiler.is_compiling():
            return self.scale_of(self._delayed.again)
        return self._scales().index_select(0, self._column).view(self._shape)

    def to_cast(self, record: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The scale to cast with now; with `record`, the tensor that the amax is recorded in, both
        float32 and 0-dim; and whether that amax counts, bool and 0-dim: None if it does.

        A pass that runs again casts with its own scales, and records nothing where an update has
        moved its amaxes. The amax of a weight counts once for each change of the weight.
        """
        delayed = self._delayed
        of_weight = self.operand == "weight"
        counts = delayed.first if of_weight else None
        recorded = self._recorded if record else None
        if torch.compiler.is_compiling():
            return self.scale(), recorded, counts
        scales = delayed.first_scales if of_weight else delayed.history.scales
        if self.operand != "grad_output" and torch._C._current_graph_task_id() != -1:
            again = delayed.again
            if again is not None:
                scales = again.weight_scales if of_weight else again.scales
                if record and again.moved:
                    recorded = delayed.discarded
        return scales[self.column], recorded, counts

    def scale_of(self, again: Pass | None) -> Tensor:
        """The scale to cast with, in a pass that is run `again` if it is one."""
        if again is None or self.operand == "grad_output":
            return self._scales()[self.column]
        # Call as many operators as above: selective checkpointing counts them.
        scales = again.weight_scales if self.operand == "weight" else again.scales
        return scales[self.column]

    def _scales(self) -> Tensor:
        delayed = self._delayed
        return delayed.first_scales if self.operand == "weight" else delayed.history.scales

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass that records is under way."""
        return self._delayed.is_recording

    def record(self, amax: Tensor) -> None:
        """Note the amax of a tensor that was cast: float32, 0-dim."""
        _, recorded, counts = self.to_cast(record=True)
        assert recorded is not None
        record_amax(recorded, amax, counts)


Slots = dict[tuple[Operand, bool], Slot]
"""A layer's slots, by operand and whether a slot is for the column copy."""


class DelayedScaling:
    """The amax history of one model and the moments at which it is updated."""

    def __init__(self) -> None:
        self.sharing = SharedAmaxes()
        with torch.inference_mode(False):  # inference tensors could not be updated later
            self.history = AmaxHistory()
            # Bool, 0-dim: whether this pass is the first with these weights.
            self.first = torch.ones((), dtype=torch.bool)
            self.discarded = torch.zeros((), dtype=torch.float32)  # amaxes that were counted before
            # The scales when it was, float32 [slots]; read for weights alone.
            self.first_scales = torch.ones(0, dtype=torch.float32)
        self.weights = WeightChanges()
        self.weights.has_amaxes, self.weights.agree = True, self.sharing.agree
        self._passes = Passes()
        self._distributed: Pass | None = None  # whose scales were distributed
        self._aside: list[Tensor] | None = None  # scales and amaxes, while a pass has its own
        self._forward_due = False
        self._pending = False  # whether a pass recorded what no update has moved
        self._settled = False  # whether `settle` moved all that was recorded
        self._records = False
        self._under_way: list[Pass] = []  # one inside the other
        self._compiled = False
        self._backward_task: int | None = None
        self._again = False
        self.quantizers: dict[str, Quantizer] = {}
        self.slots: dict[str, Slot] = {}
        self.vectors: dict[str, Slot] = {}
        self._members: dict[str, list[str]] = {}  # the slots of each vector
        # Called before an update: `history` has what a pass recorded, and the scales it cast with.
        self.before_update: Callable[[], None] | None = None
        self._updates = Replayed(self.history.update)
        self._takes = Replayed(self._take_scales)

    def add_layer(self, path: str, quantizers: Quantizers, groups: int = 0) -> Slots:
        """Give the linear layer at the module path `path` a slot for each delayed quantizer; the
        two copies of an operand share one if they are quantized alike. A grouped linear has a slot
        `<path>.<group>.<operand>` for each of its `groups`, all in the vector `<path>.<operand>`.
        """
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
        """Give attention at the module path `path` the slots of `Recipe.attention_slots`."""
        for operand, quantizer in quantizers.items():
            kind: Operand = "grad_output" if operand[0] == "d" else "input"
            self._add(f"{path}.{operand}", quantizer, kind)

    def slots_of(self, path: str, operand: str) -> list[str]:
        """The names of the slots of an operand of the layer at `path`: none, one or two."""
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
        """Follow the passes of `model`: its user calls nothing of ours in the training loop."""
        with torch.inference_mode(False):
            self.history.extend(self.quantizers, self._members)
            self.sharing.slots = list(self.quantizers)
            self._passes.reserve(self.history.scales)
            self.first_scales = torch.ones_like(self.history.scales)
            self._bind()
        device = next(model.parameters()).device
        if device.type != "meta":
            self.move(device)
        self.weights.watch([m for m in model.modules() if getattr(m, "delayed", None) is self])
        model.delayed_scaling = self  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)

    def _bind(self) -> None:
        for slot in (*self.slots.values(), *self.vectors.values()):
            slot.bind()

    def scale(self, slot: str) -> Tensor:
        """The scale to cast for `slot` with: float32, 0-dim, a view that is changed in place."""
        return self.slots[slot].scale()

    def records(self, trains: bool) -> bool:
        """Whether a layer that is called now records amaxes; `trains`: it is in training mode with
        gradients.

        Raises:
            UserError: it trains outside a pass of the whole model, so that no update would follow.
        """
        if torch.compiler.is_compiling():
            self._compiled = True
            return self._records
        again = None if torch._C._current_graph_task_id() == -1 else self.again
        if again is not None:
            if again.records and not self._again:
                self.backward_ran()
                self._again = True
            if again is not self._distributed:
                self.distribute(again)
                self._distributed = again
            return again.records
        if self._under_way:
            return self._records
        if trains:
            raise UserError(
                "Delayed scaling: a layer was trained outside a forward pass of the model that it "
                "belongs to, so its scales would never change. Call the module that was converted, "
                "convert that part instead, or use current scaling."
            )
        return False

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass that records is under way."""
        return bool(self._under_way) and self._records

    @property
    def again(self) -> Pass | None:
        """The forward pass that a backward pass runs again, at least in part; None if none."""
        return self._passes.again()

    @property
    def forward_counts(self) -> bool:
        """Whether amaxes of inputs and weights count that are cast now: not if an update moved
        them when the pass ran for the first time."""
        again = self.again
        return again is None or not again.moved

    def backward_ran(self) -> None:
        """Request an update at the end of the backward pass that is under way."""
        if torch.compiler.is_compiling():  # calls nobody back: the next pass updates
            return
        if self._again:  # reentrant checkpointing: a pass within the one that ends in the update
            return
        task = torch._C._current_graph_task_id()
        if self._backward_task != task:
            self._backward_task = task
            Variable._execution_engine.queue_callback(self._after_backward)

    def collect(self) -> None:
        """Bring in amaxes that were recorded elsewhere than by `record`."""

    def distribute(self, again: Pass | None = None) -> None:
        """Take scales to where casts read them, if that is not `scale`: those of now, or of a pass
        that is run `again`."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of `fp8_state`, after the update that is due. The update is made in a copy,
        because a backward pass may follow."""
        self.collect()
        history = copy.deepcopy(self.history)
        history.update(self._due())
        return history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave. Raises what `AmaxHistory.load_state_dict` raises."""
        self.collect()  # and have it overwritten
        self.history.load_state_dict(state_dict)
        self._forward_due = self._pending = False
        self.weights.mark()

    def settle(self) -> None:
        """Make the update that is due after a step's last backward pass, if it was not made: in
        compiled code. On several ranks, all of them call this."""
        if self._pending:
            self.collect()
            self._update(self._due(), replayed=True)
            self._settled = True
            self.distribute()
        self._forward_due = False

    @torch.no_grad()
    def calibrate(self, amaxes: Mapping[str, Tensor]) -> None:
        """Take amaxes into the history, by slot, float32 and 0-dim, that a pass of the same layers
        in another precision had. On several ranks, all of them call this."""
        self.collect()
        for slot, amax in amaxes.items():
            record_amax(self.history.recorded(slot), amax)
        self._pending = True
        self._update(None)
        self.distribute()
        self.weights.mark()  # they take new scales

    def _changing(self) -> list[Tensor]:
        """The tensors that a training step changes."""
        history = self.history
        return [history.history, history.scales, self.first_scales, history.all_recorded]

    def snapshot(self) -> list[Tensor]:
        """Copies of the tensors that a training step changes, for `put_back`."""
        return [tensor.clone() for tensor in self._changing()]

    def put_back(self, snapshot: list[Tensor], where: Tensor) -> None:
        """Be as at the `snapshot` if `where`, bool and 0-dim, is true; the device decides."""
        for tensor, before in zip(self._changing(), snapshot, strict=True):
            tensor.copy_(torch.where(where, before, tensor))

    def amaxes(self, passes: int, window: int) -> tuple[Tensor, Tensor]:
        """The largest amax of each slot in its last `passes` passes, [slots], and the `window`
        amaxes before those, [window or fewer, slots]; 0 where there was none."""
        rows = self.history.history[1:]  # row 0 is not in use
        split = max(0, len(rows) - passes)
        newest = torch.cat([rows[split:], self.history.all_recorded[None]])
        return newest.amax(dim=0), rows[max(0, split - window) : split]

    def _due(self) -> list[str] | None:
        """The slots that a finished pass recorded and no update has moved; None is all."""
        if torch.compiler.is_compiling() or self._compiled:
            # Compiled backward passes call nobody back.
            return [] if self._settled and not torch.compiler.is_compiling() else None
        if not self._forward_due:
            return []
        return [name for name, slot in self.slots.items() if slot.operand != "grad_output"]

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling and (again := self.again) is not None:
            self._begin_again(again, model.training and torch.is_grad_enabled())
            return
        if not compiling:
            self._leave()  # if a backward pass failed
        device = next(model.parameters()).device
        self.move(device)
        self.collect()
        if self._due() != []:
            self._update(self._due())
        self._forward_due = self._again = False
        self._records = model.training and torch.is_grad_enabled()
        self._pending = self._records or self._pending
        self._settled = self._settled and not self._records
        if self._records and not compiling:
            self._announce()
        # New scales for weights that changed; a pass that records uses the change up.
        self.weights.begin_pass(self._records)
        if self._records and not compiling:
            self._takes(self.first.device, self.first_scales.data_ptr())
        else:
            self._take_scales(self.sharing.key if compiling and self.sharing.active else "")
        self.distribute()
        if not compiling:
            scales = self.history.scales, self.first_scales
            begun = self._distributed = self._passes.begin(*scales, self._records)
            self._under_way.append(begun)

    def _announce(self) -> None:
        """Tell the other ranks that a pass begins that trains."""
        self.sharing.begin_pass()

    def _begin_again(self, again: Pass, trains: bool) -> None:
        """Begin a pass of the whole model that is run again, in a backward pass."""
        if trains and not again.records:  # the first time it was run without gradients
            again.records, again.moved = True, False
            self._pending = self._records = True
            self.weights.begin_pass(True)
            self._take_scales()
        self._under_way.append(again)

    def _take_scales(self, sharing: str = "") -> None:
        changing = self.first_scales, self.first, self.weights.flag
        _take_scales(*changing, self.history.scales, self._records, sharing)

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        begun = self._under_way.pop() if self._under_way else None  # None: it did not begin
        if self.again is not None:
            return
        if begun is not None:
            self._passes.end(begun)
            if self._compiled and torch.is_grad_enabled():
                for y in tree_leaves(output):
                    if isinstance(y, Tensor) and y.requires_grad:
                        hook = partial(self._enter, begun)
                        y.register_hook(hook)  # type: ignore[no-untyped-call]
        # A pass that gave no output has failed.
        self._forward_due = begun is not None and begun.records and output is not None
        if self._under_way:  # the outer pass continues
            self._records = self._under_way[-1].records

    def _enter(self, begun: Pass, gradient: Tensor) -> None:
        """Set the scales of the pass whose backward pass begins. Compiled layers, which may run
        again in it, do not ask for a pass."""
        if not begun.moved:
            return
        if self._aside is None:
            history = self.history
            changing = (history.scales, self.first_scales, history.all_recorded)
            self._aside = [tensor.clone() for tensor in changing]
            Variable._execution_engine.queue_callback(self._leave)
        self._read(begun.scales, begun.weight_scales)

    def _leave(self) -> None:
        """Undo `_enter`, and what layers recorded that ran again."""
        if self._aside is not None:
            scales, first_scales, recorded = self._aside
            self._read(scales, first_scales)
            self.history.write(torch.where(self._of_gradients(), self.history.read(), recorded))
            self._aside = None

    def _read(self, scales: Tensor, first_scales: Tensor) -> None:
        """Set the scales that casts of inputs and weights use, float32 [slots]."""
        now = self.history.scales
        now.copy_(torch.where(self._of_gradients(), now, scales))
        self.first_scales.copy_(first_scales)

    def _of_gradients(self) -> Tensor:
        of_gradients = [slot.operand == "grad_output" for slot in self.slots.values()]
        return torch.tensor(of_gradients, device=self.first.device)

    def _after_backward(self) -> None:
        # Updates all slots: reentrant checkpointing runs forward and backward passes alternately.
        self._forward_due = self._again = False
        self._backward_task = None
        self.collect()
        self._update(None)
        self.distribute()
        self._distributed = None

    def _update(self, slots: list[str] | None, *, replayed: bool = False) -> None:
        """Move what all ranks recorded for `slots` into the history; None is all slots. `replayed`:
        as one launch, where that is possible."""
        # Only after a pass that trains, which all ranks made: one may evaluate by itself.
        if self.sharing.group is not None and several_ranks() and self._pending:
            self.history.write(_reduce_amaxes(self.history.read(), self.sharing.key))
        self._pending = False
        if not torch.compiler.is_compiling():
            self._passes.move()
        if self.before_update is not None:
            self.before_update()
        if replayed and slots is None:
            self._updates(self.history.history.device, self.history.history.data_ptr())
        else:
            self.history.update(slots)

    def move(self, device: torch.device) -> None:
        """Move the state to `device`, if it is elsewhere."""
        if self.history.history.device == device:
            return
        with torch.inference_mode(False):
            self.history.to(device)
            self._passes.reserve(self.history.scales)
            self.weights.flag = self.weights.flag.to(device)
            self.first = self.first.to(device)
            self.discarded = self.discarded.to(device)
            self.first_scales = self.first_scales.to(device)
            self._bind()


# An operator of its own, for torch.compile: inductor 2.13 may fuse the copy of a flag with its
# clearing in the wrong order on a CPU. To be made plain code when test_torch_backend passes so.
@torch.library.custom_op("fp8stack::take_scales", mutates_args=("used", "first", "changed"))
def _take_scales(
    used: Tensor, first: Tensor, changed: Tensor, scales: Tensor, records: bool, sharing: str
) -> None:
    if records and sharing:  # in compiled code, which may call nothing else
        begin_pass(sharing)
    used.copy_(torch.where(changed, scales, used))
    if records:
        first.copy_(changed)
        changed.fill_(False)
