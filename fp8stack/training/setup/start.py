"""Set up a run, new or resumed, up to its first step."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8stack import data
from fp8stack.common.errors import UnservedAttention, UserError
from fp8stack.common.hub import path_in, repository_in
from fp8stack.common.io import absolute_path
from fp8stack.data.tokenizer import NAMED
from fp8stack.planning.run_config import (
    RunConfig,
    parse_config,
    preset_note,
    with_files,
)
from fp8stack.precision import probe
from fp8stack.training.datasets import with_vocabulary
from fp8stack.training.distributed.process_group import Ranks, join
from fp8stack.training.init_from import tokenizer_to_begin_with, with_source
from fp8stack.training.load import absolute_source, find_source
from fp8stack.training.memory_check import expand_segments
from fp8stack.training.metrics.trackers import start_trackers
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder, new_folder
from fp8stack.training.setup.build import Beginning, build
from fp8stack.training.setup.resume import (
    Request,
    config_to_begin_again,
    find_resumption,
    find_run,
    refuse_differences,
    restore,
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
        resume: "auto", for the run in `--out` if there is one, or the path of a run or checkpoint.
            With another `--out`, a branch begins there. A process that torchrun restarted resumes
            in any case.
        overwrite: remove the run in `--out` once the new one is built.

    Raises:
        UserError: bad input, or a setting that the losses depend on differs from the resumed run.
        NoUsableCheckpoint: `resume` names a run whose checkpoints are all damaged.
    """
    config = with_absolute_paths(parse_config(file, flags, sets))
    if overwrite:
        _refuse_overwriting(config, resume)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    to_resume = resume or ("auto" if restarted else None)
    config, request = find_run(config, to_resume, newest=restarted)
    expand_segments(config.device)  # before CUDA is initialized
    hardware = probe(config.device)
    ranks = join(hardware.device, config.rank_timeout)
    with ranks.together():
        beginning = _find_beginning(config, request, overwrite, ranks)
    try:
        run = build(beginning, hardware, ranks)
    except UnservedAttention as error:
        if beginning.resumption is not None:
            refuse_differences(beginning.resumption, [error.reason], IN_COMPUTE_DTYPE)
        raise
    if restarted and resume is None:
        note = "torchrun started this again: going on as with --resume auto"
        run = replace(run, notes=(*run.notes, note))
    with ranks.together():
        return _begin(run, beginning, overwrite)


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
    config: RunConfig, request: Request | None, overwrite: bool, ranks: Ranks
) -> Beginning:
    """Find the checkpoint to resume from, or a folder for a new run, and complete the
    configuration."""
    resumption = None if request is None else find_resumption(request, config)
    ranks.require_equal("checkpoint", "" if resumption is None else str(resumption.path))
    source, tokenizer_file, notes = None, None, []
    if resumption is not None:
        folder, config = resumption.folder, resumption.config
        notes, tokenizer_file = [*resumption.notes], resumption.tokenizer_file
    elif request is not None:
        folder = request.folder
        notes = [f"{folder.path} has no checkpoint yet: starting again from step 1"]
        config = config_to_begin_again(folder, config)
    else:
        path = ranks.from_main(lambda: str(new_folder(config, overwrite=overwrite).path))
        folder = RunFolder(Path(path))
    use_threads(config.threads)
    if resumption is None and config.init_from:
        source = find_source(config.init_from)
        config = with_source(config, source)
        tokenizer_file = tokenizer_to_begin_with(source, config)
    config, tokenizer = with_vocabulary(config, is_new=resumption is None)
    return Beginning(
        config=config,
        folder=folder,
        resumption=resumption,
        source=source,
        tokenizer=tokenizer,
        tokenizer_file=tokenizer_file,
        continues=request is not None and not (resumption is not None and resumption.is_branch),
        notes=tuple(notes),
    )


def _refuse_overwriting(config: RunConfig, resume: str | None) -> None:
    """Raise a UserError if --out is missing, --resume is given, torchrun may start this process
    again, or a file that the run begins with would be removed."""
    if resume is not None:
        raise UserError(
            "--overwrite removes a run and --resume goes on with one. Give one of them."
        )
    if config.out is None:
        raise UserError("--overwrite needs --out, the folder of the run that is to be removed.")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise UserError(
            "--overwrite removes what the run has trained when torchrun starts it again. Remove "
            f"{config.out} yourself, or give torchrun no --max-restarts."
        )
    used: list[str] = []

    def noted(path: str) -> str:
        used.append(path)
        return path

    with_files(config, noted)
    if config.init_from is not None and repository_in(config.init_from) is None:
        used.append(str(path_in(config.init_from) or config.init_from))
    for path in used:
        if Path(path).resolve().is_relative_to(Path(config.out).resolve()):
            raise UserError(
                f"{path} lies in {config.out}, which --overwrite removes. Give another --out."
            )


def _begin(run: Run, beginning: Beginning, overwrite: bool) -> Run:
    """Restore the checkpoint, lock the folder of `run`, start trackers and write the run's files.
    Returns the run with its notes."""
    folder, resumption, notes = run.folder, beginning.resumption, [*beginning.notes, *run.notes]
    if resumption is not None:
        run = restore(run, resumption)
        notes += run.notes
    elif note := preset_note(run.config):
        notes.append(note)
    if not run.ranks.is_main:
        return replace(run, notes=tuple(notes))
    with folder.released_on_error():
        folder.claim()
        if beginning.continues:
            folder.forget_after(run.step)
        elif resumption is not None:
            folder.take_over_metrics(resumption.path, run.step)
        start_trackers(run.accelerator, folder.path, resumed=beginning.continues)
        if overwrite and (removed := folder.remove()):
            notes.append(removed)
        run = replace(run, config=folder.keep_files(_with_tokenizer(run)), notes=tuple(notes))
        folder.write(run.config, run.plan_json(), run.data.tokenizer)
    return run


def _with_tokenizer(run: Run) -> RunConfig:
    """The run's configuration, with the tokenizer of its text data if the user named none."""
    config, tokenizer = run.config, run.data.tokenizer
    if config.tokenizer or tokenizer is None or not data.holds_text(config.data):
        return config
    if tokenizer.name == "bytes":
        return config
    name = tokenizer.name if tokenizer.name in NAMED else str(run.folder.tokenizer)
    return config.model_copy(update={"tokenizer": name})
