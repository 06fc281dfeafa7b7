"""A trained model, back from its run."""

from __future__ import annotations

import warnings
from pathlib import Path

from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.validation import has_weights, load_sound, newest_sound
from fp8stack.errors import UserError, quoted
from fp8stack.model.gpt import GPT
from fp8stack.precision import probe
from fp8stack.training.inference import model_in


def load(run_or_checkpoint: str | Path, recipe: str = "fp32") -> GPT:
    """The model of a run's newest good checkpoint, or of one checkpoint, in eval mode.

    Args:
        run_or_checkpoint: a run's folder, or `.../checkpoints/step-000200`.
        recipe: the precision that it is to be run in, whatever it was trained in.

    Returns:
        A GPT on this machine's device: `model(tokens [B, T]) -> logits [B, T, vocabulary]`.

    Raises:
        UserError: no run there, or delayed scaling is asked of a checkpoint without its scales.
        NoUsableCheckpoint: the checkpoint is damaged, or every one of the run.
    """
    checkpoint, path, passed_over = find_checkpoint(run_or_checkpoint)
    for reason in passed_over:
        warnings.warn(f"{path} is used, an older checkpoint. {reason}", stacklevel=2)
    return model_in(recipe, checkpoint, path, probe())


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[Checkpoint, Path, list[str]]:
    """A run's newest good checkpoint, or one checkpoint, its path, and which were passed over.

    Raises:
        UserError: no run and no checkpoint there.
        NoUsableCheckpoint: the checkpoint is damaged, or every one of the run.
    """
    path = Path(run_or_checkpoint)
    try:
        if (path / "checkpoints").is_dir():
            return newest_sound(path / "checkpoints", has_weights)
        if (path / "checkpoint.json").exists():
            return load_sound(path, has_weights), path, []
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or "that is no path"
        raise UserError(f"Cannot read '{quoted(str(path))}': {reason}.") from error
    raise UserError(
        f"No run and no checkpoint at '{quoted(str(path))}'. Give a run's folder or a checkpoint's."
    )
