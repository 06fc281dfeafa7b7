"""Quantized weights and their scales in the layouts of compressed-tensors, which vLLM reads.

"float-quantized": a value is `weight.float() * weight_scale`, their scale is our inverse one.
"mxfp4-pack-quantized" and "mxfp6-pack-quantized": the same, with the values' codes in
`weight_packed` and E8M0 codes as scales. "nvfp4-pack-quantized": scales are E4M3, and divided by
the float32 `weight_global_scale`. Source: compressed-tensors 0.20.0, `quantization/quant_scheme.py`
(FP8, FP8_DYNAMIC, FP8_BLOCK, NVFP4A16, MXFP4, MXFP6A16), `quantization/lifecycle/initialize.py`
(shapes of scales), `compressors/nvfp4`, `mxfp4` and `mxfp6`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.errors import UserError
from fp8stack.exports.files import Files, Source, as_json, hf_files
from fp8stack.formats import FORMATS, Quantizer, Quantizers
from fp8stack.hf import Part, layout_of, parts_of
from fp8stack.numerics.scales import nvfp4_scale
from fp8stack.precision.plan import block_indices
from fp8stack.precision.recipe import recipe_from_json

BLOCK = 128
PLAIN = "float-quantized"
Strategy = Literal["tensor", "channel", "block"]
Inputs = Literal["dynamic", "static", "none"]
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
PACKED = {
    ("e2m1", "e4m3", 16): _NVFP4,
    ("e2m1", "e8m0", 32): _MXFP4,
    ("e2m3", "e8m0", 32): "mxfp6-pack-quantized",
}
"""The layouts of fewer than eight bits, by the format, the scale, and the length of a block; a
square block's scale is written for each of its rows."""


class Scheme(NamedTuple):
    """How a layer is stored.

    `format` is the layout's name; `strategy` is what shares a scale, "group" in packed layouts.
    `weight` quantizes it. `inputs` says how activations are scaled: "dynamic", "static" by the
    run's scales, or "none".
    """

    format: str
    strategy: str
    weight: Quantizer
    inputs: Inputs


def quantized_files(
    source: Source, tokenizer: str | None, strategy: Strategy | None = None
) -> Files:
    """`hf_files` with quantized weights and scales for the layers whose forward pass the run
    quantized; if the run quantized none, FP8 for the linears of all blocks.

    `strategy` is what shares a scale in FP8. None casts as the run's recipe does; another one casts
    the float32 masters again, with dynamic activation scales.

    Raises a UserError for what `hf_files` does, for GPT-2's layout, weight quantizers without a
    layout, and blocks that do not divide a weight.
    """
    plain = hf_files(source, tokenizer)
    layout = layout_of(source.config)
    if layout.model_type == "gpt2":
        raise UserError(
            "--format fp8 is not possible for the layout of GPT-2, whose layers are Conv1D and no "
            "Linear: compressed-tensors and vLLM quantize Linear alone. Use --format hf."
        )
    notes: list[str] = []
    parts = parts_of(source.config, layout)
    chosen = _chosen(source, parts, notes)
    shapes = [source.weights[f"{name}.weight"].shape for name in chosen]
    inner = {columns for _, columns in shapes}
    sizes = inner | {part.rows for name in chosen for part in parts[name]}

    def odd(multiple: int) -> int | None:
        found = sizes if multiple == BLOCK else inner
        return min((size for size in found if size % multiple), default=None)

    schemes: dict[str, Scheme] = {}
    for name, (quantizers, recipe) in chosen.items():
        if quantizers is not None and quantizers.weight is not None and strategy is None:
            _require_layout(quantizers.weight, recipe)
        schemes[name] = _scheme(source, strategy, name, chosen[name], odd, notes)
    tensors: dict[str, Tensor] = {}
    for name, scheme in schemes.items():
        for part, cast in zip(parts[name], _cast(source, scheme, name, parts[name]), strict=True):
            tensors |= {f"{part.module}.{key}": tensor for key, tensor in cast.items()}
    whole = {f"{part.module}.weight" for name in schemes for part in parts[name]}
    kept = {name: tensor for name, tensor in plain.tensors.items() if name not in whole}
    left = [part.module for name in parts if name not in schemes for part in parts[name]]
    table = json.loads(plain.texts["config.json"])
    if source.dtype != torch.bfloat16 and any(s.format != PLAIN for s in schemes.values()):
        # compressed-tensors 0.20 decompresses packed weights to bfloat16, whatever else is float32.
        table["dtype"] = "bfloat16"
        notes.append(
            "transformers computes with packed weights in bfloat16, so config.json says so; what "
            "is not packed is in the file in float32"
        )
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).extend(part.module for part in parts[name])
    table["quantization_config"] = _config(groups, left)
    titles = dict.fromkeys(
        f"FP{FORMATS[scheme.weight.format].bits} weights by {scheme.strategy}, "
        + ("plain" if scheme.inputs == "none" else scheme.inputs)
        + " activations"
        for scheme in groups
    )
    return Files(
        title=f"{plain.title}, {'; '.join(titles)}",
        tensors=kept | tensors,
        metadata=plain.metadata,
        texts={**plain.texts, "config.json": as_json(table)},
        notes=[*plain.notes, *dict.fromkeys(notes)],
    )


def _chosen(
    source: Source, parts: Mapping[str, object], notes: list[str]
) -> dict[str, tuple[Quantizers | None, str]]:
    """Our names of the layers to quantize, with the run's quantizers and their recipe's name."""
    recipe = recipe_from_json(source.plan["recipe"], str(source.path))
    blocks = block_indices(parts)
    planned: dict[str, tuple[Quantizers | None, str]] = {}
    for layer in source.plan["layers"]:
        if name := layer["name"] if layer["fp8"] else "":
            quantizers, called, _ = recipe.for_layer(name, blocks.get(name), name == "lm_head")
            if quantizers is not None and quantizers.weight is not None:
                planned[name] = quantizers, called
    if not planned:
        notes.append("the run had no layer in FP8: the layers of all blocks are cast, by channel")
        return {name: (None, recipe.name) for name in parts if name != "lm_head"}
    if "lm_head" in planned and source.config.tied:
        notes.append("lm_head is the embedding, which is not in FP8: it stays out of it")
        del planned["lm_head"]
    return planned


def _scheme(
    source: Source,
    strategy: Strategy | None,
    name: str,
    quantized_as: tuple[Quantizers | None, str],
    odd: Callable[[int], int | None],
    notes: list[str],
) -> Scheme:
    """How a layer is stored: as in the run, if readers support that. `odd` returns a size that a
    number does not divide."""
    quantizers, recipe = quantized_as
    own = None if quantizers is None else quantizers.weight
    x = None if quantizers is None else quantizers.input
    inputs: Inputs = "none" if own is not None and x is None else "dynamic"
    if strategy == "block" and (size := odd(BLOCK)):
        raise UserError(
            f"--strategy block needs sizes that {BLOCK} divides, and the model has {size}. "
            "Take --strategy channel."
        )
    if own is not None and own.per_tensor and strategy in (None, "tensor"):
        strategy = "tensor"
        if own.delayed and f"{name}.weight.scale" in source.fp8:
            static = x is not None and x.delayed and x.format == own.format
            return Scheme(PLAIN, "tensor", own, "static" if static else inputs)
        if own.delayed:
            notes.append("the checkpoint has no scales: weights are cast with their own amax")
    elif own is not None and strategy is None:
        length = own.blocks[1] if own.blocks else 0
        layout = PACKED.get((own.format, own.scale, length))
        if layout and (size := odd(length)):
            notes.append(f"{recipe} -> by channel: {size} is not divisible by {length}")
        elif layout:
            if layout != _MXFP4 and x is not None:
                notes.append(f"{recipe}: activations are not quantized in {layout}")
            inputs = inputs if layout == _MXFP4 else "none"
            return Scheme(layout, "group", replace(own, rounding="nearest"), inputs)
        elif own.block == "row":
            return Scheme(PLAIN, "channel", replace(own, rounding="nearest"), inputs)
        elif own.blocks != (BLOCK, BLOCK) or own.scale == "e8m0":
            notes.append(f"{recipe} -> by channel, which all of the readers' GPUs can do")
        elif size := odd(BLOCK):
            notes.append(f"{recipe} -> by channel: {size} is not divisible by {BLOCK}")
        else:
            strategy = "block"
    chosen = strategy or "channel"
    power = own is not None and own.scale == "power_of_two"
    whole = own is None or own.delayed or own.scale != "float32"
    casts = {
        "tensor": Quantizer(
            scale="power_of_two" if power else "float32", eps=own.eps if own else 0
        ),
        "channel": Quantizer(block="row"),
        "block": Quantizer(block=(BLOCK, BLOCK), scale="power_of_two" if whole else "float32"),
    }
    return Scheme(PLAIN, chosen, casts[chosen], inputs)


def _require_layout(quantizer: Quantizer, recipe: str) -> None:
    """Raise a UserError for a weight quantizer without a layout."""
    length = quantizer.blocks[1] if quantizer.blocks else 0
    known = quantizer.format == "e4m3" or (quantizer.format, quantizer.scale, length) in PACKED
    if not known or quantizer.hadamard:
        block = quantizer.block if isinstance(quantizer.block, str) else list(quantizer.block)
        raise UserError(
            f"Recipe '{recipe}' has weights of {quantizer.format}, block = {block}, "
            f"scale = {quantizer.scale}, hadamard = {quantizer.hadamard}, for which "
            "compressed-tensors has no layout. Use --format hf, or --strategy channel for E4M3."
        )


def _cast(
    source: Source, scheme: Scheme, name: str, parts: tuple[Part, ...]
) -> Iterator[dict[str, Tensor]]:
    """The quantized weight of a layer, part by part, under the layout's names."""
    weight, quantizer = source.weights[f"{name}.weight"], scheme.weight
    scale = source.fp8[f"{name}.weight.scale"].float() if quantizer.delayed else None
    # One cast for all parts, as in the run.
    made = numerics.quantize(weight, quantizer, 1, scale=scale)
    scales, high = made.scales, 1 if quantizer.blocks is None else quantizer.blocks[0]
    if scheme.format != PLAIN:
        codes = scales.view(torch.uint8).repeat_interleave(high, 0)
        scales, high = codes if scheme.format != _NVFP4 else codes.view(scales.dtype), 1
    for part in parts:
        cast = {"weight": part.of(made.data)}
        if scheme.format != PLAIN:
            cast = {"weight_packed": _dense(cast["weight"], quantizer)}
        if scheme.format == _NVFP4:  # scales are divided by it
            cast["weight_global_scale"] = nvfp4_scale(made.amax).reshape(1)
        if quantizer.per_tensor:
            cast["weight_scale"] = scales.reshape(1).clone()
        else:
            end = -(-(part.start + part.rows) // high)
            cast["weight_scale"] = scales[part.start // high : end].clone()
        if scheme.inputs == "static":
            of_inputs = source.fp8[f"{name}.input.scale"].float()
            cast["input_scale"] = numerics.inverse(of_inputs).reshape(1)
        yield cast


def _dense(codes: Tensor, quantizer: Quantizer) -> Tensor:
    """FP6 codes packed four into three bytes, the first one lowest; FP4 is packed already."""
    if quantizer.element_bits == 4:
        return codes
    shifts = torch.tensor([0, 6, 12, 18])
    words = (codes.view(len(codes), -1, 4).to(torch.int32) << shifts).sum(2, dtype=torch.int32)
    return torch.stack([words >> shift & 255 for shift in (0, 8, 16)], 2).to(torch.uint8).flatten(1)


def _config(groups: Mapping[Scheme, list[str]], ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config`."""
    formats = {scheme.format for scheme in groups}
    made = {}
    for number, (scheme, modules) in enumerate(groups.items()):
        targets = ["Linear"] if len(groups) == 1 else modules
        group: dict[str, Any] = {"targets": targets, "weights": _weights(scheme)}
        group |= {"input_activations": _inputs(scheme), "output_activations": None}
        made[f"group_{number}"] = group | ({"format": scheme.format} if len(groups) > 1 else {})
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": made,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    bits = FORMATS[scheme.weight.format].bits
    values = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False}
    if scheme.format == PLAIN:
        square = {"block_structure": [BLOCK, BLOCK]} if scheme.strategy == "block" else {}
        return values | {"strategy": scheme.strategy} | square
    assert scheme.weight.blocks is not None
    two = scheme.format == _NVFP4
    return values | {
        "strategy": "tensor_group" if two else "group",
        "group_size": scheme.weight.blocks[1],
        "scale_dtype": "torch.float8_e4m3fn" if two else "torch.uint8",
    }


def _inputs(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.inputs == "none":
        return None
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    if scheme.inputs == "static":
        return values | {"strategy": "tensor", "dynamic": False}
    if scheme.format != PLAIN:
        return _weights(scheme) | {"dynamic": True}
    by_block = {"strategy": "group", "group_size": BLOCK}
    return (
        values
        | {"dynamic": True}
        | (by_block if scheme.strategy == "block" else {"strategy": "token"})
    )
