"""Quantized weights and their scales in the layouts of compressed-tensors and of DeepSeek, which
vLLM reads.

"float-quantized": a value is `weight.float() * weight_scale`; their scale is fp8stack's inv_scale.
"weight_scale_inv": the same by blocks of 128 x 128, under that name, as in DeepSeek-V3 and
Qwen3-FP8. "mxfp4-pack-quantized" and "mxfp6-pack-quantized": the same with codes in `weight_packed`
and scales as E8M0 codes. "nvfp4-pack-quantized": scales are E4M3, divided by the float32
`weight_global_scale`. Source: compressed-tensors 0.20.0, `quantization/quant_scheme.py`
(FP8, FP8_DYNAMIC, FP8_BLOCK, NVFP4A16, MXFP4, MXFP6A16), `quantization/lifecycle/initialize.py`
(shapes of scales), `compressors/nvfp4`, `mxfp4` and `mxfp6`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.model.hf import HfModule, layout_of, modules_of
from fp8stack.model.hf.schemes import GROUPED, INVERSE, PACKED, PLAIN
from fp8stack.model.hf.stored_tensors import pack_fp6
from fp8stack.numerics.scales import nvfp4_scale
from fp8stack.precision.plan import block_indices
from fp8stack.precision.recipe_file import recipe_from_json
from fp8stack.trained.export.format_files import Files, ModelSource, as_json, hf_files
from fp8stack.trained.export.source_folder import stored_files, unchanged_folder

BLOCK = 128
SchemeName = Literal["tensor", "channel", "block", "deepseek", "mxfp4", "mxfp6", "nvfp4"]
_MULTIPLES = {"block": BLOCK, "deepseek": BLOCK, "mxfp4": 32, "mxfp6": 32, "nvfp4": 16}
"""The sizes of blocks that must divide a weight, by scheme."""
Inputs = Literal["dynamic", "static", "none"]
_PACKED = frozenset(PACKED.values())
"""Packed layouts. They have the scale of a square block once for each of its rows."""
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_NO_HEAD_BY_BLOCKS = "lm_head stays out of FP8: servers read no head by blocks"


class Scheme(NamedTuple):
    """The storage scheme of a layer.

    `format` is the layout's name. `strategy` names the elements that share a scale; it is "group"
    in packed layouts, "block" in DeepSeek's. `weight` is the quantizer of the weight. `inputs` is
    the scaling of activations: "dynamic", "static" with the run's scales, or "none".
    """

    format: str
    strategy: str
    weight: Quantizer
    inputs: Inputs


def quantized_files(
    source: ModelSource, tokenizer: str | None, scheme_name: SchemeName | None = None
) -> Files:
    """`hf_files` with quantized weights and scales for the layers whose forward pass the run
    quantized. If the run quantized no layer, the linears of all blocks are cast to FP8. If the run
    began with a quantized folder of transformers and no weight has changed, the folder's tensors.

    `scheme_name` names the elements that share a scale in FP8, DeepSeek's layout, or a packed one.
    With None the run's recipe casts the float32 master weights; with a name they are cast by that
    scheme, with dynamic activation scales, or none in packed layouts and where the run quantized
    weights alone, but for DeepSeek's, which has no such case.

    Raises a UserError for GPT-2's layout, a weight quantizer without a layout, and blocks that do
    not divide a weight; and see `hf_files`.
    """
    notes: list[str] = []
    folder = unchanged_folder(source, scheme_name, notes)
    plain = hf_files(source, tokenizer)
    if folder is not None:
        return stored_files(folder, plain, source.dtype)
    layout = layout_of(source.config)
    if layout.model_type == "gpt2":
        raise UserError(
            "--format fp8 is not possible for the layout of GPT-2, whose layers are Conv1D and no "
            "Linear: compressed-tensors and vLLM quantize Linear alone. Use --format hf."
        )
    hf_modules = modules_of(source.config, layout)
    planned = _layers_to_quantize(source, hf_modules, scheme_name or "channel", notes)
    widths = {source.weights[f"{name}.weight"].shape[-1] for name in planned}
    sizes = widths | {module.rows for name in planned for module in hf_modules[name]}

    def indivisible_size(multiple: int) -> int | None:
        candidates = sizes if multiple == BLOCK else widths
        return min((size for size in candidates if size % multiple), default=None)

    schemes: dict[str, Scheme] = {}
    for name, (quantizers, recipe) in planned.items():
        if quantizers is not None and quantizers.weight is not None and scheme_name is None:
            _require_layout(quantizers.weight, recipe)
            _require_server(quantizers.input, recipe)
        scheme = _scheme(source, scheme_name, name, planned[name], indivisible_size, notes)
        schemes[name] = _with_known_inputs(scheme, *planned[name], notes)
    head = schemes.get("lm_head")
    if head is not None and (head.format == INVERSE or head.strategy == "block"):
        notes.append(_NO_HEAD_BY_BLOCKS)
        del schemes["lm_head"]
    of_experts = [scheme for name, scheme in schemes.items() if name in source.config.grouped]
    if any(s.format == _NVFP4 or (s.format, s.strategy) == (PLAIN, "block") for s in of_experts):
        # Its integrations/compressed_tensors.py multiplies by the weight_scale alone, by row.
        notes.append(
            "transformers 5.23 cannot decompress experts with these scales; --scheme channel "
            "gives it others"
        )
    tensors: dict[str, Tensor] = {}
    for name, scheme in schemes.items():
        for module, cast in zip(
            hf_modules[name], _cast(source, scheme, name, hf_modules[name]), strict=True
        ):
            tensors |= {f"{module.path}.{key}": tensor for key, tensor in cast.items()}
    replaced = {f"{module.path}.weight" for name in schemes for module in hf_modules[name]}
    unquantized = {name: tensor for name, tensor in plain.tensors.items() if name not in replaced}
    ignored = [
        module.path for name in hf_modules if name not in schemes for module in hf_modules[name]
    ]
    table = json.loads(plain.texts["config.json"])
    if source.dtype != torch.bfloat16 and any(s.format in _PACKED for s in schemes.values()):
        # compressed-tensors 0.20 decompresses packed weights to bfloat16, whatever else is float32.
        table["dtype"] = "bfloat16"
        notes.append(
            "transformers computes with packed weights in bfloat16, so config.json says so; what "
            "is not packed is in the file in float32"
        )
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).extend(module.path for module in hf_modules[name])
    table["quantization_config"] = _config(groups, ignored)
    titles = dict.fromkeys(
        f"FP{scheme.weight.element.bits} weights by {scheme.strategy}, "
        + ("plain" if scheme.inputs == "none" else scheme.inputs)
        + " activations"
        for scheme in groups
    )
    return Files(
        title=f"{plain.title}, {'; '.join(titles)}",
        tensors=unquantized | tensors,
        metadata=plain.metadata,
        texts={**plain.texts, "config.json": as_json(table)},
        notes=[*plain.notes, *dict.fromkeys(notes)],
    )


def _layers_to_quantize(
    source: ModelSource, layers: Mapping[str, object], cast_by: str, notes: list[str]
) -> dict[str, tuple[Quantizers | None, str]]:
    """The layers to quantize: {fp8stack path: (the run's quantizers, name of their recipe)}.
    `cast_by` is the scheme without a recipe, for a note."""
    recipe = recipe_from_json(source.plan["recipe"], str(source.path))
    blocks = block_indices(layers)
    planned: dict[str, tuple[Quantizers | None, str]] = {}
    for layer in source.plan["layers"]:
        name = layer["name"]
        if layer["fp8"] and name not in source.left_fp8:
            quantizers, recipe_name, _ = recipe.for_layer(name, blocks.get(name), name == "lm_head")
            if quantizers is not None and quantizers.weight is not None:
                planned[name] = quantizers, recipe_name
    in_fp8 = {layer["name"] for layer in source.plan["layers"] if layer["fp8"]}
    taken_out = [name for name in source.left_fp8 if name in in_fp8]
    if taken_out and planned:
        notes.append(f"the guard took {', '.join(taken_out)} out of FP8: they stay out of it")
    if not planned:
        reason = "the run has no layer in FP8"
        if taken_out:
            reason = "the guard took every layer out of FP8"
        notes.append(f"{reason}: the layers of all blocks are cast, by {cast_by}")
        without = {"lm_head", *source.config.routers}
        return {name: (None, recipe.name) for name in layers if name not in without}
    if "lm_head" in planned and source.config.tied:
        notes.append("lm_head is the embedding, which is not in FP8: it stays out of it")
        del planned["lm_head"]
    if "lm_head" in planned and cast_by in ("block", "deepseek"):
        notes.append(_NO_HEAD_BY_BLOCKS)
        del planned["lm_head"]
    return planned


def _scheme(
    source: ModelSource,
    scheme_name: SchemeName | None,
    name: str,
    quantized_as: tuple[Quantizers | None, str],
    indivisible_size: Callable[[int], int | None],
    notes: list[str],
) -> Scheme:
    """The storage scheme of a layer: as in the run, if readers support it. `indivisible_size(n)` is
    the smallest size that n does not divide, None if it divides all."""
    quantizers, recipe = quantized_as
    weight = None if quantizers is None else quantizers.weight
    activation = None if quantizers is None else quantizers.input
    of_weights_alone = weight is not None and activation is None
    inputs: Inputs = "none" if of_weights_alone and scheme_name != "deepseek" else "dynamic"
    multiple = _MULTIPLES.get(scheme_name or "", 1)
    if size := indivisible_size(multiple):
        raise UserError(
            f"--scheme {scheme_name} needs sizes that {multiple} divides, and the model has "
            f"{size}. Take --scheme channel."
        )
    if scheme_name in ("mxfp4", "mxfp6", "nvfp4"):
        packed = f"{scheme_name}-pack-quantized"
        return Scheme(packed, "group", GROUPED[packed], "none")
    layout = PLAIN if scheme_name != "deepseek" else INVERSE
    strategy = "block" if scheme_name == "deepseek" else scheme_name
    if weight is not None and weight.per_tensor and strategy in (None, "tensor"):
        strategy = "tensor"
        if weight.delayed and scheme_name is None:
            if f"{name}.weight.scale" in source.fp8:
                is_static = (
                    activation is not None
                    and activation.delayed
                    and activation.format == weight.format
                )
                cast_by = replace(weight, rounding="nearest")
                return Scheme(PLAIN, "tensor", cast_by, "static" if is_static else inputs)
            notes.append("there are no scales for weights: they are cast with their own amax")
    elif weight is not None and strategy is None:
        length = weight.blocks[1] if weight.blocks else 0
        packed_layout = PACKED.get((weight.format, weight.scale, length))
        if packed_layout and (size := indivisible_size(length)):
            notes.append(f"{recipe} -> by channel: {size} is not divisible by {length}")
        elif packed_layout:
            if packed_layout != _MXFP4 and activation is not None:
                notes.append(f"{recipe}: activations are not quantized in {packed_layout}")
            inputs = inputs if packed_layout == _MXFP4 else "none"
            return Scheme(packed_layout, "group", replace(weight, rounding="nearest"), inputs)
        elif weight.block == "row":
            return Scheme(PLAIN, "channel", replace(weight, rounding="nearest"), inputs)
        elif weight.blocks != (BLOCK, BLOCK) or weight.scale == "e8m0":
            notes.append(f"{recipe} -> by channel, which all of the readers' GPUs can do")
        elif size := indivisible_size(BLOCK):
            notes.append(f"{recipe} -> by channel: {size} is not divisible by {BLOCK}")
        else:
            strategy = "block"
    scale_strategy = strategy or "channel"
    power = weight is not None and weight.scale == "power_of_two"
    needs_powers = weight is not None and weight.scale in ("power_of_two", "e8m0")
    if layout == PLAIN:
        needs_powers = weight is None or weight.delayed or needs_powers
    casts = {
        "tensor": Quantizer(
            scale="power_of_two" if power else "float32", eps=weight.eps if weight else 0
        ),
        "channel": Quantizer(block="row"),
        "block": Quantizer(
            block=(BLOCK, BLOCK), scale="power_of_two" if needs_powers else "float32"
        ),
    }
    return Scheme(layout, scale_strategy, casts[scale_strategy], inputs)


def _with_known_inputs(
    scheme: Scheme, quantizers: Quantizers | None, recipe: str, notes: list[str]
) -> Scheme:
    """The scheme with inputs in the run's format, or with a note that they are not."""
    activation = None if quantizers is None else quantizers.input
    if scheme.inputs == "none" or activation is None:
        return scheme
    written = "e2m1" if scheme.format == _MXFP4 else "e4m3"
    if activation.format == written:
        return scheme
    if scheme.format == _MXFP4:
        notes.append(f"{recipe}: activations, in {activation.format}, are not quantized here")
        return scheme._replace(inputs="none")
    notes.append(f"{recipe}: activations are in {written} here, and were in {activation.format}")
    return scheme


def _require_layout(quantizer: Quantizer, recipe: str) -> None:
    """Raise a UserError for a weight quantizer without a layout."""
    length = quantizer.blocks[1] if quantizer.blocks else 0
    has_layout = quantizer.format == "e4m3" or (quantizer.format, quantizer.scale, length) in PACKED
    if not has_layout or quantizer.hadamard:
        block = quantizer.block if isinstance(quantizer.block, str) else list(quantizer.block)
        raise UserError(
            f"Recipe '{recipe}' has weights of {quantizer.format}, block = {block}, "
            f"scale = {quantizer.scale}, hadamard = {quantizer.hadamard}, for which "
            "compressed-tensors has no layout. Use --format hf, or --scheme channel for E4M3."
        )


def _require_server(quantizer: Quantizer | None, recipe: str) -> None:
    """Raise a UserError for activations in a format of one's own, which no server has."""
    if quantizer is not None and not quantizer.element.is_shipped:
        raise UserError(
            f"Recipe '{recipe}' has activations of {quantizer.format}, in which no server "
            "multiplies. Use --format hf, or --scheme channel for E4M3."
        )


def _cast(
    source: ModelSource, scheme: Scheme, name: str, modules: tuple[HfModule, ...]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each transformers module of a layer, under the layout's names."""
    tensors = {"weight": source.weights[f"{name}.weight"]}
    if scheme.weight.delayed:
        tensors["scale"] = source.fp8[f"{name}.weight.scale"].float()
    if scheme.inputs == "static":
        tensors["input_scale"] = _input_scale(source.fp8, f"{name}.input")
    for expert, of_matrix in groupby(modules, key=attrgetter("expert")):
        of_expert = tensors if expert is None else {k: x[expert] for k, x in tensors.items()}
        yield from _cast_matrix(scheme, of_matrix, **of_expert)


def _input_scale(fp8: Mapping[str, Tensor], slot: str) -> Tensor:
    """The scale of a layer's inputs, float32; for experts a vector of equal scales, the smallest
    one, since servers have one for all. Experts without tokens so far do not count."""
    scale, history = fp8[f"{slot}.scale"].float(), fp8[f"{slot}.amax_history"]
    if not scale.ndim:
        return scale
    has_tokens = (history.amax(0) > 0) | (scale != 1)
    return (scale[has_tokens] if has_tokens.any() else scale).amin().expand_as(scale)


def _cast_matrix(
    scheme: Scheme,
    modules: Iterable[HfModule],
    weight: Tensor,
    scale: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Iterator[dict[str, Tensor]]:
    """`_cast` of the modules of one matrix, by the scales of delayed scaling, if it has any."""
    # One cast for all modules of the matrix, as in the run.
    quantizer = scheme.weight
    quantized = numerics.quantize(weight, quantizer, 1, scale=scale)
    scales, block_rows = quantized.scales, 1 if quantizer.blocks is None else quantizer.blocks[0]
    if scheme.format in _PACKED:
        codes = scales.view(torch.uint8).repeat_interleave(block_rows, 0)
        scales, block_rows = codes if scheme.format != _NVFP4 else codes.view(scales.dtype), 1
    for module in modules:
        end = module.start + module.rows
        cast = {"weight": quantized.data[module.start : end].clone()}
        if scheme.format in _PACKED:
            codes = cast["weight"]  # of four bits, packed already
            cast = {"weight_packed": codes if quantizer.element_bits == 4 else pack_fp6(codes)}
        if scheme.format == _NVFP4:  # the reader divides scales by it
            cast["weight_global_scale"] = nvfp4_scale(quantized.amax).reshape(1)
        if quantizer.per_tensor:
            cast["weight_scale"] = scales.reshape(1).clone()
        else:
            first, last = module.start // block_rows, -(-end // block_rows)
            key = INVERSE if scheme.format == INVERSE else "weight_scale"
            cast[key] = scales[first:last].clone()
        if input_scale is not None:
            cast["input_scale"] = numerics.inverse(input_scale).reshape(1)
        yield cast


def _config(groups: Mapping[Scheme, list[str]], ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json`."""
    if any(scheme.format == INVERSE for scheme in groups):  # then it is the only one
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ignored,
        }
    formats = {scheme.format for scheme in groups}
    config_groups = {}
    for number, (scheme, modules) in enumerate(groups.items()):
        # A server's head is no Linear: it is named.
        heads = [module for module in modules if module == "lm_head"]
        targets = ["Linear", *heads] if len(groups) == 1 else modules
        group: dict[str, Any] = {"targets": targets, "weights": _weights(scheme)}
        group |= {"input_activations": _inputs(scheme), "output_activations": None}
        config_groups[f"group_{number}"] = group | (
            {"format": scheme.format} if len(groups) > 1 else {}
        )
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    bits = scheme.weight.element.bits
    values = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False}
    if scheme.format == PLAIN:
        square = {"block_structure": [BLOCK, BLOCK]} if scheme.strategy == "block" else {}
        return values | {"strategy": scheme.strategy} | square
    assert scheme.weight.blocks is not None
    has_two_scales = scheme.format == _NVFP4
    return values | {
        "strategy": "tensor_group" if has_two_scales else "group",
        "group_size": scheme.weight.blocks[1],
        "scale_dtype": "torch.float8_e4m3fn" if has_two_scales else "torch.uint8",
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
