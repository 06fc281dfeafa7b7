"""Resume a run: find it and its checkpoint, check that the configuration matches, restore it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8stack.common import presets
from fp8stack.common.errors import NoUsableCheckpoint, UserError, quoted
from fp8stack.common.hub import repository_in
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.planning.run_config import (
    FREE_IN_BRANCH,
    FREE_ON_RESUME,
    TRACKERS,
    RunConfig,
    at_home,
    merged,
    parse_config,
    with_files,
)
from fp8stack.precision import recipe_from_json
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint.reader import Checkpoint, recorded_tokenizer
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.checkpoint.validation import can_go_on, load_sound, newest_sound
from fp8stack.training.distributed.process_group import Ranks
from fp8stack.training.init_from import same_source
from fp8stack.training.load import emulation_dtype, layers_left_out, own_tokenizer
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder, choose_folder
from fp8stack.training.run_plans import ANY, Decided, without_folder


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run to resume: its folder, its saved configuration and its checkpoint, if any. `unasked`:
    without `--resume`, because `--out` contains an unfinished run. `origin`: of a branch, that is a
    new run in `folder`, the checkpoint of another run that it begins with."""

    folder: RunFolder
    saved: RunConfig
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]
    unasked: bool = False
    origin: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The path of the `tokenizer.json` of the run that wrote the checkpoint."""
        folder = self.folder if self.origin is None else RunFolder(self.origin.parent.parent)
        return folder.tokenizer

    def changes_recipes(self, config: RunConfig) -> bool:
        """Whether the recipes of a branch with the configuration `config` may differ from its
        origin's. The recipe that `auto` stands for is chosen again."""
        keys = ("recipe", "recipe_overrides", "phases")
        differ = any(getattr(self.saved, key) != getattr(config, key) for key in keys)
        return differ or "auto" in (config.recipe, *(phase.recipe for phase in config.phases))


def find_resumption_together(
    config: RunConfig, resume: str | None, ranks: Ranks
) -> Resumption | None:
    """Call `find_resumption` on the main rank; the other ranks read the same checkpoint from a
    shared file system."""
    if ranks.count == 1:
        return find_resumption(config, resume)
    resumption: Resumption | None = None

    def find() -> str | None:
        nonlocal resumption
        resumption = find_resumption(config, resume)
        if resumption is None:
            return None
        folder, checkpoint = resumption.folder, resumption.checkpoint
        if checkpoint is None:
            return str(folder.path)
        if resumption.origin is not None:
            return str(resumption.origin)
        return str(checkpoints.path_of(folder.checkpoints, checkpoint.step))

    path = ranks.from_main(find)
    if ranks.is_main or path is None:
        return resumption
    return find_resumption(config, path)


def find_resumption(config: RunConfig, resume: str | None) -> Resumption | None:
    """Find the run to resume; None for a new run. Without `resume`, an unfinished run in `--out` is
    resumed. If `resume` is a path and `--out` another folder, a branch begins there. Raises a
    UserError if there is no run at the path, if another process trains it, or if the folder of a
    branch is not free. Raises a NoUsableCheckpoint if all its checkpoints, or the given one, are
    damaged."""
    if resume is None:
        if config.out is not None:
            RunFolder(Path(config.out)).require_idle()
        if config.out is None or RunFolder(Path(config.out)).cut_at is None:
            return None
        resumption = find_resumption(config, "auto")
        return None if resumption is None else replace(resumption, unasked=True)
    named = None
    if resume == "auto":
        folder = choose_folder(config, resume=True)
        if not folder.holds_run:
            return None
    else:
        folder, named = _locate(Path(resume))
        if config.out and Path(config.out).resolve() != folder.path.resolve():
            return _branch(config, RunFolder(Path(config.out)), folder, named)
    folder.require_idle()
    if named is not None or checkpoints.candidates(folder.checkpoints):
        return _from_checkpoint(folder, *_load(folder, named))
    if (origin := folder.origin) is not None:
        raise UserError(
            f"{folder.path} was stopped before it took over {origin}. Begin it again with the "
            f"flags that it had: --resume {shell_quoted(str(origin))} --out {folder.path}"
        )
    note = f"{folder.path} has no checkpoint yet: starting again from step 1"
    saved = parse_config(str(folder.config), {})
    return Resumption(folder=folder, saved=saved, checkpoint=None, notes=(note,))


def with_saved_machine(config: RunConfig, resume: str | None) -> RunConfig:
    """`config` with the device and the timeout of the run that it resumes, unless it names its own.
    They are needed before the run's configuration is read."""
    folder = None
    with suppress(UserError):
        if resume not in (None, "auto"):
            folder, _ = _locate(Path(str(resume)))
        elif resume == "auto" or config.out is not None:
            folder = choose_folder(config, resume=resume is not None)
        if folder is not None and folder.config.exists():
            saved = parse_config(str(folder.config), {})
            keys = {"device", "rank_timeout"} - config.given.keys()
            return config.model_copy(update={key: getattr(saved, key) for key in keys})
    return config


def _locate(path: Path) -> tuple[RunFolder, Path | None]:
    """The run folder that `path` names, and the checkpoint in it if it names one."""
    places: list[tuple[Path, Path | None]] = [(path, None)]
    if (run := checkpoints.run_of(path)) is not None:
        places.append((run, path))
    for folder, named in places:
        if os.path.isfile(folder / "run.toml") or checkpoints.candidates(folder / "checkpoints"):
            return RunFolder(folder), named
    raise UserError(
        f"--resume {quoted(str(path))}: there is no run and no checkpoint. Give a run's folder."
    )


def _load(folder: RunFolder, named: Path | None) -> tuple[Checkpoint, Path, list[str]]:
    """The checkpoint `named`, or the newest usable one of the run, its path, and the reasons why
    newer ones are not used. Raises a NoUsableCheckpoint if it, or every one, is damaged."""
    if named is None:
        return newest_sound(folder.checkpoints, can_go_on)
    try:
        return load_sound(named, can_go_on), named, []
    except NoUsableCheckpoint as error:
        hint = "Give another checkpoint or the run's folder."
        raise NoUsableCheckpoint(f"{error} {hint}") from error


def _branch(
    config: RunConfig, folder: RunFolder, source: RunFolder, named: Path | None
) -> Resumption | None:
    """A new run in `folder` that begins with the checkpoint `named` of the run in `source`, or with
    its newest one; or that run, if it was begun before. A process may train in `source`
    meanwhile."""
    folder.require_idle()
    origin, has_begun = folder.origin, bool(checkpoints.candidates(folder.checkpoints))
    is_branch = origin is not None and origin.parent == source.checkpoints.resolve()
    if is_branch and has_begun and (named is None or origin == named.resolve()):
        resumption = find_resumption(config, "auto")
        return None if resumption is None else replace(resumption, unasked=True)
    if has_begun or not is_branch:  # else a kill left its metrics alone
        folder.require_free()
    if named is None and not checkpoints.candidates(source.checkpoints):
        raise UserError(f"{source.path} has no checkpoint yet to begin {folder.path} with.")
    checkpoint, path, passed_over = _load(source, named)
    begins = "a new run that begins with"
    resumption = _from_checkpoint(source, checkpoint, path, passed_over, begins)
    return replace(resumption, folder=folder, notes=resumption.notes[:1], origin=path)


def _from_checkpoint(
    folder: RunFolder,
    checkpoint: Checkpoint,
    path: Path,
    passed_over: list[str],
    begins: str = "resumed from",
) -> Resumption:
    """The resumption from a checkpoint. The configuration is the checkpoint's, since run.toml may
    have been edited."""
    table = at_home(checkpoint.info["config"], folder.path)
    saved = presets.parse(RunConfig, table, f"{path / 'checkpoint.json'}")
    reasons = "".join(f"; passed over: {reason}" for reason in passed_over)
    notes = [f"{begins} {path}{reasons}"]
    try:
        parse_config(str(folder.config), {})
    except UserError as error:
        notes.append(f"{error} It is written anew from the checkpoint.")
    return Resumption(folder=folder, saved=saved, checkpoint=checkpoint, notes=tuple(notes))


def left_out_trackers(resumption: Resumption, requested: RunConfig) -> str | None:
    """A note on the trackers that are in the saved configuration but not in the flags. They are not
    started, since the run may be another user's. None if there are none."""
    saved = resumption.saved
    names = [key for key in TRACKERS if getattr(saved, key) and key not in requested.given]
    if not names:
        return None
    flags = " ".join(f"--{name}" for name in names)
    return f"not started: {', '.join(names)}, which only the saved run names; to go on: {flags}"


def config_to_resume(resumption: Resumption, requested: RunConfig) -> RunConfig:
    """The saved configuration, without its trackers, with the current flags. Raises a UserError if
    a flag changes something that the run's losses depend on, or if the saved configuration, but no
    flag, names weights on the Hub."""
    saved, source = resumption.saved, resumption.saved.init_from
    in_hub = source is not None and repository_in(source) is not None
    if resumption.checkpoint is None and source and in_hub and requested.init_from is None:
        raise UserError(
            f"{resumption.folder.path} has no checkpoint yet and begins with {source}, which is "
            f"fetched only if you ask for it: add --init-from {shell_quoted(source)}"
        )
    if requested.init_from and same_source(requested.init_from, source):
        requested = requested.model_copy(update={"init_from": source})
    requested = _with_saved_files(requested, saved)
    table, flags = saved.model_dump() | dict.fromkeys(TRACKERS, False), requested.given
    is_branch = resumption.origin is not None
    if is_branch and flags.get("recipe", saved.recipe) != saved.recipe:
        table["recipe_overrides"] = {}
    for key in ("guard", "model_overrides", "recipe_overrides"):
        flags[key] = merged(table[key], flags.get(key, {}))
    config: RunConfig = presets.parse(RunConfig, table | flags, "flags")
    fixed = set(RunConfig.model_fields) - FREE_ON_RESUME - (FREE_IN_BRANCH if is_branch else set())
    changes = differences(saved.model_dump(include=fixed), config.model_dump(include=fixed))
    refuse_differences(resumption, list(changes))
    if is_branch and resumption.checkpoint is not None:
        done = resumption.checkpoint.step
        if config.steps <= done:
            raise UserError(
                f"--steps {config.steps} leaves nothing to train: {resumption.origin} has done "
                f"{done}. Give more."
            )
    return config


def _with_saved_files(requested: RunConfig, saved: RunConfig) -> RunConfig:
    """`requested` with the paths of the run's copies for files of the same contents."""

    def read(path: str) -> bytes:
        with suppress(OSError):
            return Path(path).read_bytes()
        return path.encode()

    copies: dict[bytes, str] = {}
    with_files(saved, lambda path: copies.setdefault(read(path), path))
    return with_files(requested, lambda path: copies.get(read(path), path))


def tokenizer_to_resume(resumption: Resumption, config: RunConfig) -> Path | None:
    """The run's `tokenizer.json`, if it has one. Raises a UserError if it differs from the
    tokenizer that the checkpoint records, unless `config` names another file."""
    file, checkpoint = resumption.tokenizer, resumption.checkpoint
    names_file = config.tokenizer is not None and Path(config.tokenizer).resolve() == file.resolve()
    recorded = None if checkpoint is None else recorded_tokenizer(checkpoint.info)
    if recorded is not None and (names_file or (config.tokenizer is None and file.is_file())):
        own_tokenizer(file, recorded)
    return file if file.is_file() else None


def decided_before(resumption: Resumption, config: RunConfig) -> Decided:
    """The decisions in the checkpoint, if any, that a run does not make again. A branch in other
    recipes takes over only the recipes that no longer ship."""
    if resumption.checkpoint is None:
        return Decided()
    decided = _decided_in(resumption.checkpoint.info)
    if resumption.origin is not None and resumption.changes_recipes(config):
        return Decided(recipes=decided.recipes)
    return decided


def _decided_in(info: Mapping[str, Any]) -> Decided:
    phases, plans = info["phases"], info["plans"]
    recipes = {
        plan["recipe"]["name"]: recipe_from_json(plan["recipe"], "plan in checkpoint.json")
        for plan in (info["plan"], *plans)
    }
    dtypes = map(emulation_dtype, (info["plan"], *plans))
    decisions: dict[str, Any] = {
        "recipes": recipes,
        "compute_dtype": next(filter(None, dtypes), None),
    }
    if phases is None or len(plans) < 2:
        decisions["auto_in_fp8"] = _is_in_fp8(info["plan"])
        return Decided(left_out={ANY: layers_left_out(info["plan"])}, **decisions)
    places = {name: place for name, place in phases["places"].items() if place < len(plans)}
    decisions["auto_in_fp8"] = "auto" not in places or _is_in_fp8(plans[places["auto"]])
    left_out = {name: layers_left_out(plans[place]) for name, place in places.items()}
    names = [without_folder(name) for name in left_out]
    left_out |= {
        name: layers
        for name, layers in zip(names, [*left_out.values()], strict=True)
        if names.count(name) == 1
    }
    needs_reference = phases["ended_at"] is not None
    return Decided(left_out=left_out, needs_reference=needs_reference, **decisions)


def _is_in_fp8(plan: Mapping[str, Any]) -> bool:
    return any(layer.get("fp8") for layer in plan["layers"])


def restore(run: Run, resumption: Resumption) -> list[str]:
    """Restore `run` from the checkpoint, if there is one, and return notes. Raises a UserError if
    the run differs from the one that wrote the checkpoint."""
    checkpoint, config, saved = resumption.checkpoint, run.config, resumption.saved
    if checkpoint is None:
        if run.ranks.is_main:
            run.folder.forget_after(0)
        return []
    notes, info = list[str](), checkpoint.info
    _require_same_identity(run, resumption, info)
    if missing := require_same_tokenizer(resumption, checkpoint, run.data.tokenizer):
        notes.append(missing)
    if checkpoint.step > config.steps:
        raise UserError(
            f"--steps {config.steps} is less than the {checkpoint.step} that the run has done. "
            "Give at least as many."
        )
    if config.steps != saved.steps:
        several = len(run.schedule.phases) > 1
        follows = "and the phases follow" if several else "follows"
        notes.append(f"steps {saved.steps} -> {config.steps}: the learning rate {follows} the new")
    if config.threads != saved.threads:
        before, now = (table.threads or "torch's choice" for table in (saved, config))
        notes.append(f"threads {before} -> {now}: sums may round differently")
    ranks = sum(name.startswith("cpu") for name in checkpoint.tensors["rng"])
    for key, before, now in (
        ("accumulate", saved.accumulate, config.accumulate),
        ("ranks", ranks, run.ranks.count),
        ("torch", info["versions"].get("torch"), torch.__version__),
    ):
        if before != now:
            notes.append(f"{key} {before} -> {now}: losses may differ")
    run.restore(checkpoint)
    if (guard := info["guard"]) is not None:
        run.demote(guard["demoted"])
        if guard["left_fp16"]:
            run.leave_fp16()
            notes.append("the guard left fp16 before: the run goes on in bf16")
    if (phases := info["phases"]) is not None and phases["ended_at"] is not None:
        notes.append(
            f"guard.quality ended the phases after step {phases['ended_at']}: the run goes on in "
            "fp32"
        )
    if config.profile and (config.profile_step or run.step + 1) <= run.step:
        notes.append(f"profile_step {config.profile_step} is done already: nothing is profiled")
    if run.ranks.is_main:
        run.folder.forget_after(run.step)
    return notes


def _require_same_identity(run: Run, resumption: Resumption, info: Mapping[str, Any]) -> None:
    """Raise a UserError if model, recipes or data differ from those in checkpoint.json."""
    saved, current = with_quantizers(info["identity"]), dict(run.identity)
    names = [run.main_plan.recipe.name, info["plan"]["recipe"]["name"]]
    if saved["recipe"] != current["recipe"] and names[0] != names[1]:
        by_machine = ", as auto chooses by machine" if run.config.recipe == "auto" else ""
        difference = "recipe is '{}' here and '{}' in the checkpoint".format(*names)
        refuse_differences(resumption, [difference + by_machine])
    refuse_differences(resumption, list(differences(saved, current)))


def with_quantizers(identity: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's identity, with recipes converted to the format of this version."""

    def as_saved_now(recipe: Mapping[str, Any]) -> dict[str, Any]:
        return recipe_from_json(recipe, "identity in checkpoint.json").to_json(words=False)

    current = {**identity, "recipe": as_saved_now(identity["recipe"])}
    if "recipes" in identity:
        recipes = identity["recipes"].items()
        current["recipes"] = {place: as_saved_now(recipe) for place, recipe in recipes}
    return current


def require_same_tokenizer(
    resumption: Resumption, checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> str | None:
    """Raise a UserError if the data's `tokenizer` differs from the one that the checkpoint records.
    Returns a note if the run's tokenizer.json is missing."""
    recorded = recorded_tokenizer(checkpoint.info)
    if recorded is None:
        return None
    if tokenizer is None or not recorded.is_alike(tokenizer.identity):
        current = "unknown" if tokenizer is None else f"{tokenizer.name} ({tokenizer.sha256[:8]})"
        saved = f"{recorded.name} ({recorded.sha256[:8]})"
        difference = f"the tokenizer is {current} here and {saved} in the checkpoint"
        refuse_differences(resumption, [difference])
    file = resumption.folder.tokenizer
    return None if file.is_file() else f"{file} was missing: it is written again"


def refuse_differences(resumption: Resumption, differing: list[str], remedy: str = "") -> None:
    """Raise a UserError about the first of the differences, `key is X here and Y in the
    checkpoint`, if any. It suggests a branch if that may change the key or, with the flags
    `remedy`, would be possible."""
    if not differing:
        return
    path, difference = resumption.folder.path, differing[0]
    key = difference.partition(" ")[0].partition(".")[0]
    may_branch = bool(remedy) or key in FREE_IN_BRANCH | {"recipe", "recipes"}
    if difference.startswith("data."):
        difference = "the data are not those that the run was trained on"
    if resumption.unasked:
        raise UserError(
            f"{path} holds a run already, and another one: {difference}. Give the same command to "
            "go on with it, another --out, or remove it by --overwrite."
        )
    if resumption.origin is not None:
        add = f"Add {remedy}" if remedy else "Change recipe, phases, steps or learning rate only."
        raise UserError(f"Cannot begin {path} with {resumption.origin}: {difference}. {add}")
    new = "start a new run in another --out"
    if resumption.checkpoint is not None and may_branch:
        flags = f"--resume {shell_quoted(str(path))} --out NEW {remedy}".strip()
        new = f"begin a new run with its checkpoint: {flags}"
    raise UserError(f"Cannot resume {path}: {difference}. Leave it as it was, or {new}.")
