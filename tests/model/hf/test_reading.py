"""Folders that transformers saved, as weights to begin with: `--init-from hf:PATH`."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fp8stack
from fp8stack import GPT, GPTConfig, data
from fp8stack.common.errors import UserError
from fp8stack.model.config import load_config
from fp8stack.model.hf import from_hf, model_from_config, open_folder
from fp8stack.planning.run_config import RunConfig, for_ranks, parse_config
from fp8stack.precision import system_memory
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.init_from import nearest_preset, with_source
from fp8stack.training.load import find_source
from tests.conftest import losses, metrics, refusal
from tests.faults.bounded import bounded
from tests.support.hf_models import (
    LAYOUT,
    SHAPES,
    config_json,
    export_to,
    loaded,
    random_model,
    randomize,
    require_same_logits,
    weights_of,
)

SMALL = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROTARY = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
MIXTURE = {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
THETA = {"rope_type": "default", "rope_theta": 5e5}
# The prefix of a configuration's class, and its keys.
HF_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", SMALL),
    "gpt2 untied": ("GPT2", SMALL | {"tie_word_embeddings": False, "n_inner": 40}),
    "gpt2 gelu": ("GPT2", SMALL | {"activation_function": "gelu"}),
    "llama": ("Llama", ROTARY),
    "llama biased": (
        "Llama",
        ROTARY | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama theta": ("Llama", ROTARY | {"rope_parameters": THETA}),
    "arcee": ("Arcee", ROTARY),
    "qwen3": ("Qwen3", ROTARY | {"head_dim": 16}),
    "olmoe": (
        "Olmoe",
        SMALL | MIXTURE | {"num_experts": 6, "norm_topk_prob": True, "eos_token_id": None},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        ROTARY | MIXTURE | {"head_dim": 16, "num_experts": 6, "decoder_sparse_step": 2},
    ),
    "mixtral": ("Mixtral", ROTARY | MIXTURE | {"num_local_experts": 6}),
}


def hf_model_of(name: str) -> Any:
    """A random model that transformers builds."""
    import transformers

    kind, keys = HF_CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    return model


@pytest.fixture
def llama(tmp_path) -> Path:
    hf_model_of("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def model_in(folder: Path) -> GPT:
    """The folder's model as an fp8stack GPT."""
    source = find_source(f"hf:{folder}")
    model = GPT(source.shape, seed=3).eval()
    restore_weights(model, source.weights)
    return model


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_model_of_transformers_computes_the_same_here(name, tmp_path):
    hf_model = hf_model_of(name)
    if name == "qwen3":  # its weights are stored in bfloat16
        hf_model = hf_model.bfloat16()
    several = name == "gpt2"
    hf_model.save_pretrained(tmp_path, max_shard_size="20KB" if several else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == several
    require_same_logits(model_in(tmp_path), loaded(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("name", SHAPES)
def test_what_we_export_computes_the_same_and_comes_back_to_the_bit(name, tmp_path):
    model = random_model(GPTConfig(**SHAPES[name]))
    hf_model = loaded(export_to(tmp_path / "a", model))
    assert hf_model.config.model_type == LAYOUT[name]
    require_same_logits(model, hf_model)
    hf_model.save_pretrained(tmp_path / "b")
    folder = open_folder(tmp_path / "b")
    described = model_from_config(folder.config, "b")
    assert described.layout.model_type == LAYOUT[name]
    assert described.config.parameter_shapes() == model.config.parameter_shapes()
    back = from_hf(described.config, described.layout, folder.tensors, "b")
    weights = weights_of(model)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)


def test_files_of_older_versions_without_prefix_and_with_masks_are_read(tmp_path):
    hf_model = hf_model_of("gpt2")
    hf_model.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    old["lm_head.weight"] = old["wte.weight"].clone()
    (tmp_path / INDEX).write_text('{"weight_map": {"h.0": "gone.safetensors"}}')  # is not read
    safetensors.torch.save_file(old, tmp_path / "model.safetensors")
    config_json(tmp_path, n_ctx=64, task_specific_params={}, dtype=None)
    require_same_logits(model_in(tmp_path), hf_model)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama theta", {"rope_parameters": None, "rope_theta": 500000}),  # of transformers 4
        ("arcee", {"rms_norm_eps": None}),
        # Two bases; the model has the one that transformers uses.
        ("llama theta", {"rope_scaling": {"rope_type": "default", "rope_theta": 9000.0}}),
    ],
)
def test_a_configuration_that_says_it_otherwise_is_read_as_transformers_reads_it(
    name, changes, tmp_path
):
    hf_model_of(name).save_pretrained(tmp_path)
    config_json(tmp_path, **changes)
    require_same_logits(model_in(tmp_path), loaded(tmp_path))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mistral"}, "model_type = 'mistral'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type = llama3"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("llama", {"sliding_window": 16}, "sliding_window = 16"),
    ("llama", {"is_causal": False}, "is_causal = false"),
    ("llama", {"layer_types": ["sliding_attention"]}, "layer_types = sliding_attention"),
    ("llama", {"attention_bias": True}, "mlp_bias = false"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("llama", {"hidden_act": "relu"}, "up_proj is not the same as its gate_proj"),
    ("llama", {"quantization_config": {"bits": 4}}, "is of a scheme without a name"),
    ("llama", {"auto_map": {"AutoModel": "x.y"}}, "auto_map is set"),
    ("llama", {"hidden_size": "wide"}, "hidden_size = 'wide'"),
    ("llama", {"hidden_size": None}, "key 'hidden_size' is missing"),
    ("llama", {"vocab_size": 255}, "'model.embed_tokens.weight' is torch.float32 (256, 32)"),
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight is not the embedding"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
    ("llama", {"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2."),
    ("llama", {"num_hidden_layers": 1}, "has a tensor too many, 'model.layers.1."),
    ("llama", {"rope_parameters": 7}, "rope_parameters = 7"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window = true"),
    ("gpt2", {"resid_pdrop": 0.2}, "attn_pdrop = 0.1"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = false"),
    ("gpt2", {"fp8stack": {"bias": False}}, "bias = false, and"),
    # Other names of its sizes must agree.
    ("gpt2", {"hidden_size": 64}, "hidden_size = 64"),
    ("arcee", {"hidden_act": "silu"}, "hidden_act = silu"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("olmoe", {"head_dim": 16}, "head_dim = 16"),
    ("olmoe", {"attention_bias": True}, "attention_bias = true"),
    ("olmoe", {"num_experts": 65536}, "too few for 2 layers of 65536 experts"),
    ("olmoe", {"num_experts_per_tok": 7}, "per_token 7 is more than the 6 experts"),
    ("qwen3_moe", {"num_experts": 7}, "num_experts and num_local_experts must agree"),
    ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
    ("qwen3_moe", {"num_hidden_layers": 3}, "decoder_sparse_step = 2: only blocks at the start"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_a_model_here_cannot_be_is_refused_by_its_key(name, changes, message, tmp_path):
    hf_model_of(name).save_pretrained(tmp_path)
    config_json(tmp_path, **changes)
    assert message in refusal(find_source, f"hf:{tmp_path}")


OTHERS: list[Any] = [
    *(None, True, False, 0, -1, 3, 0.0, -1.5, 2.5, 2**31, 2**32, 2**63, 10**30),
    *("", "x", [], [1], [None], {}, {"a": 1}, {"rope_type": []}, {"rope_theta": 10**400}),
]
OPTIONAL = (
    *("n_inner", "hidden_size", "sliding_window", "use_sliding_window", "layer_types"),
    *("rope_scaling", "rope_theta", "partial_rotary_factor", "fp8stack", "attention_bias"),
    *("mlp_bias", "head_dim", "num_key_value_heads", "quantization_config", "auto_map"),
    *("is_causal", "scale_attn_weights", "add_cross_attention", "rope_parameters"),
    *("num_experts", "num_local_experts", "clip_qkv", "mlp_only_layers", "decoder_sparse_step"),
)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_moe", "arcee"])
@pytest.mark.full
def test_keys_of_every_json_type_are_read_or_refused_in_one_line(name, tmp_path):
    hf_model_of(name).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    table = json.loads(file.read_text())
    pairs = list(itertools.product(sorted({*table, *OPTIONAL}), OTHERS))

    def read_all() -> None:
        several_lines = set[str]()
        for key, value in random.Random(name).sample(pairs, 100):
            file.write_text(json.dumps(table | {key: value}))
            try:
                find_source(f"hf:{tmp_path}")
            except UserError as error:
                several_lines |= {key for _ in str(error).splitlines()[1:]}
        print(several_lines)

    ended = bounded(read_all)
    assert (ended.code, ended.stdout) == (0, "set()\n"), ended.stderr[-500:]


@pytest.mark.parametrize(
    ("name", "key"),
    [("gpt2", "n_positions"), ("gpt2", "n_layer"), ("llama", "vocab_size"),
     ("llama", "intermediate_size")],
)  # fmt: skip
@pytest.mark.parametrize("size", [2**31, 2**40])
@pytest.mark.full
def test_shapes_are_compared_before_memory_is_taken(name, key, size, tmp_path):
    hf_model_of(name).save_pretrained(tmp_path)
    config_json(tmp_path, **{key: size})
    ended = bounded(lambda: find_source(f"hf:{tmp_path}"), 2**27, seconds=20)
    assert (ended.code, ended.is_one_line) == (2, True), ended.stderr[-500:]


def test_a_model_that_does_not_fit_into_memory_is_refused(llama, monkeypatch):
    monkeypatch.setattr(system_memory, "available_memory", lambda device: 1000)
    message = refusal(find_source, f"hf:{llama}")
    assert f"{llama} needs 0.0 GiB of memory" in message


def _with_norm(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path):
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
        safetensors.torch.save_file(tensors, folder / "model.safetensors")

    return damage


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def _indexed(text: str) -> Callable[[Path], object]:
    def damage(folder: Path):
        (folder / WEIGHTS).rename(folder / "1.safetensors")
        (folder / INDEX).write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "No folder"),
        (lambda at: (at / WEIGHTS).rename(at / "pytorch_model.bin"), "pytorch_model.bin, a pickle"),
        (lambda at: os.truncate(at / WEIGHTS, 9000), "not a safetensors file"),
        (_with_norm(lambda norm: norm / 0), "'model.norm.weight' is not finite"),
        (_with_norm(lambda norm: norm.int()), "'model.norm.weight' is torch.int32"),
        (_indexed('{"weight_map": {"a": "../model.safetensors"}}'), "elsewhere"),
        (_indexed('{"weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors is missing"),
        (_indexed('{"weight_map": {"a": "1.safetensors"}}'), "lacks the tensor 'a'"),
        (_indexed("{}"), "has no weight_map"),
        (_write("config.json", "{" * 100_000), "config.json is not valid JSON"),
        (_write("config.json", "[]"), "config.json is not a JSON object"),
        (lambda at: (at / "config.json").unlink(), "config.json is missing"),
        (lambda at: (at / WEIGHTS).unlink(), "has no model.safetensors"),
    ],
)
def test_a_damaged_folder_is_one_line_and_no_run(damage, message, llama, refused):
    damage(llama)
    assert message in refused(
        "pretrain", "--init-from", f"hf:{llama}", "--out", "new", "--steps", "2"
    )


TRAIN = [
    "--steps", "4", "--batch", "4", "--context", "32", "--eval-every", "2", "--save-every", "2",
    "--set", "eval_windows=4", "--set", "sample_tokens=0",
]  # fmt: skip


def test_training_goes_on_from_the_folders_loss_and_needs_it_no_more(llama, command, capsys):
    start = ["--init", "hf:llama", "--recipe", "fp32", "--lr", "1e-9", *TRAIN]
    assert command("pretrain", "--out", "a", *start) == 0
    assert f"weights of hf:{llama}" in capsys.readouterr().out
    model = model_in(llama)
    _, validation = data.load_corpora(None, 256)
    windows = data.validation_windows(validation, count=4, context=32, vocabulary=256)
    with torch.no_grad():
        loss = model(windows[:, :-1], windows[:, 1:]).item()
    assert metrics(Path("a"))[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)
    shutil.copytree("a", "cut")
    shutil.rmtree("cut/checkpoints/step-000004")
    assert command("pretrain", "--config", "a/run.toml", "--out", "b") == 0
    shutil.rmtree(llama)
    assert command("pretrain", "--resume", "cut") == 0
    assert losses(Path("cut")) == losses(Path("a")) == losses(Path("b"))
    assert fp8stack.load("cut").config.kv_heads == 2


def test_another_model_than_the_folders_is_refused_its_dropout_is_free_and_it_is_known_again(
    llama, monkeypatch
):
    shape = GPTConfig(vocabulary=50257, context=1024, layers=12, width=768, heads=12, dropout=0.1)
    assert nearest_preset(shape) == ("gpt2-124m", {"dropout": 0.1})
    mixed = load_config("olmoe-7b", {"experts": {"count": 8, "bias": 0.1}, "head_width": 64})
    name, overrides = nearest_preset(mixed)
    assert (name, load_config(name, overrides)) == ("olmoe-7b", mixed)
    source = find_source(f"hf:{llama}")
    requested = parse_config(None, {"model": "gpt-nano"})
    assert "context is 128 here and 64" in refusal(with_source, requested, source)
    config = with_source(RunConfig(model_overrides={"dropout": 0.1}), source)
    assert config.model_overrides["dropout"] == 0.1
    assert config.init_from == f"hf:{llama.resolve()}"
    config = with_source(parse_config(None, {}), replace(source, shape=load_config("gpt2-124m")))
    assert (config.batch, config.accumulate, for_ranks(config, 8).accumulate) == (512, 16, 2)


def test_dropout_and_keys_without_meaning_here_are_told(tmp_path):
    hf_model_of("gpt2").save_pretrained(tmp_path / "gpt2")
    config_json(tmp_path / "gpt2", embedding_multiplier=12.0)
    notes = " ".join(find_source(f"hf:{tmp_path / 'gpt2'}").notes)
    assert "dropout 0.1, as in the folder" in notes
    assert "keys that are not known here: embedding_multiplier" in notes
    hf_model_of("llama").save_pretrained(tmp_path / "llama")
    assert not find_source(f"hf:{tmp_path / 'llama'}").notes
    config_json(tmp_path / "llama", attention_dropout=0.3)
    assert "attention_dropout 0.3" in find_source(f"hf:{tmp_path / 'llama'}").notes[0]


@pytest.mark.parametrize("same", [True, False])
def test_text_becomes_tokens_of_the_weights_and_other_tokens_are_refused(
    same, llama, command, tmp_path, capsys
):
    text = fp8stack.load_tokenizer("bytes").to_json()
    table = json.loads(text)
    if not same:
        vocabulary = table["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (llama / "tokenizer.json").write_text(json.dumps(table | {"padding": None}))
    (tmp_path / "text.txt").write_text("the cat sat on a mat\n" * 500)
    begin = ["pretrain", "--init", "hf:llama", *TRAIN]
    assert command(*begin, "--out", "a", "--data", "text.txt") == 0
    sample = fp8stack.load_tokenizer(str(tmp_path / "a"))
    assert sample.encode("a")[0] == (ord("a") if same else ord("b"))
    assert command("prepare", "text.txt", "--tokenizer", "bytes", "--out", "tokens") == 0
    capsys.readouterr()
    assert command(*begin, "--out", "b", "--data", "tokens") == (0 if same else 2)
    assert ("their ids mean other text" in capsys.readouterr().err) == (not same)
    assert command(*begin, "--out", "c", "--data", "tokens", "--tokenizer", "bytes") == 0
