"""Checkpoints: safetensors and JSON in a folder, written whole or not at all, verified on load.

Nothing is pickled. A checkpoint is written to `.tmp-...`, every file is flushed to the disk, a
manifest with SHA-256 sums goes last, and one rename makes it visible. It must not know how a step
is trained; it is handed named tensors and plain data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError
from torch import Tensor

from fp8stack import presets
from fp8stack.errors import NoUsableCheckpoint, UserError, quoted
from fp8stack.training.ranks import Ranks
from fp8stack.training.sharded import SharedGroup, file_of, write_rows
from fp8stack.training.storage import TEMPORARY, sync_folder, write_flushed
from fp8stack.training.storage import storage_errors as storage_errors
from fp8stack.training.storage import write_atomically as write_atomically

FORMAT = 1
SHARED = ("model", "optimizer")
"""The groups that FSDP2's ranks share out."""
_NAME = re.compile(r"step-(\d{6,})")
_FILE = re.compile(r"([a-z0-9]+/shard-\d{5}-model-00001-of-00001|[a-z0-9]+)\.safetensors")
_MANIFEST = "checkpoint.json"
_LARGEST_MANIFEST = 8 * 2**20  # in memory it takes many times as much


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that a run needs to go on as if it had not stopped.

    `tensors` holds one group of named tensors per file: model, optimizer, fp8, rng; of those that
    ranks share out, one file per rank in a folder. `info` is plain JSON data: the step, the
    configuration, the plan, what the data was.
    """

    step: int
    info: dict[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileSum(_Strict):
    """A file's size and checksum."""

    bytes: NonNegativeInt
    sha256: str


class Info(_Strict):
    """What a run needs to know of itself besides tensors; JSON data."""

    identity: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]
    scaler: dict[str, Any] | None
    versions: dict[str, str]
    guard: dict[str, Any] | None = None  # of runs before there was one


class Manifest(_Strict):
    """`checkpoint.json`, less its own checksum."""

    format: int
    step: NonNegativeInt
    files: dict[str, FileSum]
    info: Info


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
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets the owner alone read it
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
    manifest = {"sha256": _sha256(_canonical(body)), **body}
    write_flushed(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
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
        elif not keep_every or _step(path) % keep_every:
            _remove(path)


def is_whole(path: Path) -> bool:
    """Whether every byte of the checkpoint in the folder `path` is as it was written."""
    try:
        for name, expected in _manifest(path).files.items():
            _verify(path / name, expected)
    except UserError:
        return False
    return True


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte of it verified.

    Raises:
        UserError: naming the file that is missing, cut short, changed or of another format.
    """
    manifest = _manifest(path)
    groups: dict[str, Mapping[str, Tensor]] = {}
    for name, expected in manifest.files.items():
        group, shard, _ = name.partition("/")
        if shard:  # one of many: read when asked for
            _verify(path / name, expected)
            groups[group] = {}
            continue
        content = _read(path / name, expected.bytes)
        if _sha256(content) != expected.sha256:
            raise UserError(f"{path / name} is damaged: its SHA-256 is not the manifest's.")
        try:
            groups[name.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path / name} is not a safetensors file: {error}.") from error
    for group in {name.partition("/")[0] for name in manifest.files if "/" in name}:
        stated = {name.partition("/")[2] for name in manifest.files if name.startswith(f"{group}/")}
        groups[group] = SharedGroup(path / group, stated)
    return Checkpoint(step=manifest.step, info=manifest.info.model_dump(), tensors=groups)


def _verify(file: Path, expected: FileSum) -> None:
    """See that a file is as it was written, without holding it in memory.

    Raises:
        UserError: it is not, or cannot be read.
    """
    try:
        _require_size(file, expected.bytes)
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    if digest != expected.sha256:
        raise UserError(f"{file} is damaged: its SHA-256 is not the manifest's.")


def newest(folder: Path) -> tuple[Checkpoint, Path, list[str]]:
    """The newest checkpoint in `folder` that can be loaded, its path, and why newer ones cannot.

    Raises:
        NoUsableCheckpoint: there is none; the message gives the reasons.
    """
    passed_over: list[str] = []
    for path in candidates(folder):
        try:
            return load(path), path, passed_over
        except UserError as error:
            passed_over.append(str(error))
    if not passed_over:
        raise NoUsableCheckpoint(f"No checkpoint in {folder}. Train the run first.")
    reasons = " ".join(passed_over)
    raise NoUsableCheckpoint(
        f"No usable checkpoint in {folder}: {reasons} Begin with another run's, or a new run in "
        "another --out."
    )


def usable(folder: Path) -> Iterator[Checkpoint]:
    """The checkpoints in `folder` that can be loaded, newest first."""
    for path in candidates(folder):
        with suppress(UserError):
            yield load(path)


def _temporary_of(folder: Path, step: int) -> Path:
    return folder / f"{TEMPORARY}{path_of(folder, step).name}"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return folder / f"step-{step:06d}"


def exists(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint, good or damaged."""
    return bool(candidates(folder))


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, damaged or abandoned, which are about to be done
    again, and what a process that died in the middle of a save left behind."""
    later = [path for path in candidates(folder) if _step(path) > step]
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


def candidates(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, newest first, good or damaged."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, checked against its own sum."""
    file = path / _MANIFEST
    content = _read(file, None)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: it is not JSON.") from error
    stated = body.pop("sha256", None) if isinstance(body, dict) else None
    if stated is None:
        raise UserError(f"{file} is no checkpoint manifest.")
    if stated != _sha256(_canonical(body)):
        raise UserError(f"{file} is damaged: its SHA-256 is not the one it states.")
    if body.get("format") != FORMAT:
        raise UserError(f"{file} has format {body.get('format')}; this version reads {FORMAT}.")
    manifest: Manifest = presets.parse(Manifest, body, str(file))
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise UserError(
                f"{file} names a file '{quoted(name)}', which is none of a checkpoint's."
            )
    return manifest


def _read(file: Path, size: int | None) -> bytes:
    """The content of `file`, which has `size` bytes; None is any size that a manifest can have."""
    try:
        _require_size(file, size)
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _require_size(file: Path, size: int | None) -> None:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read for ever
        raise UserError(f"{file} is no regular file.")
    if size is not None and status.st_size != size:
        raise UserError(f"{file} is damaged: it has {status.st_size} bytes, not {size}.")
    if size is None and status.st_size > _LARGEST_MANIFEST:
        raise UserError(f"{file} is too large to be a manifest: {status.st_size} bytes.")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
