"""`fp8stack forecast RUN`: a trained model's sensitivities, and the forecast from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fp8stack
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast import measured
from fp8stack.analysis.forecast.result import ForecastResult
from fp8stack.common.errors import StorageError
from fp8stack.model.config import load_config
from tests.analysis.forecast.conftest import SMALL
from tests.support.hf_models import export_to, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


def of(run: Path, *recipes: str) -> measured.Forecast:
    return measured.forecast(measured.ForecastOptions(run=str(run), recipes=recipes, windows=8))


def test_a_published_recipe_has_its_severity_and_another_its_divergence(run, tmp_path):
    (tmp_path / "mine.toml").write_text('like = "nvfp4"\n[input]\nblock = [1, 32]\n')
    mine = str(tmp_path / "mine.toml")
    forecast = of(run, "mxfp4", mine)
    published, placed = forecast.result.recipes
    law = laws.fitted()
    assert published.severity == pytest.approx(law.severities["mxfp4"])
    reference = measured.forecast(
        measured.ForecastOptions(run=str(run), recipes=("nvfp4",), windows=8)
    ).measured["nvfp4"]
    of_mine = forecast.measured[mine]
    ratios = (of_mine.forward / reference.forward, of_mine.backward / reference.backward)
    assert placed.severity == pytest.approx(law.severity(*ratios))
    assert placed.severity is not None
    ratio = 30 * 4 * 32 / load_config("gpt-nano", SMALL).parameters()
    assert placed.percent == law.gap(ratio, placed.severity)
    text = " ".join(forecast.result.as_text())
    assert "by its divergence" in text
    assert "Quartet II: https://" in text  # NVFP4's sources, which it is relative to
    assert placed.nats is not None
    assert placed.nats.mean == pytest.approx(placed.percent.mean / 100 * forecast.trained.loss)


def test_nvfp4_measured_has_the_severity_that_it_was_given(run):
    forecast = of(run, "nvfp4")
    sensitivity = forecast.measured["nvfp4"]
    assert forecast.law.severity(sensitivity.forward, sensitivity.backward) == pytest.approx(1)
    (expected,) = forecast.result.recipes
    assert expected.severity == pytest.approx(1)
    assert expected.measured is not None
    assert len(expected.measured.worst) == 5
    remaining = sensitivity.without(expected.measured.worst)
    severity = forecast.law.severity(remaining.forward, remaining.backward)
    assert expected.measured.without_worst is not None
    assert expected.measured.without_worst.mean == pytest.approx(forecast.law.gap(severity).mean)


def test_the_largest_severity_has_a_gap_of_the_budget(run):
    law = of(run, "nvfp4").law
    severity = law.largest_severity(0.5)
    assert law.gap(severity).high == pytest.approx(0.5)


@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_the_forecast_of_its_run(run, command, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    assert command("forecast", "run", "--recipes", "nvfp4,mxfp8", "--windows", "8") == 0
    output = capsys.readouterr().out
    assert "written: run/forecast.json, which `fp8stack report` shows" in output
    result = ForecastResult.model_validate_json((copy / "forecast.json").read_text())
    (row, _) = result.rows()
    assert command("report", "run") == 0
    html = (copy / "report.html").read_text()
    assert "What recipes would cost" in html
    assert all(f"<td>{cell}</td>" in html for cell in row[1:])
    assert command("show", "run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert row[1] in printed
    # Without a valid file, the forecast is of the run's size.
    (copy / "forecast.json").write_text('{"loss": "low"}')
    assert command("report", "run") == 0
    html = (copy / "report.html").read_text()
    assert "forecast.json cannot be read." in html
    assert "What recipes would cost" in html
    assert ">sources</th>" in html
    # A checkpoint's is printed, and kept nowhere.
    before = sorted(copy.rglob("*"))
    point = next((copy / "checkpoints").iterdir())
    assert command("forecast", str(point), "--recipes", "mxfp8", "--windows", "8") == 0
    assert "written" not in capsys.readouterr().out
    assert sorted(copy.rglob("*")) == before


def test_a_checkpoint_that_is_passed_over_is_told_and_the_one_before_is_used(
    run, command, tmp_path, capsys
):
    damaged = shutil.copytree(run, tmp_path / "run") / "checkpoints" / "step-000031"
    damaged.mkdir()
    (damaged / "checkpoint.json").write_text("{}")
    args = ("forecast", "run", "--recipes", "mxfp8", "--windows", "8", "--json")
    assert command(*args) == 0
    output = capsys.readouterr()
    assert output.err.startswith("passed over: run/checkpoints/step-000031/checkpoint.json is no ")
    result = json.loads(output.out)
    assert (result["checkpoint"], result["tokens"]) == ("step-000030", 30 * 4 * 32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipes", "fp32,bf16"], "fp32, bf16: nothing is quantized. Name other --recipes."),
        (["--recipes", ","], "--recipes ',' has an empty name. Example: fp32,bf16,delayed"),
        (["--recipes", "fp9"], "No recipe 'fp9'"),
        (["--windows", "2"], "--windows 2 is too few. Use 8 or more."),
        (["--tokens", "0"], "--tokens 0 is no number of training tokens. Example: 160B, or 20M"),
        (["--model", "gpt-nano"], "Give one of RUN, a trained model, and --model"),
    ],
)
def test_bad_input_of_a_forecast_is_refused(flags, message, run, refused):
    assert message in refused("forecast", str(run), *flags)


def test_a_run_that_is_not_there_is_refused(refused):
    assert "No run and no checkpoint at 'nowhere'" in refused("forecast", "nowhere")


def test_a_forecast_says_which_keys_of_a_recipe_it_leaves_out(run, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('like = "mxfp8"\nresidual = "bf16"\n')
    forecast = of(run, str(tmp_path / "mine.toml"), "mxfp8")
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith(
        "mine.toml: the forecast is of linear layers, without residual = 'bf16'"
    )
    first, second = forecast.result.recipes
    assert first.percent == second.percent


def test_a_folder_that_cannot_be_written_to_loses_no_table(run, command, monkeypatch, capsys):
    def full(*arguments: object) -> None:
        raise StorageError("Cannot write there.")

    monkeypatch.setattr(measured, "write_atomically", full)
    assert command("forecast", str(run), "--recipes", "mxfp8", "--windows", "8") == 0
    output = capsys.readouterr()
    assert "worst layers" in output.out
    assert output.err == "fp8stack: the report will not show this: Cannot write there.\n"


def test_a_folder_of_transformers_is_forecast_on_text_that_is_given(command, tmp_path, refused):
    shape = load_config("gpt-nano", SMALL | {"context": 32, "qk_norm": False})
    export_to(tmp_path / "theirs", random_model(shape))
    (tmp_path / "text.txt").write_text("some text that is not much, again and again\n" * 300)
    ask = ["forecast", "hf:theirs", "--recipes", "mxfp8", "--windows", "8", "--tokenizer", "bytes"]
    error = refused(*ask)
    assert (
        "hf:theirs comes without text. Give some that it was not trained on: --data FILE" in error
    )
    assert command(*ask, "--data", "text.txt", "--json") == 0
    forecast = measured.forecast(
        measured.ForecastOptions(
            run=f"hf:{tmp_path / 'theirs'}",
            recipes=["mxfp8"],
            data=str(tmp_path / "text.txt"),
            windows=8,
            tokens=100_000,
            tokenizer="bytes",
        )
    )
    (recipe,) = forecast.result.recipes
    assert recipe.reason == ""
    assert recipe.percent is not None
    assert recipe.percent.mean > 0
    held: dict[str, Any] = {
        "windows": 8, "data": str(tmp_path / "text.txt"), "tokenizer": "bytes"
    }  # fmt: skip
    (score,) = fp8stack.evaluate(f"hf:{tmp_path / 'theirs'}", **held)  # the same windows
    assert forecast.trained.loss == pytest.approx(score.loss, abs=1e-6)


def test_tokens_that_are_not_known_are_assumed(command, tmp_path, capsys):
    shape = load_config("gpt-nano", SMALL | {"context": 32, "qk_norm": False})
    export_to(tmp_path / "theirs", random_model(shape))
    (tmp_path / "text.txt").write_text("some text that is not much, again and again\n" * 300)
    ask = ["forecast", "hf:theirs", "--recipes", "mxfp8", "--windows", "8", "--tokenizer", "bytes"]
    assert command(*ask, "--data", "text.txt") == 0
    output = capsys.readouterr().out
    assert "--tokens is not given: 20 per parameter are assumed" in output
    assert ", 20 per parameter" in output
