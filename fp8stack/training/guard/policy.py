"""What is to be done about steps that went wrong: skip, roll back, leave FP8, stop. The ladder.

The monitor has the optimizer skip a bad step, on the device. Here, on the host, each becomes an
event, and bad steps in a row, or many among the last ones, an incident. Every incident takes the
next rung:

1. back to the last good checkpoint; the batches of the bad steps are then left out;
2. the layer in which the trouble shows first runs without FP8 for a while, a few layers at most;
3. the whole model does so for good (fp16: goes on in bf16);
4. the run stops, with a diagnosis.

Weights or moments that are broken themselves go back at once; no precision mends them.

What is decided depends on the steps alone, so a run that is resumed decides the same again. The
training loop does it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fp8stack.backends.observe import fp8_linears
from fp8stack.checkpoint import reader as checkpoints
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.sharded import local_shard
from fp8stack.checkpoint.validation import can_go_on, load_sound
from fp8stack.errors import NoUsableCheckpoint
from fp8stack.optim.chained import plain
from fp8stack.precision import Plan, resolve
from fp8stack.training.guard.diagnosis import Diagnosis, diagnose
from fp8stack.training.guard.monitor import NOT_FINITE, BadStep, Cause, Monitor
from fp8stack.training.guard.spikes import LARGEST
from fp8stack.training.run import Run

Row = dict[str, Any]

LOOK_EVERY = 100  # steps
MOST_LAYERS = 3  # layers that leave FP8 one by one before the whole model does
WHOLE = "*"
ALARM = 4  # so many overflows of fp16 in a row are told, and
LOW_SCALE = 256.0  # so small a loss scale
_FP16_REMEDY = "Lower --lr, clip harder (--set clip=0.5), or use bf16; a larger scale is no help."


@dataclass(kw_only=True)
class Outcome:
    """What is to be done about the steps up to one that was checked; by default the run goes on."""

    # What is to be told of them, rows of `metrics.jsonl`.
    events: list[Row] = field(default_factory=list)
    # How many steps in a row were bad up to now: no checkpoint is written amid them.
    streak: int = 0
    # Whether the last step was not taken: random numbers that it drew are given back.
    skipped: bool = False
    leave_out: bool = False  # whether the step that begins is not trained on its batch
    back_to: Checkpoint | None = None  # the checkpoint that the run goes back to
    leave_fp8: tuple[str, ...] = ()  # layers that go on without FP8
    enter_fp8: tuple[str, ...] = ()  # layers that go on in FP8 again
    to_bf16: bool = False  # whether a run in fp16 goes on in bf16
    failure: str = ""  # why the run has to stop, with a diagnosis: exit code 5


class Guard:
    """Decides what is to be done about what `monitor` saw of `run`; if that was resumed, goes on
    where it was. `settle` is called before checkpoints are read: all that was saved is then on the
    disk.

    Attributes:
        left_out: steps whose batches are not trained on.
        demoted: the layers that are out of FP8, with the last such step; None: for good.
    """

    def __init__(self, run: Run, monitor: Monitor, settle: Callable[[], None]) -> None:
        self.run, self.config = run, run.config.guard
        self.monitor, self.settle = monitor, settle
        state: Row = (run.resumed or {}).get("guard") or {}
        self.left_out: set[int] = set(state.get("left_out", ()))
        self.demoted: dict[str, int | None] = dict(state.get("demoted", {}))
        self._incidents: int = state.get("incidents", 0)
        self._last_bad: int = state.get("last_bad", 0)
        self._mended_at: int | None = state.get("mended_at")  # where broken weights went back to
        self._tried: list[str] = list(state.get("tried", ()))
        self._left_fp16: bool = state.get("left_fp16", False)
        self._recent = [
            BadStep(**(bad | {"causes": Cause(bad["causes"]), "loss": math.nan, "norm": math.nan}))
            for bad in state.get("bad", ())
        ]
        self._alarmed, self._found = set[str](), Outcome()
        self._looked = run.step // LOOK_EVERY
        if state:
            monitor.load_state(state["watch"])

    def state(self) -> Row:
        """What a run that goes on needs, as JSON data."""
        return {
            "watch": self.monitor.state(),
            "left_out": sorted(self.left_out),
            "demoted": dict(self.demoted),
            "incidents": self._incidents,
            "last_bad": self._last_bad,
            "mended_at": self._mended_at,
            "tried": self._tried,
            "bad": [
                {"step": bad.step, "causes": int(bad.causes), "slot": bad.slot, "said": bad.why}
                for bad in self._recent
            ],
            "left_fp16": self._left_fp16,
        }

    def begin(self, step: int) -> Outcome:
        """What to do before `step`: leave out its batch, or put layers back to FP8."""
        found = self._found = Outcome(leave_out=step in self.left_out)
        if found.leave_out:
            self._tell(step, "skip", "its batch went wrong before the roll-back")
            return found
        over = [name for name, last in self.demoted.items() if last is not None and step > last]
        for layer in over:
            del self.demoted[layer]
            self._tell(step, "restore", f"{self.config.layer_steps} steps are over", layer=layer)
        found.enter_fp8 = tuple(over)
        return found

    def check(self, step: int) -> Outcome:
        """What to do about the steps since the last check, up to `step`. This waits for the
        device."""
        # On a GPU rarely: a pass over weights and moments takes a third of the optimizer's time.
        # What is broken shows in the steps that follow, and is looked for before it is saved.
        looks = self.monitor.device.type == "cpu" or step // LOOK_EVERY > self._looked
        self._looked = step // LOOK_EVERY
        seen = self.monitor.poll(looks)
        found = self._found = Outcome(streak=seen.streak, skipped=seen.skipped)
        for slot in seen.cleared:
            layer, _, operand = slot.rpartition(".")
            why = "its history or scale was broken"
            self._tell(step, "clear_amax", why, layer=layer, operand=operand)
        # Without the guard, all that comes after the first is skipped, whatever it is.
        for bad in seen.bad if self.config.enabled else seen.bad[:1]:
            finite = {"loss": bad.loss, "grad_norm": bad.norm}
            told = {key: value if abs(value) < math.inf else None for key, value in finite.items()}
            self._tell(bad.step, "skip", bad.why, **told)
        if not self.config.enabled:
            for bad in seen.bad[:1]:
                kept = "The step was not taken; weights are as before."
                parts = [f"Step {bad.step}: {bad.why}.", kept]
                self._give_up(bad.step, parts, finite=False)
            return found
        oldest = step - max(self.monitor.reach, seen.streak)
        self._recent = [bad for bad in [*self._recent, *seen.bad] if bad.step > oldest]
        if seen.bad:
            self._last_bad = seen.bad[-1].step
        elif step - self._last_bad > self.config.calm_steps and self._incidents:
            self._incidents, self._tried, self._mended_at = 0, [], None
        self._check_scale(step, seen.overflows)
        if seen.broken:
            self._mend(step, self._broken())
        elif seen.repeats and self._recent:
            self._next_rung(step)
        return found

    def weights_failed(self, step: int, why: str) -> Outcome:
        """What to do about weights that a step broke, though it looked good."""
        self._found = Outcome()
        self._mend(step, why)
        return self._found

    def plan_now(self) -> Plan:
        """The run's plan, with the layers that are out of FP8 for now."""
        plan = self.run.plan
        if not self.demoted:
            return plan
        layers = []
        for layer in plan.layers:
            if layer.fp8 and layer.name in self.demoted:
                last = self.demoted[layer.name]
                until = "" if last is None else f" until step {last}"
                why = f"the guard took it out of FP8{until}"
                layer = replace(layer, fp8=False, precision=plan.compute_dtype, reason=why)
            layers.append(layer)
        return replace(plan, layers=tuple(layers))

    def _tell(self, step: int, event: str, why: str, **details: Any) -> None:
        self._found.events.append({"step": step, "event": event, "why": why} | details)

    def _check_scale(self, step: int, overflows: int) -> None:
        """In fp16, tell of a loss scale that falls and falls, or leave fp16 for bf16."""
        scaler = self.run.scaler
        if scaler is None:
            return
        if overflows >= self.config.overflows and self._can_leave_fp16():
            self._tried.append("left fp16 for bf16")
            self._to_bf16(step, f"{overflows} steps in a row overflowed in fp16")
            return
        scale = float(scaler.get_scale())
        low = scaler.is_dynamic and scale < LOW_SCALE
        for kind, is_so, why in (
            ("overflows", overflows >= ALARM, f"{overflows} overflows in a row."),
            ("scale", low, f"the loss scale is down to {scale:g}."),
        ):
            if is_so and kind not in self._alarmed:
                self._tell(step, "loss_scale", f"{why} {_FP16_REMEDY}")
            # Until it is over, it is told once.
            self._alarmed = self._alarmed | {kind} if is_so else self._alarmed - {kind}

    def _can_leave_fp16(self) -> bool:
        run = self.run
        in_fp16 = run.plan.loss_scaling and not self._left_fp16
        return in_fp16 and resolve("bf16", run.hardware).compute_dtype == "bf16"

    def _to_bf16(self, step: int, why: str) -> None:
        self._left_fp16 = True
        self._tell(step, "precision", why, precision="bf16")
        self._found.to_bf16 = True

    def _mend(self, step: int, why: str) -> None:
        """Broken weights come back from a checkpoint, or the run stops."""
        self._incidents += 1
        self._last_bad = step
        bad = [BadStep(step=step, loss=math.nan, norm=math.nan, causes=Cause.LOSS, said=why)]
        self.monitor.forgive()
        self._recent = []
        # Again, if good steps came in between and were saved: else it would go on for ever.
        saved = self._checkpoint_before(step, after=self._mended_at)
        if saved is None:
            self._stop(step, bad, None, in_row=True)
        else:
            self._mended_at = saved.step
            self._roll_back(step, saved, bad, why)

    def _next_rung(self, step: int) -> None:
        self._incidents += 1
        self.monitor.forgive()
        bad, self._recent = self._recent, []
        streak = self._found.streak
        if streak >= self.config.patience:
            bad = bad[-streak:]
        # In a row, a checkpoint can have been saved amid them, at a stop. Else good steps lie in
        # between.
        in_row = streak >= len(bad)
        if self._incidents == 1:
            saved = self._checkpoint_before((bad[0] if in_row else bad[-1]).step)
            if saved is not None:
                which = "steps in a row" if in_row else f"of {_span(bad)} steps"
                several = f"{len(bad)} {which} were bad: " if len(bad) > 1 else ""
                return self._roll_back(step, saved, bad, several + bad[-1].why)
        culprit, in_fp8 = self._find(bad), fp8_linears(self.run.model)
        if culprit is not None and culprit.layer in in_fp8 and len(self.demoted) < MOST_LAYERS:
            last = step + self.config.layer_steps if self.config.layer_steps else None
            self.demoted[culprit.layer] = last
            where = {"layer": culprit.layer, "operand": culprit.operand}
            return self._leave_fp8(step, where, str(culprit), last)
        why = f"steps went wrong in spite of all: {bad[-1].why}"
        if in_fp8:
            self.demoted = dict.fromkeys([*self.demoted, *in_fp8])
            return self._leave_fp8(step, {"layer": WHOLE}, why, None)
        if self._can_leave_fp16():
            return self._to_bf16(step, why)
        return self._stop(step, bad, culprit, in_row)

    def _checkpoint_before(self, step: int, after: int | None = None) -> Checkpoint | None:
        """The newest checkpoint of the run's folder that is of a step before `step`, later than
        `after` if that is given, and can be used on every rank; None if there is none."""
        ranks, folder = self.run.ranks, self.run.folder.checkpoints
        self.settle()
        saved = ranks.from_main(lambda: [*map(checkpoints.step_of, checkpoints.candidates(folder))])
        for number in saved:  # the newest first
            if (after or -1) < number < step:
                found = None
                with suppress(NoUsableCheckpoint):  # damaged, or its weights are not finite, say
                    found = load_sound(checkpoints.path_of(folder, number), can_go_on)
                if not ranks.any(found is None):
                    return found
        return None

    def _roll_back(self, step: int, saved: Checkpoint, bad: Sequence[BadStep], why: str) -> None:
        self.left_out |= {one.step for one in bad}
        self._tried.append(f"went back to step {saved.step} and left those batches out")
        self._tell(step, "rollback", why, to_step=saved.step)
        self._found.back_to = saved

    def _leave_fp8(self, step: int, where: Row, why: str, last: int | None) -> None:
        precision, what, layers = self.run.plan.compute_dtype, where["layer"], [where["layer"]]
        if what == WHOLE:
            what, layers = "the whole model", list(fp8_linears(self.run.model))
        self._tried.append(f"ran {what} in {precision}")
        self._tell(step, "demote", why, **where, precision=precision, until_step=last)
        self._found.leave_fp8 = tuple(layers)

    def _find(self, bad: Sequence[BadStep]) -> Diagnosis | None:
        """The operand that is to blame, from the verdict or by trying the step again."""
        slot = bad[-1].slot
        if slot is not None:
            layer, _, operand = slot.rpartition(".")
            return Diagnosis(layer=layer, operand=operand, what="has an amax out of all proportion")
        before = range(bad[0].step - 1, 0, -1)
        good = next((number for number in before if number not in self.left_out), 1)
        return diagnose(self.run, bad[-1].step, good)

    def _broken(self) -> str:
        """Which weight or moment is not finite or as good as infinite, in a sentence."""
        for name, parameter in self.run.model.named_parameters():
            state = plain(self.run.optimizer.state.get(parameter, {}))
            for key, tensor in {"": parameter.detach(), **state}.items():
                if tensor.dtype.itemsize == 1:  # codes; what they are of, their scales tell
                    continue
                part = local_shard(tensor)
                largest = float(part.abs().max()) if part.numel() else 0.0
                if not largest < LARGEST:
                    what = f"the moment {key} of {name}" if key else name
                    return f"{what} contains {largest:.4g}"
        return "a weight or a moment is not finite"

    def _stop(
        self, step: int, bad: Sequence[BadStep], culprit: Diagnosis | None, in_row: bool
    ) -> None:
        which = "steps in a row" if in_row else f"of the last {_span(bad)} steps"
        again = f", as in {len(bad)} {which}" if len(bad) > 1 else ""
        parts = [f"Step {bad[-1].step}: {bad[-1].why}{again}."]
        if not any(one.said for one in bad):
            parts.append("Weights are as before.")
        if culprit is not None:
            parts.append(f"It shows first in {culprit}.")
        if self._tried:
            parts.append(f"The guard {', then '.join(self._tried)}; it did not help.")
        self._give_up(step, parts, not any(one.causes & NOT_FINITE for one in bad))

    def _give_up(self, step: int, parts: list[str], finite: bool) -> None:
        kept = [path.name for path in checkpoints.candidates(self.run.folder.checkpoints)]
        saved = f"The last checkpoint is {kept[0]}." if kept else "No checkpoint was written yet."
        failure = " ".join([*parts, saved, self._remedy(finite)])
        self._tell(step, "stop", failure)
        self._found.failure = failure

    def _remedy(self, finite: bool) -> str:
        config = self.run.config
        if finite:
            return (
                "If the data changed there for good, raise guard.loss_factor or "
                f"guard.deviations; else lower --lr (now {config.lr:g})."
            )
        if self.run.plan.loss_scaling and not self._left_fp16:
            return f"Lower --lr (now {config.lr:g}), or use a recipe with more range: bf16, fp32."
        in_fp32 = self.run.plan.recipe.name == "fp32"
        cause = "" if in_fp32 else "; --recipe fp32 shows whether precision is the cause"
        return (
            f"Lower --lr (now {config.lr:g}), clip harder (clip is {config.clip:g}), or look at "
            f"the data of that step{cause}."
        )


def _span(bad: Sequence[BadStep]) -> int:
    """From the first of some steps to the last of them, how many there are."""
    return bad[-1].step - bad[0].step + 1
