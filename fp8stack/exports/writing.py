"""Writes a folder that appears complete or not at all."""

import json
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fp8stack.errors import UserError
from fp8stack.exports.card import CARD, MARK
from fp8stack.exports.files import Files
from fp8stack.hf.folder import INDEX, WEIGHTS
from fp8stack.io import replacing, settle, write_flushed
from fp8stack.tokenizer import TOKENIZER_FILE

LARGEST_FILE = (
    5_000_000_000  # bytes of tensors per file; more are split over several, with an index
)

_OWN = {
    *(WEIGHTS, INDEX, "model.toml", "config.json", "generation_config.json"),
    *(TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json"),
}


def require_room(out: Path, overwrite: bool) -> None:
    """Check that the folder `out` can be written. Raises a UserError if it is a file, or a folder
    with files in it; with `overwrite`, if it has files that no export writes. Hidden files do not
    count: they are kept."""
    inside = next((folder for folder in out.parents if (folder / "checkpoint.json").exists()), None)
    if inside is not None:
        raise UserError(f"{out} lies in the checkpoint {inside}. Give another --out.")
    try:
        out.with_name(WEIGHTS)  # raises for "."
        in_the_way = out.is_symlink() or (out.exists() and not out.is_dir())
        hidden = _hidden_files(out)
        there = sorted({*out.iterdir()} - hidden) if out.is_dir() else []
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL
        reason = getattr(error, "strerror", None) or "it is no path"
        raise UserError(f"Cannot use the folder of --out: {reason}. Give another.") from error
    if in_the_way:
        raise UserError(f"{out} is no folder. Give another --out.")
    if there and not overwrite:
        raise UserError(f"{out} is not empty. Give another --out, or replace it by --overwrite.")
    names = [path.name for path in there]
    shards = [name for name in names if re.fullmatch(r"model-.*\.safetensors", name)]
    card = [CARD] if CARD in names and _is_card(out / CARD) else []
    foreign = [name for name in names if name not in {*_OWN, *shards, *card}]
    if foreign:
        raise UserError(
            f"{out} holds '{foreign[0]}', which no export wrote, and --overwrite would remove it. "
            "Give another --out."
        )


def _hidden_files(folder: Path) -> set[Path]:
    """The regular files in a folder, if it is one, whose names begin with a dot."""
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
    """Write the files into the folder `out` (see `require_room`) in place of its contents, hidden
    files apart, with at most `largest` bytes of tensors per file. The folder and its files keep
    their modes. Raises a StorageError if the disk is full or cannot be written; then `out` is
    unchanged."""
    with replacing(out) as fresh:
        _copy_modes(out, fresh)
        _write_tensors(fresh, files.tensors, files.metadata, largest)
        for name, text in files.texts.items():
            write_flushed(fresh / name, text.encode())
        for file in _hidden_files(out):
            shutil.copy2(file, fresh / file.name)
        _copy_modes(out, fresh)


def _copy_modes(replaced: Path, fresh: Path) -> None:
    """Give a folder and its files the modes of the folder that it replaces, if there is one."""
    for old in [replaced, *replaced.iterdir()] if replaced.is_dir() else []:
        new = fresh if old == replaced else fresh / old.name
        if new.exists() and not old.is_symlink():
            new.chmod(stat.S_IMODE(old.stat().st_mode))


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], largest: int
) -> None:
    """Write `model.safetensors`, or several files and their index, named as transformers does."""
    shards = _shards(tensors, largest)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS if len(shards) == 1 else file
        save_file({name: tensors[name] for name in names}, folder / file, dict(metadata))
        settle(folder / file)
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        write_flushed(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _shards(tensors: Mapping[str, Tensor], largest: int) -> list[list[str]]:
    """The names of the tensors of each file; a larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > largest:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
