"""Resuming: find the run and its checkpoint, check that the configuration matches, restore."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.checkpoint import reader as checkpoints
from fp8stack.checkpoint.reader import Checkpoint, recorded_tokenizer
from fp8stack.checkpoint.state import differences, restore
from fp8stack.checkpoint.validation import can_go_on, load_sound, newest_sound
from fp8stack.config import (
    FREE_ON_RESUME,
    TRACKERS,
    RunConfig,
    at_home,
    parse_config,
    with_files,
)
from fp8stack.distributed.process_group import Ranks
from fp8stack.errors import NoUsableCheckpoint, UserError, quoted
from fp8stack.hf import repository_in
from fp8stack.precision import recipe_from_json
from fp8stack.terminal import shell_quoted
from fp8stack.tokenizer import Tokenizer
from fp8stack.training.load import layers_left_out
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder, choose_folder
from fp8stack.training.setup.datasets import own_tokenizer
from fp8stack.training.setup.init_from import same_source
from fp8stack.training.setup.variants import ANY, Decided


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run to resume: its folder, its saved configuration, and a checkpoint if any; `unasked` if
    the same command was repeated without `--resume`."""

    folder: RunFolder
    saved: RunConfig
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]
    unasked: bool = False


def find_resumption(config: RunConfig, resume: str | None) -> Resumption | None:
    """Find the run to resume; None for a new run. Without `resume`, it is an unfinished run in
    `--out`. Raises a UserError if there is no run at the path, if a process trains it, or if
    `--out` names another folder, and a NoUsableCheckpoint if all its checkpoints, or the one named,
    are damaged."""
    if resume is None:
        if config.out is not None:
            RunFolder(Path(config.out)).require_idle()
        if config.out is None or RunFolder(Path(config.out)).cut_at is None:
            return None
        found = find_resumption(config, "auto")
        return None if found is None else replace(found, unasked=True)
    named = None
    if resume == "auto":
        folder = choose_folder(config, resume=True)
        if not folder.holds_run:
            return None
    else:
        folder, named = _locate(Path(resume))
        if config.out and Path(config.out).resolve() != folder.path.resolve():
            raise UserError(
                f"--resume {resume} goes on in {folder.path}, not in --out {config.out}."
            )
    folder.require_idle()
    if named is not None:
        try:
            return _from_checkpoint(folder, load_sound(named, can_go_on), named, [])
        except NoUsableCheckpoint as error:
            hint = "Give another checkpoint or the run's folder."
            raise NoUsableCheckpoint(f"{error} {hint}") from error
    if checkpoints.candidates(folder.checkpoints):
        return _from_checkpoint(folder, *newest_sound(folder.checkpoints, can_go_on))
    note = f"{folder.path} has no checkpoint yet: starting again from step 1"
    saved = parse_config(str(folder.config), {})
    return Resumption(folder=folder, saved=saved, checkpoint=None, notes=(note,))


def find_together(config: RunConfig, resume: str | None, ranks: Ranks) -> Resumption | None:
    """`find_resumption` on the main rank; then all ranks read the same checkpoint, on a shared file
    system."""
    if ranks.count == 1:
        return find_resumption(config, resume)
    found: Resumption | None = None

    def find() -> str | None:
        nonlocal found
        found = find_resumption(config, resume)
        if found is None:
            return None
        step = None if found.checkpoint is None else found.checkpoint.step
        folder = found.folder
        return str(folder.path if step is None else checkpoints.path_of(folder.checkpoints, step))

    place = ranks.from_main(find)
    if ranks.is_main or place is None:
        return found
    return find_resumption(config, place)


def _from_checkpoint(
    folder: RunFolder, checkpoint: Checkpoint, path: Path, passed_over: list[str]
) -> Resumption:
    """The resumption from a checkpoint, with its configuration: run.toml may have been edited."""
    table = at_home(checkpoint.info["config"], folder.path)
    saved = presets.parse(RunConfig, table, f"{path / 'checkpoint.json'}")
    why = "".join(f"; passed over: {reason}" for reason in passed_over)
    notes = [f"resumed from {path}{why}"]
    try:
        parse_config(str(folder.config), {})
    except UserError as error:
        notes.append(f"{error} It is written anew from the checkpoint.")
    return Resumption(folder=folder, saved=saved, checkpoint=checkpoint, notes=tuple(notes))


def _locate(path: Path) -> tuple[RunFolder, Path | None]:
    """The run folder that `path` names, and the checkpoint in it if it names one."""
    places = [(path, None), (path.parent.parent, path)]
    for folder, named in places if path.parent.name == "checkpoints" else places[:1]:
        if os.path.isfile(folder / "run.toml") or checkpoints.candidates(folder / "checkpoints"):
            return RunFolder(folder), named
    raise UserError(
        f"--resume {quoted(str(path))}: there is no run and no checkpoint. Give a run's folder."
    )


def decided_in(info: Mapping[str, Any]) -> Decided:
    """The decisions that a run resumed from this checkpoint.json keeps."""
    phases, plans = info["phases"], info["plans"]
    recipes = {
        plan["recipe"]["name"]: recipe_from_json(plan["recipe"], "plan in checkpoint.json")
        for plan in (info["plan"], *plans)
    }
    if phases is None or len(plans) < 2:
        return Decided(left_out={ANY: layers_left_out(info["plan"])}, recipes=recipes)
    places = {name: place for name, place in phases["places"].items() if place < len(plans)}
    left_out = {name: layers_left_out(plans[place]) for name, place in places.items()}
    needs_reference = phases["ended_at"] is not None
    return Decided(left_out=left_out, needs_reference=needs_reference, recipes=recipes)


def put_back(run: Run, checkpoint: Checkpoint) -> None:
    """Restore the run's state and step from `checkpoint`. Raises what `restore` raises."""
    restore(run.model, run.optimizer, checkpoint.tensors, run.ranks.index, fp8_model=run.main.model)
    for variant in run.variants:
        variant.backend.weights.mark()
    if run.loss_scaler is not None and checkpoint.info["scaler"] is not None:
        run.loss_scaler.load_state_dict(checkpoint.info["scaler"])
    run.state.step = checkpoint.step


def config_to_resume(found: Resumption, asked: RunConfig) -> RunConfig:
    """The saved configuration with the flags given now; it starts no tracker of its own. Raises a
    UserError if a flag changes something that the run's losses depend on, or if only the saved
    configuration asks for weights of the Hub."""
    source = found.saved.init_from
    if found.checkpoint is None and source and asked.init_from is None and repository_in(source):
        raise UserError(
            f"{found.folder.path} has no checkpoint yet and begins with {source}, which is fetched "
            f"only if you ask for it: add --init-from {shell_quoted(source)}"
        )
    if asked.init_from and same_source(asked.init_from, found.saved.init_from):
        asked = asked.model_copy(update={"init_from": found.saved.init_from})
    asked = _with_saved_files(asked, found.saved)
    saved, given = found.saved.model_dump() | dict.fromkeys(TRACKERS, False), asked.given
    given |= {"guard": saved["guard"] | given.get("guard", {})}
    merged: RunConfig = presets.parse(RunConfig, saved | given, "flags")
    fixed = set(RunConfig.model_fields) - FREE_ON_RESUME
    saved, now = found.saved.model_dump(include=fixed), merged.model_dump(include=fixed)
    refuse_differences(found, list(differences(saved, now)))
    return merged


def left_out_trackers(found: Resumption, asked: RunConfig) -> str | None:
    """A note on the trackers that the saved configuration names and the flags given now do not:
    the run may be a stranger's. None if there are none."""
    names = [key for key in TRACKERS if getattr(found.saved, key) and key not in asked.given]
    if not names:
        return None
    flags = " ".join(f"--{name}" for name in names)
    return f"not started: {', '.join(names)}, which only the saved run names; to go on: {flags}"


def _with_saved_files(asked: RunConfig, saved: RunConfig) -> RunConfig:
    """`asked`, with files replaced by the run's copies if their contents are the same."""

    def read(path: str) -> bytes:
        with suppress(OSError):
            return Path(path).read_bytes()
        return path.encode()

    copies: dict[bytes, str] = {}
    with_files(saved, lambda path: copies.setdefault(read(path), path))
    return with_files(asked, lambda path: copies.get(read(path), path))


def tokenizer_to_resume(found: Resumption, config: RunConfig) -> Path | None:
    """The run's `tokenizer.json`, if it has one. Raises a UserError if it is not the tokenizer that
    the checkpoint records, and `config`, as resumed, names no other file."""
    file = found.folder.tokenizer
    names_file = config.tokenizer is not None and Path(config.tokenizer).resolve() == file.resolve()
    recorded = None if found.checkpoint is None else recorded_tokenizer(found.checkpoint.info)
    if recorded is not None and (names_file or (config.tokenizer is None and file.is_file())):
        own_tokenizer(file, recorded)
    return file if file.is_file() else None


def require_same_tokenizer(found: Resumption, tokenizer: Tokenizer | None) -> str | None:
    """Raise a UserError if `tokenizer`, of the data, is not the one that the checkpoint records.
    Returns a note if the file of the run is missing."""
    assert found.checkpoint is not None
    recorded = recorded_tokenizer(found.checkpoint.info)
    if recorded is None:
        return None
    if tokenizer is None or not recorded.is_alike(tokenizer.identity):
        ours = "unknown" if tokenizer is None else f"{tokenizer.name} ({tokenizer.sha256[:8]})"
        theirs = f"{recorded.name} ({recorded.sha256[:8]})"
        difference = f"the tokenizer is {ours} here and {theirs} in the checkpoint"
        refuse_differences(found, [difference])
    file = found.folder.tokenizer
    return None if file.is_file() else f"{file} was missing: it is written again"


def refuse_differences(
    found: Resumption, differing: list[str], weights_go_on: bool = False
) -> None:
    """Raise a UserError that names the first of the `differing` things, if there is one;
    `weights_go_on` says that a new run may begin with the weights."""
    for what in differing[:1]:
        if what.startswith("data."):
            what = "the data are not those that the run was trained on"
        if found.unasked:
            raise UserError(
                f"{found.folder.path} holds a run already, and another one: {what}. Give the same "
                "command to go on with it, another --out, or remove it by --overwrite."
            )
        new = "start a new run in another --out"
        if weights_go_on:
            new += f", with its weights by --init-from {shell_quoted(str(found.folder.path))}"
        raise UserError(f"Cannot resume {found.folder.path}: {what}. Leave it as it was, or {new}.")
