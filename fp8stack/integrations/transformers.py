"""FP8 state in the checkpoints of transformers' Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp8stack.integrations.fp8_state import apply_pending_updates
from fp8stack.layers import fp8_state, load_fp8_state

log = logging.getLogger("fp8stack")

FILE = "fp8.safetensors"
"""The name of the file in each checkpoint."""


class FP8StateCallback(TrainerCallback):
    """Saves the FP8 state with each checkpoint of Trainer, and restores it when training resumes.

    Without it, a resumed run starts with new scales, and its losses differ from the losses of an
    uninterrupted run. With `load_best_model_at_end`, the state of the best checkpoint is restored
    at the end.

    Args:
        resume_from: the checkpoint that `trainer.train(resume_from_checkpoint=...)` resumes from,
            if it is not in this run's `output_dir`: Trainer does not pass it to callbacks.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        self.resume_from = resume_from

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the scales before the model is evaluated or saved."""
        apply_pending_updates(kwargs["model"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the state next to the weights. Of several ranks, which share the state, one
        writes."""
        fp8, checkpoint = fp8_state(kwargs["model"]), _checkpoint(args, state)
        if not fp8 or not args.should_save:
            return
        if checkpoint.is_dir():
            save_file(fp8, checkpoint / FILE)
        else:  # a hyperparameter search keeps each trial in a folder of its own
            log.warning(f"{checkpoint} is not there: the FP8 state is not saved.")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state if training resumes.

        Raises:
            UserError: the model was not converted, or the state does not fit it.
        """
        if state.global_step:
            _restore(kwargs["model"], Path(self.resume_from or _checkpoint(args, state)))
        else:
            fp8_state(kwargs["model"])  # raises now if the model is not converted

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state of the best checkpoint, if Trainer loaded its weights."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            _restore(kwargs["model"], Path(state.best_model_checkpoint))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


def _restore(model: nn.Module, checkpoint: Path) -> None:
    if (checkpoint / FILE).is_file():
        load_fp8_state(model, load_file(checkpoint / FILE))
    elif fp8_state(model):
        log.warning(
            f"{checkpoint} has no {FILE}: the FP8 state is not restored, and losses will differ "
            "from those of the run that saved it. If the checkpoint is in another folder, pass "
            "FP8StateCallback(resume_from=PATH)."
        )
