"""A trained model, back from its run."""

from __future__ import annotations

from pathlib import Path

from fp8stack import presets
from fp8stack.backends import build_backend, fp8_state, load_fp8_state
from fp8stack.errors import NoUsableCheckpoint, UserError, quoted
from fp8stack.model import GPT, GPTConfig, plan_for
from fp8stack.precision import probe
from fp8stack.training import checkpoint as checkpoints
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.resume import layers_left_out
from fp8stack.training.state import restore_weights


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
    checkpoint, path = find_checkpoint(run_or_checkpoint)
    identity = checkpoint.info["identity"]
    config: GPTConfig = presets.parse(GPTConfig, identity["model"], f"{path}")
    hardware = probe()
    plan = plan_for(config, recipe, hardware)
    if plan.scaling == identity["recipe"]["scaling"]:  # its FP8 state is that of its FP8 layers
        plan = plan_for(config, recipe, hardware, left_out=layers_left_out(checkpoint.info))
    model = GPT(config, build_backend(plan))
    restore_weights(model, checkpoint.tensors.get("model", {}))
    if fp8_state(model):
        if "fp8" not in checkpoint.tensors:
            raise UserError(
                f"{path} holds no scales for recipe '{recipe}': it was trained in "
                f"{identity['recipe']['scaling']}. Use recipe 'current'."
            )
        load_fp8_state(model, checkpoint.tensors["fp8"])
    return model.to(hardware.device).eval()


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[Checkpoint, Path]:
    """A run's newest good checkpoint, or one checkpoint, and its path.

    Raises:
        UserError: no run and no checkpoint there.
        NoUsableCheckpoint: the checkpoint is damaged, or every one of the run.
    """
    path = Path(run_or_checkpoint)
    try:
        if (path / "checkpoints").is_dir():
            checkpoint, path, _ = checkpoints.newest(path / "checkpoints")
            return checkpoint, path
        if (path / "checkpoint.json").is_file():
            return checkpoints.load(path), path
    except OSError as error:  # such as a name that is too long
        raise UserError(f"Cannot read '{quoted(str(path))}': {error.strerror}.") from error
    except UserError as error:
        raise NoUsableCheckpoint(str(error)) from error
    raise UserError(
        f"No run and no checkpoint at '{quoted(str(path))}'. Give a run's folder or a checkpoint's."
    )
