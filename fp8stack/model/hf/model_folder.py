"""Reads a folder that transformers' `save_pretrained` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.hub import INDEX, TOKENIZER_FILE, WEIGHTS
from fp8stack.common.io import read_json

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class ModelFolder:
    """The configuration and tensors of a folder. Tensors are read when they are accessed."""

    path: Path
    config: dict[str, Any]  # the contents of `config.json`
    tensors: Tensors  # by name

    @property
    def tokenizer(self) -> Path | None:
        """The path of `tokenizer.json`; None if the folder has none."""
        file = self.path / TOKENIZER_FILE
        return file if file.is_file() else None


def open_folder(path: Path) -> ModelFolder:
    """Open the folder at `path`. Raises a UserError if the folder does not exist, or if a file is
    missing or damaged."""
    exists = False
    with suppress(OSError, ValueError):  # such as a name that is too long, or holds a NUL
        exists = path.is_dir()
    if not exists:
        raise UserError(
            f"No folder '{quoted(str(path))}'. Give one that transformers' save_pretrained wrote."
        )
    config = _json(path / "config.json")
    files: Mapping[str, list[str] | None] = {WEIGHTS: None}
    if (path / INDEX).is_file():
        files = _indexed(path)
    elif not (path / WEIGHTS).is_file():
        pickled = next((name for name in _PICKLED if (path / name).exists()), None)
        if pickled:
            raise UserError(
                f"{path} has its weights in {pickled}, a pickle, which may run code when it is "
                "read. Save it with safetensors: save_pretrained of transformers does."
            )
        raise UserError(f"{path} has no {WEIGHTS} and no {INDEX}.")
    return ModelFolder(path, config, Tensors(path, files))


def _indexed(path: Path) -> dict[str, list[str]]:
    """The tensors of each file, according to the index."""
    table = _json(path / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(f"{path / INDEX} has no weight_map.")
    files: dict[str, list[str]] = {}
    for tensor, name in table.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise UserError(f"{path / INDEX} names a file {quoted(repr(name))} elsewhere.")
        files.setdefault(name, []).append(tensor)
    return files


class Tensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name. Each file is opened once."""

    def __init__(self, path: Path, files: Mapping[str, list[str] | None]) -> None:
        self._opened: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                raise UserError(f"{file} is missing.")
            try:
                self._opened[file] = safe_open(str(file), framework="pt")
                names = set(self._opened[file].keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(f"{file} is not a safetensors file: {error}.") from error
            if missing := sorted(set(expected or ()) - names):
                raise UserError(f"{file} lacks the tensor '{quoted(missing[0])}' of the index.")
            self._file_of |= dict.fromkeys(names if expected is None else expected, file)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        try:
            tensor: Tensor = self._opened[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{file}: '{quoted(name)}' cannot be read: {error}.") from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header, without reading its values."""
        file = self._file_of[name]
        try:
            return tuple(self._opened[file].get_slice(name).get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file}: '{quoted(name)}' cannot be read: {error}.") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file} is missing. Give a folder that save_pretrained wrote.")
    table = read_json(file)
    if not isinstance(table, dict):
        raise UserError(f"{file} is not a JSON object. Give what save_pretrained wrote.")
    return table
