"""Training presets of model files: defaults that flags and the run file override."""

from __future__ import annotations

import json

import pytest

from fp8stack.common import presets
from fp8stack.model.config import load_config
from fp8stack.planning import run_config
from fp8stack.planning.run_config import RunConfig, for_ranks, parse_config, training_preset
from tests.conftest import refusal

# Learning rates and tokens per step as published: Brown et al. 2020 (GPT-3), table 2.1; Zhang et
# al. 2024 (TinyLlama), 1.1B; Llama Team 2024 (Llama 3), table 3, and section 3.4.1 for the batch;
# Muennighoff et al. 2024 (OLMoE); Dai et al. 2024 (DeepSeekMoE), section 5.1; DeepSeek-V2-Lite.
PUBLISHED = {
    "gpt2-124m": (6e-4, 0.5e6), "gpt2-350m": (3e-4, 0.5e6), "gpt2-774m": (2.5e-4, 0.5e6),
    "gpt2-1.5b": (2e-4, 1e6), "llama-1b": (4e-4, 2e6), "llama-8b": (3e-4, 4e6),
    "olmoe-7b": (4e-4, 4e6), "deepseek-16b": (4.2e-4, 18.9e6), "qwen3-30b-a3b": (4.2e-4, 18.9e6),
}  # fmt: skip
SHAPE = "vocabulary = 256\ncontext = 32\nlayers = 1\nwidth = 32\nheads = 2\n"


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_shipped_model_is_trained_as_published(model):
    config = parse_config(None, {"model": model, "steps": 100_000})
    lr, tokens = PUBLISHED[model]
    assert config.lr == lr
    assert config.batch * load_config(model).context == pytest.approx(tokens, rel=0.05)
    assert training_preset(model)["source"]


def test_nano_models_keep_the_defaults_and_all_others_have_a_preset():
    assert training_preset("gpt-nano") == training_preset("gpt-nano-moe") == {}
    assert {*presets.names("models")} == {*PUBLISHED, "gpt-nano", "gpt-nano-moe"}
    assert parse_config(None, {"model": "gpt-nano"}) == RunConfig()


def test_flags_and_the_run_file_win_and_a_preset_is_not_given(tmp_path):
    (tmp_path / "run.toml").write_text('model = "gpt2-124m"\nlr = 0.5\n')
    config = parse_config(str(tmp_path / "run.toml"), {"warmup_steps": 7}, ["beta2=0.99"])
    assert (config.lr, config.warmup_steps, config.beta2) == (0.5, 7, 0.99)
    assert (config.batch, config.accumulate) == (512, 16)
    assert set(config.given) == {"model", "lr", "warmup_steps", "beta2"}
    assert parse_config(None, {"model": "gpt2-124m", "batch": 7}).accumulate == 1
    # A short run warms up for a tenth of it.
    assert parse_config(None, {"model": "gpt2-124m", "steps": 50}).warmup_steps == 5
    assert parse_config(None, {"model": "gpt2-124m", "steps": 10**5}).warmup_steps == 715


@pytest.mark.parametrize("key", run_config.REMOVED_KEYS)
def test_a_key_that_no_longer_exists_is_named_and_ignored(key, tmp_path, capsys):
    default, instead = run_config.REMOVED_KEYS[key]
    (tmp_path / "run.toml").write_text(f"steps = 7\n{key} = {json.dumps(default)}\n")
    for sets, message in (([], ""), ([f"{key}=77"], f": {instead}")):
        run_config._tell_removed.cache_clear()
        assert parse_config(str(tmp_path / "run.toml"), {}, sets) == RunConfig(steps=7)
        warning = f"{key} no longer exists and is ignored{message}.\n"
        assert capsys.readouterr().err.endswith(warning)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 16), (4, 4), (64, 1), (3, 16)])
def test_ranks_share_the_micro_batches_of_a_preset(ranks, accumulate):
    config = for_ranks(parse_config(None, {"model": "gpt2-124m"}), ranks)
    assert config.accumulate == accumulate
    explicit = parse_config(None, {"model": "gpt2-124m", "accumulate": 8})
    assert for_ranks(explicit, ranks).accumulate == 8


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("training = 3", "is no table"),
        ("[training]\nlrr = 1.0", "Did you mean 'lr'?"),
        ("[training]\nsteps = 3", "No key of"),
        ("[training]\nlr = -1", "lr = -1"),
    ],
)
def test_a_wrong_preset_is_one_line(table, reason, tmp_path):
    (tmp_path / "mine.toml").write_text(SHAPE + table)
    message = refusal(parse_config, None, {"model": str(tmp_path / "mine.toml")})
    assert "training" in message
    assert reason in message


def test_a_models_own_preset_is_shown_and_saved_with_the_run(command, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(f'{SHAPE}[training]\nsource = "me"\nlr = 0.5\nbatch = 6\n')
    assert command("plan", "--model", "mine.toml") == 0
    assert "lr 0.5" in capsys.readouterr().out
    assert command("plan", "--model", "mine.toml", "--batch", "2", "--json") == 0
    shown_preset = json.loads(capsys.readouterr().out)["training"]
    assert (shown_preset["lr"], shown_preset["batch"], shown_preset["source"]) == (0.5, 2, "me")
    tiny = ["--steps", "1", "--recipe", "fp32", "--out", "r", "--set", "sample_tokens=0"]
    assert command("pretrain", "--model", "mine.toml", *tiny) == 0
    assert "training preset of" in capsys.readouterr().out
    saved = parse_config(str(tmp_path / "r" / "run.toml"), {})
    assert (saved.lr, saved.batch) == (0.5, 6)
    assert command("pretrain", "--resume", "auto", "--out", "r") == 0
    again = ["--model", "mine.toml", "--resume", "auto", "--out", "r", "--lr", "0.1"]
    assert command("pretrain", *again) == 2
    assert "lr is 0.1 here and 0.5" in capsys.readouterr().err
