"""The training loop: one step, and what happens around it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fp8stack import data
from fp8stack.errors import NumericFailure
from fp8stack.training import checkpoint as checkpoints
from fp8stack.training import profiling
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.display import Display, describe_run, open_display, say
from fp8stack.training.evaluate import sample, validation_loss
from fp8stack.training.feed import batches
from fp8stack.training.finite import FiniteWatch
from fp8stack.training.optimizer import learning_rate
from fp8stack.training.plot import loss_plot
from fp8stack.training.setup import Run, versions
from fp8stack.training.state import capture
from fp8stack.training.stop import stop_requests
from fp8stack.training.throughput import peak_memory_gib, peak_rate

DONE, PREEMPTED = 0, 75
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 262144.0  # of the loss in fp16; at 0 it would make NaN


def train(run: Run) -> int:
    """Train `run` from its last step to its end, and return the exit code: done or preempted.

    Raises:
        NumericFailure: the loss or a gradient is not finite; weights and checkpoints are as before.
        StorageError: the disk is full.
    """
    peak = peak_rate(run.hardware, run.plan)
    say(*describe_run(run))
    display = open_display(run.config.steps, peak, run.step)
    loop = _Loop(run, display, peak.tflops)
    try:
        with stop_requests() as requested:
            for step, tokens_BT in batches(run):
                loop.advance(step, tokens_BT)
                if requested() and step < run.config.steps:
                    path = loop.save()
                    display.close()
                    say(
                        f"stopped after step {step}, saved {path}. Go on with:",
                        f"  fp8stack pretrain --resume {run.folder.path}",
                    )
                    return PREEMPTED
            loop.finish()
    except data.DataError:
        loop.save()  # what was learnt so far is not lost with the file
        raise
    finally:
        display.close()
        run.accelerator.end_training()
        run.folder.release()
    return DONE


def _scale(scaler: torch.amp.GradScaler, like: Tensor) -> Tensor:
    """The scale itself: `get_scale` would wait for the device."""
    return scaler.scale(torch.ones_like(like))


class _Loop:
    """The parts of a run that repeat."""

    def __init__(self, run: Run, display: Display, peak_tflops: float | None) -> None:
        self.run = run
        self.config = run.config
        self.display = display
        self.peak_tflops = peak_tflops
        self.tokens_per_step = run.config.batch * run.context
        self.watch = FiniteWatch(run.optimizer, run.accelerator.device)
        self.ready = time.perf_counter()  # the steps to be timed began
        self.timed = 0  # how many of them there were
        self.pace: tuple[int, float] | None = None  # the first step of this start, and its end
        self.profiled = min(run.step + profiling.WARM_UP + 1, run.config.steps)
        self.fp8_gemms: int | None = None
        self.saved_at = run.step

    def advance(self, step: int, tokens_BT: Tensor) -> None:
        """Train one step, then log, evaluate and save as configured. A step that does none of that
        is handed to the device and not waited for."""
        config = self.config
        tokens_BT = tokens_BT.to(self.run.accelerator.device, non_blocking=True)
        profiles = config.profile and step == self.profiled
        loss, norm = (self.profile if profiles else self.train_step)(step, tokens_BT)
        self.run.step = step
        self.timed += 1
        if not config.compile:  # compiled code does not count
            self.fp8_gemms = self.run.backend.fp8_gemms()
        last = step == config.steps
        evaluates = last or step % config.eval_every == 0
        logs = step % config.log_every == 0 or evaluates
        saves = last or step % config.save_every == 0
        if logs:
            self.require_finite()
            seconds = (time.perf_counter() - self.ready) / self.timed
            row = self.row(step, float(loss), float(norm), seconds)
            if evaluates:
                row["val_loss"] = self.evaluate()
            self.log(row)
        if saves:
            self.save()
        if logs or saves:
            self.ready, self.timed = time.perf_counter(), 0
        self.pace = self.pace or (step, time.perf_counter())

    def train_step(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step over all micro-batches: the mean loss, and the gradient's norm before
        clipping, both 0-dim. If they are not finite, nothing changes, and neither does it in later
        steps until `require_finite` raises (in fp16 the step is skipped, and the loss scale falls).

        Nothing here waits for the device.
        """
        run, config = self.run, self.config
        accelerator, optimizer, scaler = run.accelerator, run.optimizer, run.scaler
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        losses = []
        for part_BT in tokens_BT.chunk(config.accumulate):
            with accelerator.accumulate(run.wrapped):
                loss = run.wrapped(part_BT[:, :-1], part_BT[:, 1:])
                # accelerate divides by the number of micro-batches
                accelerator.backward(loss if scaler is None else scaler.scale(loss))
                losses.append(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = run.model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip or math.inf)
        mean = torch.stack(losses).mean()
        if scaler is None:
            self.watch.see(step, mean, norm)
        else:  # with the smallest scale there is no smaller one to help
            self.watch.see(step, mean, norm, excused=_scale(scaler, norm) > SMALLEST_SCALE)
        optimizer.step()  # and not `scaler.step`, which would overrule the watch
        if scaler is not None:
            scaler.update()
            scaler.update(_scale(scaler, norm).clamp(SMALLEST_SCALE, LARGEST_SCALE))
        optimizer.zero_grad(set_to_none=True)
        return mean, norm

    def profile(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """`train_step` under the profiler; what it finds is written and shown."""
        with profiling.recording(self.run.accelerator.device) as recorded:
            result = self.train_step(step, tokens_BT)
        done = time.perf_counter()
        folder = self.run.folder.profile
        self.display.note(f"{profiling.write(recorded, folder, step)}profile: {folder}")
        self.ready += time.perf_counter() - done  # writing is not training
        return result

    def require_finite(self) -> None:
        """Stop if a step since the last look was not finite: weights are as they were before it.

        Raises:
            NumericFailure: one was not; the message names the first.
        """
        failure = self.watch.failure()
        if failure is None:
            return
        step, loss, norm = failure.step, failure.loss, failure.norm
        if self.run.scaler is not None:
            self.fail(f"Step {step}: the gradient overflows in fp16 even with loss scale 1.")
        self.log(self.row(step, loss, norm, 0.0) | {"event": "non-finite"})
        self.fail(
            f"Step {step}: the loss is {loss:.4g} and the gradient norm {norm:.4g}. "
            "The step was not taken."
        )

    def fail(self, what: str) -> NoReturn:
        """Give up: say what happened, what there is to go back to, and what to try."""
        saved = f"of step {self.saved_at}" if self.saved_at else "not written yet"
        raise NumericFailure(
            f"{what} The last checkpoint is {saved}. Lower --lr, or try a recipe with more range."
        )

    def row(self, step: int, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        """The metrics of a step: a row of `metrics.jsonl`."""
        run = self.run
        rate = self.tokens_per_step / seconds if seconds else 0.0
        tflops = rate * run.model.config.flops_per_token(run.context) / 1e12
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": learning_rate(step, self.config),
            "grad_norm": norm if math.isfinite(norm) else None,
            "step_ms": round(1000 * seconds, 2),
            "tokens_per_s": round(rate, 1),
            "mfu": round(tflops / self.peak_tflops, 4) if self.peak_tflops else None,
            "memory_gib": round(peak_memory_gib(run.accelerator.device), 3),
            "precision": run.plan.precision,
            "fp8_gemms": self.fp8_gemms,
        }
        if run.scaler is not None:
            row |= {"loss_scale": run.scaler.get_scale(), "skipped": not math.isfinite(norm)}
        return row

    def log(self, row: dict[str, Any]) -> None:
        """Write a row to the metrics, show it, and hand it to the trackers.

        Raises:
            NumericFailure: the row has a validation loss that is not finite.
        """
        broken = not math.isfinite(row.get("val_loss", 0.0))
        if broken:
            row |= {"val_loss": None, "event": "non-finite"}
        self.run.folder.append_metrics(row)
        self.display.step(row, self.seconds_left())
        if broken:
            self.fail(f"Step {row['step']}: the validation loss is not finite.")
        if "val_loss" in row:
            self.display.note(f"step {row['step']}: validation loss {row['val_loss']:.4f}")
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        self.run.accelerator.log(numbers, step=row["step"])

    def seconds_left(self) -> float | None:
        """The time to the end at the pace since the first step of this start, which compiles and
        warms up; None until a second one is done."""
        left = self.config.steps - self.run.step
        if self.pace is None:
            return None if left else 0.0
        first, ended = self.pace
        return (time.perf_counter() - ended) / (self.run.step - first) * left

    def evaluate(self) -> float:
        """The validation loss now. Its GEMMs are not counted among the training's."""
        run = self.run
        micro_batch = self.config.batch // self.config.accumulate
        loss = validation_loss(run.wrapped, run.windows, micro_batch, run.accelerator.device)
        run.backend.fp8_gemms()
        return loss

    def save(self) -> Path:
        """Write a checkpoint of the last step, unless there is one, and return its path.

        Raises:
            NumericFailure: a step was not finite.
        """
        run = self.run
        if self.saved_at == run.step:  # step 0 is not worth one
            return checkpoints.path_of(run.folder.checkpoints, run.step)
        self.require_finite()
        run.folder.sync_metrics()
        info = {
            "identity": run.identity,
            "config": self.config.model_dump(mode="json"),
            "plan": run.plan.to_json(),
            "scaler": run.scaler.state_dict() if run.scaler is not None else None,
            "versions": versions(),
        }
        state = Checkpoint(step=run.step, info=info, tensors=capture(run.model, run.optimizer))
        path = checkpoints.save(run.folder.checkpoints, state, self.config.keep_checkpoints)
        self.saved_at = run.step
        return path

    def finish(self) -> None:
        """Draw the loss, show a sample, and say where everything is."""
        run, folder = self.run, self.run.folder
        metrics = folder.read_metrics()
        plot = loss_plot(metrics, f"{self.config.model}, {run.plan.precision}")
        checkpoints.write_atomically(folder.plot, plot)
        text = self.sample()
        if text:
            checkpoints.write_atomically(folder.sample, text.encode())
            self.display.note(f"sample:\n{text}")
        evaluated = [row["val_loss"] for row in metrics if "val_loss" in row]
        final = evaluated[-1] if evaluated else self.evaluate()
        self.display.note(
            f"done: validation loss {final:.4f} nats per token after {run.step} steps.\n"
            f"checkpoint: {checkpoints.path_of(folder.checkpoints, run.step)}\nplot: {folder.plot}"
        )

    def sample(self) -> str:
        """Text that the model writes now; empty where tokens are not bytes or none is asked for."""
        run, config = self.run, self.config
        if not config.sample_tokens or not run.train.is_text:
            return ""
        prompt = config.sample_prompt or ("def " if config.data is None else "\n")
        tokens = sample(
            run.model,
            list(prompt.encode()),
            config.sample_tokens,
            temperature=config.temperature,
            seed=config.seed,
        )
        return prompt + data.decode(tokens)
