"""The state that a branch takes over from a checkpoint: a branch may run in other recipes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8stack.layers import fp8_state
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.run import Run


def for_branch(
    run: Run, checkpoint: Checkpoint, identity: Mapping[str, Any], *, same_phases: bool
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with which the branch `run` begins, and notes.

    In another recipe, FP8 scales and the guard are those of a new run; the counters of stochastic
    rounding go on. Unless phases and recipes are the checkpoint's, no quality check has ended the
    phases yet.

    Args:
        identity: the checkpoint's, see `Run.identity`.
        same_phases: whether the phases are the checkpoint's; their recipes are compared here.
    """
    info, step = dict(checkpoint.info), checkpoint.step
    is_same = identity["recipe"] == run.identity["recipe"]
    if not is_same:
        info["guard"] = None
    same_phases &= is_same and identity.get("recipes") == run.identity.get("recipes")
    if not same_phases or run.schedule.reference is None:
        entered = run.schedule.at(step)[0].name
        info["phases"] = {"ended_at": None, "judged_at": step, "entered": entered}
    new, saved = fp8_state(run.model), checkpoint.tensors.get("fp8", {})
    keeps_scales = is_same and _shapes_of_scales(new) == _shapes_of_scales(saved)
    state = new | {
        name: tensor
        for name, tensor in saved.items()
        if name in new and (keeps_scales or _is_counter(name))
    }
    _, index = run.schedule.at(step + 1)
    new_scales = run.plans[index].delayed and not keeps_scales
    notes = ["the scales of delayed scaling begin at 1, as in a new run"] if new_scales else []
    return replace(checkpoint, info=info, tensors={**checkpoint.tensors, "fp8": state}), notes


def _is_counter(name: str) -> bool:
    """Whether a tensor of the FP8 state counts the random bits that were drawn."""
    return name.endswith(".draws")


def _shapes_of_scales(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items() if not _is_counter(name)}
