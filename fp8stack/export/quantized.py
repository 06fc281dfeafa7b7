"""FP8 weights and scales in the layout of compressed-tensors, "float-quantized", which vLLM reads.

A value is `weight.float() * weight_scale`: their scale is our inverse one. Source:
compressed-tensors 0.20.0, `quantization/quant_scheme.py` (FP8, FP8_DYNAMIC, FP8_BLOCK) and
`quantization/lifecycle/initialize.py` (shapes of scales). It must not know of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fp8stack import numerics
from fp8stack.errors import UserError
from fp8stack.export.source import Source
from fp8stack.hf import Layout, Part, parts_of

BLOCK = 128
Strategy = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What a folder has in place of the plain weights.

    Attributes:
        title: what it is, in a few words.
        config: the `quantization_config` of `config.json`.
        tensors: FP8 weights and float32 scales, by transformers' names.
        notes: what is to be told.
    """

    title: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def quantize(source: Source, layout: Layout, strategy: Strategy | None = None) -> Quantized:
    """The weights of the layers that the run had in FP8; of a run without FP8, those of all blocks.

    Args:
        source: the model.
        layout: transformers' model that it becomes.
        strategy: what has a scale of its own. None casts as the run's recipe does; another one
            casts the float32 masters anew, and activations are then scaled when they come.

    Raises:
        UserError: the recipe's forward format is not E4M3; blocks do not divide a weight.
    """
    recipe = source.plan["recipe"]
    if recipe.get("forward_format", "e4m3") != "e4m3":
        raise UserError(
            f"Recipe '{recipe['name']}' has forward_format = {recipe['forward_format']}, and "
            "compressed-tensors knows E4M3 alone. Use --format hf."
        )
    notes: list[str] = []
    parts = parts_of(source.config, layout)
    chosen = _chosen(source, parts, notes)
    cast_parts = [part for name in chosen for part in parts[name]]
    if strategy is None:
        strategy = _strategy(source, cast_parts, notes)
    elif strategy == "block" and (odd := _odd_size(source, cast_parts)):
        raise UserError(
            f"--strategy block needs sizes that {BLOCK} divides, and the model has {odd}. "
            "Take --strategy channel."
        )
    static = strategy == "tensor" and recipe["scaling"] == "delayed" and bool(source.fp8)
    cast = _caster(source, strategy)
    tensors: dict[str, Tensor] = {}
    for name in chosen:
        for part, (data, inv_scale) in zip(parts[name], cast(name, parts[name]), strict=True):
            tensors[f"{part.module}.weight"] = data
            tensors[f"{part.module}.weight_scale"] = inv_scale
            if static:
                scale = source.fp8[f"{name}.input.scale"].float()
                tensors[f"{part.module}.input_scale"] = numerics.inverse(scale).reshape(1)
    left = [part.module for name in parts if name not in chosen for part in parts[name]]
    activations = "static" if static else "dynamic"
    return Quantized(
        title=f"FP8 weights by {strategy}, {activations} activations",
        config=_config(strategy, static, left),
        tensors=tensors,
        notes=notes,
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


def _strategy(source: Source, parts: list[Part], notes: list[str]) -> Strategy:
    """What has a scale of its own: as in the run, where readers can do that."""
    scaling = source.plan["recipe"]["scaling"]
    if scaling == "delayed" and not source.fp8:
        notes.append("the checkpoint has no scales: weights are cast with their own amax")
    if scaling in ("delayed", "current"):
        return "tensor"
    if scaling == "mxfp8":
        notes.append("mxfp8 -> by channel, which all of the readers' GPUs can do")
        return "channel"
    if scaling != "block":
        return "channel"
    if odd := _odd_size(source, parts):
        notes.append(f"block -> by channel: {odd} is not divisible by {BLOCK}")
        return "channel"
    return "block"


def _odd_size(source: Source, parts: list[Part]) -> int | None:
    """The smallest size of a weight that blocks do not divide."""
    sizes = {source.config.width, source.config.hidden, *(part.rows for part in parts)}
    return min((size for size in sizes if size % BLOCK), default=None)


Cast = Callable[[str, tuple[Part, ...]], list[tuple[Tensor, Tensor]]]


def _caster(source: Source, strategy: Strategy) -> Cast:
    """What casts the weight of a layer: FP8 bytes and float32 inverse scales of each part."""
    recipe = source.plan["recipe"]

    def whole(name: str, parts: tuple[Part, ...]) -> list[tuple[Tensor, Tensor]]:
        # One scale for all parts, as the run had: what reads them together needs no other.
        weight = source.weights[f"{name}.weight"]
        if recipe["scaling"] == "delayed" and source.fp8:
            scale = source.fp8[f"{name}.weight.scale"].float()
        else:
            scale = numerics.tensor_scale(
                numerics.amax(weight),
                power_of_two=recipe.get("power_of_two", False),
                eps=recipe.get("eps", 0.0),
            )
        data, inverse = numerics.cast_to_fp8(weight, scale), numerics.inverse(scale).reshape(1)
        return [(part.of(data), inverse.clone()) for part in parts]

    def rows(name: str, parts: tuple[Part, ...]) -> list[tuple[Tensor, Tensor]]:
        weight = source.weights[f"{name}.weight"]
        scale = numerics.tensor_scale(weight.abs().amax(dim=1, keepdim=True))
        data, inverse = numerics.cast_to_fp8(weight, scale), numerics.inverse(scale)
        return [(part.of(data), part.of(inverse)) for part in parts]

    def blocks(name: str, parts: tuple[Part, ...]) -> list[tuple[Tensor, Tensor]]:
        weight = source.weights[f"{name}.weight"]
        block = (BLOCK, BLOCK)
        two = recipe.get("power_of_two", True)
        return [
            numerics.quantize_blocks(part.of(weight), block, power_of_two=two) for part in parts
        ]

    casts: dict[Strategy, Cast] = {"tensor": whole, "channel": rows, "block": blocks}
    return casts[strategy]


def _config(strategy: Strategy, static: bool, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config`."""
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
