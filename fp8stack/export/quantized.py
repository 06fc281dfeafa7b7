"""FP8 weights and scales in the layout of compressed-tensors, "float-quantized", which vLLM reads.

A value is `weight.float() * weight_scale`: their scale is our inverse one. Source:
compressed-tensors 0.20.0, `quantization/quant_scheme.py` (FP8, FP8_DYNAMIC, FP8_BLOCK) and
`quantization/lifecycle/initialize.py` (shapes of scales).
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fp8stack import numerics
from fp8stack.errors import UserError
from fp8stack.export.files import Files, Source, as_json, hf_files
from fp8stack.hf import Part, layout_of, parts_of

BLOCK = 128
Strategy = Literal["tensor", "channel", "block"]


def quantized_files(
    source: Source, tokenizer: str | None, strategy: Strategy | None = None
) -> Files:
    """`hf_files` with FP8 weights and their scales for the layers that the run had in FP8; of a run
    without FP8, those of all blocks.

    `strategy` is what has a scale of its own. None casts as the run's recipe does; another one
    casts the float32 masters anew, and activations are then scaled when they come.

    Raises a UserError for what `hf_files` does, for GPT-2's layout, a recipe whose forward format
    is not E4M3, and blocks that do not divide a weight.
    """
    plain = hf_files(source, tokenizer)
    layout = layout_of(source.config)
    if layout.model_type == "gpt2":
        raise UserError(
            "--format fp8 is not possible for the layout of GPT-2, whose layers are Conv1D and no "
            "Linear: compressed-tensors and vLLM quantize Linear alone. Use --format hf."
        )
    recipe = source.plan["recipe"]
    if recipe.get("forward_format", "e4m3") != "e4m3":
        raise UserError(
            f"Recipe '{recipe['name']}' has forward_format = {recipe['forward_format']}, and "
            "compressed-tensors knows E4M3 alone. Use --format hf."
        )
    notes: list[str] = []
    parts = parts_of(source.config, layout)
    chosen = _chosen(source, parts, notes)
    sizes = {source.config.width, source.config.hidden}
    sizes |= {part.rows for name in chosen for part in parts[name]}
    odd = min((size for size in sizes if size % BLOCK), default=None)
    if strategy is None:
        strategy = _strategy(source, odd, notes)
    elif strategy == "block" and odd:
        raise UserError(
            f"--strategy block needs sizes that {BLOCK} divides, and the model has {odd}. "
            "Take --strategy channel."
        )
    static = strategy == "tensor" and recipe["scaling"] == "delayed" and bool(source.fp8)
    tensors: dict[str, Tensor] = {}
    for name in chosen:
        cast = _cast(source, strategy, name, parts[name])
        for part, (data, inv_scale) in zip(parts[name], cast, strict=True):
            tensors[f"{part.module}.weight"] = data
            tensors[f"{part.module}.weight_scale"] = inv_scale
            if static:
                scale = source.fp8[f"{name}.input.scale"].float()
                tensors[f"{part.module}.input_scale"] = numerics.inverse(scale).reshape(1)
    kept = {name: tensor for name, tensor in plain.tensors.items() if name not in tensors}
    left = [part.module for name in parts if name not in chosen for part in parts[name]]
    table = json.loads(plain.texts["config.json"])
    table["quantization_config"] = _config(strategy, static, left)
    activations = "static" if static else "dynamic"
    return Files(
        title=f"{plain.title}, FP8 weights by {strategy}, {activations} activations",
        tensors=kept | tensors,
        metadata=plain.metadata,
        texts={**plain.texts, "config.json": as_json(table)},
        notes=[*plain.notes, *notes],
    )


def _chosen(source: Source, parts: Mapping[str, object], notes: list[str]) -> list[str]:
    """Our names of the layers that are to be in FP8."""
    planned = [layer["name"] for layer in source.plan["layers"] if layer["fp8"]]
    if not planned:
        notes.append("the run had no layer in FP8: the layers of all blocks are cast, by channel")
        return [name for name in parts if name != "lm_head"]
    if "lm_head" in planned and source.config.tied:
        notes.append("lm_head is the embedding, which is not in FP8: it stays out of it")
        planned.remove("lm_head")
    return planned


def _strategy(source: Source, odd: int | None, notes: list[str]) -> Strategy:
    """What has a scale, as in the run where readers can do that; blocks do not divide the size
    `odd`."""
    scaling = source.plan["recipe"]["scaling"]
    if scaling == "delayed" and not source.fp8:
        notes.append("the checkpoint has no scales: weights are cast with their own amax")
    if scaling in ("delayed", "current"):
        return "tensor"
    if scaling == "mxfp8":
        notes.append("mxfp8 -> by channel, which all of the readers' GPUs can do")
    if scaling == "block" and odd:
        notes.append(f"block -> by channel: {odd} is not divisible by {BLOCK}")
    return "block" if scaling == "block" and not odd else "channel"


def _cast(
    source: Source, strategy: Strategy, name: str, parts: tuple[Part, ...]
) -> list[tuple[Tensor, Tensor]]:
    """The weight of a layer: FP8 bytes and float32 inverse scales of each part."""
    recipe = source.plan["recipe"]
    weight = source.weights[f"{name}.weight"]
    if strategy == "block":
        two, block = recipe.get("power_of_two", True), (BLOCK, BLOCK)
        weights = [part.of(weight) for part in parts]
        return [numerics.quantize_blocks(one, block, power_of_two=two) for one in weights]
    if strategy == "channel":
        scale = numerics.tensor_scale(weight.abs().amax(dim=1, keepdim=True))
        data, inverse = numerics.cast_to_fp8(weight, scale), numerics.inverse(scale)
        return [(part.of(data), part.of(inverse)) for part in parts]
    # One scale for all parts, as the run had: what reads them together needs no other.
    if recipe["scaling"] == "delayed" and source.fp8:
        scale = source.fp8[f"{name}.weight.scale"].float()
    else:
        two, eps = recipe.get("power_of_two", False), recipe.get("eps", 0.0)
        scale = numerics.tensor_scale(numerics.amax(weight), power_of_two=two, eps=eps)
    data, inverse = numerics.cast_to_fp8(weight, scale), numerics.inverse(scale).reshape(1)
    return [(part.of(data), inverse.clone()) for part in parts]


def _config(strategy: Strategy, static: bool, ignored: list[str]) -> dict[str, Any]:
    base = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = base | {"strategy": strategy, "dynamic": False}
    inputs: dict[str, Any] = base | {"strategy": "token", "dynamic": True}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs |= {"strategy": "group", "group_size": BLOCK}
    if static:
        inputs |= {"strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
