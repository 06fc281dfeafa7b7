"""Exported folders, against the programs that they are for: transformers, compressed-tensors,
safetensors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import fp8stack
from fp8stack import GPT, GPTConfig, load_config
from fp8stack.common import io
from fp8stack.model.hf import layout_of
from fp8stack.trained.export.format_files import hf_files, safetensors_files
from fp8stack.trained.export.writing import replace_folder, require_room
from tests.conftest import refusal
from tests.faults.inputs.input_corruptions import rewrite
from tests.support.backend_models import same
from tests.support.hf_models import (
    EXPERTS,
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

MIXTURE: dict[str, Any] = {"activation": "swiglu", "qk_norm": "width", "experts": EXPERTS}
TEXT = "def f(x):\n    return 'é…'\n"


def test_gpt_nano_leaves_with_its_tokenizer_and_says_the_same(run, command, capsys):
    from transformers import AutoTokenizer

    assert command("export", str(run), "--format", "hf", "--out", "x") == 0
    output = capsys.readouterr()
    assert "Qwen3ForCausalLM" in output.out
    assert f"{fp8stack.load(run).config.parameters():,} parameters" in output.out
    honour = "hidden_act silu, rope_theta 10000, rms_norm_eps 1e-05, a norm of each head's queries"
    assert output.err.count("note:") == 1
    assert honour in output.err
    hf_model, model = loaded(Path("x")), fp8stack.load(run)
    tokenizer = AutoTokenizer.from_pretrained("x")
    assert tokenizer.encode("é", add_special_tokens=False) == [0xC3, 0xA9]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_id == 255 == hf_model.generation_config.eos_token_id
    require_same_logits(model, hf_model)


@pytest.mark.parametrize(
    ("name", "warnings"), [("gpt2", 0), ("gpt2 gelu", 1), ("arcee", 0), ("qwen3 relu2", 1)]
)
def test_an_activation_that_other_programs_take_for_another_is_warned_of(name, warnings):
    files = hf_files(source_of(random_model(GPTConfig(**SHAPES[name]))), None)
    assert len([note for note in files.notes if "compute wrongly" in note]) == warnings
    if name == "gpt2":  # the key by which llama.cpp knows its context
        assert json.loads(files.texts["config.json"])["n_ctx"] == 64


def test_a_run_that_does_not_know_its_tokenizer_says_so_and_takes_one(
    run, command, tmp_path, capsys
):
    from transformers import AutoTokenizer

    checkpoint = next((run / "checkpoints").glob("step-*"))
    shutil.copytree(checkpoint, tmp_path / "moved")
    assert command("export", "moved", "--out", "x") == 0  # it knows that its tokens are bytes
    assert AutoTokenizer.from_pretrained("x").encode("a") == [97]
    capsys.readouterr()
    rewrite(tmp_path / "moved", lambda body: body["info"].update(tokenizer=None))
    assert command("export", "moved", "--out", "without") == 0
    assert "does not know its tokenizer" in capsys.readouterr().err
    assert not Path("without/tokenizer.json").exists()
    assert json.loads(Path("without/config.json").read_text())["eos_token_id"] is None
    assert command("export", "moved", "--out", "with", "--tokenizer", "bytes") == 0
    assert "tokenizer" not in capsys.readouterr().err
    assert AutoTokenizer.from_pretrained("with").encode("a") == [97]


def test_bf16_rounds_every_weight_once_and_all_may_read_whom_the_umask_lets(run, command):
    assert command("export", str(run), "--out", "x", "--dtype", "bf16") == 0
    assert command("export", str(run), "--out", "y") == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path("x").iterdir()}
    rounded, exact = (safetensors.torch.load_file(f"{d}/model.safetensors") for d in "xy")
    assert rounded.keys() == exact.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, exact[name].bfloat16()), name
    assert loaded(Path("x")).dtype == torch.bfloat16
    mask = os.umask(0)
    os.umask(mask)
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)
    assert "model.safetensors" in modes


def test_many_bytes_are_shared_out_over_files_with_an_index(tmp_path):
    model = random_model(GPTConfig(**SHAPES["qwen3"]))
    replace_folder(tmp_path / "out", hf_files(source_of(model), None), largest=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "out" / name).stat().st_size < 22_000 for name in files)
    require_same_logits(model, loaded(tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"positions": "learned"}, "norm = rmsnorm"),
        ({"positions": "learned", "norm": "layernorm", "kv_heads": 2}, "kv_heads = 2"),
        ({"norm": "layernorm"}, "norm = layernorm"),
        ({"qk_norm": True, "activation": "swiglu", "bias": True}, "bias = true"),
        ({"qk_norm": True, "activation": "gelu"}, "activation = gelu"),
        ({"qk_norm": "width", "activation": "swiglu"}, "qk_norm = width, and only OLMoE"),
        ({"head_width": 8, "heads": 3, "activation": "swiglu"}, "heads = 3"),
        (MIXTURE | {"experts": EXPERTS | {"shared": 1}}, "experts.shared = 1"),
        (MIXTURE | {"experts": EXPERTS | {"first_dense": 1}}, "experts.first_dense = 1"),
        (MIXTURE | {"experts": EXPERTS | {"bias": 0.001}}, "experts.bias = 0.001"),
        (MIXTURE | {"qk_norm": False}, "experts.normalize = false"),
    ],
)
def test_what_transformers_has_no_model_for_is_refused_by_its_key(changes, key):
    assert key in refusal(layout_of, GPTConfig(**(ROPE | changes)))


def test_safetensors_hold_our_names_and_a_model_file(run, command):
    assert command("export", str(run), "--format", "safetensors", "--out", "x") == 0
    assert sorted(path.name for path in Path("x").iterdir()) == ["model.safetensors", "model.toml"]
    with safetensors.safe_open("x/model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["recipe"], metadata["step"]) == ("delayed", "6")
    rebuilt, model = GPT(load_config("x/model.toml"), seed=5), fp8stack.load(run)
    safetensors.torch.load_model(rebuilt, "x/model.safetensors")
    assert rebuilt.config == model.config
    assert same(weights_of(rebuilt), weights_of(model))
    # A tied model is one again.
    tied = random_model(GPTConfig(**SHAPES["gpt2"]))
    replace_folder(Path("y"), safetensors_files(source_of(tied)))
    rebuilt = GPT(load_config("y/model.toml"), seed=5).eval()
    safetensors.torch.load_model(rebuilt, "y/model.safetensors")
    assert torch.equal(logits(rebuilt, tokens(50)), logits(tied, tokens(50)))


def test_an_export_is_replaced_only_if_asked_and_only_if_it_is_one(run, command, capsys):
    export = ["export", str(run), "--out", "x"]
    assert command(*export) == 0
    Path("x/model-00001-of-00002.safetensors").write_text("old")
    capsys.readouterr()
    assert command(*export) == 2
    assert "x is not empty" in capsys.readouterr().err
    assert command(*export, "--overwrite", "--format", "safetensors") == 0
    assert sorted(path.name for path in Path("x").iterdir()) == ["model.safetensors", "model.toml"]
    Path("x/thesis.txt").write_text("mine")
    assert command(*export, "--overwrite") == 2
    assert "'thesis.txt', which no export wrote" in capsys.readouterr().err
    assert Path("x/model.toml").exists()
    assert "which no export wrote" in refusal(require_room, run, overwrite=True)


def test_a_rename_that_fails_puts_the_old_export_back(run, command, monkeypatch):
    assert command("export", str(run), "--out", "x") == 0
    rename = Path.rename

    def refuses(path: Path, target: Path) -> Path:
        if target.name == "x" and not path.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses)
    monkeypatch.setattr(io, "_exchange", lambda path, with_path: False)
    flags = ["--format", "safetensors", "--overwrite"]
    assert command("export", str(run), "--out", "x", *flags) == 4
    assert Path("x/config.json").exists()
    assert [path.name for path in Path().iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--format", "gguf"], "No export format 'gguf'"),
        (["--dtype", "fp16"], "No dtype 'fp16'"),
        (["--format", "safetensors", "--tokenizer", "bytes"], "--tokenizer is of"),
        (["--scheme", "channel"], "--scheme is of --format fp8"),
        (["--format", "fp8", "--scheme", "row"], "No scheme 'row'"),
        (["--out", "file"], "file is no folder"),
        (["--out", "x" * 5000], "Cannot use the folder of --out"),
        (["--out", "CHECKPOINT/x"], "lies in the checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(flags, expected, run, refused):
    Path("file").write_text("x")
    checkpoint = next((run / "checkpoints").glob("step-*"))
    before = sorted(checkpoint.iterdir())
    flags = [flag.replace("CHECKPOINT", str(checkpoint)) for flag in flags]
    assert expected in refused("export", str(run), "--out", "x", *flags)
    assert sorted(checkpoint.iterdir()) == before


def test_a_tokenizer_that_is_not_the_models_is_refused(run, refused):
    table = json.loads(fp8stack.load_tokenizer("bytes").to_json())
    model = table["model"]
    model |= {"vocab": model["vocab"] | {"aa": 256}, "merges": [["a", "a"]]}
    Path("more.json").write_text(json.dumps(table))
    model["vocab"] = {token: id for token, id in model["vocab"].items() if "a" not in token}
    Path("other.json").write_text(json.dumps(table | {"model": model | {"merges": []}}))
    shutil.copytree(run, "run")
    error = refused("export", "run", "--tokenizer", "other.json", "--out", "x")
    assert "was trained on tokens of bytes, not of --tokenizer" in error
    Path("run/tokenizer.json").unlink()
    for checkpoint in Path("run/checkpoints").glob("step-*"):  # as older versions wrote them
        rewrite(checkpoint, lambda body: body["info"].pop("tokenizer"))
    error = refused("export", "run", "--tokenizer", "more.json", "--out", "x")
    assert "257 tokens, the model a vocabulary of 256" in error


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_an_export_that_is_written_again_keeps_its_modes(run, command):
    words = ["export", str(run), "--out", "x"]
    assert command(*words) == 0
    modes = {"x": 0o700, "x/config.json": 0o600, "x/model.safetensors": 0o640}
    for name, mode in modes.items():
        Path(name).chmod(mode)
    Path("x/README.md").unlink()
    assert command(*words, "--overwrite") == 0
    assert {name: Path(name).stat().st_mode & 0o777 for name in modes} == modes
    assert Path("x/README.md").stat().st_mode & 0o077 == 0


def test_an_export_removes_links_and_not_what_they_lead_to(run, command, refused, tmp_path):
    words = ["export", str(run), "--out", "x"]
    assert command(*words) == 0
    (tmp_path / "mine").write_text("mine")
    Path("x/config.json").unlink()
    Path("x/config.json").symlink_to(tmp_path / "mine")
    assert command(*words, "--overwrite") == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert not Path("x/config.json").is_symlink()
    Path("link").symlink_to("x")
    refused("export", str(run), "--out", "link", "--overwrite", message="link is no folder")
