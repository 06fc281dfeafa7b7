"""Set up a run, new or resumed, up to its first step."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8stack import data
from fp8stack.common.errors import UnservedAttention, UserError
from fp8stack.common.hub import path_in, repository_in
from fp8stack.common.io import absolute_path, write_atomically
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.tokenizer import NAMED, save_tokenizer
from fp8stack.planning.run_config import (
    RunConfig,
    for_ranks,
    parse_config,
    preset_note,
    to_toml,
    with_files,
)
from fp8stack.precision import probe
from fp8stack.training.checkpoint.reader import run_of
from fp8stack.training.datasets import named_tokenizer, with_vocabulary
from fp8stack.training.distributed.process_group import Ranks, join
from fp8stack.training.init_from import tokenizer_to_begin_with, with_source
from fp8stack.training.load import absolute_source, find_source
from fp8stack.training.memory_check import expand_segments
from fp8stack.training.metrics.trackers import start_trackers
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder, choose_folder, cut_runs
from fp8stack.training.setup.branch import begin_branch
from fp8stack.training.setup.build import Beginning, build
from fp8stack.training.setup.resume import (
    config_to_resume,
    find_resumption_together,
    left_out_trackers,
    refuse_differences,
    restore,
    tokenizer_to_resume,
    with_saved_machine,
)
from fp8stack.training.threads import use_threads

IN_COMPUTE_DTYPE = "--set recipe.attention=compute"  # flags for attention that is not in FP8


def set_up(
    flags: dict[str, Any],
    file: str | None,
    sets: list[str],
    resume: str | None,
    overwrite: bool = False,
) -> Run:
    """Set up the run that the flags, the run file and `--set` describe.

    Args:
        resume: "auto" or a path, to resume a run. A process that torchrun restarted resumes in any
            case.
        overwrite: remove the run in `--out` once the new one is built.

    Raises:
        UserError: bad input, or a setting that the losses depend on differs from the resumed run.
        NoUsableCheckpoint: `resume` names a run whose checkpoints are all damaged.
    """
    config = with_absolute_paths(parse_config(file, flags, sets))
    if not overwrite:
        config = with_saved_machine(config, resume)
    expand_segments(config.device)  # before CUDA is initialized
    hardware = probe(config.device)
    ranks = join(hardware.device, config.rank_timeout)
    late_notes: tuple[str, ...] = ()
    # torchrun restarted this process after a failure.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        if resume is None and (not overwrite or _removed_by_this_launch(config, ranks)):
            resume, overwrite = "auto", False
            late_notes = ("torchrun started this again: going on as with --resume auto",)
        elif (
            resume is not None
            and (stopped := run_of(Path(resume))) is not None
            and (config.out is None or Path(config.out).resolve() == stopped.resolve())
        ):
            resume = str(stopped)  # newer checkpoints may exist by now
    with ranks.together():
        beginning = _find_beginning(config, resume, overwrite, ranks)
    try:
        run = build(beginning, hardware, ranks)
    except UnservedAttention as error:
        if beginning.resumption is not None and beginning.checkpoint is not None:
            refuse_differences(beginning.resumption, [error.reason], IN_COMPUTE_DTYPE)
        raise
    with ranks.together(), run.folder.released_on_error():
        return _begin(run, beginning, overwrite, late_notes)


def _files_of(config: RunConfig) -> set[str]:
    """The paths of the model, recipe and tokenizer files that `config` names."""
    used: set[str] = set()

    def noted(path: str) -> str:
        used.add(path)
        return path

    with_files(config, noted)
    return used


def _launch() -> str:
    """A text that is the same for all processes that one torchrun starts on this machine."""
    return str(os.getppid())


def _removed_by_this_launch(config: RunConfig, ranks: Ranks) -> bool:
    """Whether --overwrite removed the earlier run before torchrun started this process again."""
    out = Path(config.out or "")
    removed: bool = ranks.from_main(lambda: RunFolder(out).launch == _launch())
    return removed


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """`config` with absolute paths, so that the run can be resumed from any directory."""
    config = with_files(config, absolute_path)
    files: dict[str, Any] = {}
    if config.data is not None:
        files["data"] = data.absolute(config.data)
    if config.init_from is not None:
        files["init_from"] = absolute_source(config.init_from)
    return config.model_copy(update=files)


def _find_beginning(
    config: RunConfig, resume: str | None, overwrite: bool, ranks: Ranks
) -> Beginning:
    """Find the run to resume, or a folder for a new run, and complete the configuration."""
    resumption, source, notes = None, None, None
    if overwrite:
        _refuse_overwriting(config.out, resume, config.init_from)
    else:
        resumption = find_resumption_together(config, resume, ranks)
    if resumption is None:
        folder = RunFolder(Path(ranks.from_main(lambda: _folder_for(config, overwrite))))
    else:
        folder = resumption.folder
        notes = left_out_trackers(resumption, config)
        config = config_to_resume(resumption, config)
    use_threads(config.threads)
    tokenizer_file = None
    if config.init_from and (resumption is None or resumption.checkpoint is None):
        source = find_source(config.init_from)
        config = with_source(config, source)
        tokenizer_file = tokenizer_to_begin_with(source, config)
    elif resumption is not None:
        tokenizer_file = tokenizer_to_resume(resumption, config)
    tokenizer = named_tokenizer(config)
    if resumption is None:
        config = with_vocabulary(for_ranks(config, ranks.count), tokenizer)
    return Beginning(
        config=config,
        folder=folder,
        resumption=resumption,
        source=source,
        tokenizer=tokenizer,
        tokenizer_file=tokenizer_file,
        tracker_note=notes,
    )


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


def _folder_for(config: RunConfig, overwrite: bool) -> str:
    """The path of a new run's folder. Raises a UserError if it cannot be used."""
    folder = choose_folder(config, resume=False)
    if not overwrite:
        folder.require_free()
        return str(folder.path)
    folder.require_folder()
    folder.require_own_files()
    if folder.path.is_symlink():
        raise UserError(
            f"{folder.path} is a symbolic link, and --overwrite removes nothing through one. Give "
            f"--out {shell_quoted(os.path.realpath(folder.path))}"
        )
    return str(folder.path)


def _begin(run: Run, beginning: Beginning, overwrite: bool, late_notes: tuple[str, ...]) -> Run:
    """Lock the folder of `run`, restore the checkpoint, start trackers and write the run's files.
    Returns the run with its notes."""
    folder, config, is_main = run.folder, run.config, run.ranks.is_main
    if is_main:
        folder.claim()
    resumption = beginning.resumption
    if resumption is not None and resumption.origin is not None:
        resumption = begin_branch(run, resumption, _with_tokenizer(run))
    if resumption is None:
        notes = [*run.notes, *_notes_of_new_run(config)]
    else:
        notes = [*resumption.notes, *run.notes, *restore(run, resumption)]
        notes += [beginning.tracker_note] if beginning.tracker_note else []
    notes += late_notes
    if is_main:
        start_trackers(run.accelerator, folder.path, resumed=beginning.continues)
        if overwrite:
            notes += filter(None, [folder.remove(_files_of(config))])
            folder.note_launch(_launch())
        config = folder.keep_files(_with_tokenizer(run))
    checkpoint = None if resumption is None else resumption.checkpoint
    run = replace(
        run, config=config, notes=tuple(notes), resumed=checkpoint.info if checkpoint else None
    )
    if is_main:
        write_atomically(folder.config, to_toml(folder.portable(config)).encode())
        folder.write_plan(run.plan_json())
        if run.data.tokenizer is not None:
            save_tokenizer(run.data.tokenizer, folder.path)
    return run


def _notes_of_new_run(config: RunConfig) -> Iterator[str]:
    """Notes on the training preset and, without `--out`, on an unfinished run."""
    if note := preset_note(config):
        yield note
    cut = None if config.out else next(cut_runs(), None)
    progress = None if cut is None else cut.cut_at
    if cut is not None and progress is not None:
        yield (
            f"{cut.path} was cut after step {progress[0]} of {progress[1]}, and this is a new run; "
            f"to go on with that one: --resume {shell_quoted(str(cut.path))}"
        )


def _with_tokenizer(run: Run) -> RunConfig:
    """The run's configuration, with the tokenizer of its text data if the user named none."""
    config, tokenizer = run.config, run.data.tokenizer
    if config.tokenizer or tokenizer is None or not data.holds_text(config.data):
        return config
    if tokenizer.name == "bytes":
        return config
    name = tokenizer.name if tokenizer.name in NAMED else str(run.folder.tokenizer)
    return config.model_copy(update={"tokenizer": name})
