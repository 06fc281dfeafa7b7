"""The weights that a new run begins with, where they are those of another run.

Weights alone: the optimizer, the step, the scales and the schedule are new. It must not know how a
run is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.errors import UserError
from fp8stack.model import GPT, load_config
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.config import RunConfig
from fp8stack.training.load import find_checkpoint
from fp8stack.training.sound import model_of
from fp8stack.training.state import differences, restore_weights

# What the weights do not depend on: how they were drawn, and noise while training.
FREE = {"dropout", "init_std"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from: a checkpoint, its path, and why newer ones were passed over."""

    path: Path
    checkpoint: Checkpoint
    passed_over: tuple[str, ...] = ()


def find_source(run_or_checkpoint: str) -> Source:
    """The checkpoint that `--init-from` names, or the newest good one of the run it names.

    Raises:
        UserError: there is no run and no checkpoint.
        NoUsableCheckpoint: it is damaged, or a run has none that is not.
    """
    checkpoint, path, passed_over = find_checkpoint(run_or_checkpoint)
    return Source(path=path.resolve(), checkpoint=checkpoint, passed_over=tuple(passed_over))


def with_source(config: RunConfig, source: Source) -> RunConfig:
    """`config` with the checkpoint named, and without `--model` the model that it is of.

    Raises:
        UserError: the model differs from the checkpoint's; the message names the first difference.
    """
    saved = presets.parse(RunConfig, source.checkpoint.info["config"], str(source.path))
    found: dict[str, Any] = {"init_from": str(source.path)}
    if "model" not in config.given:
        overrides = saved.model_overrides | config.model_overrides
        found |= {"model": saved.model, "model_overrides": overrides}
    made = config.model_copy(update=found)
    theirs = model_of(source.checkpoint)
    ours = load_config(made.model, made.model_overrides)
    there, here = (model.model_dump(mode="json", exclude=FREE) for model in (theirs, ours))
    for difference in differences(there, here):
        raise UserError(
            f"Cannot begin with the weights of {source.path}: the model's {difference}. Leave out "
            "--model and model_overrides, to have the checkpoint's model."
        )
    return made


def same_source(asked: str, saved: str | None) -> bool:
    """Whether `asked`, a run or a checkpoint, is where a run's first weights `saved` were from."""
    return saved is not None and Path(asked).resolve() in (
        Path(saved),
        Path(saved).parent.parent,  # RUN/checkpoints/step-000200
    )


def begin_with(model: GPT, source: Source) -> str:
    """Put the weights of `source` into `model`, and say so in a line.

    Raises:
        UserError: they do not fit.
    """
    restore_weights(model, source.checkpoint.tensors.get("model", {}))
    why = "".join(f"; passed over: {reason}" for reason in source.passed_over)
    return f"weights of {source.path}; optimizer, scales and schedule are new{why}"
