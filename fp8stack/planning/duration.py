"""The time, the cost and the disk of a run on GPUs, from the predicted time of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8stack.common.errors import UserError
from fp8stack.model.config import GPTConfig
from fp8stack.planning.memory import float_bytes, optimizer_bytes
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Plan
from fp8stack.precision.step_time import Range


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A run of so many training tokens, predicted. Communication, evaluations and writing
    checkpoints take no time in it; the optimizer's time is AdamW's.

    Attributes:
        tokens: training tokens.
        steps: optimizer steps.
        gpus: the number of GPUs, and `gpu` their kind.
        seconds: wall time.
        price: dollars per hour of a GPU; None if not given.
        data_bytes: the prepared tokens on disk.
        checkpoint_bytes: the newest checkpoints on disk while one is written, without those of
            `keep_every`.
        host_limits: whether the host may limit a step that is not replayed as CUDA graphs.
        loss: the loss to expect without low precision, in nats per token, if Chinchilla's law is
            of this size.
    """

    tokens: int
    steps: int
    gpus: int
    gpu: str
    seconds: Range
    price: float | None
    data_bytes: int
    checkpoint_bytes: int
    host_limits: bool
    loss: float | None = None

    @property
    def tokens_per_s(self) -> Range:
        """Tokens per second of all GPUs."""
        return Range(low=self.tokens / self.seconds.high, high=self.tokens / self.seconds.low)

    @property
    def cost(self) -> Range | None:
        """Dollars; None without a price."""
        if self.price is None:
            return None
        rate = self.gpus * self.price / 3600
        return Range(low=self.seconds.low * rate, high=self.seconds.high * rate)


def predict_durations(
    config: RunConfig,
    model: GPTConfig,
    phases: Sequence[tuple[Plan, float]],
    *,
    gpus: int,
    tokens: int,
    steps: int,
    price: float | None = None,
) -> list[Duration]:
    """Predict a run of `tokens` training tokens in `steps` steps on `gpus` GPUs, for each kind that
    they may be of.

    Args:
        config: the run.
        model: its shape.
        phases: the plan of each phase, with the times of a step, and its share of the steps.

    Raises:
        UserError: a plan emulates its recipe on this GPU, so that its time is not predicted.
    """
    for plan, _ in phases:
        if plan.emulated_layers:
            machine = plan.hardware.name.removeprefix("assumed ")
            raise UserError(
                f"--tokens: {plan.recipe.name} is emulated on {machine}, whose time nobody "
                "predicts. Give a recipe that runs natively there."
            )
    shapes = model.parameter_shapes()
    state = float_bytes(shapes) + optimizer_bytes(shapes, config.optimizer, config.momentum)
    durations = []
    for times in zip(*(plan.times for plan, _ in phases), strict=True):
        shares = [(time.step_ms, share) for time, (_, share) in zip(times, phases, strict=True)]
        seconds = Range(
            low=steps * sum(step_ms.low * share for step_ms, share in shares) / 1000,
            high=steps * sum(step_ms.high * share for step_ms, share in shares) / 1000,
        )
        duration = Duration(
            tokens=tokens,
            steps=steps,
            gpus=gpus,
            gpu=times[0].gpu,
            seconds=seconds,
            price=price,
            data_bytes=tokens * (2 if model.vocabulary <= 2**16 else 4),
            checkpoint_bytes=state * (config.keep_checkpoints + 1),
            host_limits=any(time.host_ms > time.step_ms.low for time in times),
        )
        durations.append(duration)
    return durations


def as_json(duration: Duration) -> dict[str, Any]:
    """The duration as JSON data: seconds, dollars, bytes, nats."""
    ranges = {name: getattr(duration, name) for name in ("seconds", "tokens_per_s", "cost")}
    values = {name: value for name, value in asdict(duration).items() if name not in ranges}
    for name, value in ranges.items():
        for end in ("low", "high"):
            values[f"{name}_{end}"] = None if value is None else getattr(value, end)
    return values


def sentences(durations: Sequence[Duration]) -> list[str]:
    """The durations of a run in words, one for each kind of GPU."""
    first = durations[0]
    lines = [_sentence(duration) for duration in durations]
    if any(duration.host_limits for duration in durations):
        lines.append(
            "Without CUDA graphs, launching the kernels may take the host longer than running them "
            "takes the GPU: use larger micro-batches where memory allows (a smaller --accumulate)."
        )
    lines.append(
        f"Disk: tokens {_gigabytes(first.data_bytes)}, checkpoints "
        f"{_gigabytes(first.checkpoint_bytes)}."
    )
    if first.loss is not None:
        lines.append(
            f"Loss to expect without low precision: {first.loss:.2f} nats per token by "
            "Chinchilla's law (arXiv 2404.10102), which is of other text; fp8stack forecast says "
            "what a recipe adds."
        )
    return lines


def _sentence(duration: Duration) -> str:
    """The time and the cost in words."""
    cost, rate = duration.cost, duration.tokens_per_s
    dollars = ""
    if cost is not None:
        dollars = f", ${cost.low:,.0f} to ${cost.high:,.0f} at ${duration.price:g} per GPU hour"
    return (
        f"Predicted, not measured: {duration.tokens:,} tokens in {duration.steps:,} steps on "
        f"{duration.gpus} {duration.gpu} at {rate.low:,.0f} to {rate.high:,.0f} tokens/s take "
        f"{_wall(duration.seconds)}{dollars}. Communication, evaluations and the writing of "
        "checkpoints are not counted."
    )


def _wall(seconds: Range) -> str:
    """A range of wall times in words."""
    unit, size = ("hours", 3600) if seconds.high < 48 * 3600 else ("days", 24 * 3600)
    return f"{seconds.low / size:.1f} to {seconds.high / size:.1f} {unit}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
