"""The files of each export format: tensors and small text files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8stack.common import hub
from fp8stack.common.errors import UserError
from fp8stack.common.hub import CHAT_TEMPLATE, HF, SPECIAL_TOKENS
from fp8stack.common.io import read_json
from fp8stack.common.version import __version__
from fp8stack.data.tokenizer import TOKENIZER_FILE, Tokenizer, alike, load_tokenizer
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.hf import config_json, layout_of, reader_notes, to_hf
from fp8stack.planning.run_config import toml_lines
from fp8stack.precision import Hardware
from fp8stack.training.checkpoint.reader import recorded_tokenizer, run_of
from fp8stack.training.load import (
    find_checkpoint,
    find_source,
    tokenizer_of_run,
    trained_run,
)

Dtype = Literal["fp32", "bf16"]
_USED = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token"),
    *("chat_template", "model_max_length"),
)
"""Keys of a `tokenizer_config.json` that say how the tokenizer is used."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model from a checkpoint or of transformers."""

    path: Path  # of the checkpoint, or the name of a model of transformers
    step: int  # number of steps trained
    config: GPTConfig
    weights: Mapping[str, Tensor]  # float32, all parameters, without vocabulary padding
    plan: Mapping[str, Any]  # the run's plan, as JSON data
    fp8: Mapping[str, Tensor]  # state of delayed scaling; empty without, or if it is outdated
    dtype: torch.dtype  # of the exported weights
    notes: tuple[str, ...]  # for the user
    info: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's info, as JSON data
    began_with: str | None = None  # the source of the initial weights, as `--init-from` names it
    tokenizer_file: str | None = None  # of a model of transformers, if it has one
    left_fp8: tuple[str, ...] = ()  # the layers that the guard took out of FP8

    @property
    def folder_of_source(self) -> Path | None:
        """The transformers folder of the initial weights, which may not exist any more; None if
        they come from none."""
        path = None if self.began_with is None else hub.path_in(self.began_with)
        if self.began_with is None or path is None:
            return None
        if (repository := hub.repository_in(self.began_with)) is not None:
            return hub.folder_in_cache(repository) or path
        return path

    @property
    def run(self) -> Path | None:
        """The run's folder, if the checkpoint is in one."""
        return run_of(self.path)

    def tokenizer(self, name: str | None) -> Tokenizer | None:
        """The tokenizer called `name`, by default the run's; None if the run records none. Raises a
        UserError if it cannot be loaded, or has more ids than the model's vocabulary."""
        name = name or self.tokenizer_file
        tokenizer = tokenizer_of_run(self.path, name, recorded_tokenizer(self.info))
        if tokenizer is not None and tokenizer.vocabulary > self.config.vocabulary:
            raise UserError(
                f"Tokenizer {tokenizer.name} has {tokenizer.vocabulary} tokens, the model a "
                f"vocabulary of {self.config.vocabulary}. Give the one that the data were "
                "tokenized with."
            )
        return tokenizer


def load_source(run_or_checkpoint: str | Path, dtype: torch.dtype) -> ModelSource:
    """Load the model of a checkpoint, of a run's newest good checkpoint, or of transformers
    (`hf:...`). For errors see `find_source`."""
    if isinstance(run_or_checkpoint, str) and run_or_checkpoint.startswith(HF):
        trained = find_source(run_or_checkpoint)
    else:
        trained = trained_run(*find_checkpoint(run_or_checkpoint))
    fields: dict[str, Any] = {
        "path": trained.path,
        "config": trained.shape,
        "weights": trained.weights,
        "dtype": dtype,
        "notes": trained.notes,
        "tokenizer_file": trained.own_tokenizer,
    }
    checkpoint = trained.checkpoint
    if checkpoint is None:
        plan = plan_for(trained.shape, trained.recipe, Hardware("cpu")).to_json()
        return ModelSource(step=0, plan=plan, fp8={}, began_with=trained.name, **fields)
    config, scales = trained.config, checkpoint.tensors.get("fp8", {})
    if trained.has_outdated_scales:
        scales = {}
        fields["notes"] += (
            f"the last steps were in {trained.recipe}, after the scales of delayed scaling",
        )
    return ModelSource(
        step=checkpoint.step,
        plan=checkpoint.info["plan"],
        fp8=scales,
        info=checkpoint.info,
        left_fp8=trained.left_fp8,
        began_with=None if config is None else config.init_from,
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class Files:
    """The contents of an exported folder."""

    title: str  # a short description
    tensors: Mapping[str, Tensor]  # of `model.safetensors`
    metadata: Mapping[str, str]  # of the same file
    texts: Mapping[str, str]  # of other files, by name
    notes: list[str] = field(default_factory=list)
    dtype: str | None = None  # of weights that are not quantized; None: the source's


def safetensors_files(source: ModelSource) -> Files:
    """The weights under fp8stack's parameter names, and the shape as a model file."""
    shapes = source.config.parameter_shapes() | source.config.buffer_shapes()
    weights = {name: source.weights[name] for name in shapes}
    metadata = {  # the format requires strings
        "format": "pt",
        "fp8stack": __version__,
        "recipe": str(source.plan["recipe"]["name"]),
        "step": str(source.step),
    }
    return Files(
        title="safetensors",
        tensors=_cast(weights, source.dtype),
        metadata=metadata,
        texts={"model.toml": "\n".join(toml_lines(source.config.model_dump())) + "\n"},
    )


def hf_files(source: ModelSource, tokenizer_name: str | None) -> Files:
    """The files that transformers loads. For errors see `layout_of` and `Source.tokenizer`."""
    config = source.config
    layout = layout_of(config)
    tokenizer = source.tokenizer(tokenizer_name)
    notes = reader_notes(config)
    if tokenizer is None:
        unknown = "the run does not know its tokenizer, so the folder has none"
        notes = [f"{unknown}; --tokenizer NAME|PATH gives it one", *notes]
    dtype = "float32" if source.dtype == torch.float32 else "bfloat16"
    table = config_json(config, dtype, tokenizer.end_of_text if tokenizer else None)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    texts = _tokenizer_texts(tokenizer, config.context) if tokenizer else {}
    if tokenizer is not None:
        try:
            texts, ids = _taken_over(source, tokenizer, texts)
            table |= {key: ids[key] for key in keys if key in ids}
        except (UserError, OSError, ValueError) as error:
            taken_over = "chat template, special tokens and generation settings"
            notes.append(f"{taken_over} of {source.began_with} are not taken over: {error}")
    generation = {key: table[key] for key in keys if table[key] is not None}
    return Files(
        title=f"{layout.architecture} of transformers",
        tensors=_cast(to_hf(config, layout, source.weights), source.dtype),
        metadata={"format": "pt"},
        texts={
            "generation_config.json": as_json({"_from_model_config": True} | generation),
            **texts,
            "config.json": as_json(table),
        },
        notes=notes,
    )


def _taken_over(
    source: ModelSource, tokenizer: Tokenizer, texts: dict[str, str]
) -> tuple[dict[str, str], Mapping[str, Any]]:
    """`texts` with what the transformers folder of the initial weights says on the use of its
    tokenizer: chat template, special tokens and generation. Also the folder's `config.json`. If the
    folder is gone or has another tokenizer, `texts` alone.

    Raises a UserError, an OSError or a ValueError if a file of the folder cannot be read."""
    folder = source.folder_of_source
    file = None if folder is None else folder / TOKENIZER_FILE
    if folder is None or file is None or not file.is_file():
        return texts, {}
    if not alike(load_tokenizer(str(file)), tokenizer):
        return texts, {}
    texts = dict(texts)
    for name in ("generation_config.json", SPECIAL_TOKENS, CHAT_TEMPLATE):
        if (folder / name).is_file():
            texts[name] = (folder / name).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if config.is_file():
        table = read_json(config)
        used = {key: table[key] for key in _USED if key in table}
        texts[config.name] = as_json(json.loads(texts[config.name]) | used)
        if not (folder / SPECIAL_TOKENS).is_file():  # ours would come before these tokens
            texts.pop(SPECIAL_TOKENS)
    return texts, read_json(folder / "config.json")


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def _tokenizer_texts(tokenizer: Tokenizer, context: int) -> dict[str, str]:
    text = tokenizer.to_json()
    special: dict[str, str] = {}
    if (end := tokenizer.end_token) is not None:
        # The token that begins a document ends the one before it.
        special = {"bos_token": end, "eos_token": end}
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return {
        TOKENIZER_FILE: text,
        "tokenizer_config.json": as_json(table),
        SPECIAL_TOKENS: as_json(special),
    }


def as_json(table: Mapping[str, Any]) -> str:
    """The text of a JSON file with `table`."""
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"
