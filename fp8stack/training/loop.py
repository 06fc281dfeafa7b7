"""The training loop: one step, and what happens around it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fp8stack import data
from fp8stack.errors import NumericFailure, UserError
from fp8stack.training import checkpoint as checkpoints
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.display import Display, open_display
from fp8stack.training.evaluate import sample, validation_loss
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
    print(*describe_run(run), sep="\n", flush=True)
    display = open_display(run.config.steps, peak, run.step)
    loop = _Loop(run, display, peak.tflops)
    try:
        with stop_requests() as requested:
            for step, tokens_BT in _batches(run):
                loop.advance(step, tokens_BT)
                if requested() and step < run.config.steps:
                    path = loop.save()
                    display.close()
                    print(f"stopped after step {step}, saved {path}. Go on with:")
                    print(f"  fp8stack pretrain --resume {run.folder.path}", flush=True)
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


def describe_run(run: Run) -> list[str]:
    """What is about to run, in a few lines."""
    config = run.config
    sizes = f"{config.batch} x {run.context} = {config.batch * run.context:,} tokens"
    steps = f"{run.step + 1} to {config.steps} of {sizes}"
    if config.accumulate > 1:
        steps += f" in {config.accumulate} micro-batches"
    if run.step >= config.steps:
        steps = f"all {run.step} are done; give a larger --steps to train on"
    return [
        *run.notes,
        f"machine: {run.hardware}",
        *run.plan.summary(),
        f"model: {config.model}, {run.model.config.parameters():,} parameters",
        f"data: {run.train.name}, {len(run.train):,} tokens to train on, {len(run.validation):,} "
        "held out",
        f"steps: {steps}",
        f"run: {run.folder.path}",
    ]


def _batches(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Each step that is left, with its tokens, int64 [batch, context + 1]."""
    config = run.config
    dataset = data.StepBatches(
        run.train,
        batch=config.batch,
        context=run.context,
        seed=config.seed,
        vocabulary=run.model.config.vocabulary,
    )
    steps = range(run.step + 1, config.steps + 1)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=config.workers,
        pin_memory=run.plan.device == "cuda",
        generator=torch.Generator(),  # else each start of the loader would draw from torch's own
    )
    try:
        yield from zip(steps, loader, strict=True)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            "A process that reads data died; was it out of memory? Go on with --resume auto "
            "--set workers=0"
        ) from error


class _Loop:
    """The parts of a run that repeat."""

    def __init__(self, run: Run, display: Display, peak_tflops: float | None) -> None:
        self.run = run
        self.config = run.config
        self.display = display
        self.peak_tflops = peak_tflops
        self.tokens_per_step = run.config.batch * run.context
        self.started = self.ready = time.perf_counter()
        self.fp8_gemms = 0
        self.first = run.step
        self.saved_at = run.step

    def advance(self, step: int, tokens_BT: Tensor) -> None:
        """Train one step, then log, evaluate and save as configured."""
        config = self.config
        tokens_BT = tokens_BT.to(self.run.accelerator.device, non_blocking=True)
        loss, norm = self.train_step(step, tokens_BT)
        self.run.step = step
        self.fp8_gemms = self.run.backend.fp8_gemms()
        last = step == config.steps
        evaluates = last or step % config.eval_every == 0
        logs = step % config.log_every == 0 or evaluates
        if logs:
            row = self.row(step, float(loss), float(norm), time.perf_counter() - self.ready)
            if evaluates:
                row["val_loss"] = self.evaluate()
            self.log(row)
        if last or step % config.save_every == 0:
            self.save()
        self.ready = time.perf_counter()

    def train_step(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step over all micro-batches: the mean loss, and the gradient's norm before
        clipping, both 0-dim.

        Raises:
            NumericFailure: the norm is not finite (in fp16, GradScaler skips the step instead).
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
        if scaler is not None:
            self.require_room_to_scale(step, scaler, norm)
            scaler.step(optimizer)
            scaler.update()
            scaler.update(min(max(scaler.get_scale(), SMALLEST_SCALE), LARGEST_SCALE))
        else:
            self.require_finite(step, mean, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean, norm

    def require_finite(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Stop before the update if the gradient is not finite: the weights stay as they were."""
        if math.isfinite(float(norm)) and math.isfinite(float(loss)):
            return
        self.log(self.row(step, float(loss), float(norm), 0.0) | {"event": "non-finite"})
        self.fail(
            f"Step {step}: the loss is {float(loss):.4g} and the gradient norm {float(norm):.4g}. "
            "The step was not taken."
        )

    def require_room_to_scale(self, step: int, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        """Stop if gradients overflow with the smallest loss scale: no smaller one will help."""
        if scaler.get_scale() <= SMALLEST_SCALE and not math.isfinite(float(norm)):
            self.fail(f"Step {step}: the gradient overflows in fp16 even with loss scale 1.")

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
            "lr": run.optimizer.param_groups[0]["lr"],
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
        done = row["step"] - self.first
        per_step = (time.perf_counter() - self.started) / done
        self.display.step(row, per_step * (self.config.steps - row["step"]))
        if broken:
            self.fail(f"Step {row['step']}: the validation loss is not finite.")
        if "val_loss" in row:
            self.display.note(f"step {row['step']}: validation loss {row['val_loss']:.4f}")
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        self.run.accelerator.log(numbers, step=row["step"])

    def evaluate(self) -> float:
        """The validation loss now. Its GEMMs are not counted among the training's."""
        run = self.run
        micro_batch = self.config.batch // self.config.accumulate
        loss = validation_loss(run.wrapped, run.windows, micro_batch, run.accelerator.device)
        run.backend.fp8_gemms()
        return loss

    def save(self) -> Path:
        """Write a checkpoint of the last step, unless there is one, and return its path."""
        run = self.run
        if self.saved_at == run.step:  # step 0 is not worth one
            return checkpoints.path_of(run.folder.checkpoints, run.step)
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
