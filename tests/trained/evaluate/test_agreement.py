"""`fp8stack eval --agree` against NumPy and SciPy in float64 on the logits of loaded models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8stack
from fp8stack.layers import fp8_state, load_fp8_state
from fp8stack.numerics import dequantize, quantize
from fp8stack.precision import load_recipe
from fp8stack.trained import evaluate as evaluation
from fp8stack.trained.evaluate import divergence, evaluated_run
from fp8stack.trained.evaluate.agreement import Agreement
from fp8stack.trained.evaluate.evaluated_run import EvaluatedRun
from tests.conftest import refusal
from tests.trained.conftest import trained
from tests.trained.evaluate.test_scores import windows_of

LINEARS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
ONE_BATCH = 9  # windows: in one batch, as the oracle's, the logits are the same to the bit
UP = "blocks.0.mlp.up"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("agree"), model_overrides={
        "layers": 1, "width": 128, "heads": 2, "mlp_width": 128
    })  # fmt: skip


def agree(run: str | Path, *recipes: str, **more: Any) -> Agreement:
    (result,) = evaluation.agreements(run, *recipes, **{"batch": ONE_BATCH} | more)
    return result


def log_probabilities(run: Path, model: Any) -> np.ndarray:
    """The model's log-probabilities on the run's windows, of SciPy in float64."""
    from scipy import special

    with torch.no_grad():
        return special.log_softmax(model(windows_of(run)[:, :-1]).double().numpy(), -1)


def kl_of(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """The mean of the tokens' divergences."""
    from scipy import special

    return special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1).mean()


@pytest.mark.capability("A15")
@pytest.mark.parametrize("q", ["served:fp8_dynamic", "served:mxfp4"])
def test_the_figures_are_those_of_scipy_on_the_logits(run, q):
    result = agree(run, "delayed", q)
    models = (fp8stack.load(run, recipe=recipe) for recipe in ("delayed", q))
    log_p, log_q = (log_probabilities(run, model) for model in models)
    atol = 1e-12  # both in float64, from the same logits
    kl = kl_of(log_p, log_q)
    np.testing.assert_allclose(result.kl, kl, rtol=0, atol=atol)
    assert kl > 1e-6
    labels = windows_of(run)[:, 1:].numpy()[..., None]
    of_p, of_q = (np.take_along_axis(x, labels, -1)[..., 0] for x in (log_p, log_q))
    apart = np.abs(of_p - of_q)
    expected = [np.median(apart), np.percentile(apart, 99), apart.max(), np.exp(apart).mean()]
    figures = [result.median, result.percentile_99, result.maximum, result.token_mult_prob_error]
    np.testing.assert_allclose(figures, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(result.losses, (-of_p.mean(), -of_q.mean()), rtol=0, atol=atol)
    windows = (of_p - of_q).mean(1)
    np.testing.assert_allclose(result.loss_difference, windows.mean(), rtol=0, atol=atol)
    error = windows.std(ddof=1) / math.sqrt(len(windows))
    assert result.standard_error is not None
    np.testing.assert_allclose(result.standard_error, error, rtol=0, atol=atol)
    assert result.top1 == (log_p.argmax(-1) == log_q.argmax(-1)).mean()
    assert (result.windows, result.tokens) == (9, 9 * 32)


@pytest.mark.capability("A15")
@pytest.mark.parametrize("recipe", ["fp32", "delayed", "served:fp8_static"])
def test_a_recipe_agrees_with_itself_exactly(run, recipe):
    """A run in delayed scaling is served statically as it was trained."""
    result = agree(run, recipe, recipe.replace("served:fp8_static", "delayed"))
    assert (result.kl, result.maximum, result.loss_difference) == (0, 0, 0)
    assert (result.top1, result.token_mult_prob_error) == (1, 1)
    assert (result.layers, result.kl_of_layers) == ({}, 0)


def test_the_logits_of_both_models_have_to_fit(run, monkeypatch):
    of_two = 2 * 4 * ONE_BATCH * 32 * 256
    monkeypatch.setattr(evaluated_run, "available_memory", lambda device: of_two - 1)
    assert f"of {ONE_BATCH} x 32 tokens" in refusal(agree, run, "fp32", "bf16")
    monkeypatch.setattr(evaluated_run, "available_memory", lambda device: of_two)
    assert agree(run, "fp32", "fp32").kl == 0


def test_the_comparison_by_chunks_is_that_of_all_tokens(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(30, 11, generator=generator) for _ in range(2))
    targets = torch.randint(0, 11, (30,), generator=generator)
    expected = divergence.compared(p, q, targets)
    total = divergence.divergence_sum(p, q)
    monkeypatch.setattr(divergence, "CHUNK", 11 * 7)
    for tensor, of_all in zip(divergence.compared(p, q, targets), expected, strict=True):
        torch.testing.assert_close(tensor, of_all, rtol=0, atol=0)
    assert divergence.divergence_sum(p, q) == pytest.approx(total, rel=1e-14)


# The layers at fault


def test_a_layers_kl_is_that_of_the_model_with_that_layer_quantized(run):
    result = agree(run, "fp32", "served:fp8_block")
    assert {*result.layers} == {f"blocks.0.{name}" for name in LINEARS}
    assert list(result.layers.values()) == sorted(result.layers.values(), reverse=True)
    table = load_recipe("served:fp8_block").quantizers
    assert table is not None
    of_input, of_weight = table.input, table.weight
    assert of_input is not None
    assert of_weight is not None
    model = fp8stack.load(run)

    def product(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        weight = dequantize(quantize(layer.weight.detach(), of_weight, dim=-1))
        return F.linear(dequantize(quantize(x, of_input, dim=-1)), weight, layer.bias).view_as(y)

    model.get_submodule(UP).register_forward_hook(product)
    log_p, log_q = (log_probabilities(run, m) for m in (fp8stack.load(run), model))
    expected = kl_of(log_p, log_q)
    assert result.layers[UP] == pytest.approx(expected, rel=1e-3)  # sums in another order
    assert result.kl_of_layers == result.kl  # nothing but these layers differs


@pytest.mark.capability("A15")
@pytest.mark.parametrize(
    "fault",
    ["power_of_two = true", 'recipe = "mxfp4"'],
    ids=["powers of two for scales in float32", "another format"],
)
def test_a_fault_in_one_layer_is_found_and_the_layer_named(run, tmp_path, fault):
    planted = str(tmp_path / "planted.toml")
    layers = f'[[layers]]\nmatch = "{UP}"\n{fault}\n'
    Path(planted).write_text(f'like = "served:fp8_block"\n{layers}')
    result = agree(run, "served:fp8_block", planted)
    assert list(result.layers) == [UP]
    assert result.layers[UP] == result.kl == result.kl_of_layers
    assert result.kl > 1e-9


def test_swapped_scales_of_two_layers_are_found_and_the_layers_named(run, monkeypatch):
    load, models = EvaluatedRun.model, []

    def with_swapped_scales(evaluated: Any, recipe: str) -> Any:
        models.append(load(evaluated, recipe))
        if len(models) == 2:
            state = fp8_state(models[1])
            first, second = (f"blocks.0.{name}.weight.scale" for name in ("mlp.up", "mlp.down"))
            assert state[first] != state[second]
            load_fp8_state(models[1], state | {first: state[second], second: state[first]})
        return models[-1]

    monkeypatch.setattr(EvaluatedRun, "model", with_swapped_scales)
    result = agree(run, "delayed", "delayed")
    assert {*result.layers} == {UP, "blocks.0.mlp.down"}
    assert min(result.layers.values()) > 0


# The command


def test_every_other_recipe_is_compared_with_the_first(command, run, capsys):
    words = ("eval", str(run), "--agree", "--batch", str(ONE_BATCH), "--windows", "4")
    assert command(*words, "--recipes", "fp32,bf16,served:mxfp4", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["agreements"]
    assert [row["q"]["recipe"] for row in (first, second)] == ["bf16", "served:mxfp4"]
    assert first["kl"] == agree(run, "fp32", "bf16", windows=4).kl
    expected = agree(run, "fp32", "served:mxfp4", windows=4)
    assert second["kl"] == expected.kl
    assert [(row["layer"], row["kl"]) for row in second["layers"]] == [*expected.layers.items()]
    assert second["p"]["loss"] == expected.losses[0]
    assert command(*words, "--recipes", "fp32,served:mxfp4") == 0
    text = capsys.readouterr().out
    assert f"{expected.kl:.3g}" in text.splitlines()[1]
    worst, kl = next(iter(expected.layers.items()))
    assert f"  {worst.ljust(max(map(len, expected.layers)))}  {kl:.3g}\n" in text


def test_a_kl_above_the_limit_is_exit_code_1(command, run, capsys):
    words = ("eval", str(run), "--agree", "--recipes", "fp32,served:mxfp4", "--windows", "4")
    capsys.readouterr()
    assert command(*words, "--json", "--limit", "0.5") == 0
    (row,) = json.loads(capsys.readouterr().out)["agreements"]
    assert command(*words, "--json", "--limit", str(row["kl"])) == 0
    capsys.readouterr()
    assert command(*words, "--json", "--limit", "0") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["agreements"] == [row]
    assert f"KL(fp32 || served:mxfp4) = {row['kl']:.3g} is above 0" in captured.err


def test_a_kl_that_is_not_finite_is_null_and_above_any_limit(command, run, capsys, monkeypatch):
    monkeypatch.setattr(divergence, "_log_softmax", lambda logits: logits.double() * math.nan)
    words = ("eval", str(run), "--agree", "--recipes", "fp32,bf16", "--windows", "2")
    assert command(*words, "--json", "--limit", "1") == 1
    (row,) = json.loads(capsys.readouterr().out)["agreements"]
    assert row["kl"] is row["maximum"] is row["p"]["loss"] is None


@pytest.mark.full
def test_a_checkpoint_and_a_folder_of_transformers_are_compared_too(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-000006"
    of_run = agree(run, "fp32", "served:mxfp8")
    assert agree(checkpoint, "fp32", "served:mxfp8").kl == of_run.kl
    fp8stack.export(run, "hf", tmp_path / "exported")
    data = str(run.parent / "text.txt")
    of_folder = agree(f"hf:{tmp_path / 'exported'}", "fp32", "served:mxfp8", data=data)
    # Other windows: the whole file is held-out text of the folder.
    assert of_folder.kl == pytest.approx(of_run.kl, rel=0.5)
    assert {*of_folder.layers} == {*of_run.layers}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--agree", "--recipes", "fp32"], "--agree compares two recipes or more"),
        (["--limit", "0.1"], "--limit is of --agree"),
        (["--agree", "--recipes", "fp32,bf16", "--limit", "nan"], "--limit nan is no KL"),
    ],
    ids=str,
)
def test_bad_input_of_a_comparison_is_one_line(refused, run, flags, words):
    assert words in refused("eval", str(run), *flags)
