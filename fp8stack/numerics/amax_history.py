"""The amax history of a model, for delayed scaling.

Source: Transformer Engine 2.20's delayed-scaling recipe; docs/numerics.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.common.formats import AmaxAlgorithm, Quantizer
from fp8stack.numerics.cast import FLT_MAX, record_amax


def moved(x: Tensor, device: torch.device | str, first: float) -> Tensor:
    """`x` on `device`; from meta, which holds no values, filled with its `first` value."""
    return torch.full_like(x, first, device=device) if x.is_meta else x.to(device)


class RecordedAmaxes:
    """Amaxes recorded for each slot since the last update: `all_recorded`, float32 [slots], changed
    in place.

    A vector is a name for slots in adjacent columns that are cast together, such as the slots of
    experts. `column` and `recorded` also take the name of a vector.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._columns: dict[str, int | slice] = {}  # of slots and, as slices, of vectors
        # `_recorded` has a tensor for each vector and each slot outside of vectors. `_sizes`: their
        # names, with the length of a vector or 0. `_cell_indices`, by name: the index of the tensor
        # and, for a slot in a vector, its index in that tensor.
        self._sizes: dict[str, int] = {}
        self._cell_indices: dict[str, tuple[int, int | None]] = {}
        self.all_recorded = torch.zeros(0, dtype=torch.float32, device=device)
        self._recorded: list[Tensor] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # pickle gives each tensor separate memory; tensors that modules refer to must share memory.
        self.all_recorded, cells = _cells(self.all_recorded, self._sizes.values())
        for tensor, cell in zip(self._recorded, cells, strict=True):
            tensor.set_(cell.untyped_storage(), cell.storage_offset(), cell.shape, cell.stride())

    @property
    def slots(self) -> list[str]:
        """The names of the slots, in the order of the columns."""
        return [name for name, column in self._columns.items() if isinstance(column, int)]

    def _add(self, slots: Sequence[str], vectors: Mapping[str, Sequence[str]]) -> None:
        """Add a column for each of `slots`; see `AmaxHistory.extend`."""
        first = len(self.all_recorded)
        self._columns |= {slot: column for column, slot in enumerate(slots, first)}
        by_first = {members[0]: (vector, members) for vector, members in vectors.items()}
        for column, slot in enumerate(slots, first):
            if slot in self._cell_indices:  # a member of the vector before
                continue
            name, members = by_first.get(slot, (slot, ()))
            cell = len(self._sizes)
            self._cell_indices |= {member: (cell, index) for index, member in enumerate(members)}
            self._cell_indices[name] = cell, None
            self._sizes[name] = len(members)
            if members:
                self._columns[name] = slice(column, column + len(members))
        recorded = torch.cat([self.all_recorded, self.all_recorded.new_zeros(len(slots))])
        self.all_recorded, self._recorded = _cells(recorded, self._sizes.values())

    def to(self, device: torch.device | str) -> Self:
        """Move the amaxes to `device`, in place; see `AmaxHistory.to`."""
        recorded = moved(self.all_recorded, device, 0)
        self.all_recorded, self._recorded = _cells(recorded, self._sizes.values())
        return self

    def read(self) -> Tensor:
        """The recorded amaxes of all slots: float32 [slots]. Compiled code writes to one tensor per
        slot, so it does not use `all_recorded`, which aliases them."""
        if torch.compiler.is_compiling():
            return torch.cat([cell.view(-1) for cell in self._recorded])
        return self.all_recorded

    def write(self, values: Tensor | None) -> None:
        """Replace the recorded amaxes with `values`, float32 [slots]; None is zeros."""
        compiling = torch.compiler.is_compiling()
        if values is None:
            torch._foreach_zero_(self._recorded if compiling else [self.all_recorded])
        elif compiling:
            sizes = [size or 1 for size in self._sizes.values()]
            by_cell = zip(torch.split(values, sizes), self._recorded, strict=True)
            torch._foreach_copy_(
                self._recorded, [amaxes.view(cell.shape) for amaxes, cell in by_cell]
            )
        else:
            self.all_recorded.copy_(values)

    def column(self, slot: str) -> int | slice:
        """The index of `slot` in `history` and `scales`; of a vector, a slice."""
        if slot not in self._columns:
            raise UserError(f"The amax history has no slot '{slot}'.")
        return self._columns[slot]

    def recorded(self, slot: str) -> Tensor:
        """The amax recorded for `slot` since the last update: float32, 0-dim or, of a vector,
        [slots]; written in place."""
        self.column(slot)  # raises an error for an unknown slot
        cell, index = self._cell_indices[slot]
        return self._recorded[cell] if index is None else self._recorded[cell][index]

    def record(self, slot: str, amax: Tensor | float) -> None:
        """Record the amax of a tensor that was cast for `slot`. The history keeps the largest amax
        between two updates; NaN is ignored."""
        recorded = self.recorded(slot)
        largest = torch.as_tensor(amax, dtype=torch.float32, device=recorded.device)
        record_amax(recorded, largest.detach())  # a history has no gradient


class AmaxHistory(RecordedAmaxes):
    """Amaxes and scales of every FP8 operand of a model: `history [length, slots]`, `scale
    [slots]`, both float32.

    A slot is named `<module path>.<operand>`. A cast uses the current scale and records the amax of
    its input; `update` moves the recorded amaxes into the history and computes the next scales. In
    the history, row 1 is the oldest and the last row the newest; row 0 stands for the recorded
    amaxes, which are in a separate tensor (see `_cells`).

    `scale` takes a vector as well, and `state_dict` holds it as one tensor.

    Slots may have windows of different lengths: `history` has the length of the longest, and a
    shorter window is the last rows of its column. `scales`, float32 [slots], is changed in place.

    Args:
        slots: the format of each slot by name, such as "e4m3", or its quantizer, whose length,
            margin and algorithm take precedence over the arguments below.
        length: the number of amaxes in the window.
        margin: headroom in bits: the amax is scaled to `fp8_max * 2^-margin`.
        algorithm: the amax that the scale follows: "max" of the window, or "most_recent".
        device: the device of the tensors.

    Raises:
        UserError: a length below 1, an unknown algorithm.
        ValueError: an unknown format.
    """

    def __init__(
        self,
        slots: Mapping[str, str | Quantizer] | None = None,
        *,
        length: int = 1024,
        margin: int = 0,
        algorithm: AmaxAlgorithm = "max",
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(length, int) and length < 1:
            raise UserError(f"An amax history of length {length} holds nothing. Use 1 or more.")
        if algorithm not in ("max", "most_recent"):
            raise UserError(f"No amax algorithm '{algorithm}'. Known: max, most_recent.")
        try:
            self._default = Quantizer(
                amax="delayed", history_length=length, margin=margin, amax_algorithm=algorithm
            )
        except ValueError as error:
            reason = str(error).replace("history_length", "The length of an amax history")
            raise UserError(f"{reason}.") from error
        super().__init__(device)
        self._quantizers: list[Quantizer] = []
        self.history = torch.zeros(length, 0, dtype=torch.float32, device=device)
        self.scales = torch.ones(0, dtype=torch.float32, device=device)
        self.extend(slots or {})

    @property
    def is_new(self) -> bool:
        """Whether no amax was recorded yet, and all scales are 1."""
        return not (self.history.any() or self.all_recorded.any() or (self.scales != 1).any())

    def extend(
        self,
        slots: Mapping[str, str | Quantizer],
        vectors: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Add a column for each of `slots`, with an empty window and scale 1. `vectors` are names
        for adjacent `slots` that share a quantizer.

        Raises:
            UserError: a slot exists already.
            ValueError: an unknown format, or a quantizer without one scale per tensor. No slot is
                added.
        """
        added = []
        for slot, quantizer in slots.items():
            if slot in self._columns:
                raise UserError(
                    f"The amax history has a slot '{slot}' already. Give it another name."
                )
            if isinstance(quantizer, str):
                quantizer = replace(self._default, format=quantizer)
            if not quantizer.per_tensor:
                raise ValueError(
                    f"Slot '{slot}': a history has no scale for block = {quantizer.block}"
                )
            added.append(quantizer)
        self._quantizers += added
        self._add(list(slots), vectors or {})
        length = max((q.history_length for q in self._quantizers), default=len(self.history))
        history = self.history.new_zeros(length, len(self._quantizers))
        rows, columns = min(length, len(self.history)), self.history.shape[1]
        history[length - rows :, :columns] = self.history[len(self.history) - rows :]
        self.history = history
        self.scales = torch.cat([self.scales, self.scales.new_ones(len(slots))])
        self._rules = _Rules.of(self._quantizers, history)
        self._chosen: dict[tuple[str, ...], Tensor] = {}  # results of `_flags`

    def to(self, device: torch.device | str) -> Self:
        """Move the state to `device`; in place, like `nn.Module.to`. The state is reset when
        it moves from meta, which holds no values."""
        self.history = moved(self.history, device, 0)
        self.scales = moved(self.scales, device, 1)
        self._rules = _Rules.of(self._quantizers, self.history)
        self._chosen.clear()
        return super().to(device)

    def scale(self, slot: str) -> Tensor:
        """The current scale of `slot`: float32, 0-dim or, for a vector, [slots]; a view that
        `update` changes."""
        return self.scales[self.column(slot)]

    def update(self, slots: Iterable[str] | None = None) -> None:
        """Move the recorded amaxes of `slots` (by default all) into their windows and compute their
        scales.

        A slot without recorded amaxes, or with only zeros, keeps its window and its scale. While a
        window contains an inf, its scale stays the same.
        """
        if not self._columns:
            return
        is_chosen = None if slots is None else self._flags(tuple(slots))
        last = self.read()
        _update(self.history, self.scales, last, *self._rules, is_chosen)
        self.write(None if is_chosen is None else last.where(~is_chosen, 0.0))

    def _flags(self, slots: tuple[str, ...]) -> Tensor:
        """Whether each slot is one of `slots`: bool [slots]."""
        if slots not in self._chosen:
            flags = torch.zeros(len(self._quantizers), dtype=torch.bool)
            flags[[self.column(slot) for slot in slots]] = True
            self._chosen[slots] = flags.to(self.history.device)
        return self._chosen[slots]

    def clear_nonfinite(self) -> Tensor:
        """Clear amaxes that are not finite, which would freeze their slot's scale until they leave
        the window. The scale is computed from the other amaxes in the window, or is 1 if there are
        none. A scale that is not finite or not positive is computed again as well.

        Returns:
            bool [slots], on the history's device: whether each slot was repaired.
        """
        recorded = self.all_recorded
        broken = ~torch.isfinite(self.history)
        broken_scale = ~torch.isfinite(self.scales) | (self.scales <= 0)
        slots = broken.any(dim=0) | ~torch.isfinite(recorded) | broken_scale
        self.history.masked_fill_(broken, 0.0)
        recorded.masked_fill_(~torch.isfinite(recorded), 0.0)
        decisive = decisive_amax(self.history, self._rules.most_recent)
        scales = (self._rules.target / decisive).clamp(max=FLT_MAX)
        self.scales.copy_(torch.where(slots, torch.where(decisive > 0, scales, 1.0), self.scales))
        return slots

    @property
    def most_recent(self) -> Tensor:
        """True for slots whose scale follows the newest amax of their window: bool [slots]."""
        return self._rules.most_recent

    def state_dict(self) -> dict[str, Tensor]:
        """`<slot>.amax_history` [its length] and `<slot>.scale` [], float32, copies; of a vector,
        [length, slots] and [slots]."""
        state = {}
        for slot in self._sizes:
            window = self._window(slot).clone()
            window[0] = self.all_recorded[self.column(slot)]
            state[f"{slot}.amax_history"] = window
            state[f"{slot}.scale"] = self.scale(slot).clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`.

        Raises:
            UserError: an unknown or missing slot, a tensor of another shape or dtype, or a scale
                that is negative or not finite; nothing is changed.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for slot in self._sizes:
            shapes[f"{slot}.amax_history"] = tuple(self._window(slot).shape)
            shapes[f"{slot}.scale"] = tuple(self.scale(slot).shape)
        _require_state(state, shapes)
        for slot in self._sizes:
            column = self.column(slot)
            window = state[f"{slot}.amax_history"].to(self.history.device)
            self._window(slot)[1:] = window[1:]
            self.all_recorded[column] = window[0]
            self.scales[column] = state[f"{slot}.scale"].to(self.scales.device)

    def _window(self, slot: str) -> Tensor:
        """The rows of `history` that `slot` uses, a view: [its length], of a vector [length,
        slots]."""
        column = self.column(slot)
        first = column.start if isinstance(column, slice) else column
        return self.history[-self._quantizers[first].history_length :, column]


def _require_state(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a UserError unless `state` has exactly the tensors of `shapes`, float32, and scales
    that are finite and not negative."""
    unmatched = sorted(shapes.keys() ^ state.keys())
    if unmatched:
        problem = "is missing" if unmatched[0] in shapes else "is not a slot of this model"
        raise UserError(
            f"FP8 state: '{unmatched[0]}' {problem}. Load it into the model it came from."
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape or state[name].dtype != torch.float32:
            raise UserError(
                f"FP8 state: '{name}' is {state[name].dtype} {tuple(state[name].shape)}, not "
                f"float32 {shape}. Use the recipe that it was saved with."
            )
    for name in shapes:
        if name.endswith(".scale") and not (state[name].isfinite() & (state[name] >= 0)).all():
            raise UserError(
                f"FP8 state: '{name}' is negative or not finite. Give what fp8_state gave."
            )


class _Rules(NamedTuple):
    """The parameters of each slot's update, on the history's device.

    Attributes:
        target: fp8_max * 2^-margin, float32 [slots].
        most_recent: bool [slots].
        first_row: the row of the history that is the slot's row 0, int64 [1, slots].
    """

    target: Tensor
    most_recent: Tensor
    first_row: Tensor

    @staticmethod
    def of(quantizers: Sequence[Quantizer], history: Tensor) -> _Rules:
        targets = [q.element.max * 2.0**-q.margin for q in quantizers]
        recent = [q.amax_algorithm == "most_recent" for q in quantizers]
        rows = [len(history) - q.history_length for q in quantizers]
        device = history.device
        return _Rules(
            torch.tensor(targets, dtype=torch.float32, device=device),
            torch.tensor(recent, dtype=torch.bool, device=device),
            torch.tensor([rows], dtype=torch.int64, device=device),
        )


def decisive_amax(history: Tensor, most_recent: Tensor) -> Tensor:
    """The amax in each slot's window that determines the scale: the largest, or the newest above 0
    if `most_recent`, bool [slots]; 0 if there is none. [length, slots], all finite -> [slots]."""
    newest_first = history.flip(0)
    index = (newest_first > 0).int().argmax(dim=0)
    newest = newest_first.gather(0, index[None])[0]
    return torch.where(most_recent, newest, history.amax(dim=0))


# A custom operator, which torch.compile does not trace into, so that eager and compiled code give
# the same scales (Triton's float32 division is approximate). It does not write to the recorded
# amaxes: inductor of torch 2.11 counts the offsets of views twice if an operator writes to them.
@torch.library.custom_op("fp8stack::update_amax_history", mutates_args=("history", "scale"))
def _update(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    target: Tensor,
    most_recent: Tensor,
    first_row: Tensor,
    chosen: Tensor | None,
) -> None:
    moves = last != 0 if chosen is None else (last != 0) & chosen
    # The window still holds the oldest row here: `length` amaxes in all, `last` among them.
    largest = torch.where(most_recent, last, torch.maximum(history.amax(dim=0), last))
    rolled = history.roll(-1, dims=0)
    rolled[-1] = last
    rolled.scatter_(0, first_row, 0.0)
    history.copy_(torch.where(moves, rolled, history))
    new_scale = (target / largest).clamp(max=FLT_MAX)
    is_usable = moves & torch.isfinite(largest) & (largest > 0)
    scale.copy_(torch.where(is_usable, new_scale, scale))


def _cells(values: Tensor, sizes: Iterable[int]) -> tuple[Tensor, list[Tensor]]:
    """A copy of `values` [n], and tensors in its memory: a vector for each of `sizes`, 0-dim for a
    size of 0. Casts write to these tensors, which autograd and compilers treat as
    independent; updates use the copy. The values are 16 bytes apart, because compiled code assumes
    aligned tensors."""
    memory = values.new_zeros(len(values), 4)
    memory[:, 0] = values
    cells, first = [], 0
    for size in sizes:
        cell = values.new_empty(0)
        shape, stride = ((size,), (4,)) if size else ((), ())
        cells.append(cell.set_(memory.untyped_storage(), 4 * first, shape, stride))
        first += size or 1
    return memory[:, 0], cells
