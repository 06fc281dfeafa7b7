"""The guard's policy: what to do about bad steps.

The monitor makes the optimizer skip a bad step, on the device. Here, on the host, every bad step
becomes an event, and too many bad steps, in a row or among the last steps, become an incident. An
incident takes the next rung of a ladder:

1. roll back to the last good checkpoint, and leave out the batches of the bad steps;
2. run the layer that first goes wrong without FP8 for a while, for a few layers at most;
3. run the whole model without FP8 from then on (fp16: go on in bf16);
4. stop, with a diagnosis.

If weights or moments are not finite, the run rolls back at once.

Decisions depend on the steps alone, so a resumed run decides the same. The training loop carries
them out.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fp8stack.common.errors import UserError
from fp8stack.common.tables import counted
from fp8stack.layers.observe import fp8_parts
from fp8stack.precision import Plan, resolve
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.validation import can_go_on, load_sound
from fp8stack.training.guard.diagnosis import (
    Diagnosis,
    broken_tensor,
    find_culprit,
    place_of,
)
from fp8stack.training.guard.monitor import NOT_FINITE, BadStep, Cause, Monitor
from fp8stack.training.run import Run

Row = dict[str, Any]

CHECK_WEIGHTS_EVERY = 100  # steps, on a GPU
MOST_LAYERS = 3  # layers that leave FP8 one by one before the whole model does
WHOLE = "*"
ALARM = 4  # fp16 overflows in a row that cause a warning
LOW_SCALE = 256.0  # a loss scale below this causes a warning
_FP16_REMEDY = "Lower --lr, clip harder (--set clip=0.5), or use bf16; a larger scale is no help."


@dataclass(kw_only=True)
class Outcome:
    """Actions to take after the steps up to the checked step; none by default."""

    events: list[Row] = field(default_factory=list)  # to log, as rows of `metrics.jsonl`
    streak: int = 0  # the number of bad steps in a row: no checkpoint is written amid them
    skipped: bool = False  # whether the last step was skipped: the RNG state is restored
    leave_out: bool = False  # whether to skip training on the next step's batch
    back_to: Checkpoint | None = None  # the checkpoint to roll back to
    to_bf16: bool = False  # whether to change from fp16 to bf16
    failure: str = ""  # why the run has to stop, with a diagnosis: exit code 5


class Guard:
    """Decides how to act on the verdicts of `monitor`. `wait_for_saves` waits until all checkpoints
    are on disk; it is called before checkpoints are read.

    Attributes:
        left_out: steps whose batches are left out.
        demoted: the layers taken out of FP8, with the last step without FP8; None: permanently.
    """

    def __init__(self, run: Run, monitor: Monitor, wait_for_saves: Callable[[], None]) -> None:
        self.run, self.config = run, run.config.guard
        self.monitor, self.wait_for_saves = monitor, wait_for_saves
        state: Row = (run.resumed or {}).get("guard") or {}
        self.left_out: set[int] = set(state.get("left_out", ()))
        self.demoted: dict[str, int | None] = dict(state.get("demoted", {}))
        self._incidents: int = state.get("incidents", 0)
        self._last_bad: int = state.get("last_bad", 0)
        # The step that the last roll-back for broken weights went to.
        self._mended_at: int | None = state.get("mended_at")
        self._tried: list[str] = list(state.get("tried", ()))
        self._recent = [BadStep.from_json(bad) for bad in state.get("bad", ())]
        self._alarmed, self._outcome = set[str](), Outcome()
        self._weights_checked = run.step // CHECK_WEIGHTS_EVERY
        if state:
            monitor.load_state(state["watch"])

    def state(self) -> Row:
        """The state to save in a checkpoint, as JSON data."""
        return {
            "watch": self.monitor.state(),
            "left_out": sorted(self.left_out),
            "demoted": dict(self.demoted),
            "incidents": self._incidents,
            "last_bad": self._last_bad,
            "mended_at": self._mended_at,
            "tried": self._tried,
            "bad": [bad.to_json() for bad in self._recent],
            "left_fp16": _left_fp16(self.run),
        }

    def begin(self, step: int) -> Outcome:
        """The outcome before `step`: leave out its batch, or put layers back into FP8."""
        outcome = self._outcome = Outcome(leave_out=step in self.left_out)
        if outcome.leave_out:
            self._add_event(step, "skip", "its batch went wrong before the roll-back")
            return outcome
        over = [name for name, last in self.demoted.items() if last is not None and step > last]
        for layer in over:
            del self.demoted[layer]
            steps = counted(self.config.layer_steps, "step is", "steps are")
            self._add_event(step, "restore", f"{steps} over", layer=layer)
        return outcome

    def check(self, step: int, *, acts: bool = True) -> Outcome:
        """The outcome of the steps since the last check, up to `step`. This waits for the device.
        If it does not act, the next check decides on these steps, except for broken weights."""
        # Weights are checked rarely on a GPU: reading all weights and moments takes a third of the
        # optimizer's time. Broken weights show in the next steps, and every save checks them.
        number = step // CHECK_WEIGHTS_EVERY
        due = self.monitor.device.type == "cpu" or number > self._weights_checked
        self._weights_checked = number
        findings = self.monitor.poll(check_weights=due)
        outcome = self._outcome = Outcome(streak=findings.streak, skipped=findings.skipped)
        for slot in findings.cleared:
            layer, operand, group = place_of(slot)
            layer += "" if group is None else f".{group}"
            reason = "its history or scale was broken"
            self._add_event(step, "clear_amax", reason, layer=layer, operand=operand)
        # If the guard is not enabled, all steps after the first bad step are skipped.
        for bad in findings.bad if self.config.enabled else findings.bad[:1]:
            values = {"loss": _finite(bad.loss), "grad_norm": _finite(bad.norm)}
            self._add_event(bad.step, "skip", bad.reason, **values)
        if not self.config.enabled:
            for bad in findings.bad[:1]:
                not_taken = "The step was not taken; weights are as before."
                sentences = [f"Step {bad.step}: {bad.reason}.", not_taken]
                self._give_up(bad.step, sentences, finite=False)
            return outcome
        oldest = step - max(self.monitor.reach, findings.streak)
        self._recent = [bad for bad in [*self._recent, *findings.bad] if bad.step > oldest]
        for bad in findings.bad:
            self._forget_if_calm(bad.step)
            self._last_bad = bad.step
        if acts:
            self._forget_if_calm(step)
            self._check_scale(step, findings.overflows)
        if findings.broken:
            self._mend(step, broken_tensor(self.run))
        elif acts and findings.repeats and self._recent:
            self._next_rung(step)
        return outcome

    def _forget_if_calm(self, step: int) -> None:
        """Reset the ladder if more than `calm_steps` steps since the last bad one are good."""
        if step - self._last_bad > self.config.calm_steps and self._incidents:
            self._incidents, self._tried, self._mended_at = 0, [], None

    def weights_failed(self, step: int, reason: str) -> Outcome:
        """The outcome of weights that are not finite although no step was bad."""
        self._outcome = Outcome()
        self._mend(step, reason)
        return self._outcome

    def _add_event(self, step: int, event: str, reason: str, **details: Any) -> None:
        self._outcome.events.append({"step": step, "event": event, "why": reason} | details)

    def _check_scale(self, step: int, overflows: int) -> None:
        """Warn of fp16 overflows and a low loss scale, or leave fp16 for bf16."""
        scaler = self.run.scaler
        if scaler is None:
            return
        if overflows >= self.config.overflows and _can_leave_fp16(self.run):
            self._to_bf16(step, f"{overflows} steps in a row overflowed in fp16")
            return
        scale = float(scaler.get_scale())
        low = scaler.is_dynamic and scale < LOW_SCALE
        for kind, is_so, warning in (
            ("overflows", overflows >= ALARM, f"{overflows} overflows in a row."),
            ("scale", low, f"the loss scale is down to {scale:g}."),
        ):
            if is_so and kind not in self._alarmed:
                self._add_event(step, "loss_scale", f"{warning} {_FP16_REMEDY}")
            # Warn again only after the condition has passed.
            self._alarmed = self._alarmed | {kind} if is_so else self._alarmed - {kind}

    def _to_bf16(self, step: int, reason: str) -> None:
        self._tried.append("left fp16 for bf16")
        self._add_event(step, "precision", reason, precision="bf16")
        self._outcome.to_bf16 = True

    def _mend(self, step: int, reason: str) -> None:
        """Roll back to a checkpoint because of broken weights; without one, stop."""
        self._incidents += 1
        self._last_bad = step
        bad = [BadStep(step=step, loss=math.nan, norm=math.nan, causes=Cause.LOSS, said=reason)]
        self.monitor.forgive()
        self._recent = []
        # A second roll-back needs a newer checkpoint, or the run would repeat itself forever.
        self.wait_for_saves()
        saved = _checkpoint_before(self.run, step, after=self._mended_at or -1)
        if saved is None:
            self._give_up(step, [f"Step {step}: {reason}."], finite=False)
        else:
            self._mended_at = saved.step
            self._roll_back(step, saved, bad, reason)

    def _next_rung(self, step: int) -> None:
        self._incidents += 1
        self.monitor.forgive()
        bad, self._recent = self._recent, []
        streak = self._outcome.streak
        if streak >= self.config.patience:
            bad = bad[-streak:]
        # Amid bad steps in a row, a stop may have saved a checkpoint: go back before the first.
        in_row = streak >= len(bad)
        if self._incidents == 1:
            self.wait_for_saves()
            saved = _checkpoint_before(self.run, (bad[0] if in_row else bad[-1]).step)
            if saved is not None:
                which_steps = "steps in a row" if in_row else f"of {_span(bad)} steps"
                several = f"{len(bad)} {which_steps} were bad: " if len(bad) > 1 else ""
                return self._roll_back(step, saved, bad, several + bad[-1].reason)
        culprit, in_fp8 = find_culprit(self.run, bad, self.left_out), fp8_parts(self.run.model)
        if culprit is not None and culprit.layer in in_fp8 and len(self.demoted) < MOST_LAYERS:
            last = step + self.config.layer_steps if self.config.layer_steps else None
            self.demoted[culprit.layer] = last
            where = {"layer": culprit.layer, "operand": culprit.operand}
            return self._leave_fp8(step, where, str(culprit), last)
        reason = f"steps went wrong in spite of all: {bad[-1].reason}"
        if in_fp8:
            self.demoted = dict.fromkeys([*self.demoted, *_all_in_fp8(self.run.plans)])
            return self._leave_fp8(step, {"layer": WHOLE}, reason, None)
        if _can_leave_fp16(self.run):
            return self._to_bf16(step, reason)
        is_finite = not any(bad_step.causes & NOT_FINITE for bad_step in bad)
        return self._give_up(step, _sentences(bad, culprit, in_row), is_finite)

    def _roll_back(self, step: int, saved: Checkpoint, bad: Sequence[BadStep], reason: str) -> None:
        self.left_out |= {bad_step.step for bad_step in bad}
        self._tried.append(f"went back to step {saved.step} and left those batches out")
        self._add_event(step, "rollback", reason, to_step=saved.step)
        self._outcome.back_to = saved

    def _leave_fp8(self, step: int, where: Row, reason: str, last: int | None) -> None:
        precision = self.run.plan.compute_dtype
        scope = "the whole model" if where["layer"] == WHOLE else where["layer"]
        self._tried.append(f"ran {scope} in {precision}")
        self._add_event(step, "demote", reason, **where, precision=precision, until_step=last)

    def _give_up(self, step: int, sentences: list[str], finite: bool) -> None:
        if self._tried:
            sentences.append(f"The guard {', then '.join(self._tried)}; it did not help.")
        self.wait_for_saves()
        names = [path.name for path in checkpoints.candidates(self.run.folder.checkpoints)]
        saved = f"The last checkpoint is {names[0]}." if names else "No checkpoint was written yet."
        failure = " ".join([*sentences, saved, _remedy(self.run, finite)])
        self._add_event(step, "stop", failure)
        self._outcome.failure = failure


def _left_fp16(run: Run) -> bool:
    return run.loss_scaler is not None and not any(plan.loss_scaling for plan in run.plans)


def _can_leave_fp16(run: Run) -> bool:
    return run.plan.loss_scaling and resolve("bf16", run.hardware).compute_dtype == "bf16"


def _sentences(bad: Sequence[BadStep], culprit: Diagnosis | None, in_row: bool) -> list[str]:
    """Sentences on the last bad step, how many there were, and where they began."""
    which_steps = "steps in a row" if in_row else f"of the last {_span(bad)} steps"
    again = f", as in {len(bad)} {which_steps}" if len(bad) > 1 else ""
    sentences = [f"Step {bad[-1].step}: {bad[-1].reason}{again}.", "Weights are as before."]
    return sentences if culprit is None else [*sentences, f"It shows first in {culprit}."]


def _finite(value: float) -> float | None:
    """A value as it is logged; None if it is not finite."""
    return value if abs(value) < math.inf else None


def _span(bad: Sequence[BadStep]) -> int:
    """The number of steps from the first to the last of `bad`."""
    return bad[-1].step - bad[0].step + 1


def _all_in_fp8(plans: Sequence[Plan]) -> list[str]:
    """The layers and attention that are in FP8 in any recipe of a run."""
    linears = [layer.name for plan in plans for layer in plan.layers if layer.fp8]
    if not any(plan.recipe.fp8_attention for plan in plans):
        return linears
    names = (layer.name for layer in plans[0].layers)
    return linears + [name.removesuffix(".qkv") for name in names if name.endswith(".qkv")]


def _checkpoint_before(run: Run, step: int, after: int = -1) -> Checkpoint | None:
    """The newest checkpoint before `step` and after `after` that every rank can use."""
    ranks, folder = run.ranks, run.folder.checkpoints
    saved = ranks.from_main(lambda: [*map(checkpoints.step_of, checkpoints.candidates(folder))])
    for number in saved:  # the newest first
        if after < number < step:
            checkpoint = None
            with suppress(UserError):  # damaged, its weights are not finite, or no memory
                checkpoint = load_sound(checkpoints.path_of(folder, number), can_go_on)
            if not ranks.any(checkpoint is None):
                return checkpoint
    return None


def _remedy(run: Run, finite: bool) -> str:
    """A sentence on what to change. `finite`: the bad steps were spikes."""
    config = run.config
    if finite:
        return (
            "If the data changed there for good, raise guard.loss_factor or "
            f"guard.deviations; else lower --lr (now {config.lr:g})."
        )
    if run.plan.loss_scaling:
        return f"Lower --lr (now {config.lr:g}), or use a recipe with more range: bf16, fp32."
    in_fp32 = run.plan.recipe.name == "fp32"
    cause = "" if in_fp32 else "; --recipe fp32 shows whether precision is the cause"
    return (
        f"Lower --lr (now {config.lr:g}), clip harder (clip is {config.clip:g}), or look at "
        f"the data of that step{cause}."
    )
