"""A run: what it is, which stays, and where it stands, which the training loop moves on."""

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
from fp8stack.model.gpt import GPT
from fp8stack.optim.grad_scaler import LossScaler
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.phases import Phase
from fp8stack.telemetry.operands import Telemetry
from fp8stack.tokenizer import Tokenizer
from fp8stack.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The model in one recipe: its plan, the backend that runs it, and the layers, which share
    their parameters with the run's other variants."""

    plan: Plan
    backend: Backend
    model: GPT
    compiled: bool = False  # whether its blocks and its loss are compiled code


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
    """Which variant runs when; variants by their place in `TrainingState.variants`."""

    phases: tuple[Phase, ...]  # of training, in order, from the first step to the last
    variants: tuple[int, ...]  # that of each phase
    places: dict[str, int]  # that of each recipe that was asked for
    evaluation: int | None = None  # that of validation losses; None: that of training
    reference: int | None = None  # float32 without FP8, for the quality guard; None: there is none


@dataclass(kw_only=True, eq=False)
class TrainingState:
    """Where a run stands, besides its weights, moments and scales. The training loop changes it,
    and what puts a run back to a checkpoint. (For a diagnosis a step is tried as if it came next;
    then all is as before.)"""

    variants: tuple[Variant, ...]  # of the model, one for each recipe that a phase asks for
    active: int = 0  # the place of the variant that trains now
    step: int = 0  # the step that was done last


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What a run is, and where it stands: its `state`."""

    config: RunConfig
    context: int
    folder: RunFolder
    hardware: Hardware
    ranks: Ranks
    schedule: Schedule
    # What a step calls: the model, or the switch, or what spreads either over ranks.
    wrapped: nn.Module
    switch: Switch | None  # what calls the variant that trains now, if there are several
    optimizer: Optimizer
    accelerator: Accelerator
    loss_scaler: LossScaler | None  # of fp16, if a phase is in it
    train: data.Corpus
    validation: data.Corpus
    windows: Tensor  # those of validation losses
    tokenizer: Tokenizer | None  # what the data were tokenized with, if that is known
    telemetry: Telemetry
    identity: Mapping[str, Any]
    state: TrainingState
    notes: tuple[str, ...] = ()  # what is told at the start
    # What the checkpoint told that the run goes on from, if it does.
    resumed: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """The step that was done last."""
        return self.state.step

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The model, once for each recipe that a phase asks for."""
        return self.state.variants

    @property
    def active(self) -> Variant:
        """The variant that trains now."""
        return self.state.variants[self.state.active]

    @property
    def plan(self) -> Plan:
        """What runs now."""
        return self.active.plan

    @property
    def backend(self) -> Backend:
        """The backend that runs now."""
        return self.active.backend

    @property
    def model(self) -> GPT:
        """The model as it runs now."""
        return self.active.model

    @property
    def compiled(self) -> bool:
        """Whether any variant is compiled code."""
        return any(variant.compiled for variant in self.variants)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, if what trains now is in fp16."""
        return self.loss_scaler if self.plan.loss_scaling else None

    @property
    def main(self) -> Variant:
        """See `main_variant`."""
        return main_variant(self.state.variants)

    @property
    def evaluation(self) -> Variant | None:
        """The variant that validation losses are computed in; None: that which trains."""
        place = self.schedule.evaluation
        return None if place is None else self.variants[place]

    def use(self, place: int) -> None:
        """Train with the variant at this place from now on."""
        self.state.active, self.telemetry.plan = place, self.variants[place].plan
        if self.switch is not None:
            self.switch.active = place

    def set_fp8(self, layer: str, in_fp8: bool) -> None:
        """Take a layer out of FP8, or back to it, in every variant that has it in FP8."""
        for variant in self.variants:
            if variant.plan.is_fp8 and variant.plan.layer(layer).fp8:
                part = variant.model.get_submodule(layer)
                assert isinstance(part, LowPrecisionLinear), layer
                part.in_fp8 = in_fp8


def main_variant(variants: Sequence[Variant]) -> Variant:
    """The variant whose FP8 state is kept, if one has any; else the first in FP8, if any."""
    delayed = (one for one in variants if one.backend.delayed is not None)
    fp8 = (one for one in variants if one.plan.runs_fp8)
    return next(delayed, None) or next(fp8, variants[0])
