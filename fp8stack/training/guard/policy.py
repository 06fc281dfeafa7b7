"""What is done about steps that went wrong: skip, roll back, leave FP8, stop. The ladder, no maths.

A bad step is skipped by the watch, on the device. Here, on the host, each becomes an event, and bad
steps in a row, or many among the last ones, become an incident. Every incident takes the next rung:

1. back to the last good checkpoint; the batches of the bad steps are then left out;
2. the layer in which the trouble shows first runs without FP8 for a while, a few layers at most;
3. the whole model does so for good (fp16: goes on in bf16);
4. the run stops, with a diagnosis.

Weights or moments that are broken themselves go back at once; no precision mends them.

What it decides depends on the steps alone, so a run that is resumed decides the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.backends.observe import fp8_linears
from fp8stack.checkpoint import reader as checkpoints
from fp8stack.checkpoint import writer
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.sharded import local_shard
from fp8stack.errors import NumericFailure, UserError
from fp8stack.optim.chained import plain
from fp8stack.precision import Plan
from fp8stack.training.guard.diagnosis import Diagnosis, diagnose
from fp8stack.training.guard.fp16_fallback import Fp16Fallback
from fp8stack.training.guard.monitor import NOT_FINITE, BadStep, Cause, Findings, Monitor
from fp8stack.training.guard.spikes import LARGEST
from fp8stack.training.run import Run
from fp8stack.training.setup.resume import put_back

Row = dict[str, Any]
Announce = Callable[[Row], None]

MOST_LAYERS = 3
"""Layers that leave FP8 one by one before the whole model does."""
WHOLE = "*"


class Guard:
    """Acts on what the watch saw.

    Args:
        run: it may be put back to an earlier step, and its layers taken out of FP8.
        watch: what judges its steps.
        announce: is called with each event, a row of `metrics.jsonl`.
        settle: is called before checkpoints are read: all that was saved is then on the disk.
    """

    def __init__(
        self, run: Run, watch: Monitor, announce: Announce, settle: Callable[[], None]
    ) -> None:
        self.run = run
        self.config = run.config.guard
        self.watch = watch
        self.announce = announce
        self.left_out: set[int] = set()  # steps whose batches are not trained on
        self.demoted: dict[str, int | None] = {}  # layer: the last step without FP8; None: for good
        self.incidents = 0
        self.last_bad = 0
        self.half = Fp16Fallback(run, announce)
        self.settle = settle
        self.mended_at: int | None = None  # where broken weights went back to last
        self._recent: list[BadStep] = []
        self._tried: list[str] = []

    def look(self, step: int) -> Findings:
        """Announce what happened up to `step` and act on it. If that put the run back, `run.step`
        is not `step` afterwards.

        Raises:
            NumericFailure: nothing is left to be tried.
        """
        seen = self.watch.look()
        for slot in seen.cleared:
            layer, _, operand = slot.rpartition(".")
            why = "its history or scale was broken"
            self._announce(step, "clear_amax", why, layer, operand)
        # Without the guard, all that comes after the first is skipped, whatever it is.
        for bad in seen.bad if self.config.enabled else seen.bad[:1]:
            self._skipped(bad)
        if not self.config.enabled:
            if seen.bad:
                self._stop_unguarded(seen.bad[0])
            return seen
        oldest = step - max(self.watch.reach, seen.streak)
        self._recent = [bad for bad in [*self._recent, *seen.bad] if bad.step > oldest]
        if seen.bad:
            self.last_bad = seen.bad[-1].step
        elif step - self.last_bad > self.config.calm_steps and self.incidents:
            self.incidents, self._tried, self.mended_at = 0, [], None
        if self.half.look(step, seen.overflows):
            self._tried.append("left fp16 for bf16")
        if seen.broken:
            self.weights_failed(step, self._broken())
        elif seen.repeats and self._recent:
            self._incident(step, seen.streak)
        return seen

    def before(self, step: int) -> None:
        """Give layers whose time without FP8 is over back to it."""
        for layer, last in list(self.demoted.items()):
            if last is not None and step > last:
                del self.demoted[layer]
                self._have_in_fp8(layer, True)
                why = f"{self.config.layer_steps} steps are over"
                self._announce(step, "restore", why, layer, None)

    def weights_failed(self, step: int, why: str) -> None:
        """Act on weights that `step` or one before it broke, though it looked good.

        Raises:
            NumericFailure: nothing is left to be tried.
        """
        self.incidents += 1
        self.last_bad = step
        bad = [BadStep(step=step, loss=math.nan, norm=math.nan, causes=Cause.LOSS, said=why)]
        self.watch.forgive()
        self._recent = []
        # Again, if good steps came in between and were saved: else it would go on for ever.
        if not self._roll_back(step, bad, 1, after=self.mended_at):
            self._stop(step, bad, None)
        self.mended_at = self.run.step

    def leave_out(self, step: int) -> None:
        """Announce that the batch of `step` is not trained on."""
        self._announce(step, "skip", "its batch went wrong before the roll-back")

    def plan_now(self) -> Plan:
        """The run's plan, with the layers that are out of FP8 for now."""
        plan = self.run.plan
        if not self.demoted:
            return plan
        layers = [
            replace(layer, fp8=False, precision=plan.compute_dtype, reason=_out(self.demoted[name]))
            if layer.fp8 and (name := layer.name) in self.demoted
            else layer
            for layer in plan.layers
        ]
        return replace(plan, layers=tuple(layers))

    def state(self) -> Row:
        """What a run that goes on needs, as JSON data."""
        return {
            "watch": self.watch.state(),
            "left_out": sorted(self.left_out),
            "demoted": self.demoted,
            "incidents": self.incidents,
            "last_bad": self.last_bad,
            "mended_at": self.mended_at,
            "tried": self._tried,
            "bad": [
                {"step": bad.step, "causes": int(bad.causes), "slot": bad.slot, "said": bad.why}
                for bad in self._recent
            ],
            "left_fp16": self.half.is_left,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave; layers leave FP8 as they had."""
        self.watch.load_state(state["watch"])
        self.left_out = set(state["left_out"])
        self.incidents, self.last_bad = state["incidents"], state["last_bad"]
        self._tried = list(state["tried"])
        self.mended_at = state.get("mended_at")  # older checkpoints have none
        self._recent = [
            BadStep(**(bad | {"causes": Cause(bad["causes"]), "loss": math.nan, "norm": math.nan}))
            for bad in state["bad"]
        ]
        self.demoted = dict(state["demoted"])
        for layer in self.demoted:
            self._have_in_fp8(layer, False)
        if state["left_fp16"]:
            self.half.leave()

    def _skipped(self, bad: BadStep) -> None:
        row = {"step": bad.step, "event": "skip", "why": bad.why}
        finite = {"loss": bad.loss, "grad_norm": bad.norm}
        self.announce(row | {key: _or_none(value) for key, value in finite.items()})

    def _announce(
        self, step: int, event: str, why: str, layer: str | None = None, operand: str | None = None
    ) -> None:
        where = {"layer": layer, "operand": operand}
        details = {key: value for key, value in where.items() if value is not None}
        self.announce({"step": step, "event": event, "why": why} | details)

    def _incident(self, step: int, streak: int) -> None:
        """Take the next rung that there is; `streak` bad steps in a row led to it, if that many."""
        self.incidents += 1
        self.watch.forgive()
        bad, self._recent = self._recent, []
        if streak >= self.config.patience:
            bad = bad[-streak:]
        if self.incidents == 1 and self._roll_back(step, bad, streak):
            return
        culprit = self._find(step, bad)
        if culprit is not None and self._demote_layer(step, culprit):
            return
        if self._demote_model(step, bad):
            return
        self._stop(step, bad, culprit, streak)

    def _roll_back(
        self, step: int, bad: list[BadStep], streak: int, after: int | None = None
    ) -> bool:
        """Put the run back to its newest checkpoint that can be used, if there is one, later than
        `after` if that is given."""
        run = self.run
        self.settle()
        found = None
        # In a row, one can have been saved amid them, at a stop. Else good steps lie in between.
        first_bad = bad[0] if streak >= len(bad) else bad[-1]
        for checkpoint_step in run.ranks.from_main(self._saved_steps):
            if checkpoint_step >= first_bad.step:
                continue
            if after is not None and checkpoint_step <= after:
                break
            found = self._restored(checkpoint_step)
            if found is not None:
                break
        if found is None:
            return False
        run.step = found.step
        run.ranks.wait()  # for those that still read
        if run.ranks.is_main:
            writer.forget_after(run.folder.checkpoints, found.step)
        self.left_out |= {one.step for one in bad}
        why = bad[-1].why
        if len(bad) > 1:
            which = "steps in a row" if streak >= len(bad) else f"of {_span(bad)} steps"
            why = f"{len(bad)} {which} were bad: {why}"
        self._tried.append(f"went back to step {found.step} and left those batches out")
        self.announce({"step": step, "event": "rollback", "why": why, "to_step": found.step})
        return True

    def _saved_steps(self) -> list[int]:
        """Of the checkpoints in the run's folder, the newest first."""
        paths = checkpoints.candidates(self.run.folder.checkpoints)
        return [checkpoints.step_of(path) for path in paths]

    def _restored(self, step: int) -> Checkpoint | None:
        """The checkpoint of `step`, put back on every rank; None if it is of no use on one."""
        run, found = self.run, None
        with suppress(UserError):  # it is damaged, or its weights are not finite, say
            saved = checkpoints.load(checkpoints.path_of(run.folder.checkpoints, step))
            put_back(run, saved)
            found = saved
        return None if run.ranks.any(found is None) else found

    def _find(self, step: int, bad: list[BadStep]) -> Diagnosis | None:
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

    def _demote_layer(self, step: int, culprit: Diagnosis) -> bool:
        """Have one layer run without FP8, if it is in FP8 and not too many had to before."""
        layer = fp8_linears(self.run.model).get(culprit.layer)
        if layer is None or len(self.demoted) >= MOST_LAYERS:
            return False
        steps = self.config.layer_steps
        last = step + steps if steps else None
        self._have_in_fp8(culprit.layer, False)
        self.demoted[culprit.layer] = last
        self._announce_demotion(step, culprit.layer, culprit.operand, str(culprit), last)
        return True

    def _demote_model(self, step: int, bad: list[BadStep]) -> bool:
        """Have the whole model run without FP8, or without fp16; False if there is neither."""
        why = f"steps went wrong in spite of all: {bad[-1].why}"
        layers = fp8_linears(self.run.model)
        if layers:
            for name in layers:
                self._have_in_fp8(name, False)
            self.demoted = dict.fromkeys([*self.demoted, *layers])
            self._announce_demotion(step, WHOLE, None, why, None)
            return True
        return self.half.give_up(step, why)

    def _announce_demotion(
        self, step: int, layer: str, operand: str | None, why: str, last: int | None
    ) -> None:
        precision = self.run.plan.compute_dtype
        what = "the whole model" if layer == WHOLE else layer
        self._tried.append(f"ran {what} in {precision}")
        row = {"step": step, "event": "demote", "why": why, "layer": layer}
        row |= {"operand": operand} if operand is not None else {}
        self.announce(row | {"precision": precision, "until_step": last})

    def _have_in_fp8(self, layer: str, is_so: bool) -> None:
        """Take a layer out of FP8, or back to it, in every variant of the model that has it so."""
        for variant in self.run.variants:
            if variant.plan.is_fp8 and variant.plan.layer(layer).fp8:
                part = variant.model.get_submodule(layer)
                assert isinstance(part, LowPrecisionLinear), layer
                part.in_fp8 = is_so

    def _stop(
        self, step: int, bad: list[BadStep], culprit: Diagnosis | None, streak: int = 1
    ) -> NoReturn:
        """Give up, with a diagnosis in one paragraph.

        Raises:
            NumericFailure: always.
        """
        which = "steps in a row" if streak >= len(bad) else f"of the last {_span(bad)} steps"
        again = f", as in {len(bad)} {which}" if len(bad) > 1 else ""
        parts = [f"Step {bad[-1].step}: {bad[-1].why}{again}."]
        if not any(one.said for one in bad):
            parts.append("Weights are as before.")
        if culprit is not None:
            parts.append(f"It shows first in {culprit}.")
        if self._tried:
            parts.append(f"The guard {', then '.join(self._tried)}; it did not help.")
        self._give_up(step, parts, finite=not any(one.causes & NOT_FINITE for one in bad))

    def _stop_unguarded(self, bad: BadStep) -> NoReturn:
        told = f"Step {bad.step}: {bad.why}. The step was not taken; weights are as before."
        self._give_up(bad.step, [told], False)

    def _give_up(self, step: int, parts: list[str], finite: bool) -> NoReturn:
        run = self.run
        kept = [path.name for path in checkpoints.candidates(run.folder.checkpoints)]
        saved = f"The last checkpoint is {kept[0]}." if kept else "No checkpoint was written yet."
        parts += [saved, self._remedy(finite)]
        diagnosis = " ".join(parts)
        self._announce(step, "stop", diagnosis)
        raise NumericFailure(diagnosis)

    def _remedy(self, finite: bool) -> str:
        config = self.run.config
        if finite:
            return (
                "If the data changed there for good, raise guard.loss_factor or "
                f"guard.deviations; else lower --lr (now {config.lr:g})."
            )
        if self.run.plan.loss_scaling:
            return f"Lower --lr (now {config.lr:g}), or use a recipe with more range: bf16, fp32."
        remedy = (
            f"Lower --lr (now {config.lr:g}), clip harder (clip is {config.clip:g}), or look at "
            "the data of that step"
        )
        if self.run.plan.recipe.name == "fp32":
            return f"{remedy}."
        return f"{remedy}; --recipe fp32 shows whether precision is the cause."


def _out(last: int | None) -> str:
    return "the guard took it out of FP8" + (f" until step {last}" if last is not None else "")


def _span(bad: list[BadStep]) -> int:
    """From the first of some steps to the last of them, how many there are."""
    return bad[-1].step - bad[0].step + 1


def _or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
