"""A run: its immutable parts (`Run`), and its state, which the training loop changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8stack import data
from fp8stack.backends import Backend
from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.config import RunConfig
from fp8stack.distributed.process_group import Ranks
from fp8stack.model.gpt import GPT, Attention
from fp8stack.optim.grad_scaler import LossScaler
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.phases import Phase
from fp8stack.telemetry.operands import Telemetry
from fp8stack.tokenizer import Tokenizer
from fp8stack.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The model in one recipe: its plan, its backend, and its layers, which share their parameters
    with the run's other variants."""

    plan: Plan
    backend: Backend
    model: GPT
    compiled: bool = False  # whether its blocks and its loss are compiled


class Switch(nn.Module):
    """Calls the active one of several variants of a model, so that DDP wraps one module."""

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
class RunData:
    """The data of a run."""

    train: data.Corpus
    validation: data.Corpus
    windows: Tensor  # for validation losses, see `data.validation_windows`
    tokenizer: Tokenizer | None  # of the data, if it is known

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each part."""
        return {"train": self.train.fingerprint(), "validation": self.validation.fingerprint()}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which variant runs when; variants are indices into `TrainingState.variants`."""

    phases: tuple[Phase, ...]  # of training, in order, from the first step to the last
    variants: tuple[int, ...]  # of each phase
    places: dict[str, int]  # by the recipe that was requested
    evaluation: int | None = None  # for validation losses; None: the one that trains
    reference: int | None = None  # float32 without FP8, for the quality guard, if that is on


@dataclass(kw_only=True, eq=False)
class TrainingState:
    """The state of a run besides its weights, moments and scales. The training loop changes it, and
    whatever restores a checkpoint. (A diagnosis repeats a step as if it came next, and then
    restores the state.)"""

    variants: tuple[Variant, ...]  # of the model, one for each recipe that a phase uses
    active: int = 0  # index of the variant that trains now
    step: int = 0  # the last step that was done


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run: all its parts, of which only `state` changes."""

    config: RunConfig
    context: int
    folder: RunFolder
    hardware: Hardware
    ranks: Ranks
    schedule: Schedule
    wrapped: nn.Module  # what a step calls: the model or switch, or the DDP or FSDP2 module of it
    switch: Switch | None  # calls the active variant, if there are several
    optimizer: Optimizer
    accelerator: Accelerator
    loss_scaler: LossScaler | None  # if a phase is in fp16
    data: RunData
    telemetry: Telemetry
    identity: Mapping[str, Any]
    state: TrainingState
    notes: tuple[str, ...] = ()  # printed at the start
    resumed: Mapping[str, Any] | None = None  # checkpoint.json of the checkpoint it resumed from

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.state.step

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of the model, one for each recipe that a phase uses."""
        return self.state.variants

    @property
    def active(self) -> Variant:
        """The variant that trains now."""
        return self.state.variants[self.state.active]

    @property
    def plan(self) -> Plan:
        """The active variant's plan."""
        return self.active.plan

    @property
    def backend(self) -> Backend:
        """The active variant's backend."""
        return self.active.backend

    @property
    def model(self) -> GPT:
        """The active variant's model."""
        return self.active.model

    @property
    def compiled(self) -> bool:
        """Whether any variant is compiled."""
        return any(variant.compiled for variant in self.variants)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, if the active variant is in fp16."""
        return self.loss_scaler if self.plan.loss_scaling else None

    @property
    def main(self) -> Variant:
        """See `main_variant`."""
        return main_variant(self.state.variants)

    @property
    def evaluation(self) -> Variant | None:
        """The variant that computes validation losses; None: the active one."""
        place = self.schedule.evaluation
        return None if place is None else self.variants[place]

    def use(self, place: int) -> None:
        """Train with the variant at index `place` from now on."""
        self.state.active, self.telemetry.plan = place, self.variants[place].plan
        if self.switch is not None:
            self.switch.active = place

    def set_fp8(self, layer: str, in_fp8: bool) -> None:
        """Switch FP8 on or off for a layer, or attention, in every variant whose plan has it in
        FP8."""
        for variant in self.variants:
            part = variant.model.get_submodule(layer)
            if isinstance(part, Attention):
                part.in_fp8 = in_fp8 and variant.plan.recipe.fp8_attention
            elif variant.plan.is_fp8 and variant.plan.layer(layer).fp8:
                assert isinstance(part, LowPrecisionLinear), layer
                part.in_fp8 = in_fp8


def main_variant(variants: Sequence[Variant]) -> Variant:
    """The variant whose FP8 state is saved: one in delayed scaling, else the first in FP8, else the
    first."""
    delayed = (one for one in variants if one.backend.delayed is not None)
    fp8 = (one for one in variants if one.plan.runs_fp8)
    return next(delayed, None) or next(fp8, variants[0])
