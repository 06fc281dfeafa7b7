"""Find and read checkpoints: folders of safetensors and JSON files, verified on load, without
pickle."""

import errno
import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fp8stack.common import presets
from fp8stack.common.errors import MissingRequirement, UserError, quoted
from fp8stack.common.io import parse_json, sha256_of_file
from fp8stack.data.tokenizer import TokenizerIdentity
from fp8stack.precision.system_memory import require_free
from fp8stack.training.checkpoint.schema import FORMAT, FileSum, Manifest
from fp8stack.training.checkpoint.sharded import SharedGroup

SHARED = ("model", "optimizer")  # the groups that FSDP2 shards
_NAME = re.compile(r"step-(\d{6,})")
_FILE = re.compile(r"([a-z0-9]+/shard-\d{5}-model-00001-of-00001|[a-z0-9]+)\.safetensors")
MANIFEST = "checkpoint.json"
_DAMAGE = {
    getattr(errno, name, None) for name in ("ENOENT", "ENOTDIR", "EIO", "EUCLEAN", "EBADMSG")
}
_LARGEST_MANIFEST = 8 * 2**20  # in memory it takes many times as much


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state from which a run continues as if it had not stopped. `tensors` holds the groups of
    named tensors: model, optimizer, fp8, rng. A group is one file, or, if ranks shard it, a folder
    with one file per rank."""

    step: int
    info: dict[str, Any]  # plain JSON data, see `schema.Info`
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def recorded_tokenizer(info: Mapping[str, Any]) -> TokenizerIdentity | None:
    """The tokenizer that a checkpoint.json records, if any."""
    recorded = info.get("tokenizer")
    return None if recorded is None else TokenizerIdentity(**recorded)


def is_whole(path: Path) -> bool:
    """Whether no byte of the checkpoint in the folder `path` has changed since it was written."""
    try:
        for name, expected in _manifest(path).files.items():
            _verify(path / name, expected)
    except UserError:
        return False
    return True


def load(path: Path) -> Checkpoint:
    """Read the checkpoint in the folder `path`, and verify every byte of it.

    Raises:
        MissingRequirement: the memory or a permission is missing, or the checkpoint is of another
            version of fp8stack; the message says which.
        UserError: a file is missing, cut short or changed; the message names it.
    """
    manifest = _manifest(path)
    require_free(
        sum(file_sum.bytes for file, file_sum in manifest.files.items() if "/" not in file),
        str(path),
    )
    groups: dict[str, Mapping[str, Tensor]] = {}
    shards: dict[str, set[str]] = {}
    for name, expected in manifest.files.items():
        group, shared, shard = name.partition("/")
        if shared:  # a rank's file: its tensors are read on access
            _verify(path / name, expected)
            shards.setdefault(group, set()).add(shard)
            continue
        content = _read(path / name, expected.bytes)
        if sha256_of(content) != expected.sha256:
            raise UserError(f"{path / name} is damaged: its SHA-256 is not the manifest's.")
        try:
            groups[name.removesuffix(".safetensors")] = safetensors.torch.load(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path / name} is not a safetensors file: {error}.") from error
    groups |= {group: SharedGroup(path / group, stated) for group, stated in shards.items()}
    return Checkpoint(step=manifest.step, info=manifest.to_json()["info"], tensors=groups)


def _verify(file: Path, expected: FileSum) -> None:
    """Raise a UserError if a file has changed since it was written. Reads it in pieces."""
    try:
        _require_size(file, expected.bytes)
        digest = sha256_of_file(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    if digest != expected.sha256:
        raise UserError(f"{file} is damaged: its SHA-256 is not the manifest's.")


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of `step`, whether or not it exists."""
    return folder / f"step-{step:06d}"


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint's path lies in; None if it is no such path."""
    in_run = checkpoint.parent.name == "checkpoints" and _NAME.fullmatch(checkpoint.name)
    return checkpoint.parent.parent if in_run else None


def candidates(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, newest first, good or damaged."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, verified by the checksum that it states."""
    file = path / MANIFEST
    content = _read(file, None)
    try:
        body = parse_json(content, str(file))
    except UserError as error:
        raise UserError(f"{file} is damaged: it is not JSON.") from error
    stated = body.pop("sha256", None) if isinstance(body, dict) else None
    if stated is None:
        raise UserError(f"{file} is no checkpoint manifest.")
    if stated != sha256_of(canonical(body)):
        raise UserError(f"{file} is damaged: its SHA-256 is not the one it states.")
    if body.get("format") != FORMAT:
        raise MissingRequirement(
            f"{file} has format {quoted(str(body.get('format')))}; this version of fp8stack reads "
            f"{FORMAT}. Use the version that wrote it."
        )
    manifest: Manifest = presets.parse(Manifest, body, str(file))
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise UserError(f"{file} lists '{quoted(name)}', which is not a checkpoint file.")
    return manifest


def _read(file: Path, size: int | None) -> bytes:
    """The content of `file`. Raises a UserError if it does not have `size` bytes; None allows any
    size that a manifest can have."""
    try:
        _require_size(file, size)
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> UserError:
    """The error for a file that cannot be read. A lost file or a failing disk is damage; a missing
    permission or a network file system that does not answer is none."""
    kind = UserError if error.errno in _DAMAGE else MissingRequirement
    return kind(f"{file} cannot be read: {error.strerror}.")


def _require_size(file: Path, size: int | None) -> None:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
        raise UserError(f"{file} is no regular file.")
    if size is not None and status.st_size != size:
        raise UserError(f"{file} is damaged: it has {status.st_size} bytes, not {size}.")
    if size is None and status.st_size > _LARGEST_MANIFEST:
        raise UserError(f"{file} is too large to be a manifest: {status.st_size} bytes.")


def sha256_of(content: bytes) -> str:
    """The SHA-256 of `content`, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def canonical(body: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest that its own checksum covers."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
