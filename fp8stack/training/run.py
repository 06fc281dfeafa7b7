"""A run: its immutable parts (`Run`), and its state, which the training loop changes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from fp8stack.layers import Backend
from fp8stack.layers.compiler import is_compiled
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.recipe_file import plain
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.state import restore
from fp8stack.training.distributed.parallelize import fully_shard_model, spread
from fp8stack.training.distributed.process_group import Ranks
from fp8stack.training.models import delayed_scaling, model_in
from fp8stack.training.optim.grad_scaler import LossScaler
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import RunPlans, Schedule, never_asked_for, phases_in
from fp8stack.training.telemetry.operand_errors import Telemetry


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

    plans: tuple[Plan, ...]  # one for each recipe of the run; see `Schedule`
    model: GPT  # in the recipe that trains now
    wrapped: nn.Module  # what a step calls: the model, or the DDP module of it
    active: int = 0  # index of the model's plan
    # Layers, and attention, that left FP8, with the last step without FP8; None: permanently.
    demoted: Mapping[str, int | None] = field(default_factory=dict)
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
    optimizer: Optimizer
    accelerator: Accelerator
    loss_scaler: LossScaler | None  # if a phase is in fp16
    data: RunData
    telemetry: Telemetry
    identity: Mapping[str, Any]  # see `identity_of`
    state: TrainingState
    notes: tuple[str, ...] = ()  # printed at the start
    resumed: Mapping[str, Any] | None = None  # checkpoint.json of the checkpoint it resumed from

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.state.step

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the run, one for each of its recipes."""
        return self.state.plans

    @property
    def plan(self) -> Plan:
        """The plan that trains now, without FP8 in the layers that left it."""
        return self.model.backend.plan

    @property
    def main_plan(self) -> Plan:
        """See `main_plan`."""
        return main_plan(self.state.plans)

    @property
    def model(self) -> GPT:
        """The model, in the recipe that trains now."""
        return self.state.model

    @property
    def wrapped(self) -> nn.Module:
        """The module that a step calls: the model, or the DDP module of it."""
        return self.state.wrapped

    @property
    def backend(self) -> Backend:
        """The model's backend."""
        return self.model.backend

    @property
    def delayed(self) -> DelayedScaling | None:
        """The state of delayed scaling, if a recipe of the run has it."""
        return delayed_scaling(self.model)

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled in any recipe of the run."""
        return any(map(self._compiles, self.plans))

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, if the model is in fp16."""
        return self.loss_scaler if self.plan.loss_scaling else None

    def use(self, index: int) -> None:
        """Train with the plan at `index` from now on: build the model again around its parameters.
        All ranks call this."""
        state, before = self.state, self.model
        if before.backend.delayed is not None:
            before.backend.weights.watch(())  # so that its state does not hold the model
        compiled = self._compiles(self.plans[index])
        state.model = state.wrapped = self._built(index, compiled=compiled)
        state.active, self.telemetry.plan = index, self.plan
        self.accelerator.free_memory()  # of DDP's module
        if self.ranks.count > 1:
            state.wrapped = spread(state.model, self.accelerator, self.config, before)

    def model_in(self, index: int) -> GPT:
        """The model with the plan at `index`, to evaluate it. It is built around the parameters of
        the model that trains, unless that is the one. All ranks call this."""
        if index == self.state.active:
            return self.model
        model = self._built(index)
        if self.ranks.count > 1 and self.config.parallel == "fsdp":
            fully_shard_model(model, self.accelerator, self.model, trains=False)
        return model

    def _built(self, index: int, *, compiled: bool = False) -> GPT:
        plan, demoted = self.plans[index], self.state.demoted
        if demoted:
            plan = _without_fp8(plan, demoted)
        model = model_in(plan, self.config, self.model.config, self.model, compiled=compiled)
        for path in demoted:
            model.leave_fp8(path)  # attention, which is no layer of the plan
        return model

    def _compiles(self, plan: Plan) -> bool:
        kind = self.config.activation_checkpointing
        return is_compiled(self.config.compile, plan, self.hardware, kind)[0]

    def demote(self, layers: Mapping[str, int | None]) -> None:
        """Run `layers`, and attention, without FP8, and no others, whatever the recipe. Values are
        as in `TrainingState.demoted`."""
        if layers != self.state.demoted:
            self.state.demoted = dict(layers)
            self.use(self.state.active)

    def leave_fp16(self) -> None:
        """Train in bf16, without a loss scale, where the plan was fp16."""
        plans = (_in_bf16(plan) if plan.loss_scaling else plan for plan in self.plans)
        self.state.plans = tuple(plans)
        self.use(self.state.active)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, moments, scales, random state and step from `checkpoint`. Raises what
        `training.checkpoint.state.restore` raises."""
        restore(self.model, self.optimizer, checkpoint.tensors, self.ranks.index)
        self.backend.weights.mark_changed()
        if self.loss_scaler is not None and checkpoint.info["scaler"] is not None:
            self.loss_scaler.load_state_dict(checkpoint.info["scaler"])
        self.state.step = checkpoint.step

    def plan_json(self) -> dict[str, Any]:
        """The plan of the requested recipe as JSON data, the main plan if no phase has it, and the
        phases if any."""
        recipe = self.config.recipe
        phase_plans = [self.plans[index] for index in self.schedule.indices]
        phases = phases_in(self.config)  # `config` names the run's copies of recipe files
        requested = (
            ran for phase, ran in zip(phases, phase_plans, strict=True) if phase.recipe == recipe
        )
        plan = next(requested, self.main_plan).to_json() | {"asked": presets.label(recipe)}
        if warning := never_asked_for(self.config, phases):
            plan["reasons"] = [warning, *plan["reasons"]]
        if self.config.phases:
            plan["phases"] = [
                asdict(phase) | {"precision": ran.precision, "compute_dtype": ran.compute_dtype}
                for phase, ran in zip(self.schedule.phases, phase_plans, strict=True)
            ]
        return plan


def main_plan(plans: Sequence[Plan]) -> Plan:
    """The plan of a run whose recipe is that of its checkpoints: the one in delayed scaling, else
    the first in FP8, else the first."""
    delayed = (plan for plan in plans if plan.delayed)
    fp8 = (plan for plan in plans if plan.runs_fp8)
    return next(delayed, None) or next(fp8, plans[0])


def identity_of(planned: RunPlans, run_data: RunData) -> dict[str, Any]:
    """The model, recipes and data of a run, which must equal the checkpoint's on resume."""
    recipes = [plan.recipe.to_json(words=False) for plan in planned.plans]
    identity = {
        "model": planned.model.model_dump(mode="json"),
        "recipe": main_plan(planned.plans).recipe.to_json(words=False),
        "data": run_data.fingerprints(),
    }
    schedule = planned.schedule
    places = {*schedule.indices, schedule.evaluation} - {None}
    if len(places) > 1:  # without the guard's reference, which may come and go
        identity["recipes"] = {
            str(place): recipe for place, recipe in enumerate(recipes) if place in places
        }
    return identity


def versions() -> dict[str, str]:
    """The versions to save in a checkpoint."""
    return {
        "fp8stack": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }


def _without_fp8(plan: Plan, demoted: Mapping[str, int | None]) -> Plan:
    """The plan with layers that left FP8, see `TrainingState.demoted`."""
    layers = []
    for layer in plan.layers:
        if layer.fp8 and layer.name in demoted:
            last = demoted[layer.name]
            until = "" if last is None else f" until step {last}"
            layer = replace(
                layer,
                fp8=False,
                precision=plan.compute_dtype,
                reason=f"the guard took it out of FP8{until}",
                quantizers=None,
                backend=None,
            )
        layers.append(layer)
    return replace(plan, layers=tuple(layers))


def _in_bf16(plan: Plan) -> Plan:
    """The plan in bf16 that replaces one in fp16."""
    return replace(
        plan,
        recipe=plain("bf16", plan.recipe),
        compute_dtype="bf16",
        reasons=(*plan.reasons, "the guard left fp16 for bf16"),
        layers=tuple(
            replace(layer, precision=layer.precision.replace("fp16", "bf16"))
            for layer in plan.layers
        ),
    )
