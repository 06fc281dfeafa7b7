"""FP8 weights as compressed-tensors and transformers themselves read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import GPT, GPTConfig, UserError, numerics, plan_for
from fp8stack.analysis.conform import oracles
from fp8stack.common.formats import Quantizer
from fp8stack.layers import build_backend, fp8_state, load_fp8_state
from fp8stack.model.hf import layout_of, modules_of
from fp8stack.precision import Hardware, load_recipe
from fp8stack.trained.export.format_files import Files, ModelSource
from fp8stack.trained.export.quantized_weights import quantized_files
from fp8stack.trained.export.writing import replace_folder
from fp8stack.training.checkpoint.state import restore_weights
from tests.support.hf_models import (
    ROPE,
    SHAPES,
    loaded,
    logits,
    random_model,
    require_same_logits,
    source_of,
    tokens,
    weights_of,
)
from tests.support.quantized_folders import dequantized

CPU = Hardware("cpu")
WIDE = ROPE | {"width": 256, "heads": 2, "mlp_width": 384}
QWEN3 = GPTConfig(**(WIDE | {"activation": "swiglu", "qk_norm": True}))
RELU2 = GPTConfig(**(WIDE | {"activation": "relu2", "qk_norm": True}))
ARCEE = GPTConfig(**(WIDE | {"activation": "relu2", "bias": True}))
LLAMA = GPTConfig(**(WIDE | {"activation": "swiglu", "kv_heads": 1}))
EXPERTS = {"count": 4, "per_token": 2, "width": 128}
MIXTURE = GPTConfig(**(WIDE | {"activation": "swiglu", "qk_norm": True, "experts": EXPERTS}))
MODELS = {"qwen3": QWEN3, "qwen3 relu2": RELU2, "arcee": ARCEE, "llama": LLAMA}


def trained(config: GPTConfig, recipe: str, **changes: object) -> tuple[GPT, ModelSource]:
    """A model that was trained in a recipe, one pass of it, and what is exported of it."""
    plan = plan_for(config, load_recipe(recipe, changes), CPU)
    model = GPT(config, build_backend(plan))
    restore_weights(model, weights_of(random_model(config)))
    x = tokens(config.vocabulary)
    model(x, x).backward()
    state = fp8_state(model)
    again = GPT(config, build_backend(plan)).eval()  # as it is loaded from a checkpoint
    restore_weights(again, weights_of(model))
    load_fp8_state(again, state)
    return again, source_of(again, plan=plan.to_json(), fp8=state)


def untrained(recipe: str, **changes: object) -> ModelSource:
    """The source of an export of `QWEN3` in a recipe that needs no passes."""
    plan = plan_for(QWEN3, load_recipe(recipe, changes), CPU)
    return source_of(random_model(QWEN3), plan=plan.to_json())


def quantization_config(files: Files) -> dict[str, Any]:
    return json.loads(files.texts["config.json"])["quantization_config"]


def exported(folder: Path, source: ModelSource) -> Path:
    replace_folder(folder, quantized_files(source, None))
    return folder


def validated(files: Files) -> Any:
    """The configuration as compressed-tensors reads it."""
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate(quantization_config(files))


def dequantized_by_oracle(
    model: GPT, source: ModelSource, recipe: str, power_of_two: bool = False
) -> dict[str, torch.Tensor]:
    """The dequantized weights of the model's recipe, cast by layer; by row in recipes that are not
    listed here."""
    quantizer = {
        "delayed": Quantizer(),
        "current": Quantizer(scale="power_of_two" if power_of_two else "float32"),
        "block": Quantizer(block=(128, 128), scale="power_of_two"),
    }.get(recipe, Quantizer(block="row"))
    weights = weights_of(model)
    for layer in model.config.linear_shapes():
        name = f"{layer}.weight"
        if layer != "lm_head":
            scale = float(source.fp8[f"{name}.scale"]) if recipe == "delayed" else None
            quantized = oracles.quantize(weights[name].numpy(), quantizer, 1, scale=scale)
            weights[name] = torch.from_numpy(quantized.values * quantized.factor)
    return weights


def test_each_expert_is_cast_by_itself_and_the_router_stays_plain(tmp_path):
    model, source = trained(MIXTURE, "delayed")
    folder = exported(tmp_path / "x", source)
    hf_model = dequantized(folder, fp8=False)
    experts = hf_model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    weights = model.get_parameter("blocks.1.mlp.experts.up.weight").detach()
    scales = source.fp8["blocks.1.mlp.experts.up.weight.scale"]
    for expert, weight, scale in zip(experts, weights, scales, strict=True):
        quantized = oracles.quantize(weight.numpy(), Quantizer(), 1, scale=float(scale))
        assert torch.equal(expert, torch.from_numpy(quantized.values * quantized.factor))
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    assert table["ignore"] == [*routers, "lm_head"]


def test_experts_share_the_static_scale_of_the_largest_inputs():
    """Servers have one for all of a layer; an expert without tokens so far does not count."""
    _, source = trained(MIXTURE, "delayed")
    names = (slot := "blocks.1.mlp.experts.up.input") + ".scale", f"{slot}.amax_history"
    scale, history = (source.fp8[name].clone() for name in names)
    assert (scale != 1).all()
    scale[3], history[:, 3] = 1, 0
    source = replace(source, fp8={**source.fp8, names[0]: scale, names[1]: history})
    tensors = quantized_files(source, None).tensors
    for expert in range(4):
        for key in ("gate_proj", "up_proj"):
            input_scale = tensors[f"model.layers.1.mlp.experts.{expert}.{key}.input_scale"]
            assert torch.equal(input_scale, (1 / scale[:3].min()).reshape(1))


@pytest.mark.parametrize("recipe", ["block", "nvfp4"])
def test_scales_of_experts_that_transformers_cannot_read_are_noted(recipe):
    note = "transformers 5.23 cannot decompress experts"
    source = source_of(random_model(MIXTURE), plan=plan_for(MIXTURE, recipe, CPU).to_json())
    assert note in " ".join(quantized_files(source, None).notes)
    assert note not in " ".join(quantized_files(source, None, "channel").notes)


@pytest.mark.parametrize("recipe", ["delayed", "block", "bf16"])
def test_logits_with_quantized_activations_are_within_the_error_of_fp8(recipe, tmp_path):
    model, source = trained(RELU2, recipe)
    hf_model = loaded(exported(tmp_path / "x", source))
    in_fp8 = trained(RELU2, "current")[0] if recipe == "bf16" else model
    plain = GPT(RELU2).eval()
    restore_weights(plain, weights_of(model))
    x = tokens(RELU2.vocabulary)
    exact, fp8_logits, hf_logits = logits(plain, x), logits(in_fp8, x), logits(hf_model, x)
    fp8_error = (fp8_logits - exact).square().mean().sqrt()
    assert 0.3 * fp8_error < (hf_logits - exact).square().mean().sqrt() < 1.5 * fp8_error
    if recipe == "delayed":  # its activations have the run's own scales
        assert (hf_logits - fp8_logits).square().mean().sqrt() < 0.3 * fp8_error


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "bf16"])
def test_the_configuration_is_one_of_compressed_tensors(recipe):
    _, source = trained(QWEN3, recipe)
    files = quantized_files(source, None)
    config = validated(files)
    assert (config.quant_method, config.format) == ("compressed-tensors", "float-quantized")
    assert config.ignore == ["lm_head"]
    scheme = config.config_groups["group_0"]
    weights = scheme.weights
    assert (weights.num_bits, weights.type, weights.dynamic) == (8, "float", False)
    expected = {
        "delayed": ("tensor", "tensor", False),
        "current": ("tensor", "token", True),
        "block": ("block", "group", True),
        "bf16": ("channel", "token", True),
    }[recipe]
    inputs = scheme.input_activations
    assert (scheme.weights.strategy, inputs.strategy, inputs.dynamic) == expected
    tensors = files.tensors
    module = "model.layers.0.mlp.gate_proj"
    shape = {"tensor": (1,), "channel": (384, 1), "block": (3, 2)}[expected[0]]
    assert tensors[f"{module}.weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{module}.weight_scale"].shape == shape
    assert tensors[f"{module}.weight_scale"].dtype == torch.float32
    assert (f"{module}.input_scale" in tensors) == (recipe == "delayed")
    if recipe == "delayed":  # activations have the scales of the run
        scale = source.fp8["blocks.1.attention.qkv.input.scale"]
        assert scale != 1
        for letter in "qkv":
            input_scale = tensors[f"model.layers.1.self_attn.{letter}_proj.input_scale"]
            assert torch.equal(input_scale, (1 / scale).reshape(1))
    assert tensors["lm_head.weight"].dtype == torch.float32


def test_layers_that_the_recipe_leaves_out_stay_plain(tmp_path):
    model, source = trained(QWEN3, "current", exclude=["blocks.0.attention.qkv"], head=True)
    folder = exported(tmp_path / "x", source)
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert table["ignore"] == [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    hf_model = loaded(folder)
    logits(hf_model, tokens(QWEN3.vocabulary))  # what decompresses them
    state = hf_model.state_dict()
    q_weight = model.get_parameter("blocks.0.attention.qkv.weight")[:256]
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], q_weight)
    assert not torch.equal(state["lm_head.weight"], model.get_parameter("lm_head.weight")[:50])


def test_what_the_guard_took_out_of_fp8_stays_out_of_it():
    _, source = trained(QWEN3, "delayed")
    source = replace(source, left_fp8=("blocks.0.mlp.up", "blocks.1.attention.output"))
    files = quantized_files(source, None)
    plain = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    plain.append("model.layers.1.self_attn.o_proj")
    assert all(f"{name}.weight_scale" not in files.tensors for name in plain)
    assert "model.layers.0.mlp.down_proj.weight_scale" in files.tensors
    config = quantization_config(files)
    assert set(config["ignore"]) >= set(plain)
    assert any("blocks.0.mlp.up, blocks.1.attention.output out of FP8" in n for n in files.notes)
    all_layers = tuple(layer["name"] for layer in source.plan["layers"] if layer["fp8"])
    notes = quantized_files(replace(untrained("current"), left_fp8=all_layers), None).notes
    assert any(note.startswith("the guard took every layer out of FP8: ") for note in notes)
    assert not any("the run has no layer in FP8" in note for note in notes)


def test_weights_are_rounded_to_nearest_in_a_format_that_readers_have():
    _, source = trained(QWEN3, "delayed", **{"weight": {"rounding": "stochastic"}})
    name = "model.layers.0.mlp.down_proj.weight"
    nearest = quantized_files(trained(QWEN3, "delayed")[1], None).tensors[name]
    assert torch.equal(quantized_files(source, None).tensors[name].float(), nearest.float())
    _, source = trained(QWEN3, "delayed", forward_format="e5m2")
    assert quantized_files(source, None, "tensor").tensors[name].dtype == torch.float8_e4m3fn


def test_a_tied_head_stays_out_of_fp8_and_that_is_told(tmp_path):
    config = LLAMA.model_copy(update={"tied": True})
    _, source = trained(config, "current", head=True)
    files = quantized_files(source, None)
    assert any("lm_head is the embedding" in note for note in files.notes)
    assert files.tensors["model.embed_tokens.weight"].dtype == torch.float32
    replace_folder(tmp_path / "x", files)
    loaded(tmp_path / "x")


def test_a_head_in_fp8_is_named_because_a_servers_is_no_linear():
    config = quantization_config(quantized_files(untrained("current", head=True), None))
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert config["ignore"] == []


@pytest.mark.parametrize(
    ("recipe", "scheme", "vocabulary"),
    [("current", "block", 50), ("current", "deepseek", 50), ("block", None, 256)],
)
def test_a_head_stays_out_of_fp8_by_blocks_and_that_is_told(recipe, scheme, vocabulary):
    config = QWEN3.model_copy(update={"vocabulary": vocabulary})  # of any size
    plan = plan_for(config, load_recipe(recipe, {"head": True}), CPU).to_json()
    files = quantized_files(source_of(random_model(config), plan=plan), None, scheme)
    assert any("lm_head stays out of FP8: servers read no head" in note for note in files.notes)
    assert files.tensors["lm_head.weight"].dtype == torch.float32
    table = quantization_config(files)
    assert table["modules_to_not_convert" if scheme == "deepseek" else "ignore"] == ["lm_head"]
    if scheme != "deepseek":
        assert table["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_blocks_that_do_not_fit_become_channels_and_that_is_told_or_are_refused():
    _, source = trained(GPTConfig(**SHAPES["qwen3"]), "block")
    files = quantized_files(source, None)
    assert "by channel" in files.title
    assert any("16 is not divisible by 128" in note for note in files.notes)
    with pytest.raises(UserError, match=r"and the model has 16\. Take --scheme channel"):
        quantized_files(source, None, "block")


@pytest.mark.parametrize(
    ("name", "recipe", "strategy", "like"),
    [
        ("qwen3", "delayed", None, "delayed"),
        ("arcee", "current", None, "current"),
        ("qwen3 relu2", "mxfp8", None, "mxfp8"),
        ("llama", "delayed", "channel", "mxfp8"),
        ("llama", "block", "tensor", "current"),
        ("llama", "bf16", "block", "block"),
    ],
)
def test_weights_that_readers_decompress_are_ours_to_the_bit(
    name, recipe, strategy, like, tmp_path
):
    model, source = trained(MODELS[name], recipe)
    files = quantized_files(source, None, strategy)
    if strategy is not None:
        group = quantization_config(files)["config_groups"]["group_0"]
        assert group["weights"]["strategy"] == strategy
        assert group["input_activations"]["dynamic"]
        assert not any(tensor.endswith("input_scale") for tensor in files.tensors)
    replace_folder(tmp_path / "x", files)
    hf_model, plain = dequantized(tmp_path / "x", fp8=False), GPT(MODELS[name]).eval()
    power = recipe == "block"  # its scales are powers of two, whatever the strategy
    restore_weights(plain, dequantized_by_oracle(model, source, like, power_of_two=power))
    state = hf_model.state_dict()
    up = plain.get_parameter("blocks.0.mlp.up.weight")
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], up[-384:])
    down = plain.get_parameter("blocks.0.mlp.down.weight")
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], down)
    require_same_logits(plain, hf_model, atol=2e-5)


@pytest.mark.parametrize("recipe", ["block", "bf16"])
def test_deepseeks_layout_has_powers_of_two_where_the_recipe_has_them(recipe, tmp_path):
    model, source = trained(LLAMA, recipe)
    files = quantized_files(source, None, "deepseek")
    table = quantization_config(files)
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", [128, 128])
    assert table["modules_to_not_convert"] == ["lm_head"]
    scales = files.tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert (scales.dtype, scales.shape) == (torch.float32, (2, 3))
    assert bool((torch.frexp(scales).mantissa == 0.5).all()) == (recipe == "block")
    replace_folder(tmp_path / "x", files)
    hf_model = loaded(tmp_path / "x")  # transformers dequantizes without a GPU
    weight = model.get_parameter("blocks.0.mlp.down.weight").detach().numpy()
    scale: Any = "power_of_two" if recipe == "block" else "float32"
    quantized = oracles.quantize(weight, Quantizer(block=(128, 128), scale=scale), 1)
    down = hf_model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, torch.from_numpy(quantized.values * quantized.factor))


PACKED = {
    "nvfp4": ("nvfp4-pack-quantized", "nvfp4: activations are not quantized"),
    "mxfp4": ("mxfp4-pack-quantized", ""),
    "mxfp6_e2m3": ("mxfp6-pack-quantized", "mxfp6_e2m3: activations are not quantized"),
}


@pytest.mark.parametrize("recipe", PACKED)
def test_packed_weights_are_decompressed_by_their_library_to_the_runs_own(recipe):
    from compressed_tensors.compressors import BaseCompressor

    plan = plan_for(LLAMA, recipe, CPU)
    source = source_of(random_model(LLAMA), plan=plan.to_json())
    files = quantized_files(source, None)
    format, note = PACKED[recipe]
    assert any(line.startswith(note) for line in files.notes)
    assert any("in bfloat16, so config.json says so" in line for line in files.notes)
    assert files.tensors["lm_head.weight"].dtype == torch.float32
    config = validated(files)
    assert (config.format, config.ignore) == (format, ["lm_head"])
    scheme = config.config_groups["group_0"]
    assert (scheme.input_activations is None) == bool(note)
    compressor = BaseCompressor.get_value_from_registry(format)
    layers = modules_of(LLAMA, layout_of(LLAMA))
    del layers["lm_head"]
    for name, modules in layers.items():
        quantizer: Any = plan.layer(name).quantizers.weight
        weight = numerics.dequantize(numerics.quantize(source.weights[f"{name}.weight"], quantizer))
        for module in modules:
            begin = f"{module.path}."
            names = [name for name in files.tensors if name.startswith(begin)]
            state = {name.removeprefix(begin): files.tensors[name] for name in names}
            assert set(state) == set(compressor.compression_param_names(scheme))
            result = compressor.decompress(state, scheme)["weight"].float()
            # They give bfloat16, in which all of it is exact but the scale of an NVFP4 tensor.
            rtol = 2.0**-8 if recipe == "nvfp4" else 0.0
            torch.testing.assert_close(result, module.select(weight), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("recipe", "dtype", "name", "tied"),
    [
        ("delayed", torch.float32, "arcee", False),
        ("current", torch.bfloat16, "llama", True),
        ("block", torch.float32, "llama", False),
        ("nvfp4", torch.float32, "qwen3", True),
        ("mxfp6_e2m3", torch.bfloat16, "arcee", False),
    ],
)
@pytest.mark.full
def test_transformers_runs_every_export_as_it_loads_it_by_default(
    recipe, name, dtype, tied, tmp_path
):
    source = replace(
        trained(MODELS[name].model_copy(update={"tied": tied}), recipe)[1], dtype=dtype
    )
    files = quantized_files(source, None)
    replace_folder(tmp_path / "x", files)
    hf_model = loaded(tmp_path / "x")
    expected = torch.bfloat16 if recipe in PACKED else dtype
    assert hf_model.dtype == expected
    hf_logits = logits(hf_model, tokens(source.config.vocabulary))
    assert hf_logits.dtype == expected
    assert hf_logits.isfinite().all()
    # Weights that are not quantized are in the file, bitwise, in the requested dtype.
    embedding = source.weights["embedding.weight"].to(dtype)
    assert torch.equal(hf_model.get_input_embeddings().weight, embedding.to(expected))
    assert torch.equal(files.tensors["model.embed_tokens.weight"], embedding)


MX_INPUT = {"input": {"format": "e2m1", "block": [1, 32], "scale": "e8m0"}}


@pytest.mark.parametrize(
    ("recipe", "changes", "note"),
    [
        ("mxfp8", {"weight": {"format": "e2m1"}}, "activations, in e4m3, are not quantized here"),
        ("rowwise", MX_INPUT, "activations are in e4m3 here, and were in e2m1"),
    ],
)
def test_activations_in_a_format_that_the_layout_lacks_are_told(recipe, changes, note):
    files = quantized_files(untrained(recipe, **changes), None)
    assert f"{recipe}: {note}" in files.notes
    inputs = quantization_config(files)["config_groups"]["group_0"]["input_activations"]
    assert (inputs is None) == (recipe == "mxfp8")
    assert ("plain" if inputs is None else "dynamic") + " activations" in files.title


def test_a_run_in_quantized_weights_alone_has_plain_activations_but_in_deepseeks_layout():
    source = untrained("served:mxfp4")
    files = quantized_files(source, None, "channel")
    assert "plain activations" in files.title
    group = quantization_config(files)["config_groups"]["group_0"]
    assert group["input_activations"] is None
    files = quantized_files(source, None, "deepseek")
    assert "dynamic activations" in files.title
    assert quantization_config(files)["activation_scheme"] == "dynamic"


def test_layers_of_different_quantizers_are_groups_of_their_own(tmp_path):
    rules = [
        {"match": "blocks.*.mlp.*", "recipe": "mxfp4"},
        {"match": "blocks.0.attention.output", "recipe": "nvfp4_forward_high"},
    ]
    plan = plan_for(LLAMA, load_recipe("block", {"layers": rules}), CPU)
    model = random_model(LLAMA)
    source = source_of(model, plan=plan.to_json(), dtype=torch.bfloat16)
    files = quantized_files(source, None)
    assert not any("so config.json says so" in note for note in files.notes)
    assert "FP8 weights by block, dynamic activations; FP4 weights by group" in files.title
    config = validated(files)
    assert config.format == "mixed-precision"
    first, second = config.config_groups.values()
    assert (first.format, second.format) == ("float-quantized", "mxfp4-pack-quantized")
    assert "model.layers.0.self_attn.q_proj" in first.targets
    assert "model.layers.1.mlp.up_proj" in second.targets
    # Its forward pass is not quantized.
    assert "model.layers.0.self_attn.o_proj" in config.ignore
    assert files.tensors["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert files.tensors["model.layers.0.mlp.up_proj.weight_packed"].dtype == torch.uint8
    replace_folder(tmp_path / "x", files)
    hf_model = loaded(tmp_path / "x")
    logits(hf_model, tokens(LLAMA.vocabulary))  # what decompresses them
    weight = model.get_parameter("blocks.1.mlp.down.weight")
    quantizer = load_recipe("mxfp4").quantizers.weight
    assert quantizer is not None
    dequantized_weight = numerics.dequantize(numerics.quantize(weight, quantizer))
    assert torch.equal(
        hf_model.state_dict()["model.layers.1.mlp.down_proj.weight"].float(), dequantized_weight
    )


def test_what_has_no_fp8_layout_is_refused():
    _, source = trained(GPTConfig(**SHAPES["gpt2"]), "current")
    with pytest.raises(UserError, match="Conv1D"):
        quantized_files(source, None)
    for recipe, changes, words in (
        ("current", {"forward_format": "e5m2"}, "weights of e5m2, block = tensor"),
        ("mxfp6_e3m2", {}, r"weights of e3m2, block = \[1, 32\], scale = e8m0"),
        ("current", {"quantizer": {"format": "e3m4"}}, "weights of e3m4, block = tensor"),
        ("current", {"input": {"format": "e3m4"}}, "activations of e3m4, in which no server"),
        ("nvfp4", {"weight": {"block": [1, 32]}}, r"e2m1, block = \[1, 32\], scale = e4m3"),
    ):
        plan = plan_for(QWEN3, load_recipe(recipe, changes), CPU).to_json()
        source = source_of(random_model(QWEN3), plan=plan)
        with pytest.raises(UserError, match=rf"{words}.* Use --format hf, or --scheme channel"):
            quantized_files(source, None)
        assert "FP8 weights by channel" in quantized_files(source, None, "channel").title
