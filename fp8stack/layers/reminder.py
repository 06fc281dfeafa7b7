"""A reminder that weights were loaded into a converted model and its FP8 state was not."""

from __future__ import annotations

import logging

import torch
from torch import nn

log = logging.getLogger("fp8stack")


class StateReminder:
    """Warns once, at the first pass after weights were loaded without FP8 state.

    Attributes:
        due: whether the next pass warns; a compiled model has it as a guard.
    """

    def __init__(self) -> None:
        self.due = False
        self._state_loaded = False  # since the last pass
        self._warned = False

    def attach(self, model: nn.Module) -> None:
        """Look before each pass of `model`, compiled or not."""
        model.register_forward_pre_hook(self._before_forward)

    def weights_loaded(self) -> None:
        """Note that the weight of a layer with FP8 state was loaded."""
        self.due = not self._state_loaded and not self._warned

    def state_loaded(self) -> None:
        """Note that FP8 state was loaded, for weights loaded before or after it."""
        self._state_loaded = True
        self.due = False

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.remind()
        elif self.due:
            self._remind_while_compiling()

    def remind(self) -> None:
        """Warn if that is due; a pass is about to run."""
        if self.due:
            self._warned = True
            log.warning(
                "Weights were loaded into a converted model, its FP8 state was not: its scales or "
                "draw counters are not those that the weights were saved with. Save "
                "fp8stack.fp8_state(model) beside the weights, and after convert restore it with "
                "fp8stack.load_fp8_state(model, state)."
            )
        self.due = self._state_loaded = False

    # So that torch.compile calls it while it traces.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _remind_while_compiling(self) -> None:
        self.remind()
