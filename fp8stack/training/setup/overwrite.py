"""Make room for a new run where there is an old one: what that wrote is removed, by name.

Whatever else lies in the folder stays. It must not know the new run.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fp8stack.checkpoint import reader as checkpoints
from fp8stack.checkpoint import writer
from fp8stack.errors import UserError
from fp8stack.hf import path_in
from fp8stack.io import storage_errors
from fp8stack.training.metrics.profiler import TABLE, TRACE
from fp8stack.training.run_folder import RunFolder

_BESIDES = (
    "report.html",
    "report_files/*.png",
    "presets/*.toml",
    "tensorboard/events.out.tfevents.*",
    f"profile/{TRACE}",
    f"profile/{TABLE}",
)


def refuse_overwriting(out: str | None, resume: str | None, init_from: str | None) -> None:
    """See that what `--overwrite` asks for makes sense.

    Raises:
        UserError: nothing says what to overwrite, or it is needed.
    """
    if resume is not None:
        raise UserError(
            "--overwrite removes a run and --resume goes on with one. Give one of them."
        )
    if out is None:
        raise UserError("--overwrite needs --out, the folder of the run that is to be removed.")
    source = None if init_from is None else path_in(init_from) or Path(init_from)
    if source is not None and source.resolve().is_relative_to(Path(out).resolve()):
        raise UserError(
            f"--init-from {init_from} lies in {out}, which --overwrite removes. Give another --out."
        )


def files_of_run(folder: RunFolder) -> list[Path]:
    """The files in the folder that a run wrote there, checkpoints apart.

    Raises:
        UserError: the folder is a file.
    """
    folder.require_folder()
    own = [
        folder.plan,
        folder.tokenizer,
        folder.telemetry,
        folder.debug,
        folder.plot,
        folder.sample,
        folder.sessions,
    ]
    besides = [file for pattern in _BESIDES for file in sorted(folder.path.glob(pattern))]
    # Those that make it a run come last: cut short, it still is one, without checkpoints.
    return [p for p in (*own, *besides, folder.metrics, folder.config) if p.is_file()]


def remove_run(folder: RunFolder, files: Iterable[Path]) -> str | None:
    """Remove the checkpoints and these `files`, and say so in a line; None if there was nothing.

    The folder is claimed already.

    Raises:
        StorageError: a file cannot be removed.
    """
    names = [path.name for path in checkpoints.candidates(folder.checkpoints)]
    writer.forget_after(folder.checkpoints, -1)
    with storage_errors(folder.path):
        for file in files:
            names.append(str(file.relative_to(folder.path)))
            file.unlink()
            if file.parent != folder.path:
                with suppress(OSError):  # other things are in there
                    file.parent.rmdir()
    return f"overwrote the run in {folder.path}: removed {', '.join(names)}" if names else None
