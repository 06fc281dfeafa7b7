"""Reads a folder that transformers' `save_pretrained` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.hub import INDEX, TOKENIZER_FILE, WEIGHTS
from fp8stack.common.io import read_json
from fp8stack.model.hf.schemes import stored_schemes
from fp8stack.model.hf.stored_tensors import DequantizedTensors, Tensors

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The configuration and tensors of a folder. Tensors are read when they are accessed."""

    path: Path
    config: dict[str, Any]  # the contents of `config.json`
    stored: Tensors  # as the files hold them, by name
    tensors: DequantizedTensors  # the same with quantized weights in float32

    @property
    def tokenizer(self) -> Path | None:
        """The path of `tokenizer.json`; None if the folder has none."""
        file = self.path / TOKENIZER_FILE
        return file if file.is_file() else None


def open_folder(path: Path) -> ModelFolder:
    """Open the folder at `path`. Raises a UserError if the folder does not exist, or if a file is
    missing or damaged, or if the weights are quantized in a scheme that cannot be read."""
    exists = False
    with suppress(OSError, ValueError):  # such as a name that is too long, or holds a NUL
        exists = path.is_dir()
    if not exists:
        raise UserError(
            f"No folder '{quoted(str(path))}'. Give one that transformers' save_pretrained wrote."
        )
    config = _json(path / "config.json")
    schemes = stored_schemes(config, str(path / "config.json"))
    files: Mapping[str, list[str] | None] = {WEIGHTS: None}
    has_one_file = (path / WEIGHTS).is_file()
    if not has_one_file and (path / INDEX).is_file():  # transformers may leave a stale index
        files = _indexed(path)
    elif not has_one_file:
        pickled = next((name for name in _PICKLED if (path / name).exists()), None)
        if pickled:
            raise UserError(
                f"{path} has its weights in {pickled}, a pickle, which may run code when it is "
                "read. Save it with safetensors: save_pretrained of transformers does."
            )
        raise UserError(f"{path} has no {WEIGHTS} and no {INDEX}.")
    stored = Tensors(path, files)
    tensors = DequantizedTensors(stored, schemes, str(path))
    return ModelFolder(path=path, config=config, stored=stored, tensors=tensors)


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


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file} is missing. Give a folder that save_pretrained wrote.")
    table = read_json(file)
    if not isinstance(table, dict):
        raise UserError(f"{file} is not a JSON object. Give what save_pretrained wrote.")
    return table
