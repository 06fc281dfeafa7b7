"""Quantized folders of transformers that a model's weights come from, written again to the byte.

Casting dequantized weights again does not give the bytes and scales that they came from: scales may
have headroom, clip, or be rounded in another way. So while all weights of a model equal a folder's
dequantized weights, an export copies the folder's tensors.
"""

from pathlib import Path

import torch

from fp8stack.common.errors import UserError
from fp8stack.model.hf import ModelFolder, holds, model_from_config, open_folder
from fp8stack.trained.export.format_files import Files, ModelSource


def unchanged_folder(
    source: ModelSource, scheme: str | None, notes: list[str]
) -> ModelFolder | None:
    """The quantized folder whose weights have the values of `source`; None if there is none. A note
    says if the folder that the run began with cannot be read.

    Args:
        scheme: the requested scheme; a folder in another one does not count. None: any.
        notes: where the note is added.
    """
    try:
        if (path := source.folder_of_source) is None:
            return None
        folder = open_folder(path)
        names = {stored.name for stored in folder.tensors.schemes.values()}
        if not names or (scheme is not None and names != {scheme}):
            return None
        layout = model_from_config(folder.config, str(path)).layout
        where = (folder.tensors, str(path), source.weights)
        return folder if holds(source.config, layout, *where) else None
    except UserError as error:
        notes.append(
            f"{source.began_with}, which the run began with, cannot be read, so weights are cast "
            f"again even if no step has changed them: {error}"
        )
        return None


def stored_files(folder: ModelFolder, plain: Files, dtype: torch.dtype) -> Files:
    """The tensors and the `config.json` of a quantized folder, to the byte, with the other files of
    `plain`. `dtype` is the requested one of weights that are not quantized."""
    notes = [*plain.notes, f"no weight has changed: the tensors are those of {folder.path}"]
    if dtype == torch.bfloat16:
        notes.append("--dtype bf16 changes nothing: tensors keep their dtypes")
    schemes = dict.fromkeys(map(str, folder.tensors.schemes.values()))
    return Files(
        title=f"{plain.title}, {'; '.join(schemes)}",
        tensors={name: folder.stored[name] for name in folder.stored},
        metadata=plain.metadata,
        texts={**plain.texts, "config.json": _text(folder.path / "config.json")},
        notes=notes,
        dtype="as stored",
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
