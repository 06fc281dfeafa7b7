"""Folders of transformers in FP8, FP6 and FP4, as published models have them: written by NumPy and
ml_dtypes alone, from the layouts of DeepSeek-V3, Qwen3-FP8 and compressed-tensors."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.torch
import torch

from fp8stack import GPTConfig
from fp8stack.trained.export.format_files import hf_files
from tests.support.hf_models import ROPE, loaded, random_model, source_of

WIDE = ROPE | {"vocabulary": 256, "width": 256, "heads": 2, "mlp_width": 384}
WIDE |= {"activation": "swiglu"}
EXPERTS = {"count": 3, "per_token": 2, "width": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"kv_heads": 1},
    "qwen3": WIDE | {"qk_norm": True},
    "olmoe": WIDE | {"qk_norm": "width", "experts": EXPERTS},
    "qwen3_moe": WIDE | {"qk_norm": True, "experts": EXPERTS | {"first_dense": 1}},
    "mixtral": WIDE | {"experts": EXPERTS | {"normalize": True}, "tied": True},
}


@dataclass(frozen=True)
class Layout:
    """The layout of a published folder: its elements and scales, and the words of its config."""

    block: tuple[int, int] | None  # rows and columns that share a scale; None: all
    weights: dict[str, Any] | None = None  # compressed-tensors' words; None: "fp8" of transformers
    format: str = "float-quantized"
    elements: str = "float8_e4m3fn"
    scales: str = "float32"
    scale_format: str | None = None  # `scale_fmt` of transformers' fp8
    scale_name: str = "weight_scale"


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP4 = FP8 | {"num_bits": 4}
INVERSE: Any = {"scale_name": "weight_scale_inv"}
MX = {"strategy": "group", "group_size": 32}
MXFP6 = FP8 | MX | {"num_bits": 6}
NVFP4 = FP4 | {"strategy": "tensor_group", "group_size": 16}
LAYOUTS = {
    "deepseek": Layout((128, 128), **INVERSE),
    "deepseek ue8m0": Layout((128, 128), **INVERSE, scale_format="ue8m0"),
    "deepseek e8m0": Layout((128, 128), **INVERSE, scales="float8_e8m0fnu", scale_format="ue8m0"),
    "fp8 per tensor": Layout(None, **INVERSE),
    "autofp8": Layout(None),
    "tensor": Layout(None, FP8 | {"strategy": "tensor"}),
    "channel": Layout((1, 0), FP8 | {"strategy": "channel"}),
    "channel bf16": Layout((1, 0), FP8 | {"strategy": "channel"}, scales="bfloat16"),
    "block": Layout((128, 128), FP8 | {"strategy": "block", "block_structure": [128, 128]}),
    "mxfp8": Layout((1, 32), FP8 | MX, "mxfp8-quantized", scales="float8_e8m0fnu"),
    "mxfp4": Layout((1, 32), FP4 | MX, "mxfp4-pack-quantized", "float4_e2m1fn", "float8_e8m0fnu"),
    "mxfp6": Layout((1, 32), MXFP6, "mxfp6-pack-quantized", "float6_e2m3fn", "float8_e8m0fnu"),
    "nvfp4": Layout((1, 16), NVFP4, "nvfp4-pack-quantized", "float4_e2m1fn", "float8_e4m3fn"),
}
HEADROOM = {"headroom": 1.3, "clipped": 0.7, "power_of_two": 1.0}
"""Factors on the scale amax / (largest element)."""
FOLDERS = [
    *((layout, "headroom") for layout in LAYOUTS),
    *((layout, kind) for layout in ("deepseek", "mxfp4") for kind in ("clipped", "power_of_two")),
]
"""The layouts with each kind of scale, as cases of a test."""
IGNORED = ("lm_head", "model.layers.1.self_attn.o_proj")


def is_linear(name: str) -> bool:
    """Whether a tensor of transformers is a linear's weight that published folders quantize."""
    linear = re.search(r"(_proj|lm_head|\.w[123])\.weight$", name) is not None
    return linear and name.removesuffix(".weight") not in IGNORED


def quantized(weight: np.ndarray, layout: Layout, kind: str) -> tuple[dict[str, Any], np.ndarray]:
    """The tensors of a weight, by key, and its dequantized values in float32."""
    rows, columns = weight.shape
    height, width = layout.block or weight.shape
    height, width = height or rows, width or columns
    element_type = np.dtype(getattr(ml_dtypes, layout.elements))
    scale_type = np.dtype(getattr(ml_dtypes, layout.scales, np.float32))
    largest = np.float32(ml_dtypes.finfo(element_type).max)
    amax = np.array(
        [
            [np.abs(weight[i : i + height, j : j + width]).max() for j in range(0, columns, width)]
            for i in range(0, rows, height)
        ],
        np.float32,
    )
    scale = amax * np.float32(HEADROOM[kind]) / largest
    tensors: dict[str, Any] = {}
    if layout.scales == "float8_e4m3fn":
        upper = np.float32(6 * 448 / np.abs(weight).max() / HEADROOM[kind])
        scale = np.minimum(amax / largest * upper, 448).astype(scale_type)
        tensors["weight_global_scale"] = torch.tensor([upper])
        multiplier = scale.astype(np.float32) / upper
    else:
        if kind == "power_of_two" or "e8m0" in layout.scales or layout.scale_format:
            scale = np.exp2(np.round(np.log2(scale)))
        scale = scale.astype(scale_type)
        multiplier = scale.astype(np.float32)
    spread = multiplier.repeat(height, 0)[:rows].repeat(width, 1)[:, :columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.nan_to_num(weight / spread)
    codes = np.clip(scaled, -largest, largest).astype(element_type)
    values = codes.astype(np.float32) * spread
    raw = codes.view(np.uint8)
    if layout.elements == "float4_e2m1fn":
        tensors["weight_packed"] = torch.from_numpy(raw[:, ::2] & 15 | raw[:, 1::2] << 4)
    elif layout.elements == "float6_e2m3fn":
        bits = np.unpackbits(raw[:, :, None], axis=2, count=6, bitorder="little")
        packed = np.packbits(bits.reshape(rows, -1), axis=1, bitorder="little")
        tensors["weight_packed"] = torch.from_numpy(packed)
    else:
        tensors["weight"] = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn)
    stored = torch.from_numpy(scale.view(f"u{scale_type.itemsize}").copy())
    if layout.weights is None or layout.scales != "float8_e8m0fnu":  # compressed-tensors: uint8
        stored = stored.view(getattr(torch, layout.scales))
    stored = stored if layout.block else stored.reshape(())
    tensors[layout.scale_name] = stored
    return tensors, values


def config_of(layout: Layout, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a layout."""
    if layout.weights is None:
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        config |= {"activation_scheme": "dynamic"}
        if layout.scale_name == "weight_scale":
            return config | {"ignored_layers": ignored}
        config |= {"weight_block_size": layout.block and list(layout.block)}
        config |= {"scale_fmt": layout.scale_format} if layout.scale_format else {}
        return config | {"modules_to_not_convert": ignored}
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    plain = layout.format == "float-quantized"
    group = {"targets": ["Linear"], "weights": layout.weights, "output_activations": None}
    return {
        "config_groups": {"group_0": group | {"input_activations": dynamic if plain else None}},
        "format": layout.format,
        "ignore": ignored,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def write_quantized(
    folder: Path, layout: str, kind: str = "headroom", model: str = "llama", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Write a random model in a layout of `LAYOUTS`; what is not quantized is in bfloat16.

    Returns:
        The values of all tensors without quantization, in float32.
    """
    stored, values, table = _contents(layout, kind, model, seed)
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(table))
    return values


def dequantized(folder: Path, fp8: bool) -> Any:
    """The model that transformers dequantizes to float32, from its own scheme "fp8" or from
    compressed-tensors."""
    from transformers.utils import quantization_config as configs

    config: Any = configs.FineGrainedFP8Config if fp8 else configs.CompressedTensorsConfig
    options = {"quantization_config": config(dequantize=True), "dtype": torch.float32}
    return loaded(folder, **options).float()  # "fp8" leaves what is not quantized in bfloat16


@cache
def _contents(
    layout: str, kind: str, model: str, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a folder, their values, and its config."""
    files = hf_files(source_of(random_model(GPTConfig(**MODELS[model]), seed)), None)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    ignored = []
    for name, tensor in files.tensors.items():
        begin = name.removesuffix("weight")
        if is_linear(name):
            tensors, array = quantized(tensor.numpy(), LAYOUTS[layout], kind)
            stored |= {f"{begin}{key}": x.contiguous() for key, x in tensors.items()}
            values[name] = torch.from_numpy(array)
            continue
        stored[name] = tensor.bfloat16()
        values[name] = tensor.bfloat16().float()
        if re.search(r"(gate|lm_head|o_proj)\.weight$", name):
            ignored.append(begin.removesuffix("."))
    table = json.loads(files.texts["config.json"]) | {"dtype": "bfloat16"}
    table["quantization_config"] = config_of(LAYOUTS[layout], ignored)
    return stored, values, table
