"""A checkpoint's model in a recipe, to be run and not trained."""

from __future__ import annotations

from pathlib import Path

from fp8stack.backends import build_backend, fp8_state, load_fp8_state
from fp8stack.errors import UserError
from fp8stack.model import GPT, plan_for
from fp8stack.precision import Hardware
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.resume import layers_left_out
from fp8stack.training.sound import model_of
from fp8stack.training.state import restore_weights


def model_in(
    recipe: str, checkpoint: Checkpoint, path: Path, hardware: Hardware, backend: str = "auto"
) -> GPT:
    """The model of `checkpoint` in eval mode, on the device of `hardware`.

    Args:
        recipe: the precision that it is to be run in, whatever it was trained in.
        checkpoint: see `find_checkpoint`.
        path: where it was found.
        hardware: this machine.
        backend: who computes, see `resolve`.

    Raises:
        UserError: delayed scaling is asked of a checkpoint without its scales, or what `resolve`
            raises.
    """
    identity = checkpoint.info["identity"]
    config = model_of(checkpoint)
    plan = plan_for(config, recipe, hardware, backend)
    if plan.scaling == identity["recipe"]["scaling"]:  # its FP8 state is that of its FP8 layers
        left_out = layers_left_out(checkpoint.info["plan"])
        plan = plan_for(config, recipe, hardware, backend, left_out=left_out)
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
