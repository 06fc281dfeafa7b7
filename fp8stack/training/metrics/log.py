"""Writes metrics, events and telemetry to files, display and trackers, on the main rank only."""

import math
import time
from typing import Any

from fp8stack.precision import Plan
from fp8stack.training.metrics.console import Display, describe_event
from fp8stack.training.metrics.expert_load import ExpertLoad
from fp8stack.training.metrics.throughput import Peak, peak_memory_gib, peak_rate
from fp8stack.training.optim.optimizer import learning_rate
from fp8stack.training.run import Run


class MetricsLog:
    """Logs a run. MFU is relative to `peak`, the peak of one rank."""

    def __init__(self, run: Run, display: Display, peak: Peak) -> None:
        self.run, self.display, self.peak = run, display, peak
        self._tokens_per_step = run.config.batch * run.context
        self._ready = time.perf_counter()  # when the steps to be timed began
        self._timed = 0  # how many of them there are
        self._pace: tuple[int, float] | None = None  # this process's first step, and its end
        self.fp8_gemms: int | None = None  # of the last step

    def update_peak(self) -> None:
        """Use the peak of the plan that trains now."""
        began = time.perf_counter()
        before, self.peak = self.peak, peak_rate(self.run.hardware, self.run.plan)
        if self.peak.name != before.name:
            self.display.note(str(self.peak))
        self.pause(time.perf_counter() - began)  # measuring is not training

    def step_done(self) -> None:
        """Count a step, and the FP8 GEMMs that it ran."""
        self._timed += 1
        compiled = self.run.model.loss.is_compiled  # compiled code does not count its GEMMs
        self.fp8_gemms = None if compiled else self.run.backend.fp8_gemms()

    def step_over(self, step: int) -> None:
        """Called when a step is logged and saved; `seconds_left` measures from the first such
        call."""
        self._pace = self._pace or (step, time.perf_counter())

    def restart_clock(self) -> None:
        """Time the steps from now on."""
        self._ready, self._timed = time.perf_counter(), 0

    def pause(self, seconds: float) -> None:
        """Exclude this time, which was not training."""
        self._ready += seconds

    def forget_pace(self) -> None:
        """Measure the pace again from here, after a roll-back."""
        self._pace = None

    def row(self, step: int, loss: float, norm: float, precision: str) -> dict[str, Any]:
        """The metrics of the last step: a row of `metrics.jsonl`."""
        run = self.run
        seconds = (time.perf_counter() - self._ready) / self._timed
        rate = self._tokens_per_step / seconds if seconds else 0.0
        tflops = rate * run.model.config.flops_per_token(run.context) / 1e12 / run.ranks.count
        self.peak = self.peak.at_least(tflops)
        mfu = self.peak.mfu(tflops)
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
            "fp8_gemms": self.fp8_gemms,
        }
        if run.scaler is not None:
            scaler = run.scaler.statistics()
            row |= {"loss_scale": scaler.scale, "overflows": scaler.overflows}
            row["skipped"] = not math.isfinite(norm)
        return row

    def log(self, row: dict[str, Any]) -> None:
        """Log a row to `metrics.jsonl`, display and trackers. A validation loss that is not finite
        becomes None and an event. The row of a left-out step has only a validation loss."""
        step, val_loss, trained = row["step"], row.get("val_loss"), "loss" in row
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss, reason = None, "the validation loss is not finite"
            row |= {"val_loss": None, "event": "non-finite", "why": reason}
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

    def report(self, step: int, plan: Plan, load: ExpertLoad | None = None) -> None:
        """Log a step's telemetry under `plan`, and the `load` of its experts, to `telemetry.jsonl`
        and the trackers."""
        run = self.run
        if not run.ranks.is_main:
            return
        sample = run.telemetry.finish(step, self.fp8_gemms, plan)
        mixtures = [path.removesuffix(".router") for path in run.model.config.routers]
        of_experts = [] if load is None else load.rows(step, mixtures)
        numbers = {} if load is None else load.numbers(mixtures)
        run.folder.append_telemetry([*sample.rows, *of_experts], run.main_plan.to_json())
        run.accelerator.log(sample.numbers | numbers, step=step)

    def seconds_left(self) -> float | None:
        """The time left at the pace since this process's first step, which compiles and is left
        out; None until the second step is done."""
        steps_left = self.run.config.steps - self.run.step
        if self._pace is None:
            return None if steps_left else 0.0
        first, ended = self._pace
        return (time.perf_counter() - ended) / (self.run.step - first) * steps_left
