"""The phases of a run during training: which variant trains each step, and calibration before a
switch.

Before a switch to delayed scaling, amaxes are recorded for some steps while the layers still run in
the other recipe, so that FP8 starts with scales that fit, not with 1. Phases depend on the step
alone, unless the quality guard ended them, which the run's state records.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.layers.observe import observing
from fp8stack.precision.phases import Phase
from fp8stack.training.run import Run, Variant

CONSERVATIVE = "conservative"


class Phases:
    """Selects the variant of a run's model for each step, and ends the phases early if a recipe
    harms the loss; `announce` is called with each event, a row of `metrics.jsonl`."""

    def __init__(self, run: Run, announce: Callable[[dict[str, Any]], None]) -> None:
        self.run, self.announce = run, announce
        state = (run.resumed or {}).get("phases") or {}
        self.ended_at: int | None = state.get("ended_at")  # after this step the reference trains
        self.judged_at: int = state.get("judged_at", 0)  # the last step that was compared
        self.entered: str | None = state.get("entered")  # the last phase that was announced
        self.reason: str | None = state.get("reason")  # why the phases ended
        self._told_the_end = self._has_ended(run.step)

    def variant(self, step: int) -> int:
        """The index of the variant that trains `step`."""
        return self._at(step)[1]

    def enter(self, step: int) -> None:
        """Announce the phase that begins with `step`, if one does; its variant is already
        active."""
        phase, place = self._at(step)
        schedule = self.run.schedule
        several = len(schedule.phases) > 1
        if phase.name != self.entered and several and self.ended_at is None:
            recipe = phase.asked.replace(phase.recipe, self.run.plan.asked, 1)  # not a whole path
            reason = f"{recipe} was asked for from this step on"
            is_first = schedule.variants.index(place) == schedule.phases.index(phase) > 0
            if is_first and self.run.plan.recipe.attention_slots:  # within kernels: not calibrated
                reason += "; the scales of its attention begin at 1, as in a new run"
            self._announce(step, phase.name, self.run.active, reason)
        if step - 1 == self.ended_at and not self._told_the_end:  # a resumed run lost the event
            self._announce(step, CONSERVATIVE, self.run.active, self.reason or "guard.quality")
            self._told_the_end = True
        self.entered = phase.name

    def phase(self, step: int) -> str:
        """The name of the phase of `step`."""
        return CONSERVATIVE if self._has_ended(step) else self._at(step)[0].name

    def evaluation(self, step: int) -> Variant | None:
        """The variant of the validation loss after `step`; None: the one that trains."""
        return None if self._has_ended(step) else self.run.evaluation

    def calibrates(self, step: int) -> bool:
        """Whether `step` is one of the last before training or evaluation in delayed scaling."""
        run, schedule, config = self.run, self.run.schedule, self.run.config
        if run.main.backend.delayed is None or self._has_ended(step):
            return False
        if run.variants[self.variant(step)] is run.main:
            return False
        if run.evaluation is run.main:
            steps_to_evaluation = min(-step % config.eval_every, config.steps - step)
            if steps_to_evaluation < config.calibration_steps:
                return True
        return any(
            run.variants[place] is run.main
            and step < phase.first <= step + config.calibration_steps
            for phase, place in zip(schedule.phases, schedule.variants, strict=True)
        )

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Record the amaxes of the forward and backward passes within, which are not changed, for
        the scales of delayed scaling. All ranks call this."""
        delayed = self.run.main.backend.delayed
        assert delayed is not None
        amaxes: dict[str, Tensor] = {}
        scaler, head, config = self.run.scaler, self.run.model.lm_head, self.run.config
        micro_batches = config.accumulate * self.run.ranks.count
        tokens = config.batch // micro_batches * self.run.context

        def see(path: str, layer: nn.Module, operand: str, x: Tensor) -> None:
            amax = numerics.amax(x)
            if operand == "grad_output" and scaler is not None:  # the loss was scaled
                amax = amax / scaler.now(amax)
            is_plain_head = layer is head and type(layer) is nn.Linear
            if operand == "grad_output" and is_plain_head and x.shape[:-1].numel() < tokens:
                amax = amax / micro_batches  # a chunk of `head_loss`, which lacks this factor
            for slot in delayed.slots_of(path, operand):
                amaxes[slot] = torch.maximum(amaxes.get(slot, amax), amax)

        modules = dict(self.run.model.named_modules())
        named = (layer.name for layer in self.run.main.plan.layers if layer.fp8)
        linears = {name: cast(nn.Linear, modules[name]) for name in named}
        with observing(self.run.model, see, layers=linears):
            yield
        delayed.move(self.run.accelerator.device)
        delayed.calibrate(amaxes)

    def judge(self, step: int, loss: Callable[[Variant], float | None]) -> None:
        """Compare the validation loss with the loss of the same weights in float32. If it is worse
        by more than `guard.quality`, end the phases: after `step` the run trains in float32.
        `loss` returns the validation loss of a variant, None if a stop was requested."""
        run = self.run
        place, limit = run.schedule.reference, run.config.guard.quality
        if self.judged_at == step or place is None or run.variants[place] is run.active:
            return
        if step == run.config.steps:  # nothing follows
            return
        # the reference is only there because the phases ended before
        if not (run.config.guard.enabled and limit):
            return
        reference = run.variants[place]
        val_loss, exact = loss(run.active), loss(reference)
        if val_loss is None or exact is None:
            return
        self.judged_at = step
        if not math.isfinite(exact) or val_loss <= exact * (1 + limit):
            return
        self.ended_at = step
        worse = f"{100 * (val_loss / exact - 1):.2g} %" if math.isfinite(val_loss) else "infinitely"
        reason = (
            f"validation loss {val_loss:.4f} in {run.plan.precision} is {worse} worse than the "
            f"{exact:.4f} of the same weights in fp32, and guard.quality allows {100 * limit:g} %"
        )
        self.reason, self._told_the_end = reason, True
        self._announce(step + 1, CONSERVATIVE, reference, reason)

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as JSON data."""
        return {
            "ended_at": self.ended_at,
            "judged_at": self.judged_at,
            "entered": self.entered,
            "reason": self.reason,
            "places": self.run.schedule.places,
        }

    def rolled_back(self, step: int) -> None:
        """Forget what was decided after `step`, to which the run was rolled back."""
        self.judged_at = min(self.judged_at, step)
        self.entered = self._at(step)[0].name if step else None
        if self.ended_at is not None and self.ended_at > step:
            self.ended_at = self.reason = None

    def _has_ended(self, step: int) -> bool:
        return self.ended_at is not None and step > self.ended_at

    def _at(self, step: int) -> tuple[Phase, int]:
        phase, place = self.run.schedule.at(step)
        if self._has_ended(step):
            assert self.run.schedule.reference is not None
            place = self.run.schedule.reference
        return phase, place

    def _announce(self, step: int, name: str, variant: Variant, reason: str) -> None:
        plan = variant.plan
        row = {"step": step, "event": "phase", "phase": name, "why": reason}
        self.announce(row | {"recipe": plan.recipe.name, "precision": plan.precision})
