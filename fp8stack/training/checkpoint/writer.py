"""Write checkpoints atomically, and remove them when newer ones take their place. A checkpoint is
written to `.tmp-...`, every file is flushed to the disk, a manifest with SHA-256 sums is written
last, and a rename makes the checkpoint visible."""

import json
import shutil
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fp8stack.common.io import (
    TEMPORARY,
    settle,
    sha256_of_file,
    storage_errors,
    sync_folder,
    write_flushed,
)
from fp8stack.training.checkpoint.reader import (
    MANIFEST,
    SHARED,
    Checkpoint,
    candidates,
    canonical,
    is_whole,
    path_of,
    sha256_of,
    step_of,
)
from fp8stack.training.checkpoint.schema import Manifest
from fp8stack.training.checkpoint.sharded import file_of, write_rows
from fp8stack.training.distributed.process_group import ALONE, Ranks


def write(
    folder: Path,
    checkpoint: Checkpoint,
    first_rows: Mapping[str, int] | None = None,
    ranks: Ranks = ALONE,
) -> Path:
    """Write this rank's tensors of `checkpoint` to `folder/step-000200`, on a file system that all
    ranks share, and return that path. All `ranks` call this.

    If ranks shard the model, every rank writes its rows of the groups `SHARED`, and the main rank
    everything else. `first_rows` has the index of each tensor's first row on this rank; None if the
    model is not sharded. Raises a RankLost if a rank is gone, and a StorageError if the disk is
    full or cannot be written; older checkpoints are untouched.
    """
    final = path_of(folder, checkpoint.step)
    temporary = folder / f"{TEMPORARY}{final.name}"  # the same name on every rank
    with ExitStack() as cleared:
        with ranks.together(), storage_errors(folder):
            if ranks.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                cleared.callback(shutil.rmtree, temporary, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                temporary.mkdir(mode=stat.S_IMODE(folder.stat().st_mode))
        with ranks.together(), storage_errors(folder):
            mine = _write_tensors(temporary, checkpoint, first_rows, ranks)
            sums: dict[str, Any] = {}
            for text in ranks.texts(json.dumps(mine)):
                sums |= json.loads(text)
            if ranks.is_main:
                _finish(temporary, final, checkpoint, sums)
    return final


def _finish(temporary: Path, final: Path, checkpoint: Checkpoint, sums: Mapping[str, Any]) -> None:
    """Write the manifest of the files with these sums, and give the checkpoint its final name."""
    content = {"step": checkpoint.step, "files": sums, "info": checkpoint.info}
    body = Manifest.model_validate(content).to_json()
    manifest = {"sha256": sha256_of(canonical(body)), **body}
    write_flushed(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(final.parent)


def _write_tensors(
    temporary: Path, checkpoint: Checkpoint, first_rows: Mapping[str, int] | None, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Write this rank's files and flush them to the disk. Returns the size and checksum of each."""
    sums = {}
    for group, tensors in checkpoint.tensors.items():
        if first_rows is not None and group in SHARED:
            file = temporary / group / file_of(ranks.index)
            file.parent.mkdir(mode=stat.S_IMODE(temporary.stat().st_mode), exist_ok=True)
            mine = {
                name: tensor
                for name, tensor in tensors.items()
                if ranks.is_main or name in first_rows
            }
            write_rows(file, mine, first_rows)
        elif ranks.is_main:
            file = temporary / f"{group}.safetensors"
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file
            )
        else:
            continue
        settle(file)
        file_sum = {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)}
        sums[file.relative_to(temporary).as_posix()] = file_sum
        if file.parent != temporary:
            sync_folder(file.parent)
    return sums


def retain(folder: Path, keep: int, keep_every: int, good: set[Path]) -> None:
    """Remove the checkpoints that are older than the newest `keep` good ones, except the
    checkpoints of every `keep_every`-th step (0: no exception).

    A checkpoint is good if it is in `good`, because this process wrote or loaded it, or if all its
    bytes are verified now; it is then added to `good`. So a damaged checkpoint never takes the
    place of a good one, and with `keep` at least 2 there are always two good ones, once two exist.
    """
    good_count = 0
    for path in candidates(folder):
        if good_count < keep:
            if path in good or is_whole(path):
                good.add(path)
                good_count += 1
        elif not keep_every or step_of(path) % keep_every:
            _remove(path)


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step`, which are damaged or about to be repeated, and
    the files of processes that died during a save."""
    for path in candidates(folder):
        if step_of(path) > step:
            _remove(path)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove the files of processes that died while writing into `folder`."""
    for path in folder.glob(f"{TEMPORARY}*"):
        _discard(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint. The rename comes first, so that an interruption never leaves a damaged
    checkpoint behind."""
    removed = path.with_name(f"{TEMPORARY}old-{path.name}")
    with suppress(OSError):
        path.rename(removed)
    _discard(removed)


def _discard(path: Path) -> None:
    """Remove a file, a folder with its contents, or a symbolic link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
