"""Checkpoints: safetensors and JSON in a folder, written whole or not at all, verified on load.

Nothing is pickled. A checkpoint is written to `.tmp-...`, every file is flushed to the disk, a
manifest with SHA-256 sums goes last, and one rename makes it visible. It must not know how a step
is trained; it is handed named tensors and plain data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError
from torch import Tensor

from fp8stack import presets
from fp8stack.errors import NoUsableCheckpoint, StorageError, UserError, quoted

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "checkpoint.json"
_LARGEST_MANIFEST = 64 * 2**20
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that a run needs to go on as if it had not stopped.

    `tensors` holds one group of named tensors per file: model, optimizer, fp8, rng. `info` is plain
    JSON data: the step, the configuration, the plan, what the data was.
    """

    step: int
    info: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)


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
    """Write `checkpoint` to `folder/step-000200` and remove all but the newest `keep`.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched.
    """
    final = path_of(folder, checkpoint.step)
    temporary = folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    with storage_errors(folder):
        try:
            temporary.mkdir(parents=True, exist_ok=False)
            files = {}
            for group, tensors in checkpoint.tensors.items():
                name = f"{group}.safetensors"
                content = safetensors.torch.save(
                    {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                )
                _write(temporary / name, content)
                files[name] = {"bytes": len(content), "sha256": _sha256(content)}
            body = {
                "format": FORMAT,
                "step": checkpoint.step,
                "files": files,
                "info": checkpoint.info,
            }
            manifest = {"sha256": _sha256(_canonical(body)), **body}
            _write(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_folder(temporary)
            temporary.rename(final)
            sync_folder(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    for old in candidates(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte of it verified.

    Raises:
        UserError: naming the file that is missing, cut short, changed or of another format.
    """
    manifest = _manifest(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, expected in manifest.files.items():
        content = _read(path / name, expected.bytes)
        if _sha256(content) != expected.sha256:
            raise UserError(f"{path / name} is damaged: its SHA-256 is not the manifest's.")
        try:
            groups[name.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path / name} is not a safetensors file: {error}.") from error
    return Checkpoint(step=manifest.step, info=manifest.info.model_dump(), tensors=groups)


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
    for path in [*later, *folder.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the system's error into one line that names the path and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = error.errno if isinstance(error, OSError) else None
        full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        remedy = "Make room there" if full else "Give a folder that can be written"
        raise StorageError(f"Cannot write to {path}: {reason}. {remedy}.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path` whole: a reader sees the old content or the new.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    with storage_errors(path):
        try:
            _write(temporary, content)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    try:
        body = json.loads(_read(file, None))
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
        if not re.fullmatch(r"[a-z0-9]+\.safetensors", name):
            raise UserError(
                f"{file} names a file '{quoted(name)}', which is none of a checkpoint's."
            )
    return manifest


def _read(file: Path, size: int | None) -> bytes:
    """The content of `file`, which has `size` bytes; None is any size that a manifest can have."""
    try:
        actual = file.stat().st_size
        if size is not None and actual != size:
            raise UserError(f"{file} is damaged: it has {actual} bytes, not {size}.")
        if size is None and actual > _LARGEST_MANIFEST:
            raise UserError(f"{file} is too large to be a manifest: {actual} bytes.")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
