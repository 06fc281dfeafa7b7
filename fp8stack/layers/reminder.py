"""A warning that weights were loaded into a converted model without its FP8 state."""

from __future__ import annotations

import logging

import torch
from torch import nn

from fp8stack.numerics.operators import assume_constant_result

log = logging.getLogger("fp8stack")


class StateReminder:
    """Warns once, at the first pass after weights were loaded without FP8 state.

    Attributes:
        due: whether the next pass warns; compiled code is guarded on it.
    """

    def __init__(self) -> None:
        self.due = False
        self._state_loaded = False  # since the last pass
        self._warned = False

    def attach(self, model: nn.Module) -> None:
        """Register a forward pre-hook on `model`, which also runs in compiled code."""
        model.register_forward_pre_hook(self._before_forward)

    def weights_loaded(self) -> None:
        """Called when the weight of a layer with FP8 state was loaded."""
        self.due = not self._state_loaded and not self._warned

    def state_loaded(self) -> None:
        """Called when FP8 state was loaded, before or after the weights."""
        self._state_loaded = True
        self.due = False

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.remind()
        elif self.due:
            self._remind_while_compiling()

    def remind(self) -> None:
        """Warn if `due`; called before each pass."""
        if self.due:
            self._warned = True
            log.warning(
                "Weights were loaded into a converted model, its FP8 state was not. If they were "
                "trained in FP8, save fp8stack.fp8_state(model) beside them, and after convert "
                "restore it with fp8stack.load_fp8_state(model, state)."
            )
        self.due = self._state_loaded = False

    @assume_constant_result
    def _remind_while_compiling(self) -> None:
        self.remind()
