"""The scales of recent forward passes, for activation checkpointing: a block is recomputed in the
backward pass, by which time later passes may have changed the scales."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from fp8stack.common.errors import UserError

LIMIT = 256
"""The number of passes whose scales are stored, in 8 bytes per slot and pass."""


def device_of(model: nn.Module, inputs: object, state: torch.device) -> torch.device:
    """The device of a forward pass of `model`, whose FP8 state is on the device `state`. Offloaded
    weights are on meta until their layer is called: the inputs tell it then, unless they are on the
    CPU and yet to be moved."""
    device = next(model.parameters()).device
    if device.type == "meta":
        devices = [x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        return next((device for device in devices if device.type != "cpu"), state)
    return device


@dataclass(eq=False)
class Pass:
    """A forward pass of the model.

    Attributes:
        scales: the scales of inputs, float32 [slots].
        weight_scales: the scales of weights, float32 [slots].
        records: whether the pass records amaxes.
        moved: whether an update moved the amaxes of its inputs and weights into the history.
        end: the sequence number of autograd's first node after the pass; None while it runs.
    """

    scales: Tensor
    weight_scales: Tensor
    records: bool
    moved: bool = False
    end: int | None = None


class Passes:
    """The forward passes of one model, the newest last.

    Autograd numbers its nodes in the order of their creation, so the number of the node that runs
    while a block is recomputed identifies the block's pass.
    """

    def __init__(self) -> None:
        self._begun: deque[Pass] = deque()
        self._count = 0
        self._memory: Tensor | None = None  # of their scales, float32 [LIMIT, 2, slots]
        self._forgotten = -1  # nodes up to this number belong to passes that were dropped
        self._outer: tuple[int, Pass] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(Passes())  # a copy has no autograd graph

    def reserve(self, like: Tensor) -> Tensor:
        """Allocate memory for the scales of all passes on the device of `like`, float32 [slots]."""
        memory = self._memory
        if memory is None or memory.device != like.device or memory.shape[0] != LIMIT:
            with torch.inference_mode(False):
                memory = self._memory = like.new_zeros(LIMIT, 2, len(like))
        return memory

    def begin(self, scales: Tensor, weight_scales: Tensor, records: bool) -> Pass:
        """Store the scales of inputs and weights, [slots], of a forward pass that begins."""
        if len(self._begun) >= LIMIT:
            self._forgotten = self._begun.popleft().end or self._forgotten
        self._outer = None
        room = self.reserve(scales)[self._count % LIMIT]
        self._count += 1
        torch.stack([scales, weight_scales], out=room)
        self._begun.append(Pass(room[0], room[1], records))
        return self._begun[-1]

    def end(self, ended: Pass) -> None:
        """Note that a forward pass has ended."""
        ended.end = torch._C._autograd._get_sequence_nr()

    def mark_moved(self) -> None:
        """Note that an update moves the amaxes of all passes so far into the history."""
        for begun in reversed(self._begun):
            if begun.moved:
                break
            begun.moved = True

    def recomputed(self) -> Pass | None:
        """The forward pass that the running backward pass recomputes, fully or in part; None
        outside of backward passes.

        Raises:
            UserError: the scales of that pass were dropped.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or not self._begun:
            return None
        # Reentrant checkpointing runs backward passes within the outer one, whose nodes have other
        # numbers.
        if self._outer is None:
            Variable._execution_engine.queue_callback(self._backward_ended)
        if self._outer is None or self._outer[0] == task:
            self._outer = task, self._pass_of_node()
        return self._outer[1]

    def _backward_ended(self) -> None:
        self._outer = None

    def _pass_of_node(self) -> Pass:
        node: Any = torch._C._current_autograd_node()
        if node is None:  # a hook at the end of the backward pass
            return self._begun[-1]
        number = node._sequence_nr()
        if number < self._forgotten:
            raise UserError(
                "Delayed scaling: activation checkpointing runs a forward pass again after more "
                f"than {LIMIT} others. Call backward() earlier, or use current scaling."
            )
        # A node that recomputes an entire pass was created before that pass began.
        ended = (begun for begun in self._begun if begun.end is None or number < begun.end)
        return next(ended, self._begun[-1])
