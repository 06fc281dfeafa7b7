"""`fp8stack forecast` and `tune`: the law, what is said, and the recipe that is written."""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize

import fp8stack
from fp8stack.analysis.benchmark.timing import summarize
from fp8stack.analysis.forecast import forecast as forecasts
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast import times, tune
from fp8stack.analysis.forecast.law import Law
from fp8stack.analysis.forecast.result import ForecastResult
from fp8stack.common.errors import StorageError, UserError
from fp8stack.model.config import load_config, plan_for
from fp8stack.precision import Hardware, load_recipe
from tests.conftest import refusal
from tests.support.cases import case
from tests.support.hf_models import export_to, random_model
from tests.support.study_recipes import BACKWARD_HIGH

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"layers": 2, "width": 32, "heads": 1, "mlp_width": 32}
LAW = Law(
    forward=1.2, power=0.9, backward=0.1, deviation=0.1, parameters=(10_000, 100_000),
    ratio=(0.005, 8.0), largest=1.0, runs=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    keys: dict[str, Any] = {
        "recipe": "mxfp8", "steps": 30, "batch": 4, "context": 32, "model_overrides": SMALL,
        "eval_windows": 4, "sample_tokens": 0, "telemetry_every": 0, "warmup_steps": 2,
    }  # fmt: skip
    return fp8stack.pretrain(out=str(folder / "run"), **keys)


@pytest.fixture
def covered(monkeypatch) -> None:
    """A law that covers the run."""
    monkeypatch.setattr(forecasts, "fitted", lambda: LAW)


def of(run: Path, *recipes: str) -> forecasts.Forecast:
    return forecasts.forecast(forecasts.ForecastOptions(run=str(run), recipes=recipes, windows=8))


# The law


def test_the_law_is_its_formula_and_its_interval_is_of_90_percent():
    gap = LAW.gap(0.01, 0.02)
    mean = 1.2 * 0.01**0.9 + 0.1 * 0.02
    assert gap.mean == pytest.approx(mean)
    assert (gap.low, gap.high) == pytest.approx((mean * (1 - 0.164485), mean * (1 + 0.164485)))


@pytest.mark.parametrize(
    ("parameters", "tokens", "forward", "reason"),
    [
        (50_000, 100_000, 0.5, ""),
        (4_000, 8_000, 0.1, "models of 0.01 to 0.1 million parameters, and this has 0.004"),
        (7 * 10**9, 10**9, 0.1, "and this has 7e+03 million"),
        (50_000, None, 0.1, "how many tokens the model was trained on is not known (--tokens)"),
        (50_000, 10**9, 0.1, "training tokens per parameter, and this model has 2e+04"),
        (50_000, 100_000, 3.0, "its divergence of 3 nats per token is above the 1"),
    ],
)
def test_the_law_says_what_it_does_not_cover(parameters, tokens, forward, reason):
    text = LAW.beyond(parameters, tokens, forward)
    assert reason in text
    assert bool(text) == bool(reason)


def test_the_law_does_not_cover_a_mixture_of_experts():
    config = load_config("gpt-nano-moe")
    text = forecasts.uncovered(LAW, config, 2 * config.parameters())
    assert text == "the law is of models without experts, and this has some"


def test_the_law_that_comes_with_the_package_is_one():
    law = laws.fitted()
    assert 0.3 < law.forward < 5
    assert 0.5 < law.power < 1.5
    assert law.runs > 20
    assert not law.beyond(*(int(x) for x in (law.parameters[1], law.parameters[1] * law.ratio[0])))


# The forecast


@pytest.mark.usefixtures("covered")
def test_a_forecast_is_the_law_of_what_was_measured(run):
    forecast = of(run, "nvfp4", "mxfp8")
    for expected in forecast.recipes:
        assert expected.reason == ""
        assert expected.gap == LAW.gap(expected.forward, expected.backward)
        assert len(expected.worst) == 5
        remaining = forecast.measured[expected.recipe].without(expected.worst)
        assert expected.without_worst == LAW.gap(remaining.forward, remaining.backward)
    nvfp4, mxfp8 = (expected.gap.mean for expected in forecast.recipes if expected.gap)
    assert nvfp4 > 3 * mxfp8 > 0
    assert forecast.trained.tokens == 30 * 4 * 32
    result = forecast.result()
    text = "\n".join(result.as_text())
    loss = forecast.trained.loss
    assert f"{100 * nvfp4 / loss:+.2f} %" in text
    assert "million parameters, trained on" in text
    assert "the first quarter of training is in fp32 in such a gap" in text
    assert result.recipes[0].gap is not None
    assert result.recipes[0].gap.mean == nvfp4
    assert type(result).model_validate_json(result.model_dump_json()) == result


@pytest.mark.usefixtures("covered", "undrawn")
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
    assert "the first quarter of training is in fp32 in such a gap" in html
    assert command("report", "run", "--text") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert row[1] in printed
    assert "the first quarter of training is in fp32 in such a gap" in printed
    # A file that is none is said, and nothing else is lost.
    (copy / "forecast.json").write_text('{"loss": "low"}')
    assert command("report", "run") == 0
    html = (copy / "report.html").read_text()
    assert "forecast.json cannot be read." in html
    assert "What recipes would cost" not in html
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
    ("uncovered", "reason"),
    [
        ({"parameters": (10**6, 10**7)}, "the law is of models of 1 to 10 million parameters"),
        ({"ratio": (20.0, 80.0)}, "the law is of 20 to 80 training tokens per parameter"),
        (None, "how many tokens the model was trained on is not known (--tokens)"),
    ],
)
@pytest.mark.parametrize("command_line", ["forecast", "tune --bits 5"])
def test_what_cannot_be_told_is_said_before_anything_is_computed(
    run, command, capsys, monkeypatch, tmp_path, uncovered, reason, command_line
):
    source = str(run)
    if uncovered is None:
        export_to(tmp_path / "theirs", random_model(load_config("gpt-nano", SMALL)))
        source = f"hf:{tmp_path / 'theirs'}"
        (tmp_path / "text.txt").write_text("some text\n" * 300)
    monkeypatch.setattr(forecasts, "fitted", lambda: replace(LAW, **(uncovered or {})))

    def compute(*args: Any, **options: Any) -> None:
        raise UserError("It computes.")

    for name in ("GPT", "nats_of", "sensitivities"):
        monkeypatch.setattr(forecasts, name, compute)
    text = ["--data", "text.txt"] * (uncovered is None)
    assert command(*command_line.split(), source, "--recipes", "mxfp8", *text) == 2
    errors = capsys.readouterr().err
    if command_line == "forecast":
        first, then = errors.splitlines()
        assert first.startswith(f"cannot tell the gap of any recipe: {reason}")
        assert then == "fp8stack: It computes."
    else:
        assert f"No recipe can be tuned for {source}: {reason}" in errors
        assert "It computes." not in errors


def test_what_the_law_does_not_cover_cannot_be_told(run, command, capsys):
    """The run's model is smaller than any that the law was fitted to; its layers are told."""
    assert command("forecast", str(run), "--recipes", "nvfp4,delayed", "--windows", "8") == 0
    output = capsys.readouterr()
    assert "cannot tell the gap of nvfp4, delayed: the law is of models of" in output.out
    assert "blocks.0" in output.out
    args = ("forecast", str(run), "--recipes", "mxfp4", "--windows", "8", "--json")
    assert command(*args) == 0
    (recipe,) = json.loads(capsys.readouterr().out)["recipes"]
    assert recipe["gap"] is None
    assert len(recipe["forward_layers"]) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipes", "fp32,bf16"], "fp32, bf16: nothing is quantized. Name other --recipes."),
        (["--recipes", ","], "--recipes ',' has an empty name. Example: fp32,bf16,delayed"),
        (["--recipes", "fp9"], "No recipe 'fp9'"),
        (["--windows", "2"], "--windows 2 is too few. Use 8 or more."),
        (["--tokens", "0"], "--tokens 0: a model is trained on 1 or more."),
    ],
)
def test_bad_input_of_a_forecast_is_refused(flags, message, run, refused):
    assert message in refused("forecast", str(run), *flags)


def test_a_run_that_is_not_there_is_refused(refused):
    assert "No run and no checkpoint at 'nowhere'" in refused("forecast", "nowhere")


def test_a_forecast_says_which_keys_of_a_recipe_it_leaves_out(run, covered, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('like = "mxfp8"\nresidual = "bf16"\n')
    forecast = of(run, str(tmp_path / "mine.toml"), "mxfp8")
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith(
        "mine.toml: the forecast is of linear layers, without residual = 'bf16'"
    )
    assert forecast.recipes[0].gap == forecast.recipes[1].gap


@pytest.mark.usefixtures("covered")
def test_a_folder_that_cannot_be_written_to_loses_no_table(run, command, monkeypatch, capsys):
    def full(*arguments: object) -> None:
        raise StorageError("Cannot write there.")

    monkeypatch.setattr(forecasts, "write_atomically", full)
    assert command("forecast", str(run), "--recipes", "mxfp8", "--windows", "8") == 0
    output = capsys.readouterr()
    assert "worst layers" in output.out
    assert output.err == "fp8stack: the report will not show this: Cannot write there.\n"


# Tuning


def choices(bits: Any, forward: Any, backward: Any, weights: Any) -> tune.Choices:
    table: tune.Choices = object.__new__(tune.Choices)
    table.figures = np.array([bits, forward, backward, np.zeros_like(bits)])
    table.times = None
    table.weights = np.array(weights)
    table.layers = [f"l{n}" for n in range(len(weights))]
    table.pairs = [(f"r{n}", f"r{n}") for n in range(table.figures.shape[2])]
    return table


@pytest.mark.parametrize("seed", [case(seed, quick=seed < 2) for seed in range(6)])
def test_the_assignment_is_the_best_of_all(seed):
    """Held to every assignment of 4 candidates to 5 layers."""
    draw = np.random.default_rng(seed)
    bits = np.sort(draw.uniform(4, 16, (5, 4)), axis=1)
    forward = -np.sort(-draw.uniform(0, 0.02, (5, 4)), axis=1)
    backward = -np.sort(-draw.uniform(0, 0.05, (5, 4)), axis=1)
    table = choices(bits, forward, backward, draw.dirichlet(np.ones(5)))
    assignments = [table.assigned(chosen, LAW) for chosen in itertools.product(range(4), repeat=5)]
    for budget in (0.01, 0.02, 0.03):
        possible = [assignment for assignment in assignments if assignment.gap.mean <= budget]
        cheapest = table.cheapest(LAW, budget)
        if not possible:
            assert cheapest is None
            continue
        assert cheapest is not None
        assert cheapest.gap.mean <= budget * (1 + 1e-6)
        assert cheapest.bits <= min(assignment.bits for assignment in possible) + 1e-9
    for limit in (7.0, 9.0, 12.0):
        possible = [assignment for assignment in assignments if assignment.bits <= limit]
        best = table.best(LAW, limit)
        assert (best is None) == (not possible)
        if best is not None:
            assert best.bits <= limit + 1e-6
            assert best.gap.mean <= min(assignment.gap.mean for assignment in possible) * (1 + 1e-9)


def test_what_the_solver_prints_is_not_in_the_output(monkeypatch, capfd):
    solve = scipy.optimize.milp

    def loud(*args, **kwargs):
        ctypes.CDLL(None).puts(b"HighsMipSolverData")
        return solve(*args, **kwargs)

    monkeypatch.setattr(tune, "milp", loud)
    numbers = np.full((2, 2), 0.01)
    table = choices(np.array([[4.0, 8.0]] * 2), numbers, numbers, np.full(2, 0.5))
    assert table.best(LAW, 6.0) is not None
    ctypes.CDLL(None).puts(b"after")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "after\n"


def test_recipes_are_chosen_where_ctypes_cannot_open_the_program_itself(monkeypatch):
    def on_windows(name):
        raise TypeError("argument of type 'NoneType' is not a container or iterable")

    monkeypatch.setattr(ctypes, "CDLL", on_windows)
    numbers = np.full((2, 2), 0.01)
    table = choices(np.array([[4.0, 8.0]] * 2), numbers, numbers, np.full(2, 0.5))
    assert table.best(LAW, 6.0) is not None


def test_bits_are_those_of_the_wider_operand():
    for name, expected in {
        "nvfp4": (4, 4, 4),
        "mxfp6_e2m3": (6, 6, 6),
        "current": (8, 8, 8),
        "nvfp4_forward_high": (16, 4, 4),
        BACKWARD_HIGH: (4, 16, 16),
    }.items():
        assert tuple(tune.bits_of(load_recipe(name).quantizers).values()) == expected
    assert set(tune.bits_of(None).values()) == {16.0}


@pytest.mark.usefixtures("covered")
def test_a_tuned_recipe_is_written_and_runs_as_it_was_assigned(run, command, tmp_path, capsys):
    loss = of(run, "mxfp8").trained.loss
    ask = ["--windows", "8", "--recipes", "nvfp4,mxfp8,bf16"]
    assert command("tune", str(run), "--bits", "6", "--out", "six.toml", *ask) == 0
    output = capsys.readouterr().out
    file = run / "run.toml"
    then = f"fp8stack pretrain --config {file} --recipe six.toml --out six-run"
    assert f"written: six.toml. Train in it:\n  {then}" in output
    assert "gap: the first quarter of training is in fp32 in such a gap" in output
    forecast = of(run, "nvfp4", "mxfp8")
    target = tune.Target(bits=6, path=tmp_path / "x.toml")
    assignment = tune.tuned(tune.Choices(forecast), forecast, target)
    assert assignment.bits <= 6
    recipe = load_recipe(str(tmp_path / "six.toml"))
    plan = plan_for(load_config("gpt-nano", SMALL), recipe, Hardware("cpu"))
    tables = {n: load_recipe(n).quantizers for n in ("nvfp4", "mxfp8")} | {"bf16": None}
    for path, (forward, backward) in assignment.layers.items():
        table, ahead, back = plan.layer(path).quantizers, tables[forward], tables[backward]
        assert (table is None) == (ahead is None)
        if table is not None and ahead is not None:
            assert (table.input, table.weight) == (ahead.input, ahead.weight)
            assert table.grad_output == (back and back.grad_output)
            assert table.input_wgrad == (back and back.input_wgrad)
            assert table.weight_dgrad == (back and back.weight_dgrad)
    # A budget: at most that gap, and no more bits than it takes.
    assert command("tune", str(run), "--budget", "0.5%", "--out", "b.toml", *ask, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gap"]["mean"] <= 0.005 * loss * (1 + 1e-6)
    assert result["bits"] < 16


@pytest.mark.usefixtures("covered")
def test_no_recipe_is_written_that_cannot_be_loaded(run):
    """Delayed scaling has no backward pass in high precision."""
    forecast = of(run, "delayed", "nvfp4")
    for bits in (4.5, 6, 9, 13.4):
        target = tune.Target(bits=bits, path=Path("x.toml"))
        assignment = tune.tuned(tune.Choices(forecast), forecast, target)
        assert ("delayed", "bf16") not in assignment.layers.values()


@pytest.mark.usefixtures("covered")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "0.00001%", "--recipes", "nvfp4"], "the smallest gap of these recipes is"),
        (["--bits", "3"], "--bits 3: these recipes need at least 4.00. Give more"),
        ([], "Give one of --budget, such as 0.2%, --bits, such as 6, and --time 80%."),
        (["--budget", "1%", "--bits", "5"], "Give one of --budget"),
        (["--time", "fast"], "--time 'fast' is no share in percent. Example: --time 80%"),
        (["--budget", "much"], "--budget 'much' is no share in percent. Example: --budget 0.2%"),
        (["--bits", "40"], "--bits 40: a GEMM has more than 0 and at most 16."),
        (["--bits", "5", "--recipes", "bf16"], "--recipes names no recipe that is quantized."),
        (["--bits", "5", "--recipes", ","], "--recipes ',' has an empty name"),
        (["--bits", "5", "--out", "x.txt"], "a recipe is a TOML file. Example: tuned.toml"),
        (["--bits", "5", "--out", "there.toml"], "there.toml exists. Give another --out"),
    ],
)
def test_bad_input_of_tuning_is_refused(flags, message, run, refused, tmp_path):
    (tmp_path / "there.toml").touch()
    assert message in refused("tune", str(run), "--windows", "8", *flags)
    assert [path.name for path in tmp_path.glob("*.toml")] == ["there.toml"]


@pytest.mark.usefixtures("covered")
def test_a_recipe_is_tuned_for_the_time_of_its_layers(run, command, monkeypatch, capsys):
    """On a machine whose GEMMs take as long as they have bits, and which gains nothing from FP4
    where a layer widens: FP4 goes where it gains."""

    def side_by_side(plans, shape, bias, *, compiled, **options):
        assert compiled  # Transformer Engine's layers too are held to bf16 as it would train
        _, inputs, outputs = shape

        def ms(plan):
            bits = tune.bits_of(plan.recipe.quantizers).values()
            return outputs * sum(16 if outputs > inputs and width == 4 else width for width in bits)

        return {name: summarize([float(ms(plan))]) for name, plan in plans.items()}

    monkeypatch.setattr(times, "side_by_side", side_by_side)
    monkeypatch.setattr(times, "is_compiled", lambda _, plan, hardware: (not plan.is_fp8, ""))
    ask = ["--windows", "8", "--recipes", "nvfp4,mxfp8,bf16", "--json"]
    for share in (0.45, 0.6, 0.8):
        out = f"{share}.toml"
        assert command("tune", str(run), "--time", f"{100 * share}%", "--out", out, *ask) == 0
        result = json.loads(capsys.readouterr().out)
        assert share - 0.1 < result["time"] <= share
        in_fp4 = {path for path, pair in result["layers"].items() if "nvfp4" in pair}
        assert all(path.endswith(("output", "down")) for path in in_fp4)  # the others widen
        assert in_fp4 or share > 0.5
        assert f"{100 * share:g} % of bf16's time at most" in Path(out).read_text()
    # The other way round: the least time for a gap, where times are what counts.
    budget = f"{100 * result['gap']['mean'] / of(run, 'mxfp8').trained.loss * 1.001}%"
    monkeypatch.setattr(tune.Target, "is_timed", lambda *arguments: True)
    assert command("tune", str(run), "--budget", budget, "--out", "b.toml", *ask) == 0
    assert json.loads(capsys.readouterr().out)["time"] <= result["time"] + 1e-6
    ask[-2] = "nvfp4"
    assert command("tune", str(run), "--time", "30%", "--out", "c.toml", *ask) == 2
    error = capsys.readouterr().err
    assert "--time 30%: these recipes need at least 78.6% of bf16's time here. Give more" in error


@pytest.mark.usefixtures("covered")
def test_times_are_measured_on_this_machine(run, command, capsys, monkeypatch):
    monkeypatch.setattr(times, "ROUNDS", 1)
    ask = ["--windows", "8", "--recipes", "mxfp8,bf16"]
    assert command("tune", str(run), "--time", "100%", "--out", "a.toml", *ask) == 0
    head, tuned, mxfp8, plain, *_ = capsys.readouterr().out.splitlines()
    assert "time, % of bf16" in head
    assert plain.split()[:3] == ["bf16", "16.00", "100.0"]
    assert float(mxfp8.split()[2]) > 0
    assert float(tuned.split()[2]) <= 100


def test_times_are_what_counts_on_a_gpu_that_runs_a_candidate():
    path, h100 = Path("x.toml"), Hardware("cuda", (9, 0), cuda_version=(13, 0))
    assert tune.Target(budget=0.1, path=path).is_timed(h100)
    assert not tune.Target(budget=0.1, path=path).is_timed(Hardware("cpu"))
    assert not tune.Target(bits=5, path=path).is_timed(h100)
    assert tune.default_candidates(Hardware("cpu")) == list(tune.CANDIDATES)
    assert tune.default_candidates(h100) == ["rowwise", "block", "current", "delayed", "bf16"]
    assert tune.default_candidates(Hardware("cuda", (8, 0))) == list(tune.CANDIDATES)


def test_a_model_that_the_law_does_not_cover_is_not_tuned(run, refused):
    error = refused("tune", str(run), "--bits", "5", "--windows", "8", "--recipes", "mxfp8")
    assert f"No recipe can be tuned for {run}: the law is of models of" in error


def test_a_recipe_takes_the_backward_pass_of_another(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "mxfp6_e2m3"\nbackward = "nvfp4"\n')
    mine, ahead, back = (
        load_recipe(name).quantizers for name in (str(path), "mxfp6_e2m3", "nvfp4")
    )
    assert mine is not None
    assert ahead is not None
    assert back is not None
    assert mine.gemms["fprop"] == ahead.gemms["fprop"]
    assert (mine.gemms["dgrad"], mine.gemms["wgrad"]) == (back.gemms["dgrad"], back.gemms["wgrad"])
    for text, message in (
        ('like = "mxfp8"\nbackward = "bf16"\n', "Use backward = 'high_precision'"),
        ('like = "mxfp8"\nbackward = "fp3"\n', "No recipe 'fp3'"),
    ):
        path.write_text(text)
        assert message in refusal(load_recipe, str(path))


@pytest.mark.usefixtures("covered")
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
    forecast = forecasts.forecast(
        forecasts.ForecastOptions(
            run=f"hf:{tmp_path / 'theirs'}",
            recipes=["mxfp8"],
            data=str(tmp_path / "text.txt"),
            windows=8,
            tokens=100_000,
            tokenizer="bytes",
        )
    )
    (recipe,) = forecast.recipes
    assert recipe.reason == ""
    assert recipe.gap is not None
    assert recipe.gap.mean > 0
    held: dict[str, Any] = {
        "windows": 8, "data": str(tmp_path / "text.txt"), "tokenizer": "bytes"
    }  # fmt: skip
    (score,) = fp8stack.evaluate(f"hf:{tmp_path / 'theirs'}", **held)  # the same windows
    assert forecast.trained.loss == pytest.approx(score.loss, abs=1e-6)
