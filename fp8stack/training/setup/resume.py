"""Resume a run, or begin a branch, a new run with the checkpoint of another one: find the
checkpoint, check that the configuration matches, and restore the run. A branch may run in other
recipes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.hub import repository_in
from fp8stack.common.terminal import shell_quoted
from fp8stack.layers import fp8_state
from fp8stack.model.config import load_config
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
from fp8stack.training.checkpoint.reader import (
    Checkpoint,
    candidates,
    recorded_tokenizer,
    run_of,
)
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.checkpoint.validation import (
    can_go_on,
    layers_left_out,
    load_sound,
    newest_sound,
)
from fp8stack.training.load import emulation_dtype, is_scale, own_tokenizer
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import ANY, Decided


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run that `--resume` names, and its checkpoint if `--resume` names one. Training goes on
    in `folder`, which is the run's own or, for a branch, another `--out`."""

    run: RunFolder
    named: Path | None
    folder: RunFolder

    @property
    def is_branch(self) -> bool:
        """Whether a new run begins with the checkpoint."""
        return self.folder.path.resolve() != self.run.path.resolve()


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint to resume from, the configurations of the run that wrote it and of the run that
    goes on, and the folder in which it goes on."""

    folder: RunFolder
    saved: RunConfig
    config: RunConfig
    checkpoint: Checkpoint
    path: Path  # the checkpoint's
    is_branch: bool
    notes: tuple[str, ...]
    tokenizer_file: Path | None = None  # the run's `tokenizer.json`, if it has one


def find_run(
    config: RunConfig, resume: str | None, *, newest: bool = False
) -> tuple[RunConfig, Request | None]:
    """The run that `resume` names: "auto" for the run in `--out`, or the path of a run or of a
    checkpoint (with `newest`, the run's newest one in its place); None for a new run. `config` gets
    the device and the timeout of that run, which are needed before its checkpoint is read, unless
    it names its own. Raises a UserError if there is no run at the path."""
    request = None if resume is None else _request(config, resume, newest)
    if request is not None:
        with suppress(UserError):
            saved = parse_config(str(request.run.config), {})
            keys = {"device", "rank_timeout"} - config.given.keys()
            config = config.model_copy(update={key: getattr(saved, key) for key in keys})
    return config, request


def _request(config: RunConfig, resume: str, newest: bool) -> Request | None:
    out = None if config.out is None else RunFolder(Path(config.out))
    if resume == "auto":
        if out is None:
            raise UserError("--resume auto needs --out, the run's folder. Or name it: --resume RUN")
        return Request(run=out, named=None, folder=out) if out.holds_run else None
    path = Path(resume)
    places = [(path, None), *([(run, path)] if (run := run_of(path)) else [])]
    for folder, named in places:
        if os.path.isfile(folder / "run.toml") or candidates(folder / "checkpoints"):
            request = Request(run=RunFolder(folder), named=named, folder=out or RunFolder(folder))
            return replace(request, named=None) if newest and not request.is_branch else request
    raise UserError(
        f"--resume {quoted(resume)}: there is no run and no checkpoint. Give a run's folder."
    )


def find_resumption(request: Request, requested: RunConfig) -> Resumption | None:
    """Load the checkpoint to resume from, and complete its configuration with the flags in
    `requested`; None if the run has no checkpoint yet. Raises a UserError if another process trains
    in the folder, the folder of a branch is not free, or a flag changes what the run's losses
    depend on, and a NoUsableCheckpoint if all checkpoints of the run, or the named one, are
    damaged."""
    request.folder.require_idle()
    request = _unless_begun(request)
    run, folder, named = request.run, request.folder, request.named
    if named is None and not candidates(run.checkpoints):
        if request.is_branch:
            raise UserError(f"{run.path} has no checkpoint yet to begin {folder.path} with.")
        if (origin := run.origin) is not None:
            raise UserError(
                f"{run.path} was stopped before it took over {origin}. Begin it again with the "
                f"flags that it had: --resume {shell_quoted(str(origin))} --out {run.path}"
            )
        return None
    if named is None:
        checkpoint, path, passed_over = newest_sound(run.checkpoints, can_go_on)
    else:
        checkpoint, path, passed_over = load_sound(named, can_go_on), named, []
    # run.toml may have been edited.
    table = at_home(checkpoint.info["config"], run.path)
    saved: RunConfig = presets.parse(RunConfig, table, f"{path / 'checkpoint.json'}")
    begins = "a new run that begins with" if request.is_branch else "resumed from"
    note = "; passed over: ".join([f"{begins} {path}", *passed_over])
    resumption = Resumption(
        folder=folder,
        saved=saved,
        config=saved,
        checkpoint=checkpoint,
        path=path,
        is_branch=request.is_branch,
        notes=(note, *_left_out(request, requested, saved)),
    )
    config = _config_to_resume(resumption, requested)
    return replace(resumption, config=config, tokenizer_file=_tokenizer(resumption, config))


def _left_out(request: Request, requested: RunConfig, saved: RunConfig) -> Iterator[str]:
    """Notes on settings in files and flags that the run does not take."""
    try:
        parse_config(str(request.run.config), {})
    except UserError as error:
        if not request.is_branch:
            yield f"{error} It is written anew from the checkpoint."
    # Trackers are not started unless a flag asks for them: the run may be another user's.
    trackers = [key for key in TRACKERS if getattr(saved, key) and key not in requested.given]
    if trackers:
        flags, names = " ".join(f"--{key}" for key in trackers), ", ".join(trackers)
        yield f"not started: {names}, which only the saved run names; to go on: {flags}"
    if requested.init_from:
        yield "--init-from is not read: the run has a checkpoint"


def _unless_begun(request: Request) -> Request:
    """`request`, or for a branch that was begun before, the request to resume that one. Raises a
    UserError if the folder of a branch holds something else."""
    if not request.is_branch:
        return request
    folder, origin = request.folder, request.folder.origin
    is_its_own = origin is not None and origin.parent == request.run.checkpoints.resolve()
    has_begun = bool(candidates(folder.checkpoints))
    if is_its_own and has_begun and (request.named is None or origin == request.named.resolve()):
        return Request(run=folder, named=None, folder=folder)
    if has_begun or not is_its_own:  # else a kill left its metrics alone
        folder.require_free()
    return request


def _over_saved(saved: RunConfig, requested: RunConfig, **more: Any) -> RunConfig:
    """The saved configuration, without its trackers, with the current flags over it and `more`
    between them."""
    table, flags = saved.model_dump() | dict.fromkeys(TRACKERS, False) | more, requested.given
    for key in ("guard", "model_overrides", "recipe_overrides"):
        flags[key] = merged(table[key], flags.get(key, {}))
    config: RunConfig = presets.parse(RunConfig, table | flags, "flags")
    return config


def config_to_begin_again(folder: RunFolder, requested: RunConfig) -> RunConfig:
    """The configuration of a run without a checkpoint, which begins again: its run.toml with the
    current flags. Raises a UserError if run.toml, but no flag, names weights on the Hub."""
    saved = parse_config(str(folder.config), {})
    source = saved.init_from
    if source and repository_in(source) is not None and requested.init_from is None:
        raise UserError(
            f"{folder.path} has no checkpoint yet and begins with {source}, which is "
            f"fetched only if you ask for it: add --init-from {shell_quoted(source)}"
        )
    return _over_saved(saved, requested)


def _config_to_resume(resumption: Resumption, requested: RunConfig) -> RunConfig:
    """The saved configuration with the current flags. Raises a UserError if a flag changes
    something that the run's losses depend on."""
    saved, fresh = resumption.saved, dict[str, Any]()
    requested = _with_saved_files(requested, saved)
    if resumption.is_branch and requested.given.get("recipe", saved.recipe) != saved.recipe:
        fresh["recipe_overrides"] = {}
    name, saved_name = (presets.label(keys.model) for keys in (requested, saved))
    is_other_model = "model" in requested.given and name != saved_name
    if is_other_model:
        fresh["model_overrides"] = {}
    config = _over_saved(saved, requested, **fresh).model_copy(
        update={"init_from": saved.init_from}
    )
    free = FREE_ON_RESUME | {"init_from"} | (FREE_IN_BRANCH if resumption.is_branch else set())
    before, now = (keys.model_dump(exclude=set(free)) for keys in (saved, config))
    refuse_differences(resumption, differences(before, now))
    shape = load_config(config.model, config.model_overrides).model_dump(mode="json")
    changes = list(differences(resumption.checkpoint.info["identity"]["model"], shape, "model."))
    if changes and is_other_model:
        changes = list(differences({"model": saved_name}, {"model": name}))
    refuse_differences(resumption, changes)
    done = resumption.checkpoint.step
    if config.steps < done + resumption.is_branch:  # a finished run says that it is done
        raise UserError(
            f"--steps {config.steps} leaves nothing to train: {resumption.path} has done {done}. "
            "Give more."
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


def _tokenizer(resumption: Resumption, config: RunConfig) -> Path | None:
    """The run's `tokenizer.json`, if it has one. Raises a UserError if it differs from the
    tokenizer that the checkpoint records, unless `config` names another file."""
    file = RunFolder(resumption.path.parent.parent).tokenizer
    names_file = config.tokenizer is not None and Path(config.tokenizer).resolve() == file.resolve()
    recorded = recorded_tokenizer(resumption.checkpoint.info)
    if recorded is not None and (names_file or (config.tokenizer is None and file.is_file())):
        own_tokenizer(file, recorded)
    return file if file.is_file() else None


def decided_before(resumption: Resumption, config: RunConfig) -> Decided:
    """The decisions in the checkpoint that a run does not make again. A branch in other recipes
    takes over only the recipes that no longer ship."""
    decided, saved = _decided_in(resumption.checkpoint.info), resumption.saved
    keys = ("recipe", "recipe_overrides", "phases")
    differ = any(getattr(saved, key) != getattr(config, key) for key in keys)
    uses_auto = "auto" in (config.recipe, *(phase.recipe for phase in config.phases))
    if resumption.is_branch and (differ or uses_auto):  # auto chooses by machine
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
    needs_reference = phases["ended_at"] is not None
    return Decided(left_out=left_out, needs_reference=needs_reference, **decisions)


def _is_in_fp8(plan: Mapping[str, Any]) -> bool:
    return any(layer.get("fp8") for layer in plan["layers"])


def restore(run: Run, resumption: Resumption) -> Run:
    """Restore `run` from the checkpoint, without a change of files. Returns it with notes on what
    differs. Raises a UserError if it is not the run that wrote the checkpoint."""
    checkpoint, config, saved = resumption.checkpoint, run.config, resumption.saved
    identity, notes = _require_same_identity(run, resumption), list[str]()
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
        ("torch", checkpoint.info["versions"].get("torch"), torch.__version__),
    ):
        if before != now:
            notes.append(f"{key} {before} -> {now}: losses may differ")
    if resumption.is_branch:
        same_phases = saved.phases == config.phases
        checkpoint, more = _for_branch(run, checkpoint, identity, same_phases=same_phases)
        notes += more
    run.restore(checkpoint)
    info = checkpoint.info
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
    file = run.folder.tokenizer
    if not resumption.is_branch and run.data.tokenizer is not None and not file.is_file():
        notes.append(f"{file} was missing: it is written again")
    if config.profile and (config.profile_step or run.step + 1) <= run.step:
        notes.append(f"profile_step {config.profile_step} is done already: nothing is profiled")
    return replace(run, notes=tuple(notes), resumed=info)


def _for_branch(
    run: Run, checkpoint: Checkpoint, identity: Mapping[str, Any], *, same_phases: bool
) -> tuple[Checkpoint, list[str]]:
    """The first checkpoint of the branch `run`, and notes.

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
        if name in new and (keeps_scales or not is_scale(name))
    }
    _, index = run.schedule.at(step + 1)
    new_scales = run.plans[index].delayed and not keeps_scales
    notes = ["the scales of delayed scaling begin at 1, as in a new run"] if new_scales else []
    return replace(checkpoint, info=info, tensors={**checkpoint.tensors, "fp8": state}), notes


def _shapes_of_scales(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items() if is_scale(name)}


def _require_same_identity(run: Run, resumption: Resumption) -> Mapping[str, Any]:
    """Raise a UserError if data, tokenizer or, unless in a branch, recipes differ from those in the
    checkpoint. Returns the checkpoint's identity, with recipes in the format of this version."""
    info, current = resumption.checkpoint.info, dict(run.identity)
    saved = {**info["identity"], "recipe": _as_saved_now(info["identity"]["recipe"])}
    recipes = {place: _as_saved_now(keys) for place, keys in saved.pop("recipes").items()}
    saved |= {"recipes": recipes} if recipes else {}
    keys = {"data"} if resumption.is_branch else saved.keys() | current.keys()
    names = [run.main_plan.recipe.name, info["plan"]["recipe"]["name"]]
    if "recipe" in keys and saved["recipe"] != current["recipe"] and names[0] != names[1]:
        by_machine = ", as auto chooses by machine" if run.config.recipe == "auto" else ""
        difference = "recipe is '{}' here and '{}' in the checkpoint".format(*names)
        refuse_differences(resumption, [difference + by_machine])
    before, now = ({key: table[key] for key in keys & table.keys()} for table in (saved, current))
    refuse_differences(resumption, differences(before, now))
    recorded, tokenizer = recorded_tokenizer(info), run.data.tokenizer
    if recorded and (tokenizer is None or not recorded.is_alike(tokenizer.identity)):
        name = "unknown" if tokenizer is None else f"{tokenizer.name} ({tokenizer.sha256[:8]})"
        saved_name = f"{recorded.name} ({recorded.sha256[:8]})"
        difference = f"the tokenizer is {name} here and {saved_name} in the checkpoint"
        refuse_differences(resumption, [difference])
    return saved


def _as_saved_now(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of a checkpoint's identity in the format of this version."""
    return recipe_from_json(recipe, "identity in checkpoint.json").to_json(words=False)


def refuse_differences(resumption: Resumption, differing: Iterable[str], remedy: str = "") -> None:
    """Raise a UserError about the first of the differences, `key is X here and Y in the
    checkpoint`, if any. It suggests a branch if that may change the key or, with the flags
    `remedy`, would be possible."""
    path, difference = resumption.folder.path, next(iter(differing), None)
    if difference is None:
        return
    key = difference.partition(" ")[0].partition(".")[0]
    if difference.startswith("data."):
        difference = "the data are not those that the run was trained on"
    if resumption.is_branch:
        add = f"Add {remedy}" if remedy else "Change recipe, phases, steps or learning rate only."
        raise UserError(f"Cannot begin {path} with {resumption.path}: {difference}. {add}")
    new = "start a new run in another --out"
    if remedy or key in FREE_IN_BRANCH | {"recipe", "recipes"}:
        flags = f"--resume {shell_quoted(str(path))} --out NEW {remedy}".strip()
        new = f"begin a new run with its checkpoint: {flags}"
    raise UserError(f"Cannot resume {path}: {difference}. Leave it as it was, or {new}.")
