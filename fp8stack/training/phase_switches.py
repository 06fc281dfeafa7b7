"""The phases of a run during training: which plan trains each step.

Phases depend on the step alone, unless the quality guard ended them, which the run's state records.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8stack.planning.phases import Phase
from fp8stack.training.guard.diagnosis import repeat_step
from fp8stack.training.run import Run

CONSERVATIVE = "conservative"


def switch(run: Run, index: int, step: int) -> None:
    """Train with the plan at `index` from now on. Delayed scaling that begins takes its first
    scales from the operands of `step`, the next one, in the recipe before."""
    scale = 1.0 if run.scaler is None else run.scaler.get_scale()
    begins = run.plans[index].delayed and run.delayed is not None and run.delayed.history.is_new
    trace = repeat_step(run, step) if begins else []
    run.use(index)
    if run.delayed is None or not trace:
        return
    run.delayed.move(run.accelerator.device)
    amaxes: dict[str, Tensor] = {}
    for layer, operand, amax, group in trace:
        path = layer if group is None else f"{layer}.{group}"
        amax = amax / scale if operand == "grad_output" else amax
        amax = amax.where(amax.isfinite(), 0.0)  # as if there was none
        for slot in run.delayed.slots_of(path, operand):
            amaxes[slot] = torch.maximum(amaxes.get(slot, amax), amax)
    run.delayed.calibrate(amaxes)


class Phases:
    """Selects the plan of each step, and ends the phases early if a recipe harms the loss;
    `announce` is called with each event, a row of `metrics.jsonl`."""

    def __init__(self, run: Run, announce: Callable[[dict[str, Any]], None]) -> None:
        self.run, self.announce = run, announce
        state = (run.resumed or {}).get("phases") or {}
        self.ended_at: int | None = state.get("ended_at")  # after this step the reference trains
        self.judged_at: int = state.get("judged_at", 0)  # the last step that was compared
        self.entered: str | None = state.get("entered")  # the last phase that was announced
        self.reason: str | None = state.get("reason")  # why the phases ended

    def plan(self, step: int) -> int:
        """The index of the plan that trains `step`."""
        return self._at(step)[1]

    def enter(self, step: int) -> None:
        """Announce the phase that begins with `step`, if one does; its plan is already in use."""
        phase, index = self._at(step)
        plan, name, reason = self.run.plans[index], self.phase(step), self.reason
        if self._has_ended(step):
            begins = step - 1 == self.ended_at
        else:
            begins = name != self.entered and len(self.run.schedule.phases) > 1
            recipe = phase.asked.replace(phase.recipe, plan.asked, 1)  # not a whole path
            reason = f"{recipe} was asked for from this step on"
        if begins:
            row = {"step": step, "event": "phase", "phase": name, "why": reason or "guard.quality"}
            self.announce(row | {"recipe": plan.recipe.name, "precision": plan.precision})
        self.entered = phase.name

    def phase(self, step: int) -> str:
        """The name of the phase of `step`."""
        return CONSERVATIVE if self._has_ended(step) else self._at(step)[0].name

    def evaluation(self, step: int) -> int:
        """The index of the plan of the validation loss after `step`."""
        evaluation = None if self._has_ended(step) else self.run.schedule.evaluation
        return self.run.state.active if evaluation is None else evaluation

    def judge(self, step: int, loss: Callable[[int], float | None]) -> None:
        """Compare the validation loss with the loss of the same weights in float32. If it is worse
        by more than `guard.quality`, end the phases: after `step` the run trains in float32.
        `loss` returns the validation loss by a plan's index, None if a stop was requested."""
        run, active = self.run, self.run.state.active
        reference, limit = run.schedule.reference, run.config.guard.quality
        if self.judged_at == step or reference in (None, active):
            return
        if step == run.config.steps:  # nothing follows
            return
        # the reference is only there because the phases ended before
        if not (run.config.guard.enabled and limit):
            return
        val_loss, exact = loss(active), loss(reference)
        if val_loss is None or exact is None:
            return
        self.judged_at = step
        if not math.isfinite(exact) or val_loss <= exact * (1 + limit):
            return
        self.ended_at = step
        worse = f"{100 * (val_loss / exact - 1):.2g} %" if math.isfinite(val_loss) else "infinitely"
        self.reason = (
            f"validation loss {val_loss:.4f} in {run.plan.precision} is {worse} worse than the "
            f"{exact:.4f} of the same weights in fp32, and guard.quality allows {100 * limit:g} %"
        )

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
        phase, index = self.run.schedule.at(step)
        if self._has_ended(step):
            assert self.run.schedule.reference is not None
            index = self.run.schedule.reference
        return phase, index
