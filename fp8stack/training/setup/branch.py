"""Begin a branch: a new run with the weights, moments, data position and step of a checkpoint of
another run, and if wanted with another recipe or learning rate.

The branch gets a checkpoint of its own first, with which it is then resumed like any run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8stack.data.tokenizer import save_tokenizer
from fp8stack.layers import fp8_state
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.checkpoint.reader import Checkpoint, path_of
from fp8stack.training.checkpoint.sharded import SharedGroup
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.checkpoint.writer import write_alike
from fp8stack.training.run import Run
from fp8stack.training.setup.resume import (
    Resumption,
    refuse_differences,
    require_same_tokenizer,
    with_quantizers,
)

GUARD_OF_RECIPE: dict[str, Any] = {
    "demoted": {},
    "left_fp16": False,
    "tried": [],
    "bad": [],
    "incidents": 0,
    "last_bad": 0,
    "mended_at": None,
}
WATCH_OF_RECIPE: dict[str, Any] = {"streak": 0, "overflows": 0, "recent": []}
"""The parts of the guard's state that depend on the recipe, as in a new run."""


def begin_branch(run: Run, resumption: Resumption, config: RunConfig) -> Resumption:
    """Write the metrics and the first checkpoint of the branch `run`, and return the resumption
    from that checkpoint. All ranks call this; the main rank writes.

    The metrics, which name the origin, come first: if a kill leaves them alone, the same command
    begins again. Raises a UserError if model, data or tokenizer differ or if the origin is gone,
    and a StorageError if the disk is full.
    """
    checkpoint, origin = resumption.checkpoint, resumption.origin
    assert checkpoint is not None
    assert origin is not None
    folder, step = run.folder, checkpoint.step
    saved = with_quantizers(checkpoint.info["identity"])
    for key in ("model", "data"):
        differing = differences(saved[key], run.identity[key], f"{key}.")
        refuse_differences(resumption, list(differing))
    require_same_tokenizer(resumption, checkpoint, run.data.tokenizer)
    fp8, note = _fp8_state(run, saved, checkpoint)
    plans = [plan.to_json() for plan in run.plans]
    current = {"identity": dict(run.identity), "plan": run.main_plan.to_json(), "plans": plans}
    info = checkpoint.info | current
    info |= _decisions(run, saved, checkpoint, same_phases=resumption.saved.phases == config.phases)
    if run.ranks.is_main:
        folder.take_over_metrics(origin, step)
        if run.data.tokenizer is not None:
            save_tokenizer(run.data.tokenizer, folder.path)
        config = folder.portable(folder.keep_files(config))
        info["config"] = config.model_dump(mode="json")
    checkpoint = replace(checkpoint, info=info, tensors={**checkpoint.tensors, "fp8": fp8})
    if run.ranks.is_main:
        write_alike(folder.checkpoints, checkpoint, origin)
    run.ranks.wait()  # until it is there: shards are read from it, since the origin may be removed
    written = path_of(folder.checkpoints, step)
    tensors = {
        group: values.in_folder(written / group) if isinstance(values, SharedGroup) else values
        for group, values in checkpoint.tensors.items()
    }
    checkpoint = replace(checkpoint, tensors=tensors)
    return replace(resumption, checkpoint=checkpoint, notes=(*resumption.notes, *note))


def _fp8_state(
    run: Run, saved_identity: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[Mapping[str, Tensor], list[str]]:
    """The FP8 state that the branch begins with, and a note: the state of a new run, with the
    checkpoint's counters of stochastic rounding, and with its scales if its recipe and all their
    names and shapes are the same."""
    new, saved = fp8_state(run.model), checkpoint.tensors.get("fp8", {})
    is_same = saved_identity["recipe"] == run.identity["recipe"]
    keeps_scales = is_same and _shapes_of_scales(new) == _shapes_of_scales(saved)
    state = new | {
        name: tensor
        for name, tensor in saved.items()
        if name in new and (keeps_scales or _is_counter(name))
    }
    _, index = run.schedule.at(checkpoint.step + 1)
    if keeps_scales or not run.plans[index].delayed:
        return state, []
    return state, ["the scales of delayed scaling begin at 1, as in a new run"]


def _is_counter(name: str) -> bool:
    """Whether a tensor of the FP8 state counts the random bits that were drawn."""
    return name.endswith(".draws")


def _shapes_of_scales(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items() if not _is_counter(name)}


def _decisions(
    run: Run, saved_identity: Mapping[str, Any], checkpoint: Checkpoint, *, same_phases: bool
) -> dict[str, Any]:
    """The state of phases and guard that the branch begins with: the checkpoint's, except for what
    was decided of recipes that are others now."""
    info, step = checkpoint.info, checkpoint.step
    guard, phases = info["guard"], info["phases"]
    if guard is not None and saved_identity["recipe"] != run.identity["recipe"]:
        guard = guard | GUARD_OF_RECIPE | {"watch": guard["watch"] | WATCH_OF_RECIPE}
    recipes = [[table["recipe"], table.get("recipes")] for table in (saved_identity, run.identity)]
    if not same_phases or recipes[0] != recipes[1]:
        phases = {"ended_at": None, "judged_at": step, "entered": run.schedule.at(step)[0].name}
    if phases is not None:
        phases = phases | {"places": run.schedule.places}
        if run.schedule.reference is None:
            phases["ended_at"] = None
    return {"guard": guard, "phases": phases}
