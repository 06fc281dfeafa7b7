"""A trained model to run: of a run, of a checkpoint, or of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fp8stack.backends import build_backend
from fp8stack.checkpoint.state import restore_weights
from fp8stack.errors import UserError, quoted
from fp8stack.hf import path_in
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Plan
from fp8stack.training.load import TrainedRun, find_checkpoint
from fp8stack.training.setup.init_from import find_source


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedElsewhere:
    """A model of transformers: weights and a tokenizer, without data, recipe or scales."""

    path: Path  # `hf:` and a folder's path, or `hf:owner/name@commit`
    shape: GPTConfig
    weights: Mapping[str, Tensor]
    notes: tuple[str, ...]
    tokenizer: str | None
    config: None = None
    recipe: str = "fp32"

    def plan(self, recipe: str, hardware: Hardware, backend: str) -> Plan:
        """The plan that runs the model in `recipe`. Raises what `resolve` raises, and a UserError
        for delayed scaling."""
        plan = plan_for(self.shape, recipe, hardware, backend)
        if plan.delayed:
            raise UserError(
                f"{quoted(str(self.path))} holds no scales for recipe '{recipe}'. Use recipe "
                "'current'."
            )
        return plan

    def model(self, recipe: str, hardware: Hardware, backend: str) -> GPT:
        """The model in eval mode, on the device of `hardware`. Raises what `plan` raises."""
        model = GPT(self.shape, build_backend(self.plan(recipe, hardware, backend)))
        restore_weights(model, self.weights)
        return model.to(hardware.device).eval()


def find_trained(name: str) -> TrainedRun | TrainedElsewhere:
    """Find a trained model: of a run's newest usable checkpoint, one checkpoint, `hf:` and a folder
    that transformers saved, or `hf:owner/name[@revision]`. Raises what `find_source` and
    `find_checkpoint` raise."""
    if path_in(name) is None:
        checkpoint, path, passed_over = find_checkpoint(name)
        notes = tuple(f"passed over: {reason}" for reason in passed_over)
        return TrainedRun(path=path, checkpoint=checkpoint, notes=notes)
    source = find_source(name)
    return TrainedElsewhere(
        path=Path(source.name),
        shape=source.shape,
        weights=source.weights,
        notes=source.notes,
        tokenizer=None if source.tokenizer is None else str(source.tokenizer),
    )
