"""A run: everything that a training loop needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8stack import data
from fp8stack.backends import Backend
from fp8stack.config import RunConfig
from fp8stack.distributed.process_group import ALONE, Ranks
from fp8stack.model.gpt import GPT
from fp8stack.optim.grad_scaler import LossScaler
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.phases import Phase
from fp8stack.telemetry.operands import Telemetry
from fp8stack.tokenizer import Tokenizer
from fp8stack.training.run_folder import RunFolder


@dataclass(kw_only=True, eq=False)
class Variant:
    """The model in one recipe: its plan, who computes, and the layers, which share their parameters
    with the run's other variants."""

    plan: Plan
    backend: Backend
    model: GPT


class Switch(nn.Module):
    """Calls one of several variants of a model: one module, for DDP, whichever trains."""

    def __init__(self, models: Iterable[GPT]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.active = 0

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """The loss, see `GPT.forward`."""
        loss: Tensor = self.models[self.active](tokens_BT, targets_BT, documents_BT)
        return loss


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which variant runs when; variants by their place in `Run.variants`.

    Attributes:
        phases: of training, in order, from the first step to the last.
        variants: that of each phase.
        places: that of each recipe that was asked for.
        evaluation: that of validation losses; None: that of training.
        reference: float32 without FP8, for the quality guard; None: there is none.
    """

    phases: tuple[Phase, ...]
    variants: tuple[int, ...]
    places: dict[str, int]
    evaluation: int | None = None
    reference: int | None = None


@dataclass(kw_only=True)
class Run:
    """Everything a training loop needs, and the step that was done last.

    Attributes:
        variants: of the model, one for each recipe that a phase asks for.
        active: the variant that trains now.
        wrapped: what a step calls: the model, or the switch, or what spreads either over ranks.
        switch: what calls the variant that trains now, if there are several.
        windows: those of validation losses.
        tokenizer: what the data were tokenized with, if that is known.
        loss_scaler: of fp16, if a phase is in it; `scaler` is it in such a phase, and else None.
    """

    config: RunConfig
    context: int
    folder: RunFolder
    hardware: Hardware
    variants: tuple[Variant, ...]
    active: Variant
    schedule: Schedule
    wrapped: nn.Module
    switch: Switch | None = None
    optimizer: Optimizer
    accelerator: Accelerator
    loss_scaler: LossScaler | None
    scaler: LossScaler | None = None
    train: data.Corpus
    validation: data.Corpus
    windows: Tensor
    tokenizer: Tokenizer | None
    telemetry: Telemetry
    identity: dict[str, Any]
    ranks: Ranks = ALONE
    step: int = 0
    notes: tuple[str, ...] = ()
    guard_state: dict[str, Any] | None = None
    phases_state: dict[str, Any] | None = None

    @property
    def plan(self) -> Plan:
        """What runs now."""
        return self.active.plan

    @property
    def backend(self) -> Backend:
        """Who computes now."""
        return self.active.backend

    @property
    def model(self) -> GPT:
        """The model as it runs now."""
        return self.active.model

    @property
    def main(self) -> Variant:
        """The variant whose FP8 state is kept, if one has any; else the first in FP8, if any."""
        delayed = (one for one in self.variants if one.backend.delayed is not None)
        fp8 = (one for one in self.variants if one.plan.runs_fp8)
        return next(delayed, None) or next(fp8, self.variants[0])

    @property
    def evaluation(self) -> Variant | None:
        """The variant that validation losses are computed in; None: that which trains."""
        place = self.schedule.evaluation
        return None if place is None else self.variants[place]

    def use(self, variant: Variant) -> None:
        """Train with `variant` from now on."""
        self.active = variant
        self.scaler = self.loss_scaler if variant.plan.loss_scaling else None
        self.telemetry.plan = variant.plan
        if self.switch is not None:
            self.switch.active = self.variants.index(variant)
