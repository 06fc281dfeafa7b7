"""When delayed scaling records amaxes and updates scales. No GEMM here, no cast.

A model's forward scales are due an update after each of its forward passes, its backward scales
after each backward pass; a pass in eval mode or without gradients changes nothing. The forward
update is made at the end of the backward pass or, if there is none, just before the next forward
pass: by then a recomputed (checkpointed) block has seen the same scales as the first time. (With
checkpointing, run no second forward pass before the first one's backward.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fp8stack.numerics import AmaxHistory
from fp8stack.precision.recipe import DelayedRecipe


class DelayedScaling:
    """The amax history of one model and the moments at which it is updated."""

    def __init__(self, recipe: DelayedRecipe) -> None:
        self.recipe = recipe
        self.history = AmaxHistory(
            length=recipe.history_length, margin=recipe.margin, algorithm=recipe.amax_algorithm
        )
        self._forward: list[str] = []
        self._forward_due = False
        self._backward_task: int | None = None

    def add_layer(self, path: str) -> None:
        """Give the linear layer at the module path `path` its three slots."""
        for operand in ("input", "weight"):
            self._forward.append(f"{path}.{operand}")
            self.history.add(f"{path}.{operand}", self.recipe.forward_format)
        self.history.add(f"{path}.grad_output", self.recipe.backward_format)

    def attach(self, model: nn.Module) -> None:
        """Follow the passes of `model`: its user calls nothing of ours in the training loop."""
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def state(self) -> dict[str, Tensor]:
        """The state with the update that is due, which is not made: a backward pass may follow."""
        history = self.history
        if self._forward_due:
            history = copy.deepcopy(history)
            history.update(self._forward)
        return history.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave. Raises what `AmaxHistory.load_state_dict` raises."""
        self.history.load_state_dict(state)
        self._forward_due = False

    def backward_ran(self) -> None:
        """Note, from inside a backward pass, that it is to end in an update."""
        task = torch._C._current_graph_task_id()
        if self._backward_task != task:
            self._backward_task = task
            Variable._execution_engine.queue_callback(self._after_backward)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        device = next(model.parameters()).device
        if self.history.history.device != device:
            with torch.inference_mode(False):  # inference tensors could not be updated later
                self.history.to(device)
        if self._forward_due:
            self._forward_due = False
            self.history.update(self._forward)

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._forward_due = model.training and torch.is_grad_enabled()

    def _after_backward(self) -> None:
        # All that recorded: reentrant checkpointing runs forward and backward piece by piece here.
        self._forward_due = False
        self._backward_task = None
        self.history.update()
