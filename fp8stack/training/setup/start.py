"""Set up a run, new or resumed, up to its first step."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8stack import data
from fp8stack.checkpoint.state import differences
from fp8stack.config import RunConfig, for_ranks, parse_config, preset_note, to_toml, with_files
from fp8stack.distributed.process_group import join
from fp8stack.errors import UnservedAttention, UserError
from fp8stack.hf import path_in, repository_in
from fp8stack.io import write_atomically
from fp8stack.precision import probe
from fp8stack.terminal import shell_quoted
from fp8stack.threads import use_threads
from fp8stack.tokenizer import NAMED, save_tokenizer
from fp8stack.training.metrics.trackers import start_trackers
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder, choose_folder, cut_runs
from fp8stack.training.setup import resume as resuming
from fp8stack.training.setup.allocator import expand_segments
from fp8stack.training.setup.build import build, with_quantizers
from fp8stack.training.setup.datasets import with_vocabulary
from fp8stack.training.setup.init_from import (
    absolute_source,
    find_source,
    tokenizer_to_begin_with,
    with_source,
)
from fp8stack.training.setup.variants import Decided, leave_fp16, plan_of


def set_up(
    flags: dict[str, Any],
    file: str | None,
    sets: list[str],
    resume: str | None,
    overwrite: bool = False,
) -> Run:
    """Set up the run that the flags, the run file and `--set` describe.

    Args:
        resume: auto or a path, to resume a run; a process that torchrun restarted resumes by
            itself.
        overwrite: remove the run in `--out` once the new one is built.

    Raises:
        UserError: bad input, or a run to resume that differs in what its losses depend on.
        NoUsableCheckpoint: `resume` names a run whose checkpoints are all damaged.
    """
    config = with_absolute_paths(parse_config(file, flags, sets))
    expand_segments(config.device)  # before CUDA is initialized
    hardware = probe(config.device)
    ranks = join(hardware.device, config.rank_timeout)
    # Whether torchrun started this process after another one had failed.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and resume is not None and Path(resume).parent.name == "checkpoints":
        resume = str(Path(resume).parent.parent)  # newer checkpoints may exist by now
    again = resume is None and restarted
    overwrite = overwrite and not again
    source, left_out = None, None
    with ranks.together():
        if overwrite:
            _refuse_overwriting(config.out, resume, config.init_from)
        asked = "auto" if again else resume
        found = None if overwrite else resuming.find_together(config, asked, ranks)
        if found is None:
            config = for_ranks(config, ranks.count)

            def choose() -> str:
                chosen = choose_folder(config, resume=False)
                if overwrite:
                    chosen.require_folder()
                    chosen.require_own_files()
                    if chosen.path.is_symlink():
                        raise UserError(
                            f"{chosen.path} is a symbolic link, and --overwrite removes nothing "
                            f"through one. Give --out {shell_quoted(os.path.realpath(chosen.path))}"
                        )
                else:
                    chosen.require_free()
                return str(chosen.path)

            folder = RunFolder(Path(ranks.from_main(choose)))
        else:
            folder = found.folder
            left_out = resuming.left_out_trackers(found, config)
            config = resuming.config_to_resume(found, config)
        use_threads(config.threads)
        if config.init_from and (found is None or found.checkpoint is None):
            source = find_source(config.init_from)
            config = with_source(config, source)
        if found is None:
            config = with_vocabulary(config)
    checkpoint = found.checkpoint if found else None
    with ranks.together():
        if source is not None:
            tokenizer = tokenizer_to_begin_with(source, config)
        else:
            tokenizer = None if found is None else resuming.tokenizer_to_resume(found, config)
    try:
        run = build(
            config,
            folder,
            resuming.decided_in(checkpoint.info) if checkpoint else Decided(),
            hardware=hardware,
            ranks=ranks,
            source=source,
            tokenizer=tokenizer,
        )
    except UnservedAttention as error:
        if found is not None and checkpoint is not None:
            resuming.refuse_differences(found, [error.reason], weights_go_on=True)
        raise
    notes = run.notes
    with ranks.together(), folder.released_on_error():
        if ranks.is_main:
            folder.claim()
        if found is None:
            notes += tuple(filter(None, (preset_note(config), _cut_note(config))))
        else:
            notes = found.notes + notes + _resume(run, found)
            notes += (left_out,) if left_out else ()
        if ranks.is_main:
            start_trackers(run.accelerator, folder.path, resumed=found is not None)
        removed = folder.remove() if overwrite and ranks.is_main else None
        goes_on = "torchrun started this again: going on as with --resume auto" if again else None
        run = replace(
            run,
            config=folder.keep_files(pinned(run)) if ranks.is_main else config,
            notes=notes + tuple(note for note in (goes_on, removed) if note),
            resumed=checkpoint.info if checkpoint else None,
        )
        if ranks.is_main:
            write_atomically(folder.config, to_toml(folder.portable(run.config)).encode())
            folder.write_plan(plan_of(run))
            if run.data.tokenizer is not None:
                save_tokenizer(run.data.tokenizer, folder.path)
    return run


def _refuse_overwriting(out: str | None, resume: str | None, init_from: str | None) -> None:
    """Raise a UserError if --out is missing, --resume is given, or `init_from` would be removed."""
    if resume is not None:
        raise UserError(
            "--overwrite removes a run and --resume goes on with one. Give one of them."
        )
    if out is None:
        raise UserError("--overwrite needs --out, the folder of the run that is to be removed.")
    source = None
    if init_from is not None and repository_in(init_from) is None:
        source = path_in(init_from) or Path(init_from)
    if source is not None and source.resolve().is_relative_to(Path(out).resolve()):
        raise UserError(
            f"--init-from {init_from} lies in {out}, which --overwrite removes. Give another --out."
        )


def pinned(run: Run) -> RunConfig:
    """The run's configuration, naming the tokenizer of its text if the user named none."""
    config, tokenizer = run.config, run.data.tokenizer
    if config.tokenizer or tokenizer is None or not data.holds_text(config.data):
        return config
    if tokenizer.name == "bytes":
        return config
    name = tokenizer.name if tokenizer.name in NAMED else str(run.folder.tokenizer)
    return config.model_copy(update={"tokenizer": name})


def _cut_note(config: RunConfig) -> str | None:
    """A note for a new run without `--out` that there is an unfinished run to resume."""
    cut = None if config.out else next(cut_runs(), None)
    at = None if cut is None else cut.cut_at
    if cut is None or at is None:
        return None
    return (
        f"{cut.path} was cut after step {at[0]} of {at[1]}, and this is a new run; to go on with "
        f"that one: --resume {shell_quoted(str(cut.path))}"
    )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """`config` with absolute paths, so that the run can be resumed from any directory."""
    config = with_files(config, os.path.realpath)
    files: dict[str, Any] = {}
    if config.data is not None:
        files["data"] = data.absolute(config.data)
    if config.init_from is not None:
        files["init_from"] = absolute_source(config.init_from)
    return config.model_copy(update=files)


def _resume(run: Run, found: resuming.Resumption) -> tuple[str, ...]:
    """Restore `run` from the checkpoint, and return notes about it."""
    checkpoint, config, saved = found.checkpoint, run.config, found.saved
    if checkpoint is None:
        if run.ranks.is_main:
            run.folder.forget_after(0)
        return ()
    notes, info = list[str](), checkpoint.info
    theirs, ours = with_quantizers(info["identity"]), dict(run.identity)
    if theirs["recipe"]["compute_dtype"] != ours["recipe"]["compute_dtype"]:
        by_machine = ", as auto chooses by machine" if config.recipe == "auto" else ""
        names = [run.main.plan.recipe.name, info["plan"]["recipe"]["name"]]
        differing = "recipe is '{}' here and '{}' in the checkpoint".format(*names)
        resuming.refuse_differences(found, [differing + by_machine], weights_go_on=True)
    resuming.refuse_differences(found, list(differences(theirs, ours)))
    if missing := resuming.require_same_tokenizer(found, run.data.tokenizer):
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
        before, now = (one.threads or "torch's choice" for one in (saved, config))
        notes.append(f"threads {before} -> {now}: sums may round differently")
    if (then := info["versions"].get("torch")) != torch.__version__:
        notes.append(f"torch {then} -> {torch.__version__}: losses may differ")
    resuming.put_back(run, checkpoint)
    if (guard := info["guard"]) is not None:
        for layer in guard["demoted"]:
            run.set_fp8(layer, False)
        if guard["left_fp16"]:
            leave_fp16(run)
            notes.append("the guard left fp16 before: the run goes on in bf16")
    if config.profile and (config.profile_step or run.step + 1) <= run.step:
        notes.append(f"profile_step {config.profile_step} is done already: nothing is profiled")
    if run.ranks.is_main:
        run.folder.forget_after(run.step)
    return tuple(notes)
