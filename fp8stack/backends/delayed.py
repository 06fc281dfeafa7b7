"""When delayed scaling records amaxes and updates scales. No GEMM here, no cast.

A model's forward scales are due an update after each of its forward passes, its backward scales
after each backward pass; a pass in eval mode or without gradients changes nothing. The forward
update is made at the end of the backward pass or, if there is none, just before the next forward
pass: by then a recomputed (checkpointed) block has seen the same scales as the first time.
"""

from __future__ import annotations

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
        self._backward: list[str] = []
        self._forward_due = False
        self._backward_due = False

    def add_layer(self, path: str) -> None:
        """Give the linear layer at the module path `path` its three slots."""
        for operand in ("input", "weight"):
            self._forward.append(f"{path}.{operand}")
            self.history.add(f"{path}.{operand}", self.recipe.forward_format)
        self._backward.append(f"{path}.grad_output")
        self.history.add(f"{path}.grad_output", self.recipe.backward_format)

    def attach(self, model: nn.Module) -> None:
        """Follow the passes of `model`: its user calls nothing of ours in the training loop."""
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def settle(self) -> None:
        """Make the update of the forward scales that is still due."""
        if self._forward_due:
            self._forward_due = False
            self.history.update(self._forward)

    def backward_ran(self) -> None:
        """Note, from inside a backward pass, that it is to end in an update."""
        if not self._backward_due:
            self._backward_due = True
            Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        parameter = next(model.parameters())
        if self.history.history.device != parameter.device:
            self.history.to(parameter.device)
        self._backward_due = False  # a backward pass that failed half-way left it set
        self.settle()

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._forward_due = model.training and torch.is_grad_enabled()

    def _after_backward(self) -> None:
        self._backward_due = False
        self.settle()
        self.history.update(self._backward)
