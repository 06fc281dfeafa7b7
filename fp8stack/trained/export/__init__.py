"""Exports a trained model to files that other programs load."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from fp8stack.common.errors import UserError, unknown
from fp8stack.common.io import restore
from fp8stack.trained.export.card import CARD, model_card
from fp8stack.trained.export.format_files import Dtype, hf_files, load_source, safetensors_files
from fp8stack.trained.export.quantized_weights import SchemeName, quantized_files
from fp8stack.trained.export.writing import replace_folder, require_room

__all__ = ["Exported", "Format", "export", "write_export"]

Format = Literal["hf", "safetensors", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    out: Path
    format: str
    title: str  # a short description of the folder's contents
    parameters: int
    dtype: str  # of weights that are not quantized
    source: Path  # the checkpoint
    notes: tuple[str, ...]  # for the user

    @property
    def line(self) -> str:
        """The result in one line, without the notes."""
        parameters = f"{self.parameters:,} parameters"
        return f"{self.out}: {self.title}, {parameters}, {self.dtype}, of {self.source}"

    def as_json(self) -> dict[str, Any]:
        """The result as JSON data."""
        strings = {"out": str(self.out), "source": str(self.source), "notes": list(self.notes)}
        return asdict(self) | strings


def export(
    run_or_checkpoint: str | Path,
    format: str,
    out: str | Path,
    *,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    scheme: str | None = None,
    overwrite: bool = False,
) -> tuple[str, list[str]]:
    """Write a trained model into the folder `out`, which appears complete or not at all.

    Args:
        run_or_checkpoint: a run, whose newest good checkpoint is used,
            `.../checkpoints/step-000200`, or a model of transformers, `hf:FOLDER` or
            `hf:owner/name[@revision]`.
        format: "hf", a folder for transformers; "fp8", such a folder with weights in FP8, FP6 or
            FP4 and their scales, for transformers and vLLM; "safetensors", a file with
            fp8stack's parameter names.
        out: a folder that does not exist or is empty.
        dtype: of weights that are not quantized: "fp32", as trained, or "bf16".
        tokenizer: a name or path, for a run that records no tokenizer.
        scheme: for "fp8", the elements that share a scale: "tensor", "channel" (a row of a weight)
            or "block" (128 x 128), in compressed-tensors' layout; or "deepseek", "block" in the
            layout of DeepSeek-V3 and Qwen3-FP8 (`weight_scale_inv`); or "mxfp4", "mxfp6" or
            "nvfp4", weights alone. None uses the run's recipe, or
            the tensors of the folder that the weights come from, if no step has changed them.
        overwrite: replace an earlier export.

    Returns:
        A line that describes the export, and notes.

    Raises:
        UserError: bad input, or a model that the format cannot hold; the message names the key.
        NoUsableCheckpoint: every checkpoint is damaged.
        StorageError: the folder cannot be written.
    """
    options = {"tokenizer": tokenizer, "scheme": scheme}
    exported = write_export(
        run_or_checkpoint, format, out, dtype=dtype, overwrite=overwrite, **options
    )
    return exported.line, list(exported.notes)


def write_export(
    run_or_checkpoint: str | Path,
    format: str,
    out: str | Path,
    *,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    scheme: str | None = None,
    overwrite: bool = False,
    repository: str | None = None,
) -> Exported:
    """Like `export`, but return the result as data. `repository` is the `owner/name` on the Hub
    that the model card mentions."""
    choices = (("export format", format, Format), ("dtype", dtype, Dtype))
    for kind, name, literal in (*choices, ("scheme", scheme, SchemeName)):
        if name is not None and name not in get_args(literal):
            raise unknown(kind, name, get_args(literal))
    if scheme is not None and format != "fp8":
        raise UserError("--scheme is of --format fp8. Leave it out.")
    out = Path(out)
    restore(out)
    require_room(out, overwrite)
    source = load_source(run_or_checkpoint, torch.float32 if dtype == "fp32" else torch.bfloat16)
    if format == "safetensors":
        if tokenizer is not None:
            raise UserError("--tokenizer is of --format hf and fp8. Leave it out.")
        written = safetensors_files(source)
    else:
        if format == "hf":
            written = hf_files(source, tokenizer)
        else:
            written = quantized_files(source, tokenizer, cast(SchemeName | None, scheme))
        card = model_card(source, written, repository)
        written = replace(written, texts={**written.texts, CARD: card})
    replace_folder(out, written)
    return Exported(
        out=out,
        format=format,
        title=written.title,
        parameters=source.config.parameters(),
        dtype=written.dtype or dtype,
        source=source.path,
        notes=(*source.notes, *written.notes),
    )
