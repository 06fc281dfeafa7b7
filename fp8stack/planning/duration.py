"""The time, the cost and the disk of a run on GPUs, predicted by the roofline of one GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8stack.common.errors import UserError
from fp8stack.model.config import GPTConfig
from fp8stack.planning.memory import float_bytes, optimizer_bytes
from fp8stack.planning.roofline import predict
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Plan
from fp8stack.precision.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A run of so many training tokens, predicted. Communication, evaluations, writing checkpoints
    and launches take no time in it; the optimizer's time is AdamW's.

    Attributes:
        tokens: training tokens.
        steps: optimizer steps.
        gpus: the number of GPUs, and `gpu` their kind.
        tokens_per_s: of all GPUs.
        seconds: wall time.
        price: dollars per hour of a GPU; None if not given.
        data_bytes: the prepared tokens on disk.
        checkpoint_bytes: the newest checkpoints on disk while one is written, without those of
            `keep_every`.
        loss: the loss to expect without low precision, in nats per token, if Chinchilla's law is
            of this size.
    """

    tokens: int
    steps: int
    gpus: int
    gpu: str
    tokens_per_s: float
    seconds: float
    price: float | None
    data_bytes: int
    checkpoint_bytes: int
    loss: float | None = None

    @property
    def cost(self) -> float | None:
        """Dollars; None without a price."""
        return None if self.price is None else self.seconds / 3600 * self.gpus * self.price


def predict_duration(
    config: RunConfig,
    model: GPTConfig,
    context: int,
    phases: Sequence[tuple[Plan, float]],
    gpu: Gpu,
    *,
    gpus: int,
    tokens: int,
    price: float | None = None,
) -> Duration:
    """Predict a run of `tokens` training tokens on `gpus` GPUs, which divide the batch.

    Args:
        phases: the plan of each phase, and its share of the steps.

    Raises:
        UserError: a plan emulates its recipe on this GPU, so that the roofline has no prediction.
    """
    per_step = config.batch * context
    sequences = config.batch // (config.accumulate * gpus)
    seconds = 0.0  # of a step, on average
    for plan, share in phases:
        if plan.emulated_layers:
            raise UserError(
                f"--tokens: {plan.recipe.name} is emulated on {gpu.name}, whose time nobody "
                "predicts. Give a recipe that runs natively there."
            )
        predicted = predict(
            model,
            plan,
            gpu,
            batch=sequences,
            context=context,
            checkpointing=config.activation_checkpointing,
        )
        optimizer = predicted.parts_ms["optimizer"]
        passes = predicted.step_ms - optimizer
        shards = gpus if config.parallel == "fsdp" else 1
        seconds += share * (config.accumulate * passes + optimizer / shards) / 1000
    steps = math.ceil(tokens / per_step)
    shapes = model.parameter_shapes()
    state = float_bytes(shapes) + optimizer_bytes(shapes, config.optimizer, config.momentum)
    return Duration(
        tokens=tokens,
        steps=steps,
        gpus=gpus,
        gpu=gpu.name,
        tokens_per_s=per_step / seconds,
        seconds=steps * seconds,
        price=price,
        data_bytes=tokens * (2 if model.vocabulary <= 2**16 else 4),
        checkpoint_bytes=state * (config.keep_checkpoints + 1),
    )


def as_json(duration: Duration) -> dict[str, Any]:
    """The duration as JSON data: seconds, dollars, bytes, nats."""
    return asdict(duration) | {"cost": duration.cost}


def sentences(duration: Duration) -> list[str]:
    """The duration in words."""
    hours = duration.seconds / 3600
    wall = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    cost = duration.cost
    dollars = "" if cost is None else f", ${cost:,.0f} at ${duration.price:g} per GPU hour"
    lines = [
        f"Predicted, not measured: {duration.tokens:,} tokens in {duration.steps:,} steps on "
        f"{duration.gpus} {duration.gpu} at {duration.tokens_per_s:,.0f} tokens/s take {wall}"
        f"{dollars}. Kernels are ideal; launches, communication, evaluations and the writing "
        "of checkpoints are not counted.",
        f"Disk: tokens {_gigabytes(duration.data_bytes)}, checkpoints "
        f"{_gigabytes(duration.checkpoint_bytes)}.",
    ]
    if duration.loss is not None:
        lines.append(
            f"Loss to expect without low precision: {duration.loss:.2f} nats per token by "
            "Chinchilla's law (arXiv 2404.10102), which is of other text; fp8stack forecast says "
            "what a recipe adds."
        )
    return lines


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
