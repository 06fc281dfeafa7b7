"""A run: its immutable parts (`Run`), and its state, which the training loop changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8stack import data
from fp8stack.common import presets
from fp8stack.common.version import __version__
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.layers.linear import CastLinear
from fp8stack.model.gpt import GPT, Attention, Block
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.recipe_file import plain
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.state import restore
from fp8stack.training.distributed.process_group import Ranks
from fp8stack.training.optim.grad_scaler import LossScaler
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import Schedule, never_asked_for, phases_in
from fp8stack.training.telemetry.operand_errors import Telemetry


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
    final_windows: Tensor  # for the validation loss after the last step
    tokenizer: Tokenizer | None  # of the data, if it is known

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the training and the validation data."""
        return {"train": self.train.fingerprint(), "validation": self.validation.fingerprint()}


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
    """A run. Only `state` changes."""

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
            variant.model.set_fp8(layer, in_fp8)

    def leave_fp16(self) -> None:
        """Replace each fp16 variant by one in bf16, without a loss scale."""
        self.state.variants = tuple(
            _in_bf16(variant) if variant.plan.loss_scaling else variant for variant in self.variants
        )
        self.use(self.state.active)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, moments, scales, random state and step from `checkpoint`. Raises what
        `training.checkpoint.state.restore` raises."""
        rank, main = self.ranks.index, self.main.model
        restore(self.model, self.optimizer, checkpoint.tensors, rank, fp8_model=main)
        for variant in self.variants:
            variant.backend.weights.mark_changed()
        if self.loss_scaler is not None and checkpoint.info["scaler"] is not None:
            self.loss_scaler.load_state_dict(checkpoint.info["scaler"])
        self.state.step = checkpoint.step

    def plan_json(self) -> dict[str, Any]:
        """The main variant's plan as JSON data, with the requested recipe, and the phases if
        any."""
        plan = self.main.plan.to_json() | {"asked": presets.label(self.config.recipe)}
        # `config`, not `schedule`, names the run's copies of recipe files.
        if warning := never_asked_for(self.config, phases_in(self.config)):
            plan["reasons"] = [warning, *plan["reasons"]]
        if self.config.phases:
            phase_plans = [self.variants[place].plan for place in self.schedule.variants]
            plan["phases"] = [
                asdict(phase) | {"precision": ran.precision, "compute_dtype": ran.compute_dtype}
                for phase, ran in zip(self.schedule.phases, phase_plans, strict=True)
            ]
        return plan


def main_variant(variants: Sequence[Variant]) -> Variant:
    """The variant whose FP8 state is saved: one in delayed scaling, else the first in FP8, else the
    first."""
    delayed = (variant for variant in variants if variant.backend.delayed is not None)
    fp8 = (variant for variant in variants if variant.plan.runs_fp8)
    return next(delayed, None) or next(fp8, variants[0])


def versions() -> dict[str, str]:
    """The versions to save in a checkpoint."""
    return {
        "fp8stack": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }


def _in_bf16(variant: Variant) -> Variant:
    """The bf16 variant that replaces an fp16 one: its plan in bf16 and a backend for it. The
    modules stay the same, with their hooks, DDP, FSDP2 and compiled code, and use the new
    backend."""
    old = variant.plan
    plan = replace(
        old,
        recipe=plain("bf16", old.recipe),
        compute_dtype="bf16",
        reasons=(*old.reasons, "the guard left fp16 for bf16"),
        layers=tuple(
            replace(layer, precision=layer.precision.replace("fp16", "bf16"))
            for layer in old.layers
        ),
    )
    backend = build_backend(plan, draws=variant.backend.draws)
    backend.vocabulary_multiple = variant.backend.vocabulary_multiple
    for module in variant.model.modules():
        if isinstance(module, GPT | Block | Attention):
            module.backend = backend
        elif isinstance(module, CastLinear | GroupedLinear):
            module.compute_dtype = backend.compute_dtype
    return replace(variant, plan=plan, backend=backend)
