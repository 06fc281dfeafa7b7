"""Quantized folders of transformers that are written again to the byte, until weights change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch

import fp8stack
from fp8stack import GPTConfig
from fp8stack.model.hf import layout_of, to_hf
from fp8stack.training.load import find_source
from tests.support.hf_models import SHAPES, export_to, random_model, require_same_logits
from tests.support.hub_stand_in import Hub
from tests.support.quantized_folders import LAYOUTS, dequantized, write_quantized

FP8 = ("--format", "fp8", "--out", "x")
TRAIN = [
    "--steps", "2", "--batch", "2", "--context", "32", "--save-every", "1", "--recipe", "current",
    "--set", "eval_windows=1", "--set", "sample_tokens=0", "--set", "weight_decay=0",
]  # fmt: skip


def stored(folder: Path) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """The dtype, shape and bytes of each tensor of a folder."""
    tensors: dict[str, tuple[torch.dtype, list[int], bytes]] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[name] = tensor.dtype, list(tensor.shape), data
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full
def test_an_export_of_a_folder_holds_its_tensors_to_the_byte(layout, command, tmp_path):
    write_quantized(tmp_path / "source", layout)
    assert command("export", "hf:source", *FP8) == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")
    tables = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("x", "source"))
    assert next(tables) == next(tables)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_experts_are_written_again_to_the_byte(model, command, tmp_path):
    write_quantized(tmp_path / "source", "deepseek", model=model)
    assert command("export", "hf:source", *FP8) == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")


@pytest.mark.full
def test_a_run_writes_the_bytes_until_a_step_changes_a_weight(command, tmp_path, capsys):
    values = write_quantized(tmp_path / "source", "deepseek")
    start = ["--init", "hf:source", *TRAIN]
    assert command("pretrain", "--out", "idle", *start, "--lr", "1e-300") == 0
    output = capsys.readouterr().out
    assert "FP8 with a float32 scale per block of 128 x 128 (weight_scale_inv)" in output
    assert "the nearest recipe is --recipe block --set recipe.quantizer.scale=float32" in output
    assert command("export", "idle", *FP8) == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")
    assert command("pretrain", "--out", "run", *start, "--lr", "1e-3") == 0
    assert command("export", "run", "--format", "fp8", "--out", "y", "--scheme", "deepseek") == 0
    source = find_source("run")
    weights = to_hf(source.shape, layout_of(source.shape), source.weights)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights[name], values[name])
    written = safetensors.torch.load_file("y/model.safetensors")
    blocks = weights[name].unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    torch.testing.assert_close(written[f"{name}_scale_inv"], scales, rtol=1e-6, atol=0)


def test_static_scales_of_activations_and_many_files_are_written_again(command, tmp_path, capsys):
    write_quantized(tmp_path / "source", "tensor")
    tensors = safetensors.torch.load_file("source/model.safetensors")
    names = [name for name in tensors if name.endswith("weight_scale")]
    tensors |= {name.replace("weight", "input"): torch.tensor([0.25]) for name in names}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])
    Path("source/model.safetensors").unlink()
    index: dict[str, str] = {}
    for number, name in enumerate(tensors):
        index[name] = f"model-{number % 2}.safetensors"
    for file in set(index.values()):
        of_file = {name: tensors[name] for name in tensors if index[name] == file}
        safetensors.torch.save_file(of_file, f"source/{file}")
    Path("source/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert command("export", "hf:source", *FP8, "--dtype", "bf16") == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")
    notes = capsys.readouterr().err
    assert "the folder's scales of activations are left out" in notes
    assert "--dtype bf16 changes nothing" in notes


@pytest.mark.full
def test_a_folder_that_is_gone_or_another_one_is_no_source(command, tmp_path, capsys):
    write_quantized(tmp_path / "source", "channel")
    start = ["--init", "hf:source", *TRAIN, "--lr", "1e-300"]
    assert command("pretrain", "--out", "run", *start) == 0
    shutil.copytree("source", "kept")
    shutil.rmtree("source")
    write_quantized(tmp_path / "source", "channel", seed=1)
    assert command("export", "run", *FP8) == 0
    assert stored(tmp_path / "x") != stored(tmp_path / "source") != stored(tmp_path / "kept")
    shutil.rmtree("source")
    capsys.readouterr()
    assert command("export", "run", *FP8, "--overwrite") == 0
    assert f"hf:{tmp_path / 'source'}, which the run began with, cannot be read" in (
        capsys.readouterr().err
    )
    Path("kept").rename("source")
    assert command("export", "run", *FP8, "--overwrite") == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")


@pytest.mark.full
def test_a_repository_is_compared_in_the_cache_and_not_fetched_again(
    hub: Hub, command, tmp_path, capsys
):
    write_quantized(tmp_path / "source", "mxfp4")
    hub.add("a/b", {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()})
    start = ["--init", "hf:a/b", *TRAIN, "--lr", "1e-300"]
    assert command("pretrain", "--out", "run", *start) == 0
    hub.requests.clear()
    assert command("export", "run", *FP8) == 0
    assert stored(tmp_path / "x") == stored(tmp_path / "source")
    shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
    capsys.readouterr()
    assert command("export", "run", *FP8, "--overwrite") == 0
    assert "which the run began with, cannot be read" in capsys.readouterr().err
    assert not hub.requests


@pytest.mark.parametrize(
    ("scheme", "model"),
    [
        ("deepseek", "qwen3_moe"), ("channel", "llama"), ("channel", "qwen3_moe"),
        ("mxfp6", "llama"),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_written_scheme_is_read_back_here_and_by_transformers(scheme, model, command, tmp_path):
    write_quantized(tmp_path / "source", "block", model=model)
    assert command("export", "hf:source", *FP8, "--scheme", scheme) == 0
    hf_model = dequantized(tmp_path / "x", fp8=scheme == "deepseek")
    require_same_logits(fp8stack.load("hf:x"), hf_model, atol=1e-4)


def test_what_says_how_the_tokenizer_is_used_is_taken_over(command, tmp_path, capsys):
    from transformers import AutoTokenizer

    write_quantized(tmp_path / "source", "mxfp4")
    source, generation = tmp_path / "source", {"eos_token_id": [0, 2], "temperature": 0.6}
    tokenizer = fp8stack.load_tokenizer("bytes")
    (source / "tokenizer.json").write_text(tokenizer.to_json())
    used = {"chat_template": "{{ messages }}", "bos_token": "a", "pad_token": "b"}
    table = used | {"tokenizer_class": "OtherTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(table))
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"bos_token_id": 7}))
    for scheme in ([], ["--scheme", "channel"]):
        assert command("export", "hf:source", *FP8, *scheme, "--overwrite") == 0
        assert json.loads(Path("x/generation_config.json").read_text()) == generation
        assert Path("x/chat_template.jinja").read_text() == "{{ messages }}"
        written = json.loads(Path("x/tokenizer_config.json").read_text())
        assert written | used == written
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
        loaded_tokenizer = AutoTokenizer.from_pretrained("x")
        assert (loaded_tokenizer.bos_token, loaded_tokenizer.pad_token) == ("a", "b")
        assert json.loads(Path("x/config.json").read_text())["bos_token_id"] == 7
    (source / "chat_template.jinja").write_bytes(b"\xff")
    assert command("export", "hf:source", *FP8, "--overwrite") == 0
    assert "are not taken over: 'utf-8' codec" in capsys.readouterr().err
    assert not Path("x/chat_template.jinja").exists()


def test_a_converted_folder_has_a_card_that_claims_no_training(command, tmp_path):
    write_quantized(tmp_path / "source", "mxfp4")
    assert command("export", "hf:source", *FP8, "--scheme", "deepseek") == 0
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in stored(tmp_path / "x")
    card = Path("x/README.md").read_text()
    assert "Converted by fp8stack, without training." in card
    assert "| steps |" not in card
    assert "compressed-tensors" not in card


def test_packed_schemes_take_the_block_of_their_layout_or_are_refused(command, refused, tmp_path):
    write_quantized(tmp_path / "source", "channel")
    assert command("export", "hf:source", *FP8, "--scheme", "nvfp4") == 0
    values = find_source("hf:source")
    weights = find_source("hf:x").weights["blocks.0.mlp.down.weight"]
    weight = values.weights["blocks.0.mlp.down.weight"].unflatten(1, (-1, 16))
    error = (weights.unflatten(1, (-1, 16)) - weight).abs().amax(2)
    assert (error <= weight.abs().amax(2) / 6 * 1.07).all()
    table = json.loads((tmp_path / "x/config.json").read_text())["quantization_config"]
    assert table["format"] == "nvfp4-pack-quantized"
    assert table["config_groups"]["group_0"]["input_activations"] is None
    assert command("export", "hf:x", "--format", "fp8", "--out", "y", "--scheme", "nvfp4") == 0
    assert stored(tmp_path / "y") == stored(tmp_path / "x")
    export_to(tmp_path / "odd", random_model(GPTConfig(**SHAPES["qwen3"] | {"mlp_width": 40})))
    flags = ["--format", "fp8", "--out", "z", "--scheme", "mxfp4"]
    assert "mxfp4 needs sizes that 32 divides, and the model has 40" in refused(
        "export", "hf:odd", *flags
    )
