"""`fp8stack forecast --model`: a forecast by the size of a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.forecast import (
    chinchilla_loss,
    expected_cost,
    forecast_by_size,
    parse_tokens,
)
from fp8stack.common.presets import names
from fp8stack.model.config import load_config
from tests.conftest import refusal
from tests.support.small_loop import MIXTURE, SmallLoop

LAW = laws.fitted()


@pytest.mark.parametrize("model", names("models"))
def test_every_shipped_model_has_a_forecast(model):
    result = forecast_by_size(model, None, ("nvfp4", "mxfp8"))
    nvfp4, mxfp8 = (expected.percent for expected in result.recipes)
    assert nvfp4 is not None
    assert mxfp8 is not None
    assert 1.5 < nvfp4.mean < 2.5
    assert 0.1 < mxfp8.mean < 0.2
    assert (result.loss is None) == model.startswith("gpt-nano")  # bytes, and under a million


@pytest.mark.capability("D12")
def test_a_gap_is_told_in_percent_in_nats_and_in_tokens_with_its_sources():
    result = forecast_by_size("llama-8b", parse_tokens("160B"), ("nvfp4", "mxfp4", "delayed"))
    nvfp4, mxfp4, delayed = result.recipes
    parameters = load_config("llama-8b").parameters()
    ratio = 160e9 / parameters
    loss = chinchilla_loss(parameters, 160e9)
    assert nvfp4.percent == LAW.gap(parameters, ratio, nvfp4.severity or 0.0)
    assert nvfp4.nats.high == pytest.approx(loss * nvfp4.percent.high / 100)
    assert nvfp4.extra_tokens.low == LAW.extra_tokens(ratio, nvfp4.percent.low)
    assert set(nvfp4.sources) >= {"Quartet II", "nanochat", "NVIDIA 12B", "fp8stack's study"}
    assert mxfp4.sources == ("fp8stack's study", "NVIDIA 8B")
    text = "\n".join(result.as_text())
    assert f"{nvfp4.percent.mean:+.2f} %" in text
    assert "llama-8b: 8.03B parameters, 160B training tokens, 19.9 per parameter" in text
    assert "arXiv 2509.25149" in text
    assert "delayed: known from models of 0.1M to 0.9M parameters alone" in text
    assert type(result).model_validate_json(result.model_dump_json()) == result
    sentence = result.sentence()
    assert sentence.startswith(f"loss gap to expect of nvfp4: {nvfp4.percent.mean:+.2f} % in the ")
    assert "19.9 tokens per parameter; rests on Quartet II, nanochat" in sentence
    # The factor of FP8 is set.
    assert delayed.percent.high / delayed.percent.mean == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("model", "tokens", "is_wider", "has_extra"),
    [
        ("gpt2-124m", "1M", True, False),
        ("gpt2-124m", "2B", False, True),
        ("llama-8b", "700B", False, True),
        ("llama-8b", "900B", False, False),  # beyond 100 tokens per parameter
        ("gpt2-124m", "200B", True, False),
    ],
)
def test_far_from_the_published_tokens_the_interval_is_wider_and_says_why(
    model, tokens, is_wider, has_extra
):
    result = forecast_by_size(model, parse_tokens(tokens), ("nvfp4",))
    (nvfp4,) = result.recipes
    text = "\n".join(result.as_text())
    assert ("extrapolated, with a wider interval: published gaps are of 0.024 to 833" in text) == (
        is_wider
    )
    assert (nvfp4.extra_tokens is not None) == has_extra
    assert (nvfp4.nats is None) == (tokens == "1M")
    assert ("growth with tokens beyond 20" in text) == (tokens in ("700B", "900B", "200B"))


def test_a_mixture_of_experts_counts_its_active_parameters_and_says_that_it_is_extrapolated():
    result = forecast_by_size("qwen3-30b-a3b", None, ("mxfp8",))
    active = load_config("qwen3-30b-a3b").active_parameters()
    assert result.tokens == 20 * active
    text = "\n".join(result.as_text())
    assert "30.5B parameters (3.35B active)" in text
    assert "extrapolated: the law is of models without experts, and this counts the active" in text


def test_a_recipe_that_no_source_trains_with_and_layers_in_bf16_are_said(tmp_path):
    head, share = tmp_path / "head.toml", tmp_path / "share.toml"
    head.write_text('like = "mxfp8"\nhead = true\n')
    share.write_text('like = "mxfp8"\nexclude_last_blocks = 3\n')
    result = forecast_by_size("gpt2-124m", None, (str(head), str(share)))
    assert result.recipes[0].percent is None
    text = "\n".join(result.as_text())
    assert "cannot tell" in text
    assert "no source quantizes the head; `fp8stack compare` measures it" in text
    assert "cannot tell, no source quantizes the head" in result.sentence()
    assert "quantizes 75% of the blocks' linear work" in text


def test_tokens_may_have_a_unit_and_what_is_no_number_is_refused():
    for text, tokens in (("160B", 160e9), ("1.5T", 1.5e12), (" 20m", 20e6), ("2000", 2000)):
        assert parse_tokens(text) == tokens
    for text in ("", "B", "-3B", "0", "nan", "1e400T", "many"):
        assert "is no number of training tokens" in refusal(parse_tokens, text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-9b"], "No model 'llama-9b'"),
        (["--model", "llama-8b", "--recipes", "bf16"], "bf16: nothing is quantized."),
        ([], "Missing option '--model'"),
    ],
)
def test_bad_input_by_size_is_refused(words, message, refused):
    assert message in refused("forecast", *words)


def test_the_command_prints_json(command, capsys):
    words = ("--model", "llama-8b", "--tokens", "160B", "--recipes", "nvfp4", "--json")
    assert command("forecast", *words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipes"][0]["percent"]["mean"] == pytest.approx(LAW.level, abs=0.05)


@pytest.mark.parametrize(
    ("recipe", "keys", "is_known"),
    [
        ("mxfp8", {}, True),
        ("fp32", {}, False),
        ("delayed", {"phases": "default"}, False),
        ("delayed", MIXTURE, False),
    ],
)
def test_a_run_in_one_recipe_without_experts_is_told_its_expected_cost(
    recipe, keys, is_known, tmp_path
):
    run = SmallLoop(tmp_path / "r", recipe, **keys).run
    run.state.step = 20
    line = expected_cost(run)
    assert (line is not None) == is_known
    if line is not None:
        assert line.startswith(f"loss gap to expect of {recipe}: +0.")


def test_a_forecast_by_size_does_not_import_torch():
    code = (
        "import sys; from fp8stack import cli\n"
        "try: cli.main(['forecast', '--model', 'llama-8b'])\n"
        "finally: sys.exit(9 * ('torch' in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"nvfp4" in ended.stdout
