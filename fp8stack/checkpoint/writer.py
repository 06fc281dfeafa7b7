"""Checkpoints written whole or not at all, and removed when newer ones take their place.

A checkpoint is written to `.tmp-...`, every file is flushed to the disk, a manifest with SHA-256
sums goes last, and one rename makes it visible. It must not know how a step is trained; it is
handed named tensors and plain data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from fp8stack.checkpoint.reader import (
    FORMAT,
    MANIFEST,
    SHARED,
    Checkpoint,
    FileSum,
    candidates,
    canonical,
    is_whole,
    path_of,
    sha256_of,
    step_of,
)
from fp8stack.checkpoint.sharded import file_of, write_rows
from fp8stack.distributed.process_group import Ranks
from fp8stack.io import TEMPORARY, share_mode, storage_errors, sync_folder, write_flushed


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `checkpoint` to `folder/step-000200` and `retain` the newest `keep`.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched.
    """
    path = write(folder, checkpoint)
    retain(folder, keep, 0, {path})
    return path


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` to `folder/step-000200` and return that path.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    with being_written(folder, checkpoint.step) as temporary:
        files: dict[str, FileSum] = {}
        for group, tensors in checkpoint.tensors.items():
            files |= write_group(temporary, group, tensors)
        return publish(temporary, checkpoint.step, files, checkpoint.info)


def write_together(
    folder: Path, checkpoint: Checkpoint, first_rows: Mapping[str, int], ranks: Ranks
) -> Path:
    """`write`, by all ranks that share out the groups `SHARED`: each writes its rows, and the main
    one the rest.

    Args:
        folder: on a file system that all ranks share.
        checkpoint: what this rank has of it.
        first_rows: at which row of the whole this rank's begin, of tensors that are shared out;
            the main rank writes the others.
        ranks: all of them call this.

    Raises:
        StorageError: a rank cannot write.
        RankLost: a rank is gone.
    """
    final = path_of(folder, checkpoint.step)
    with ExitStack() as cleared:
        with ranks.together():
            if ranks.is_main:
                cleared.enter_context(being_written(folder, checkpoint.step))
        temporary = _temporary_of(folder, checkpoint.step)
        with ranks.together(), storage_errors(folder):
            files: dict[str, FileSum] = {}
            for group, tensors in checkpoint.tensors.items():
                if group in SHARED:
                    files |= _write_rows(temporary / group, tensors, first_rows, ranks)
                elif ranks.is_main:
                    files |= write_group(temporary, group, tensors)
            sums = {name: found.model_dump() for name, found in files.items()}
            for text in ranks.texts(json.dumps(sums)):
                found = {name: FileSum.model_validate(of) for name, of in json.loads(text).items()}
                files |= found
            if ranks.is_main:
                publish(temporary, checkpoint.step, files, checkpoint.info)
    return final


def _write_rows(
    folder: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int], ranks: Ranks
) -> dict[str, FileSum]:
    """Write this rank's file of a group that is shared out; see `write_together`."""
    folder.mkdir(exist_ok=True)
    file = folder / file_of(ranks.index)
    mine = {name: of for name, of in tensors.items() if ranks.is_main or name in first_rows}
    write_rows(file, mine, first_rows)
    found = {f"{folder.name}/{file.name}": _flushed(file, folder.parent)}
    sync_folder(folder)
    return found


@contextmanager
def being_written(folder: Path, step: int) -> Iterator[Path]:
    """The temporary folder that the checkpoint of `step` is written into; gone after.

    Its name depends on the step alone, so that every rank knows it.

    Raises:
        StorageError: whatever within could not be written.
    """
    temporary = _temporary_of(folder, step)
    with storage_errors(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_group(temporary: Path, group: str, tensors: Mapping[str, Tensor]) -> dict[str, FileSum]:
    """Write one file of a checkpoint, flush it to the disk, and return its name and sum."""
    file = temporary / f"{group}.safetensors"
    on_host = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(on_host, file)
    return {file.name: _flushed(file, temporary)}


def _flushed(file: Path, folder: Path) -> FileSum:
    """Flush a file to the disk; as readable as its folder."""
    share_mode(file, folder)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
        return FileSum(bytes=os.fstat(stream.fileno()).st_size, sha256=digest)


def publish(
    temporary: Path, step: int, files: Mapping[str, FileSum], info: Mapping[str, Any]
) -> Path:
    """Write the manifest of the `files` in `temporary`, and make them the checkpoint of `step` by
    one rename; its path is returned."""
    sums = {name: found.model_dump() for name, found in files.items()}
    body = {"format": FORMAT, "step": step, "files": sums, "info": info}
    manifest = {"sha256": sha256_of(canonical(body)), **body}
    write_flushed(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(temporary)
    final = path_of(temporary.parent, step)
    temporary.rename(final)
    sync_folder(final.parent)
    return final


def retain(folder: Path, keep: int, keep_every: int, good: set[Path]) -> None:
    """Remove the checkpoints that are older than the newest `keep` good ones, but not those of
    every `keep_every`-th step (0: of none).

    Good is what is in `good`, which this process wrote or loaded, and what is found whole now, byte
    by byte; it is added there. So a damaged checkpoint never takes the place of a good one, and
    with `keep` at least 2 there are always two good ones, once there were.
    """
    found = 0
    for path in candidates(folder):
        if found < keep:
            if path in good or is_whole(path):
                good.add(path)
                found += 1
        elif not keep_every or step_of(path) % keep_every:
            _remove(path)


def _temporary_of(folder: Path, step: int) -> Path:
    return folder / f"{TEMPORARY}{path_of(folder, step).name}"


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, damaged or abandoned, which are about to be done
    again, and what a process that died in the middle of a save left behind."""
    later = [path for path in candidates(folder) if step_of(path) > step]
    for path in later:
        _remove(path)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what a process that died while it wrote into `folder` left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint: by one rename it is none any more, whenever this is cut short."""
    gone = path.with_name(f"{TEMPORARY}old-{path.name}")
    with suppress(OSError):
        gone = path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
