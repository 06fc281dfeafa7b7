"""Folders of transformers whose linears are in FP8, FP6 or FP4, as weights to begin with."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch

import fp8stack
from fp8stack import GPT
from fp8stack.model.hf import layout_of, open_folder, to_hf
from fp8stack.planning.run_config import parse_config
from fp8stack.precision import load_recipe
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.load import Trained, find_source
from tests.conftest import refusal
from tests.support.hf_models import config_json, logits, require_same_logits, tokens
from tests.support.quantized_folders import FOLDERS, dequantized, write_quantized


def in_transformers(source: Trained) -> dict[str, torch.Tensor]:
    """The weights that were read, under transformers' names."""
    return to_hf(source.shape, layout_of(source.shape), source.weights)


def model_of(source: Trained) -> GPT:
    model = GPT(source.shape, seed=3).eval()
    restore_weights(model, source.weights)
    return model


@pytest.mark.parametrize(("layout", "kind"), FOLDERS)
def test_every_weight_is_dequantized_to_the_bit(layout, kind, tmp_path):
    values = write_quantized(tmp_path, layout, kind)
    weights = in_transformers(find_source(f"hf:{tmp_path}"))
    assert weights.keys() == values.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.view(torch.int32), values[name].view(torch.int32)), name


@pytest.mark.parametrize("model", ["olmoe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("layout", ["deepseek", "nvfp4"])
def test_each_expert_has_scales_of_its_own(layout, model, tmp_path):
    values = write_quantized(tmp_path, layout, model=model)
    weights = in_transformers(find_source(f"hf:{tmp_path}"))
    assert weights.keys() == values.keys()
    assert all(torch.equal(weights[name], values[name]) for name in weights)


@pytest.mark.parametrize("layout", ["deepseek e8m0", "tensor", "block", "mxfp4"])
def test_transformers_dequantizes_to_the_same_logits(layout, tmp_path):
    write_quantized(tmp_path, layout, model="qwen3")
    hf_model = dequantized(tmp_path, fp8="deepseek" in layout)
    require_same_logits(model_of(find_source(f"hf:{tmp_path}")), hf_model, atol=1e-4)


Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"


def _without(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{key}")


def _changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    name = f"{UP}.{key}"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def _filled(key: str, value: float) -> Callable[[Tensors], Any]:
    return _changed(key, lambda scales: torch.full_like(scales, value))


WRONG: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("deepseek", _without("weight_scale_inv"), f"'{UP}.weight' has no 'weight_scale_inv' beside"),
    ("nvfp4", _without("weight_global_scale"), "has no 'weight_global_scale' beside it"),
    ("deepseek", _filled("weight_scale_inv", math.nan), "weight_scale_inv' holds nan, where FP8"),
    ("mxfp4", _filled("weight_scale", 255), f"'{UP}.weight_scale' holds nan, where FP4"),
    ("tensor", _filled("weight_scale", -1.0), "_proj.weight_scale' holds -1, where FP8"),
    ("deepseek", _filled("weight_scale_inv", 1e-45), "_proj.weight_scale_inv' holds 1.4e-45"),
    ("nvfp4", _filled("weight_global_scale", 0.0), "_proj.weight_global_scale' holds 0"),
    ("nvfp4", _filled("weight_global_scale", 1e38), "_proj.weight_global_scale' holds 1e+38"),
    ("deepseek", _changed("weight_scale_inv", lambda s: s[:1]), "is F32 [1, 2], where FP8 with"),
    ("deepseek", _changed("weight_scale_inv", torch.Tensor.int), "is I32 [3, 2], where FP8 with"),
    ("tensor", _changed("weight_scale", lambda s: s.expand(2)), "is F32 [2], where FP8"),
    ("mxfp4", _changed("weight_packed", torch.Tensor.short), "is I16 [384, 128], as FP4"),
    ("mxfp6", _changed("weight_packed", lambda x: x[:, 1:]), "is U8 [384, 191], as FP6"),
    ("deepseek", lambda t: t.update({f"{UP}.weight_g_idx": torch.ones(1)}), "a tensor too many"),
    ("deepseek", _changed("weight", lambda w: w.view(torch.uint8)), "_proj.weight' is torch.uint8"),
]


@pytest.mark.parametrize(("layout", "damage", "message"), WRONG)
def test_a_folder_with_wrong_scales_is_one_line(layout, damage, message, tmp_path):
    write_quantized(tmp_path, layout)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    damage(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert message in refusal(find_source, f"hf:{tmp_path}")


def _group(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(changes)


def _targets(target: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"].update(targets=[target])


UNREAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("deepseek", lambda c: c.update(quant_method="gptq", bits=4), "is of gptq: read are fp8"),
    ("deepseek", lambda c: c.pop("quant_method"), "is of a scheme without a name"),
    ("deepseek", lambda c: c.update(weight_block_size=[100, 100]), "= [100, 100]: blocks are read"),
    ("deepseek", lambda c: c.update(fmt="e5m2"), "fmt = e5m2: only e4m3"),
    ("deepseek", lambda c: c.update(expert_dtype="fp4"), "expert_dtype = fp4: only fp8"),
    ("channel", _group(symmetric=False), "only weights of type float that are symmetric"),
    ("channel", _group(strategy="group", group_size=128), "8 bits with strategy = group: 8 bits"),
    ("channel", _group(num_bits=4), "of 4 bits with strategy = channel: 8 bits with tensor"),
    ("block", _group(block_structure=[96, 96]), "block_structure = [96, 96]: blocks are read"),
    ("mxfp4", _group(group_size=16), "num_bits and group_size must be 4 and 32"),
    ("channel", lambda c: c.update(format="int-quantized"), "compressed-tensors int-quantized"),
    ("channel", lambda c: c.update(config_groups=[]), "it has no table config_groups"),
    ("channel", lambda c: c.update(config_groups={"FP8": ["Linear"]}), "FP8 has no list of targ"),
    ("channel", lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_c"),
    ("channel", lambda c: c.update(transform_config={"config_groups": {}}), "transform_config is"),
    ("channel", _targets("re:("), "is no pattern"),
    ("channel", _targets(r"re:(.)\1"), r"its target re:(.)\1 is no pattern that is read"),
    ("channel", _targets("x"), "gives it no scheme"),
    ("channel", lambda c: c["config_groups"]["group_0"].update(weights=7), "weights are no table"),
    ("channel", lambda c: c["config_groups"]["group_0"].pop("weights"), "is torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("layout", "change", "message"), UNREAD)
def test_a_scheme_that_is_not_read_is_one_line_that_names_it(layout, change, message, tmp_path):
    write_quantized(tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change(config)
    config_json(tmp_path, quantization_config=config)
    error = refusal(find_source, f"hf:{tmp_path}")
    assert message in error
    assert str(tmp_path) in error
    assert "float32, bfloat16 or float16." in error


NEAREST = {
    ("deepseek", "headroom"): "block --set recipe.quantizer.scale=float32",
    ("deepseek ue8m0", "headroom"): "block",
    ("tensor", "power_of_two"): "current --set recipe.quantizer.scale=power_of_two",
    ("channel", "headroom"): "rowwise --set recipe.quantizer.scale=float32",
    ("mxfp6", "headroom"): "mxfp6_e2m3",
    ("mxfp4", "headroom"): "mxfp4",
    ("nvfp4", "headroom"): "nvfp4 --set 'recipe.weight.block=[1, 16]'",
}


@pytest.mark.parametrize(("layout", "kind"), NEAREST)
def test_the_nearest_recipe_is_named_with_options_that_give_its_quantizer(layout, kind, tmp_path):
    write_quantized(tmp_path, layout, kind)
    (note,) = find_source(f"hf:{tmp_path}").notes
    name, *sets = shlex.split(note.partition("--recipe ")[2].replace("--set ", ""))
    assert note.endswith(f"the nearest recipe is --recipe {NEAREST[layout, kind]}")
    overrides = parse_config(None, {"recipe": name}, sets).recipe_overrides
    quantizers = load_recipe(name, overrides).quantizers
    assert quantizers is not None
    weight = quantizers.weight
    assert weight is not None
    stored = next(iter(open_folder(tmp_path).tensors.schemes.values())).weight
    assert (weight.format, weight.block) == (stored.format, stored.block)


def test_groups_are_chosen_by_name_then_pattern_then_class(tmp_path):
    values = write_quantized(tmp_path, "channel")
    by_tensor = write_quantized(tmp_path / "other", "tensor")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors_by_tensor = safetensors.torch.load_file(tmp_path / "other/model.safetensors")
    moved = [name for name in tensors_by_tensor if ".k_proj." in name or name.startswith(UP)]
    tensors |= {name: tensors_by_tensor[name] for name in moved}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    weights = group["weights"] | {"strategy": "tensor"}
    for name, target in (("group_1", "re:.*k_proj"), ("group_2", UP)):
        config["config_groups"][name] = group | {"targets": [target], "weights": weights}
    config_json(tmp_path, quantization_config=config)
    source = find_source(f"hf:{tmp_path}")
    for name, weight in in_transformers(source).items():
        assert torch.equal(weight, (by_tensor if name in moved else values)[name])
    assert len(source.notes) == 2


def test_a_folder_runs_in_any_recipe_by_load(tmp_path):
    write_quantized(tmp_path, "mxfp4")
    model = fp8stack.load(f"hf:{tmp_path}", recipe="mxfp4")
    exact = fp8stack.load(f"hf:{tmp_path}")
    x = tokens(256)
    assert model.backend.plan.recipe.name == "mxfp4"
    assert torch.equal(logits(exact, x), logits(model_of(find_source(f"hf:{tmp_path}")), x))
