"""Begin a branch: a new run with the weights, moments, data position and step of a checkpoint of
another run, and if wanted with another recipe or learning rate.

Its folder gets a checkpoint of its own first, with which it is then resumed like any run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8stack.layers import fp8_state
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.checkpoint.writer import write_alike
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup.resume import (
    BRANCH,
    Resumption,
    branch_reason,
    refuse_differences,
    with_quantizers,
)

GUARD_OF_RECIPE = {"demoted": {}, "left_fp16": False, "tried": [], "bad": []}
"""The part of the guard's state that depends on the recipe, as in a new run."""


def begin_branch(run: Run, resumption: Resumption, config: RunConfig) -> Resumption:
    """Write the first checkpoint of the branch `run`, with its metrics until then. All ranks call
    this; the main rank writes. Returns the resumption from that checkpoint. Raises a UserError if
    model or data differ, and a StorageError if the disk is full."""
    checkpoint, origin = resumption.checkpoint, resumption.origin
    assert checkpoint is not None
    assert origin is not None
    saved = with_quantizers(checkpoint.info["identity"])
    for key in ("model", "data"):
        differing = differences(saved[key], run.identity[key], f"{key}.")
        refuse_differences(resumption, list(differing))
    fp8, note = _fp8_state(run, checkpoint, is_same=saved["recipe"] == run.identity["recipe"])
    info = dict(checkpoint.info) | {"identity": dict(run.identity)}
    info |= {"plan": run.main.plan.to_json()}
    info |= {"plans": [variant.plan.to_json() for variant in run.variants]}
    if resumption.changes_recipes(config):
        info |= _new_decisions(run, checkpoint)
    if run.ranks.is_main:
        config = run.folder.portable(run.folder.keep_files(config))
        info["config"] = config.model_dump(mode="json")
    tensors = {**checkpoint.tensors, "fp8": fp8}
    checkpoint = replace(checkpoint, info=info, tensors=tensors)
    if run.ranks.is_main:
        write_alike(run.folder.checkpoints, checkpoint, origin)
        event = {"step": checkpoint.step, "event": BRANCH, "why": branch_reason(origin)}
        source = RunFolder(origin.parent.parent)
        run.folder.take_over_metrics(source, checkpoint.step, event)
    notes = (*resumption.notes, *note)
    return replace(resumption, checkpoint=checkpoint, notes=notes)


def _fp8_state(
    run: Run, checkpoint: Checkpoint, *, is_same: bool
) -> tuple[Mapping[str, Tensor], list[str]]:
    """The FP8 state that the branch begins with, and a note: the checkpoint's state if its recipe
    `is_same` and all names and shapes are, else the state of a new run."""
    new, saved = fp8_state(run.main.model), checkpoint.tensors.get("fp8", {})
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (new, saved)]
    if is_same and shapes[0] == shapes[1]:
        return saved, []
    _, place = run.schedule.at(checkpoint.step + 1)
    if run.main.backend.delayed is None or run.variants[place] is not run.main:
        return new, []
    return new, ["the scales of delayed scaling begin at 1, as in a new run"]


def _new_decisions(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The state of phases and guard if recipes differ from the checkpoint's."""
    phase, _ = run.schedule.at(checkpoint.step)
    phases = {"ended_at": None, "judged_at": 0, "entered": phase.name}
    guard = checkpoint.info["guard"]
    return {
        "phases": phases | {"places": run.schedule.places},
        "guard": None if guard is None else guard | GUARD_OF_RECIPE,
    }
