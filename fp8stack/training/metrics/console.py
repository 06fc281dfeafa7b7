"""The display of a run: notes and a row of every 20th part of the steps, with a live line below
them on a terminal."""

import sys
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.text import Text

from fp8stack import data
from fp8stack.common.progress import Bar
from fp8stack.common.screen import Screen
from fp8stack.common.terminal import is_terminal, printable, say
from fp8stack.layers.kernels.replay import records
from fp8stack.model.config import load_config
from fp8stack.planning.phases import EVALUATION
from fp8stack.training.graphs import obstacle
from fp8stack.training.metrics.throughput import Peak
from fp8stack.training.run import Run


class Display:
    """Base class of displays, which prints nothing.

    Args:
        steps: the last step of the run.
        start: the step that the run begins or is resumed after.
        log_every: the key of the run. If it is None, the first step, the last one, and one every
            5 % of the run get a row, at least 10 steps apart unless the run is shorter.
    """

    def __init__(self, steps: int, start: int, log_every: int | None) -> None:
        self.steps, self.first = steps, start + 1
        spread = max(10, steps // 20) if steps >= 10 else 1
        self.row_every = 1 if log_every else spread  # other steps are not logged

    def note(self, *lines: str, keep: str = "") -> None:
        """Print lines that stay, without escaping the control characters in `keep`."""

    def step(self, row: dict[str, Any], seconds_left: float | None) -> None:
        """Show a logged step by its row of metrics; `seconds_left` is None if unknown."""

    def has_row(self, step: int) -> bool:
        """Whether a logged step gets a row that stays."""
        return step in (self.first, self.steps) or step % self.row_every == 0

    def close(self) -> None:
        """Restore the terminal."""


def describe(row: dict[str, Any], steps: int) -> str:
    """The log line of a step, without the time left."""
    norm, mfu = row["grad_norm"], row["mfu"]
    figures = [
        f"step {row['step']}/{steps}",
        _loss(row),
        f"lr {row['lr']:.2e}",
        "grad norm non-finite" if norm is None else f"grad norm {norm:.2f}",
    ]
    if "loss_scale" in row:
        skipped = ", skipped" if row["skipped"] else ""
        figures.append(f"loss scale {row['loss_scale']:.0f}{skipped}")
    if "balance_loss" in row:
        balance = row["balance_loss"]
        idle = f", {row['idle_experts']} idle" if row["idle_experts"] else ""
        figures.append(f"balance {'non-finite' if balance is None else f'{balance:.2f}'}{idle}")
    figures += [
        f"{row['step_ms']:.0f} ms",
        _speed(row),
        *([] if mfu is None else [f"MFU {100 * mfu:.0f}%"]),
        f"{row['memory_gib']:.2f} GiB",
        row["precision"],
    ]
    return " | ".join(figures)


def _loss(row: dict[str, Any]) -> str:
    return "loss non-finite" if row["loss"] is None else f"loss {row['loss']:.4f}"


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s'] / 1000:.1f}k tok/s"


def describe_event(event: dict[str, Any]) -> str:
    """The log line of an event: of the guard, or the beginning of a phase."""
    kind, step, reason = event["event"], event["step"], event["why"]
    if kind == "phase":
        line = f"step {step}: phase {event['phase']} begins, in {event['precision']}"
        return f"{line}: {reason}" if event["phase"] == "conservative" else line
    layer, precision = event.get("layer"), event.get("precision")
    done = {
        "skip": "skipped",
        "rollback": f"back to step {event.get('to_step')}",
        "demote": f"{layer} goes on in {precision}",
        "restore": f"{layer} is in FP8 again",
        "clear_amax": f"amax history of {layer}.{event.get('operand')} cleared",
        "loss_scale": "loss scale",
        "precision": f"goes on in {precision}",
        "stop": "gives up",
    }
    return f"guard: step {step}: {done.get(kind, kind)}: {reason}"


def describe_run(run: Run, peak: Peak) -> list[str]:
    """The lines printed at the start of a run: machine, plan, model, data, steps, MFU's peak."""
    config = run.config
    sizes = f"{config.batch} x {run.context} = {config.batch * run.context:,} tokens"
    micro = f" in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    steps = f"{run.step + 1} to {config.steps} of {sizes}{micro}"
    if run.step >= config.steps:
        steps = f"all {run.step} are done; give a larger --steps to train on"
    return [
        *run.notes,
        f"machine: {run.hardware}",
        *(line for plan in run.plans for line in plan.summary()),
        *_phases(run),
        _model(run),
        *_data(run),
        f"steps: {steps}",
        *([f"ranks: {run.ranks.count}, {run.config.parallel}"] if run.ranks.count > 1 else []),
        f"run: {run.folder.path}",
        str(peak),
        *(["compiling: the first step takes a minute or so"] if run.compiled else []),
        *_graphs(run),
    ]


def _graphs(run: Run) -> list[str]:
    """Whether passes are replayed as CUDA graphs, on a GPU that has them."""
    if not records(run.accelerator.device) or not run.compiled:
        return []
    reason = obstacle(run)
    passes = f"launched kernel by kernel: {reason}" if reason else "replayed from the third step on"
    return [f"CUDA graphs: passes are {passes}"]


def _model(run: Run) -> str:
    """The model's name and size, with the first keys that `model_overrides` changes."""
    config, shape = run.config, run.model.config
    preset = load_config(config.model)
    changed = [k for k in config.model_overrides if getattr(shape, k) != getattr(preset, k)]
    changes = ", ".join(f"{key} {getattr(shape, key)}" for key in changed[:3])
    more = f" and {len(changed) - 3} more keys" if len(changed) > 3 else ""
    differs = f" ({changes}{more})" if changed else ""
    active = f", {shape.active_parameters():,} active" if shape.experts is not None else ""
    return f"model: {config.model}{differs}, {shape.parameters():,} parameters{active}"


def _data(run: Run) -> list[str]:
    """The data, and how a mixture or epochs are read."""
    config, train, held_out = run.config, run.data.train, run.data.validation
    lines = [f"{train.name}, {len(train):,} tokens to train on, {len(held_out):,} held out"]
    if config.data_order == "epochs" or isinstance(train, data.Mixture):
        sizes = {"batch": config.batch, "context": run.context, "steps": config.steps}
        lines += data.describe(train, **sizes, order=config.data_order)
    if config.document_mask:
        lines.append("attention stays within documents")
    return [f"data: {line}" for line in lines]


def _phases(run: Run) -> list[str]:
    """The steps and the precision of each phase, if there are several."""
    schedule = run.schedule
    if len(schedule.phases) == 1 and schedule.evaluation is None:
        return []
    spans = [
        f"{phase.name} {phase.first} to {phase.last} in {run.plans[index].precision}"
        for phase, index in zip(schedule.phases, schedule.indices, strict=True)
    ]
    used = {phase.name for phase in schedule.phases} | {EVALUATION}
    unused = [phase.name for phase in run.config.phases if phase.name not in used]
    spans += [f"{name} has no steps" for name in unused]
    if schedule.evaluation is not None:
        spans.append(f"validation losses in {run.plans[schedule.evaluation].precision}")
    return [f"phases: {', '.join(spans)}"]


class PlainDisplay(Display):
    """Plain lines, for logs and pipes."""

    def note(self, *lines: str, keep: str = "") -> None:
        """See `Display.note`."""
        say(*lines, keep=keep)

    def step(self, row: dict[str, Any], seconds_left: float | None) -> None:
        """See `Display.step`."""
        if self.has_row(row["step"]):
            eta = "n/a" if seconds_left is None else timedelta(seconds=round(seconds_left))
            say(f"{describe(row, self.steps)} | ETA {eta}")


class RichDisplay(Display):
    """A live line with the latest step's loss and speed. Rows and notes scroll by above it, and
    stay once it is closed."""

    def __init__(self, steps: int, start: int, log_every: int | None, console: Console) -> None:
        super().__init__(steps, start, log_every)
        self.progress = Bar("step", MofNCompleteColumn(), steps, start, console, transient=True)
        self.progress.start()

    def note(self, *lines: str, keep: str = "") -> None:
        """See `Display.note`."""
        self._print_urgent()
        self._print(*(printable(line, keep) for line in lines))

    def tell(self, text: str) -> None:
        """Show a line below the bar, and print it with the next note. Signal handlers call this,
        which may interrupt a print."""
        self.progress.urgent = text

    def step(self, row: dict[str, Any], seconds_left: float | None) -> None:
        """See `Display.step`."""
        if self.has_row(row["step"]):
            self.note(describe(row, self.steps))
        self.progress.show(row["step"], f"{_loss(row)} | {_speed(row)}")

    def close(self) -> None:
        """See `Display.close`."""
        self._print_urgent()
        self.progress.stop()

    def _print_urgent(self) -> None:
        text, self.progress.urgent = self.progress.urgent, None
        if text is not None:
            self._print(text)

    def _print(self, *lines: str) -> None:
        self.progress.console.print(Text("\n".join(lines)), soft_wrap=True)


def open_display(steps: int, start: int, log_every: int | None) -> Display:
    """A `RichDisplay` if stdout is a terminal, else a `PlainDisplay`."""
    if is_terminal(sys.stdout):
        return RichDisplay(steps, start, log_every, Screen(lasting=True))
    return PlainDisplay(steps, start, log_every)
