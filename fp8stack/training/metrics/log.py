"""What a run tells of itself: rows of metrics, events, telemetry; to files, display and trackers.
Of several ranks, the main one tells."""

import math
import time
from typing import Any

from fp8stack.optim.optimizer import learning_rate
from fp8stack.precision import Plan
from fp8stack.training.metrics.console import Display, describe_event
from fp8stack.training.metrics.throughput import peak_memory_gib
from fp8stack.training.run import Run


class MetricsLog:
    """Writes down what a run does, and shows it. The MFU refers to the display's peak, a rank's."""

    def __init__(self, run: Run, display: Display) -> None:
        self.run, self.display = run, display
        self._tokens_per_step = run.config.batch * run.context
        self._ready = time.perf_counter()  # the steps to be timed began
        self._timed = 0  # how many of them there were
        self._pace: tuple[int, float] | None = None  # the first step of this start, and its end

    def step_done(self) -> None:
        """Count a step that was handed to the device."""
        self._timed += 1

    def step_over(self, step: int) -> None:
        """Note that all that belongs to a step is done; the first is where the pace is taken."""
        self._pace = self._pace or (step, time.perf_counter())

    def restart_clock(self) -> None:
        """Time the steps from now on."""
        self._ready, self._timed = time.perf_counter(), 0

    def pause(self, seconds: float) -> None:
        """Leave out a time that was no training."""
        self._ready += seconds

    def forget_pace(self) -> None:
        """Take the pace anew: the run was put back."""
        self._pace = None

    def row(
        self, step: int, loss: float, norm: float, precision: str, fp8_gemms: int | None
    ) -> dict[str, Any]:
        """The metrics of a step that just ended: a row of `metrics.jsonl`."""
        run = self.run
        seconds = (time.perf_counter() - self._ready) / self._timed
        rate = self._tokens_per_step / seconds if seconds else 0.0
        tflops = rate * run.model.config.flops_per_token(run.context) / 1e12 / run.ranks.count
        self.display.peak = self.display.peak.at_least(tflops)
        mfu = self.display.peak.mfu(tflops)
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": learning_rate(step, run.config),
            "grad_norm": norm if math.isfinite(norm) else None,
            "step_ms": round(1000 * seconds, 2),
            "tokens_per_s": round(rate, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(peak_memory_gib(run.accelerator.device), 3),
            "precision": precision,
            "fp8_gemms": fp8_gemms,
        }
        if run.scaler is not None:
            seen = run.scaler.statistics()
            row |= {"loss_scale": seen.scale, "overflows": seen.overflows}
            row["skipped"] = not math.isfinite(norm)
        return row

    def log(self, row: dict[str, Any]) -> None:
        """Write a row to the metrics, show it, and hand it to the trackers. A validation loss that
        is not finite stands out, and becomes None. Of a step that was not trained, the row has
        nothing else."""
        step, val_loss, trained = row["step"], row.get("val_loss"), "loss" in row
        if val_loss is not None and not math.isfinite(val_loss):
            why = "the validation loss is not finite"
            val_loss = None
            row |= {"val_loss": None, "event": "non-finite", "why": why}
        if not self.run.ranks.is_main:
            return
        self.run.folder.append_metrics(row)
        if trained:
            self.display.step(row, self.seconds_left())
        if val_loss is not None:
            self.display.note(f"step {step}: validation loss {val_loss:.4f}")
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        if trained:
            self.run.accelerator.log(numbers, step=step)
        elif val_loss is not None:
            self.run.accelerator.log({"val_loss": val_loss}, step=step)

    def announce(self, event: dict[str, Any]) -> None:
        """Write an event to the metrics and show it."""
        if not self.run.ranks.is_main:
            return
        self.run.folder.append_metrics(event)
        self.display.note(describe_event(event))

    def report(self, step: int, fp8_gemms: int | None, plan: Plan) -> None:
        """Write what telemetry saw of a step under `plan`, and hand it to the trackers."""
        run = self.run
        if not run.ranks.is_main:
            return
        found = run.telemetry.finish(step, fp8_gemms, plan)
        run.folder.append_telemetry(found.rows, run.main.plan.to_json())
        run.accelerator.log(found.numbers, step=step)

    def seconds_left(self) -> float | None:
        """The time to the end at the pace since the first step of this start, which compiles and
        warms up; None until a second one is done."""
        left = self.run.config.steps - self.run.step
        if self._pace is None:
            return None if left else 0.0
        first, ended = self._pace
        return (time.perf_counter() - ended) / (self.run.step - first) * left
