"""The training loop: steps, logging, evaluation, checkpoints, and the guard's decisions."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8stack import data
from fp8stack.common.errors import DataWorkerLost, NumericFailure, UserError
from fp8stack.common.terminal import say
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint import writer
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.saver import Saver
from fp8stack.training.checkpoint.state import capture, first_rows, largest_of_state, random_states
from fp8stack.training.dataloader import batches
from fp8stack.training.distributed.process_group import losing_ranks
from fp8stack.training.evaluate import validation_loss
from fp8stack.training.finalize import finish
from fp8stack.training.guard.monitor import LOG_ROWS, Monitor
from fp8stack.training.guard.policy import Guard, Outcome
from fp8stack.training.metrics.console import Display, RichDisplay, describe_run, open_display
from fp8stack.training.metrics.log import MetricsLog
from fp8stack.training.metrics.profiler import StepProfiler
from fp8stack.training.metrics.read import Metrics, read_metrics
from fp8stack.training.metrics.throughput import Peak, peak_rate, restart_peak_memory
from fp8stack.training.phase_switches import Phases, switch
from fp8stack.training.run import Run, versions
from fp8stack.training.signals import STOPPED, StopRequests, stop_requests
from fp8stack.training.step import Step

DONE, PREEMPTED = 0, 75


def train(run: Run, requested: StopRequests | None = None) -> int:
    """Train `run` from its last step to its end. Returns the exit code, `DONE` or `PREEMPTED`.

    Args:
        requested: returns whether a signal requested a stop; if None, `train` installs the signal
            handlers itself.

    Raises:
        NumericFailure: steps went wrong and the guard has nothing left to try. Checkpoints are not
            removed.
        StorageError: the disk is full.
        Preempted: a signal stopped the run before there was anything to save.
    """
    if requested is None:
        with stop_requests() as requested:
            return train(run, requested)
    config = run.config
    go_on = run.folder.go_on(config)
    nothing_done = f"{STOPPED} Go on with: {go_on}"
    with run.folder.released_on_error(), requested.at_once(nothing_done):
        peak = peak_rate(run.hardware, run.plan)
    row_settings = (config.steps, run.step, config.log_every)
    display = Display(*row_settings)  # silent: only the main rank prints
    if run.ranks.is_main:
        say(*describe_run(run, peak))
        if run.step == config.steps:
            say("the only step is done" if run.step == 1 else f"all {run.step} steps are done")
        display = open_display(*row_settings)
        if isinstance(display, RichDisplay):
            requested.tell = display.tell
    loop = _Loop(run, display, peak, requested)
    alone = run.ranks.count == 1  # several ranks must stop together
    compiles = run.compiled and run.step < config.steps and alone
    try:
        with losing_ranks(), loop.session() as ended, loop.saver:
            loop.save()  # the first checkpoint of a branch
            loop.evaluate_if_interrupted()
            while run.step < config.steps:
                for step, tokens_BT in loop.batches():
                    # Compiling takes minutes, and there is nothing to save yet.
                    with requested.at_once(nothing_done) if compiles else nullcontext():
                        rolled_back = loop.advance(step, tokens_BT)
                    compiles = False
                    if config.checkpoint_async and run.ranks.any(loop.saver.failed):
                        loop.wait()
                    if run.ranks.any(requested()):
                        ended["how"] = "stopped by a signal, and saved"
                        path = loop.stop()
                        display.note(f"stopped after step {run.step}, saved {path}. Go on with:")
                        display.note(f"  {go_on}")
                        return PREEMPTED
                    if rolled_back:
                        break
            loop.wait()
            at_end = f"Stopped at the end, all is saved. Go on with: {go_on}"
            if not alone and run.ranks.any(requested()):
                ended["how"] = "stopped by a signal, and saved"
                display.note(at_end)
                return PREEMPTED
            with requested.at_once(at_end) if alone else nullcontext():
                model = run.model_in(loop.phases.evaluation(run.step))
                finish(run, display, model, loop.evaluate)
    finally:
        loop.profiler.close()  # still recording if the run ends early
        display.close()
        # `end_training` would also destroy the process group
        for tracker in run.accelerator.trackers:
            tracker.finish()
        run.folder.release()
    return DONE


class _Loop:
    """The state and the actions of the training loop."""

    def __init__(
        self, run: Run, display: Display, peak: Peak, stops: Callable[[], bool] = lambda: False
    ) -> None:
        self.run, self.display, self.stops = run, display, stops
        self.config = config = run.config
        self.metrics = MetricsLog(run, display, peak)
        self.monitor = Monitor(
            run.optimizer,
            config.guard,
            run.delayed,
            config.accumulate,
            keep_norms=config.clip_window if config.clip_mode == "adaptive" else 0,
            draws=run.backend.draws,
            log_rows=max(LOG_ROWS, min(config.log_every or 1, config.steps)),
        )
        resumed_from = checkpoints.path_of(run.folder.checkpoints, run.step)
        begins_branch = run.step > 0 and run.ranks.is_main and not resumed_from.exists()
        self.saver = Saver(
            run.folder.checkpoints,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            in_background=config.checkpoint_async,
            before=run.folder.sync_metrics,
            good=[resumed_from],  # verified when it was read
            first_rows=first_rows(run.model) or None,
            ranks=run.ranks.apart(),
        )
        self.guard = Guard(run, self.monitor, self.wait)
        self.phases = Phases(run, self.metrics.announce)
        if run.step and (plan := self.phases.plan(run.step)) != run.state.active:
            run.use(plan)
        self.train_step = Step(run, self.monitor)
        device = run.accelerator.device
        self.profiler = StepProfiler(config, run.step, device, run.folder.profile)
        self.saved_at = 0 if run.ranks.any(begins_branch) else run.step
        self.save_due = False
        self.streak = 0  # bad steps in a row at the last check

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the batches of `dataloader.batches`. If any rank cannot read its data, save a
        checkpoint, then raise a DataError or a DataWorkerLost."""
        remaining, ranks = batches(self.run, self.stops), self.run.ranks
        while True:
            error: UserError | None = None
            batch = None
            try:
                batch = next(remaining, None)
            except (data.DataError, DataWorkerLost) as failed:
                error = failed
            if ranks.any(error is not None):
                self.stop()
                with ranks.together():
                    if isinstance(error, DataWorkerLost):
                        raise DataWorkerLost(f"{error} {self.lost_worker_note()}") from error
                    if error is not None:
                        raise error
            if batch is None:
                return
            yield batch

    def advance(self, step: int, tokens_BT: Tensor) -> bool:
        """Train one step, then log, evaluate and save if due. A step without any of these does not
        synchronize with the device. Returns whether the run rolled back to an earlier step."""
        run, config = self.run, self.config
        last = step == config.steps
        evaluates = last or step % config.eval_every == 0
        logs = evaluates or step % (config.log_every or 1) == 0
        self.save_due |= last or step % config.save_every == 0
        self.enter_phase(step)
        outcome = self.guard.begin(step)
        self.carry_out(outcome)
        row: dict[str, Any] = {"step": step}
        if outcome.leave_out:
            run.state.step, logs = step, evaluates
        else:
            row |= self.train(step, tokens_BT, logs)
        if (logs or self.save_due or self.train_step.draws) and self.check(step):
            return True
        if logs:
            if evaluates and (val_loss := self.evaluate()) is not None:
                row["val_loss"] = val_loss
            if len(row) > 1:
                self.metrics.log(row)
            self.metrics.restart_clock()
            if "val_loss" in row and self.check_validation_loss(step, row["val_loss"]):
                return True
        if self.save_if_due(step):
            return True
        self.metrics.step_over(step)
        return False

    def train(self, step: int, tokens_BT: Tensor, logs: bool) -> dict[str, Any]:
        """Train on the batch of `step`. Returns the step's row of metrics; empty unless `logs`."""
        run, config = self.run, self.config
        tokens_BT = tokens_BT.to(run.accelerator.device, non_blocking=True)
        profiles = run.ranks.is_main and self.profiler.wants(step)
        loss, norm = (self.profile if profiles else self.train_step)(step, tokens_BT)
        run.state.step = step
        self.metrics.step_done()
        if run.telemetry.due(step, 1, config.steps):
            self.metrics.report(step, run.plan, self.train_step.load())
        if not logs:
            return {}
        # Reading the loss synchronizes with the device.
        precision = run.plan.precision
        row = self.metrics.row(step, float(loss), float(norm), precision)
        if (load := self.train_step.load()) is not None:
            row |= load.metrics()
        if len(run.schedule.phases) > 1:
            row["phase"] = self.phases.phase(step)
        return row

    def enter_phase(self, step: int) -> None:
        """Use the plan that trains `step`."""
        if (plan := self.phases.plan(step)) != self.run.state.active:
            good = next(n for n in itertools.count(step) if n not in self.guard.left_out)
            switch(self.run, plan, good)
            self.metrics.update_peak()
            restart_peak_memory(self.run.accelerator.device)
        self.phases.enter(step)

    def check(self, step: int, *, acts: bool = True) -> bool:
        """Run the guard's checks of the steps up to `step`, see `Guard.check`. Returns and raises
        as `carry_out` does."""
        outcome = self.guard.check(step, acts=acts)
        self.streak = outcome.streak
        return self.carry_out(outcome)

    def carry_out(self, outcome: Outcome) -> bool:
        """Carry out the guard's decisions and log its events. Returns whether the run rolled back.
        Raises a NumericFailure if the guard gave up."""
        run = self.run
        if outcome.to_bf16:
            run.leave_fp16()
            self.metrics.update_peak()
            if run.ranks.is_main:
                run.folder.write_plan(run.plan_json())
        run.demote(self.guard.demoted)
        if outcome.back_to is not None:
            self.roll_back(outcome.back_to)
        for event in outcome.events:
            self.metrics.announce(event)
        if outcome.failure:
            raise NumericFailure(outcome.failure)
        if outcome.skipped and outcome.back_to is None:
            self.train_step.restore_rng()
        return outcome.back_to is not None

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Restore the run from an earlier checkpoint, and remove the later ones."""
        run = self.run
        run.restore(checkpoint)
        if (plan := self.phases.plan(run.step)) != run.state.active:
            run.use(plan)
        run.ranks.wait()  # until all ranks have read it
        if run.ranks.is_main:
            writer.forget_after(run.folder.checkpoints, run.step)
        self.saved_at, self.streak, self.save_due = run.step, 0, False
        self.phases.rolled_back(run.step)
        self.metrics.restart_clock()
        self.metrics.forget_pace()

    def check_validation_loss(self, step: int, val_loss: float | None) -> bool:
        """Act on a validation loss that is not finite, or pass it to the phases, which may change
        the recipe. Returns whether the run rolled back."""
        if val_loss is None or not math.isfinite(val_loss):
            return self.recover(step, "the validation loss is not finite")
        self.phases.judge(step, self.loss_in)
        self.metrics.restart_clock()
        return False

    def recover(self, step: int, reason: str) -> bool:
        """Recover from weights that are not finite although no step was judged bad. Returns whether
        the run rolled back. Raises a NumericFailure if it cannot."""
        if self.config.guard.enabled:
            return self.carry_out(self.guard.weights_failed(step, reason))
        saved = f"of step {self.saved_at}" if self.saved_at else "not written yet"
        raise NumericFailure(
            f"Step {step}: {reason}. The last checkpoint is {saved}. Lower --lr, or try a recipe "
            "with more range."
        )

    def profile(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Train a step under the profiler; after the last one, write and print the profile."""
        with self.profiler.step(step):
            result = self.train_step(step, tokens_BT)
        done = time.perf_counter()
        if (text := self.profiler.written()) is not None:
            self.display.note(*text.splitlines(), f"profile: {self.run.folder.profile}")
        self.metrics.pause(time.perf_counter() - done)  # writing is not training
        return result

    def session(self) -> AbstractContextManager[dict[str, str]]:
        """See `RunFolder.session`; only the main rank records a session, and only if steps are
        left."""
        if not self.run.ranks.is_main or self.run.step == self.config.steps:
            return nullcontext({})
        return self.run.folder.session(lambda: self.run.step, versions())

    def evaluate_if_interrupted(self) -> None:
        """Evaluate the run's last step if an evaluation was due and was interrupted. The last step
        before a branch is not the branch's to evaluate."""
        run, config = self.run, self.config
        due = run.step == config.steps or run.step % config.eval_every == 0
        if not run.step or not due:
            return
        metrics = read_metrics(run.folder.path) if run.ranks.is_main else Metrics()
        is_evaluated = run.step in (metrics.began, *metrics.column("val_loss")[0])
        if run.ranks.any(run.ranks.is_main and not is_evaluated):
            loss = self.evaluate()
            if loss is not None and math.isfinite(loss) and run.ranks.is_main:
                run.folder.complete_metrics(run.step, {"val_loss": loss})
                run.accelerator.log({"val_loss": loss}, step=run.step)
                self.display.note(f"step {run.step}: validation loss {loss:.4f}")
        self.phases.judge(run.step, self.loss_in)

    def evaluate(self) -> float | None:
        """The validation loss; None if a stop was requested. FP8 GEMMs are not counted."""
        return self.loss_in(self.phases.evaluation(self.run.step))

    def loss_in(self, plan: int) -> float | None:
        """The validation loss with the plan at an index; see `evaluate`."""
        run = self.run
        batch, device = self.config.batch // self.config.accumulate, run.accelerator.device
        model = run.model_in(plan)
        is_last = run.step == self.config.steps
        windows = run.data.final_windows if is_last else run.data.windows
        loss = validation_loss(model, windows, batch, device, run.ranks, self.stops)
        run.backend.fp8_gemms()  # resets the counter
        return loss

    def stop(self) -> Path:
        """Check the last steps, save, and wait for the disk. Returns the checkpoint's path. Raises
        what `check` and `save` raise."""
        self.check(self.run.step, acts=False)  # the resumed run decides, at its next check
        self.save()
        self.wait()
        return checkpoints.path_of(self.run.folder.checkpoints, self.run.step)

    def lost_worker_note(self) -> str:
        """A sentence on how to resume a run that lost a data worker."""
        step, command = self.run.step, self.run.folder.go_on(self.config)
        saved = f"The run is saved after step {step}" if step else "No step was done yet"
        return f"{saved}: go on with {command}, and with --set workers=0 if it happens again."

    def wait(self) -> None:
        """Wait until all checkpoints are on disk. Raises what `Saver.wait` raises, on all ranks."""
        with self.run.ranks.together():
            self.saver.wait()

    def save_if_due(self, step: int) -> bool:
        """Save a checkpoint if due; after bad steps, only at the end of the run. Returns whether
        the run rolled back."""
        if not self.save_due or (self.streak and step != self.config.steps):
            return False
        rolled_back = self.save()
        self.metrics.restart_clock()
        return rolled_back

    def save(self) -> bool:
        """Write a checkpoint of the last step, unless it exists. If weights are not finite,
        `recover` instead. Returns whether the run rolled back. Raises what `recover` raises, and a
        StorageError if the disk is full."""
        run = self.run
        self.save_due = False
        if self.saved_at == run.step:  # true at step 0, too, which is not saved
            return False
        if run.ranks.any(not largest_of_state(run.optimizer).isfinite()):
            return self.recover(run.step, "a weight or a moment is not finite")
        tokenizer = run.data.tokenizer
        info = {
            "identity": run.identity,
            "config": run.folder.portable(self.config).model_dump(mode="json"),
            "plan": run.main_plan.to_json(),
            "plans": [plan.to_json() for plan in run.plans],
            "phases": self.phases.state(),
            "scaler": run.loss_scaler.state_dict() if run.loss_scaler is not None else None,
            "versions": versions(),
            "guard": self.guard.state(),
            "tokenizer": None if tokenizer is None else tokenizer.identity.model_dump(),
        }
        groups = partial(capture, run.model, run.optimizer, random_states(run.ranks))
        with run.ranks.together():
            if run.ranks.is_main or self.saver.first_rows is not None:
                self.saver.save(run.step, info, groups)
        self.saved_at = run.step
        return False
