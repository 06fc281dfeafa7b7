"""`fp8stack tune`: the assignment of recipes to layers, and the recipe that is written."""

from __future__ import annotations

import ctypes
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from fp8stack.analysis.benchmark.timing import summarize
from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast import measured, times, tune
from fp8stack.analysis.forecast.measured import ModelLaw
from fp8stack.analysis.forecast.sensitivity import Sensitivity
from fp8stack.analysis.forecast.severity import bits_of
from fp8stack.model.config import load_config, plan_for
from fp8stack.precision import Hardware, load_recipe
from tests.analysis.forecast.conftest import SMALL
from tests.conftest import refusal
from tests.support.cases import case

pytestmark = pytest.mark.usefixtures("one_thread")

REFERENCE = Sensitivity(
    plan=plan_for(load_config("gpt-nano", SMALL), "nvfp4", Hardware("cpu")), forward=0.01,
    layers={}, backward=0.03, backward_layers={}, work={},
)  # fmt: skip
LAW = ModelLaw(
    law=replace(laws.fitted(), power=0.9), ratio=20.0, reference=REFERENCE,
    severity_of_reference=1.0,
)  # fmt: skip


def of(run: Path, *recipes: str) -> measured.Forecast:
    return measured.forecast(measured.ForecastOptions(run=str(run), recipes=recipes, windows=8))


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
    for limit in (1.5, 2.5, 4.0):
        possible = [assignment for assignment in assignments if assignment.severity <= limit]
        cheapest = table.cheapest(LAW, limit)
        if not possible:
            assert cheapest is None
            continue
        assert cheapest is not None
        assert cheapest.severity <= limit * (1 + 1e-6)
        assert cheapest.bits <= min(assignment.bits for assignment in possible) + 1e-9
    for cost in (7.0, 9.0, 12.0):
        possible = [assignment for assignment in assignments if assignment.bits <= cost]
        best = table.best(LAW, cost)
        assert (best is None) == (not possible)
        if best is not None:
            assert best.bits <= cost + 1e-6
            least = min(assignment.severity for assignment in possible)
            assert best.severity <= least * (1 + 1e-9)


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


def test_a_tuned_recipe_is_written_and_runs_as_it_was_assigned(run, command, tmp_path, capsys):
    ask = ["--windows", "8", "--recipes", "nvfp4,mxfp8,bf16"]
    assert command("tune", str(run), "--bits", "6", "--out", "six.toml", *ask) == 0
    output = capsys.readouterr().out
    file = run / "run.toml"
    then = f"fp8stack pretrain --config {file} --recipe six.toml --out six-run"
    assert f"written: six.toml. Train in it:\n  {then}" in output
    assert "gap: by divergences on this model, relative to NVFP4's" in output
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
    # A budget: at most that gap with its interval, and no more bits than it takes.
    assert command("tune", str(run), "--budget", "0.5%", "--out", "b.toml", *ask, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gap"]["mean"] < result["gap"]["high"] <= 0.5 * (1 + 1e-6)
    assert result["bits"] < 16


def test_a_budget_that_no_quantized_layer_keeps_to_leaves_all_layers_in_bf16(run, command, capsys):
    ask = ["--windows", "8", "--recipes", "nvfp4,bf16", "--out", "b.toml", "--json"]
    assert command("tune", str(run), "--budget", "0.0000001%", *ask) == 0
    result = json.loads(capsys.readouterr().out)
    assert {tuple(pair) for pair in result["layers"].values()} == {("bf16", "bf16")}
    assert (result["bits"], result["gap"]["mean"]) == (pytest.approx(16), 0)
    assert not load_recipe("b.toml").is_fp8


def test_no_recipe_is_written_that_cannot_be_loaded(run):
    """Delayed scaling has no backward pass in high precision."""
    forecast = of(run, "delayed", "nvfp4")
    for bits in (4.5, 6, 9, 13.4):
        target = tune.Target(bits=bits, path=Path("x.toml"))
        assignment = tune.tuned(tune.Choices(forecast), forecast, target)
        assert ("delayed", "bf16") not in assignment.layers.values()


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


def test_a_recipe_is_tuned_for_the_time_of_its_layers(run, command, monkeypatch, capsys):
    """On a machine whose GEMMs take as long as they have bits, and which gains nothing from FP4
    where a layer widens: FP4 goes where it gains."""

    def side_by_side(plans, shape, bias, *, compiled, **options):
        assert compiled  # Transformer Engine's layers too are held to bf16 as it would train
        _, inputs, outputs = shape

        def ms(plan):
            bits = bits_of(plan.recipe.quantizers).values()
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
    budget = f"{result['gap']['high'] * 1.001}%"
    monkeypatch.setattr(tune.Target, "is_timed", lambda *arguments: True)
    assert command("tune", str(run), "--budget", budget, "--out", "b.toml", *ask) == 0
    assert json.loads(capsys.readouterr().out)["time"] <= result["time"] + 1e-6
    ask[-2] = "nvfp4"
    assert command("tune", str(run), "--time", "30%", "--out", "c.toml", *ask) == 2
    error = capsys.readouterr().err
    assert "--time 30%: these recipes need at least 78.6% of bf16's time here. Give more" in error


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


def test_bits_that_no_recipe_has_are_refused_before_anything_is_measured(monkeypatch, refused):
    monkeypatch.setattr(measured, "forecast", lambda *_: pytest.fail("measured"))
    message = "--bits 5: these recipes need at least 8.00. Give more, or other --recipes."
    assert message in refused("tune", "run", "--bits", "5", "--recipes", "mxfp8,bf16")


def test_the_command_trains_the_model_that_was_tuned(run):
    config = f"fp8stack pretrain --config {run / 'run.toml'} --recipe t.toml --out t-run"
    for named in (run, run / "checkpoints" / "step-000400"):
        assert tune.command(str(named), "t.toml") == config
    assert tune.command("hf:folder", "t.toml") == (
        "fp8stack pretrain --init-from hf:folder --data TEXT --recipe t.toml"
    )


def test_the_command_trains_a_run_in_a_folder_called_checkpoints(tmp_path):
    file = tmp_path / "checkpoints" / "run1" / "run.toml"
    file.parent.mkdir(parents=True)
    file.touch()
    assert tune.command(str(file.parent), "t.toml") == (
        f"fp8stack pretrain --config {file} --recipe t.toml --out t-run"
    )
