"""Writes a folder that appears complete or not at all."""

import json
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.common.hub import CHAT_TEMPLATE, INDEX, SPECIAL_TOKENS, WEIGHTS
from fp8stack.common.io import replacing, settle, write_flushed
from fp8stack.data.tokenizer import TOKENIZER_FILE
from fp8stack.trained.export.card import CARD, MARK
from fp8stack.trained.export.format_files import Files

LARGEST_FILE = 5_000_000_000  # bytes of tensors per file; more are split, with an index

_EXPORTED = {
    *(WEIGHTS, INDEX, "model.toml", "config.json", "generation_config.json"),
    *(TOKENIZER_FILE, "tokenizer_config.json", SPECIAL_TOKENS, CHAT_TEMPLATE),
}


def require_room(out: Path, overwrite: bool) -> None:
    """Check that the folder `out` can be written. Raises a UserError if it is a file, or a folder
    that is not empty; with `overwrite`, if it contains files that no export writes. Hidden files do
    not count, because they are kept."""
    checkpoint = next(
        (folder for folder in out.parents if (folder / "checkpoint.json").exists()), None
    )
    if checkpoint is not None:
        raise UserError(f"{out} lies in the checkpoint {checkpoint}. Give another --out.")
    try:
        out.with_name(WEIGHTS)  # raises for "."
        in_the_way = out.is_symlink() or (out.exists() and not out.is_dir())
        hidden = _hidden_files(out)
        existing = sorted({*out.iterdir()} - hidden) if out.is_dir() else []
    except (OSError, ValueError) as error:  # for example a name that is too long or contains NUL
        reason = getattr(error, "strerror", None) or "it is no path"
        raise UserError(f"Cannot use the folder of --out: {reason}. Give another.") from error
    if in_the_way:
        raise UserError(f"{out} is no folder. Give another --out.")
    if existing and not overwrite:
        raise UserError(f"{out} is not empty. Give another --out, or replace it by --overwrite.")
    names = [path.name for path in existing]
    shards = [name for name in names if re.fullmatch(r"model-.*\.safetensors", name)]
    card = [CARD] if CARD in names and _is_card(out / CARD) else []
    foreign = [name for name in names if name not in {*_EXPORTED, *shards, *card}]
    if foreign:
        raise UserError(
            f"{out} holds '{foreign[0]}', which no export wrote, and --overwrite would remove it. "
            "Give another --out."
        )


def _hidden_files(folder: Path) -> set[Path]:
    """The regular files in `folder` whose names begin with a dot; empty if it is no folder."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return {
        entry
        for entry in entries
        if entry.name.startswith(".") and entry.is_file() and not entry.is_symlink()
    }


def _is_card(file: Path) -> bool:
    """Whether an export wrote this README.md."""
    try:
        return MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def replace_folder(out: Path, files: Files, largest: int = LARGEST_FILE) -> None:
    """Replace the contents of the folder `out` by `files`, except for hidden files, which are kept.
    See `require_room`.

    A file has at most `largest` bytes of tensors. The folder and its files keep their modes. Raises
    a StorageError, and leaves `out` unchanged, if the disk is full or cannot be written.
    """
    with replacing(out) as fresh:
        _copy_modes(out, fresh)
        _write_tensors(fresh, files.tensors, files.metadata, largest)
        for name, text in files.texts.items():
            write_flushed(fresh / name, text.encode())
        for file in _hidden_files(out):
            shutil.copy2(file, fresh / file.name)
        _copy_modes(out, fresh)


def _copy_modes(replaced: Path, fresh: Path) -> None:
    """Copy the modes of the folder `replaced` and its files to `fresh`, if `replaced` exists."""
    for old_path in [replaced, *replaced.iterdir()] if replaced.is_dir() else []:
        new_path = fresh if old_path == replaced else fresh / old_path.name
        if new_path.exists() and not old_path.is_symlink():
            new_path.chmod(stat.S_IMODE(old_path.stat().st_mode))


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], largest: int
) -> None:
    """Write `model.safetensors`, or several files and an index, with transformers' names."""
    shards = _shards(tensors, largest)
    file_by_tensor: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS if len(shards) == 1 else file
        save_file({name: tensors[name] for name in names}, folder / file, dict(metadata))
        settle(folder / file)
        file_by_tensor |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": file_by_tensor}
        write_flushed(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _shards(tensors: Mapping[str, Tensor], largest: int) -> list[list[str]]:
    """The names of the tensors in each file. A tensor above `largest` bytes has its own file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > largest:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
