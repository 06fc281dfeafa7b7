"""`fp8stack eval` against a plain loop over a loaded model's logits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

import fp8stack
from fp8stack.data import load_corpora, validation_windows
from fp8stack.data.tokenizer import load_tokenizer
from fp8stack.layers.observe import fp8_parts
from fp8stack.trained import evaluate as evaluation
from fp8stack.trained.evaluate import evaluated_run
from fp8stack.trained.evaluate import scores as scoring
from fp8stack.trained.evaluate.scores import Score, bits_per_byte, nats_of
from tests.conftest import exit_code, metrics, refusal
from tests.faults.inputs.input_corruptions import rewrite
from tests.support.study_recipes import NO_HADAMARD
from tests.trained.conftest import SMALL, TEXT, trained


def scores(*runs: Path, recipes: Sequence[str] = (), **more: Any) -> list[Score]:
    return evaluation.evaluate(runs, *recipes, **more)


def by_hand(run: Path, recipe: str, windows: Tensor) -> list[float]:
    """The mean nats per token of each window."""
    model = fp8stack.load(run, recipe=recipe)
    losses = []
    for row in windows:
        with torch.no_grad():
            chances = model(row[None, :-1])[0].double().softmax(-1).tolist()
        labels = row[1:].tolist()
        likely = [math.log(chance[label]) for chance, label in zip(chances, labels, strict=True)]
        losses.append(-sum(likely) / len(likely))
    return losses


def windows_of(run: Path, count: int = 9, context: int = 32, whole_text: str = "") -> Tensor:
    text = np.frombuffer((whole_text or TEXT).encode(), dtype=np.uint8).astype(np.int64)
    used_text = text if whole_text else text[len(text) - int(len(text) * 0.1) :]
    last = len(used_text) - context - 1
    starts = [i * last // (count - 1) for i in range(count)]
    return torch.from_numpy(np.stack([used_text[s : s + context + 1] for s in starts]))


def test_losses_differences_and_errors_are_those_of_a_plain_loop(run):
    # One window at a time: in current scaling a window's loss depends on the others in its batch.
    results = scores(run, recipes=["fp32", "delayed", "current", "mxfp8"], batch=1)
    first = np.array(by_hand(run, "fp32", windows_of(run)))
    for score in results:
        expected = np.array(by_hand(run, score.recipe, windows_of(run)))
        np.testing.assert_allclose(score.losses_N, expected, rtol=1e-5)
        mean = expected.mean()
        figures = (score.loss, score.perplexity, score.bits_per_byte)
        assert figures == pytest.approx((mean, math.exp(mean), mean / math.log(2)), rel=1e-5)
        if score.recipe == "fp32":
            assert score.difference is score.standard_error is None
            continue
        paired = expected - first
        assert score.difference == pytest.approx(paired.mean(), abs=1e-6)
        error = paired.std(ddof=1) / math.sqrt(9)
        assert score.standard_error == pytest.approx(error, rel=0.02)
        assert np.abs(paired).max() > 1e-5  # else it ran in fp32
    (default,) = scores(run)  # by itself it repeats its own validation loss
    assert default.recipe == "delayed"
    assert default.loss == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-6)


def test_windows_and_context_are_as_asked_and_gemms_that_ran_are_counted(run):
    (score,) = scores(run, recipes=["fp32"], windows=5, context=20)
    expected = by_hand(run, "fp32", windows_of(run, 5, 20))
    np.testing.assert_allclose(score.losses_N, expected, rtol=1e-5)
    plain, single = scores(run, recipes=["fp32", "mxfp8"], windows=1)
    assert single.difference is not None
    assert single.standard_error is None
    assert (plain.fp8_gemms, single.fp8_gemms) == (0, 4)
    assert single.plan.summary()[0].startswith("plan: mxfp8, emulated by")


def test_another_file_is_taken_whole_and_the_runs_own_is_not(run, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT.swapcase(), encoding="utf-8")
    of_run = run.parent / "text.txt"
    moved = Path(shutil.copy(of_run, tmp_path / "moved.txt"))
    for path, text in ((of_run, ""), (moved, ""), (tmp_path / "other.txt", TEXT.swapcase())):
        (score,) = scores(run, recipes=["fp32"], data=str(path))
        expected = by_hand(run, "fp32", windows_of(run, whole_text=text))
        np.testing.assert_allclose(score.losses_N, expected, rtol=1e-5)


def test_several_runs_have_a_baseline_each_and_the_batch_changes_no_loss(run):
    checkpoint = run / "checkpoints" / "step-000006"
    results = scores(run, checkpoint, recipes=["fp32", "current"])
    assert [score.run for score in results] == [str(run)] * 2 + [str(checkpoint)] * 2
    assert [score.baseline for score in results] == [None, results[0], None, results[2]]
    model, windows = fp8stack.load(run), windows_of(run)
    by_single, all_ = nats_of(model, windows, 1), nats_of(model, windows, 9)
    torch.testing.assert_close(by_single, all_, rtol=1e-5, atol=1e-6)
    assert not model.training


@pytest.mark.full
def test_a_mixture_runs_with_its_biases_and_the_scales_of_its_experts(tmp_path):
    experts = {"count": 4, "per_token": 2, "width": 32, "shared": 1, "bias": 0.003}
    run = trained(tmp_path, model="gpt-nano-moe", model_overrides=SMALL | {"experts": experts})
    state = load_file(run / "checkpoints" / "step-000006" / "model.safetensors")
    name = "blocks.0.mlp.balance_bias"
    assert state[name].any()
    results = scores(run, recipes=["delayed", "fp32", "nvfp4"], batch=1)
    for score in results:
        assert torch.equal(fp8stack.load(run, recipe=score.recipe).get_buffer(name), state[name])
        expected = by_hand(run, score.recipe, windows_of(run))
        np.testing.assert_allclose(score.losses_N, expected, rtol=1e-5)
        assert score.difference != 0
        text = fp8stack.generate(run, "line", tokens=4, temperature=0, recipe=score.recipe)
        assert text.startswith("line")
    assert results[0].loss == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-6)


# Bits per byte


def test_tokens_without_text_count_neither_as_bits_nor_as_bytes():
    nats = torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
    lengths = torch.tensor([[1, 4, 0], [2, 2, 1]])
    expected = (1 + 2 + 3 + 4 + 5) / 10 / math.log(2)
    assert bits_per_byte(nats, lengths) == pytest.approx(expected)
    assert bits_per_byte(nats, torch.tensor([[5], [5]])) == pytest.approx(65 / 10 / math.log(2))
    assert bits_per_byte(nats, None) is None
    assert bits_per_byte(nats, torch.zeros(2, 3, dtype=torch.int64)) is None


@pytest.mark.parametrize("known_by_token", [True, False])
def test_bits_per_byte_of_a_trained_tokenizer_count_the_text(tmp_path, known_by_token, monkeypatch):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    ids = library.encode(TEXT).ids
    np.array(ids, dtype="<u2").tofile(tmp_path / "tokens.bin")
    run = trained(
        tmp_path, data=str(tmp_path / "tokens.bin"), tokenizer=str(tmp_path / "tokenizer.json"),
        model_overrides=SMALL | {"vocabulary": 300},
    )  # fmt: skip
    tokenizer = load_tokenizer(str(run / "tokenizer.json"))
    if not known_by_token:
        monkeypatch.setattr(type(tokenizer), "byte_lengths", lambda self: None)
    (score,) = scores(run, recipes=["fp32"])
    _, held_out = load_corpora(str(tmp_path / "tokens.bin"), 300)
    windows = validation_windows(held_out, count=9, context=32, vocabulary=300)
    nats = sum(by_hand(run, "fp32", windows)) * 32
    text = sum(len(library.decode(row[1:].tolist()).encode()) for row in windows)
    # If a window begins or ends within a character, its bytes are decoded to U+FFFD.
    tolerance = 0.02 if known_by_token else 1e-5
    assert score.bits_per_byte is not None
    assert score.bits_per_byte == pytest.approx(nats / text / math.log(2), rel=tolerance)
    assert score.bits_per_byte < score.loss / math.log(2)


def on_tokens(folder: Path, **more: Any) -> Path:
    """A run on random tokens."""
    np.random.default_rng(0).integers(0, 300, 4000).astype("<u2").tofile(folder / "tokens.bin")
    shape = SMALL | {"vocabulary": 300}
    return trained(folder, data=str(folder / "tokens.bin"), model_overrides=shape, **more)


def test_a_perplexity_keeps_its_zeros(run):
    (score,) = scores(run, recipes=["fp32"])
    cells = {math.log(3.9): "3.900", math.log(1234): "1234", 20.0: "4.852e+08"}
    for loss, cell in cells.items():
        score = replace(score, losses_N=torch.tensor([loss], dtype=torch.float64))
        assert f" {cell} " in evaluation.text_lines([score])[1]


def test_what_is_not_known_or_not_finite_is_null_in_json(tmp_path, monkeypatch):
    run = on_tokens(tmp_path)
    (score,) = scores(run)  # without a tokenizer
    assert score.bits_per_byte is None
    assert evaluation.as_json([score])["scores"][0]["bits_per_byte"] is None
    assert "unknown" in "\n".join(evaluation.text_lines([score]))
    real = scoring.nats_of
    monkeypatch.setattr(scoring, "nats_of", lambda *args: real(*args) * math.nan)
    (score,) = scores(run)
    assert math.isnan(score.perplexity)
    row = evaluation.as_json([score])["scores"][0]
    assert row["loss"] is row["perplexity"] is row["bits_per_byte"] is None


def test_tokens_of_another_tokenizer_than_the_runs_are_refused_with_the_remedy(tmp_path):
    library = Library(models.WordLevel({str(i): i for i in range(300)}, unk_token="0"))
    library.save(str(tmp_path / "tokenizer.json"))
    other_run = on_tokens(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    remedy = ["--tokenizer", "bytes", "--out", str(tmp_path / "bytes")]
    assert exit_code("prepare", str(tmp_path / "text.txt"), *remedy) == 0
    message = refusal(scores, other_run, data=str(tmp_path / "bytes"))
    assert "Give text, or tokens that `fp8stack prepare` made of it" in message


# The phase and recipe of the last step


@pytest.mark.full
def test_after_phases_it_repeats_the_validation_loss_of_the_last_one(tmp_path):
    run = trained(tmp_path, phases="default", decay_fraction=0.4)
    assert [row["phase"] for row in metrics(run)][-2:] == ["decay", "decay"]
    (default,) = scores(run)
    assert default.recipe == "bf16"
    assert default.loss == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-6)
    (older,) = scores(run, recipes=["delayed"])
    assert older.fp8_gemms > 0
    assert older.plan.reasons[-1] == "the last steps, in bf16, set no scales"


def test_layers_that_the_guard_took_out_of_fp8_stay_out(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    demoted = {"blocks.0.mlp.up": 9, "blocks.0.mlp.down": None}
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        rewrite(checkpoint, lambda body: body["info"]["guard"].update(demoted=demoted))
    model, plain = (fp8stack.load(path, recipe="delayed") for path in (tmp_path / "run", run))
    assert set(fp8_parts(plain)) - set(fp8_parts(model)) == set(demoted)
    for layer in demoted:
        plain.leave_fp8(layer)
    windows = windows_of(run)
    (score,) = scores(tmp_path / "run")
    assert torch.equal(score.losses_N, nats_of(plain, windows, 4).mean(dim=1))
    assert score.loss != scores(run)[0].loss
    assert "blocks.0.mlp.up, blocks.0.mlp.down" in score.plan.reasons[-1]
    (plain_score,) = scores(tmp_path / "run", recipes=["fp32"])
    assert not any("guard" in reason for reason in plain_score.plan.reasons)


def test_layers_are_left_out_as_the_requested_recipe_says(run, tmp_path):
    recipe = tmp_path / "head.toml"
    recipe.write_text('like = "current"\nhead = true\n')
    current, with_head = scores(run, recipes=["current", str(recipe)])
    assert with_head.fp8_gemms > current.fp8_gemms
    assert with_head.difference != 0
    recipe.write_text('like = "delayed"\nhead = true\n')
    (score,) = scores(run, recipes=[str(recipe)])
    assert "no scales for lm_head" in score.plan.reasons[-1]


# Bad input


def test_all_runs_are_tried_before_the_first_is_evaluated(run, monkeypatch):
    monkeypatch.setattr(scoring, "nats_of", pytest.fail)
    assert "No run and no checkpoint at 'nothing'" in refusal(scores, run, "nothing")


def test_logits_that_do_not_fit_are_refused(run, monkeypatch):
    monkeypatch.setattr(evaluated_run, "available_memory", lambda device: 4 * 4 * 32 * 256 - 1)
    assert "of 4 x 32 tokens" in refusal(scores, run)
    assert len(scores(run, batch=3)) == len(scores(run, batch=64, windows=3)) == 1


# Documents


def test_a_run_with_a_document_mask_is_evaluated_with_it(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 40, 4000)
    tokens[9::10] = 255  # ends a document
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    run = trained(
        tmp_path, data=str(tmp_path / "tokens.bin"), tokenizer="bytes", document_mask=True
    )
    (score,) = scores(run)
    assert score.loss == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-6)
    _, held_out = load_corpora(str(tmp_path / "tokens.bin"), 256, end_of_text=255)
    windows = validation_windows(held_out, count=9, context=32, vocabulary=256)
    unmasked = np.mean(by_hand(run, "delayed", windows))
    assert abs(score.loss - unmasked) > 1e-5


# The command


def test_json_has_the_scores_and_nothing_else_is_on_stdout(command, run, capfd):
    assert command("eval", str(run), "--recipes", "fp32,mxfp8", "--json") == 0
    captured = capfd.readouterr()
    printed_scores = json.loads(captured.out)["scores"]
    results = scores(run, recipes=["fp32", "mxfp8"])
    for row, score in zip(printed_scores, results, strict=True):
        assert row["loss"] == pytest.approx(score.loss, rel=1e-9)
        assert row["difference"] == score.difference
        assert row["standard_error"] == score.standard_error
        assert (row["windows"], row["context"]) == (9, 32)
        assert row["plan"] == score.plan.summary()
    counts = [(row["fp8_layers"], row["layers"], row["fp8_gemms"]) for row in printed_scores]
    assert counts == [(0, 5, 0), (4, 5, 12)]
    assert printed_scores[1]["baseline"] == "fp32"
    assert "step-000006 in mxfp8: 9 windows" in captured.err


def test_the_table_says_what_ran_and_why(command, run, capfd):
    assert command("eval", str(run), "--recipes", "fp32,mxfp8", "--windows", "4") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["run", "recipe"]
    assert "baseline" in lines[1]
    assert "mxfp8-emulated (emulate)" in lines[2]
    assert " ± " in lines[2]
    headline = next(line for line in lines if line.startswith("FP8: "))
    assert headline.endswith(" (4 of 5 linears); lm_head: fp32, the recipe says head = false")
    assert any(line.endswith("(held-out part): 4 windows, 128 tokens") for line in lines)


def test_a_terminals_table_has_the_same_cells(run):
    from rich.console import Console

    results = scores(run, recipes=["fp32", "mxfp8"], windows=4)
    results[0] = replace(results[0], run="runs/[/b][red]")  # no markup
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(evaluation.rich_table(results))
    drawn = console.export_text()
    for line in evaluation.text_lines(results)[:3]:
        for cell in line.split("  "):
            assert cell.strip() in drawn


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--windows", "0"], "--windows 0"),
        (["--batch", "0"], "--batch 0"),
        (["--context", "1000"], "--context 1000 is more than the 128"),
        (["--recipes", "mxpf8,fp32"], "Did you mean 'mxfp8'?"),
        (["--recipes", ""], "--recipes '' has an empty name"),
        (["--recipes", "fp32,mxfp8,fp32"], "--recipes names 'fp32' twice"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(refused, run, flags, words):
    assert words in refused("eval", str(run), *flags)


def test_a_run_in_delayed_scaling_is_served_in_its_own_scales(tmp_path):
    run = trained(tmp_path, recipe_overrides={"history_length": 3})
    delayed, static, current = scores(run, recipes=["delayed", "served:fp8_static", "current"])
    assert torch.equal(delayed.losses_N, static.losses_N)
    assert not torch.equal(delayed.losses_N, current.losses_N)


def test_scales_of_other_layers_are_refused_with_the_recipes_names(run, tmp_path):
    file = tmp_path / "fewer.toml"
    file.write_text('like = "delayed"\nexclude = ["*.mlp.down"]\n')
    message = refusal(scores, run, recipes=[str(file)])
    assert f"scales that do not fit recipe '{file}': it is the checkpoint of a run in" in message


@pytest.mark.parametrize("trained_in", ["fp32", "delayed"])
@pytest.mark.full
def test_a_run_is_evaluated_in_recipes_whose_state_it_does_not_have(trained_in, tmp_path, capsys):
    plain = trained(tmp_path, recipe=trained_in)
    results = scores(plain, recipes=["fp32", "nvfp4", NO_HADAMARD, "mxfp4"])
    assert [score.plan.precision.removesuffix("-emulated") for score in results[1:]] == [
        *("nvfp4", "nvfp4_no_hadamard", "mxfp4")
    ]
    assert all(0 < abs(score.difference or 0) < 0.5 for score in results[1:])
    if trained_in != "delayed":
        capsys.readouterr()
        for recipe in ("delayed", "served:fp8_static"):
            message = refusal(scores, plain, recipes=["fp32", recipe])
            assert f"holds no scales for recipe '{recipe}'" in message
        assert "windows" not in capsys.readouterr().err  # before any recipe is evaluated
