"""What each format consists of: tensors and small text files. It must not know where they go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fp8stack
from fp8stack.config import toml_lines
from fp8stack.errors import UserError
from fp8stack.export.quantized import Strategy, quantize
from fp8stack.export.source import Source
from fp8stack.hf import config_json, layout_of, reader_notes, to_hf
from fp8stack.model.config import GPTConfig
from fp8stack.tokenizer import TOKENIZER_FILE, Tokenizer

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The contents of a folder.

    Attributes:
        title: what it is, in a few words.
        tensors: of `model.safetensors`.
        metadata: of the same file.
        texts: of other files, by name.
        notes: what is to be told.
    """

    title: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    texts: Mapping[str, str]
    notes: list[str] = field(default_factory=list)


def safetensors_files(source: Source) -> Files:
    """The weights by our own names, and the shape as a model file."""
    config = source.config
    weights = {name: source.weights[name] for name in config.parameter_shapes()}
    return Files(
        title="safetensors",
        tensors=_cast(weights, source.dtype),
        metadata=_metadata(source),
        texts={"model.toml": model_toml(config)},
    )


def hf_files(source: Source, tokenizer: str | None) -> Files:
    """A folder that transformers loads. Raises what `layout_of` and `Source.tokenizer` raise."""
    config = source.config
    layout = layout_of(config)
    found = source.tokenizer(tokenizer)
    texts, notes = _tokenizer_texts(found, config.context)
    end = found.end_of_text if found else None
    table = config_json(config, _NAMES[source.dtype], end)
    return Files(
        title=f"{layout.architecture} of transformers",
        tensors=_cast(to_hf(config, layout, source.weights), source.dtype),
        metadata={"format": "pt"},
        texts=texts | _config_texts(table),
        notes=notes + reader_notes(config),
    )


def quantized_files(
    source: Source, tokenizer: str | None, strategy: Strategy | None = None
) -> Files:
    """The same with FP8 weights and their scales.

    Args:
        source: the model.
        tokenizer: see `hf_files`.
        strategy: what has a scale of its own; None is as in the run.

    Raises:
        UserError: what `hf_files` raises, and for GPT-2's layout.
    """
    plain = hf_files(source, tokenizer)
    layout = layout_of(source.config)
    if layout.model_type == "gpt2":
        raise UserError(
            "--format fp8 is not possible for the layout of GPT-2, whose layers are Conv1D and no "
            "Linear: compressed-tensors and vLLM quantize Linear alone. Use --format hf."
        )
    quantized = quantize(source, layout, strategy)
    kept = {name: own for name, own in plain.tensors.items() if name not in quantized.tensors}
    table = json.loads(plain.texts["config.json"]) | {"quantization_config": quantized.config}
    return Files(
        title=f"{layout.architecture} of transformers, {quantized.title}",
        tensors=kept | quantized.tensors,
        metadata=plain.metadata,
        texts=dict(plain.texts) | {"config.json": _as_json(table)},
        notes=[*plain.notes, *quantized.notes],
    )


def model_toml(config: GPTConfig) -> str:
    """The shape as the text of a model file; keys without a value are left out."""
    return "\n".join(toml_lines(config.model_dump())) + "\n"


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def _metadata(source: Source) -> dict[str, str]:
    """What a safetensors file of ours says of itself; strings, as the format wants them."""
    return {
        "format": "pt",
        "fp8stack": fp8stack.__version__,
        "recipe": str(source.plan["recipe"]["name"]),
        "step": str(source.step),
    }


def _config_texts(table: dict[str, Any]) -> dict[str, str]:
    """`config.json`, and `generation_config.json` with the ids that it has."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: table[key] for key in keys if table[key] is not None}
    return {
        "config.json": _as_json(table),
        "generation_config.json": _as_json({"_from_model_config": True} | generation),
    }


def _tokenizer_texts(tokenizer: Tokenizer | None, context: int) -> tuple[dict[str, str], list[str]]:
    """The tokenizer's files, and what is to be told of them."""
    if tokenizer is None:
        note = (
            "the run does not know its tokenizer, so the folder has none; --tokenizer NAME|PATH "
            "gives it one"
        )
        return {}, [note]
    text = tokenizer.to_json()
    special: dict[str, str] = {}
    if tokenizer.end_of_text is not None:
        added = json.loads(text)["added_tokens"]
        end = next(one["content"] for one in added if one["id"] == tokenizer.end_of_text)
        # What begins a document ends the one before it.
        special = {"bos_token": end, "eos_token": end}
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return {
        TOKENIZER_FILE: text,
        "tokenizer_config.json": _as_json(table),
        "special_tokens_map.json": _as_json(special),
    }, []


def _as_json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"
