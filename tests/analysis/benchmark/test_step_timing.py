"""A training step that is measured: its arms, that it trains, and `fp8stack bench step`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fp8stack.analysis.benchmark import step_timing as step
from fp8stack.common.errors import UserError
from fp8stack.model.config import GPTConfig
from fp8stack.precision import Hardware

CPU = Hardware("cpu")
H200 = Hardware("cuda", (9, 0), name="NVIDIA H200", has_te=True, cuda_version=(12, 9),
                torch_version="2.13.0", te_version="2.20.2")  # fmt: skip
SHAPE = GPTConfig(vocabulary=64, context=32, layers=1, width=32, heads=2)
TINY = step.StepWork(model="tiny", config=SHAPE, batch=2, context=32)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.full
def test_a_cpu_has_every_recipe_and_compiles_those_that_are_named():
    names = [arm.name for arm in step.arms(CPU, ["fp32", "delayed"], ["delayed"])]
    assert names == ["fp32", "delayed", "delayed compiled"]
    assert step.baseline(CPU) == "fp32"


def test_a_gpu_has_every_backend_compiled_except_te():
    arms = step.arms(H200, ["bf16", "delayed", "mxfp8"], ())
    assert [(arm.name, arm.compiled) for arm in arms] == [
        ("bf16", True),
        ("delayed", False),  # te, what `resolve` chooses
        ("delayed by torch", True),
        ("delayed by emulate", True),
        ("mxfp8", True),
    ]
    assert step.baseline(H200) == "bf16"


def test_an_arm_that_would_run_as_something_else_is_refused():
    arm = step.StepArm(name="x", recipe="delayed", backend="te", compiled=False)
    with pytest.raises(UserError, match="'x' does not run here"):
        step.build(arm, TINY, CPU)
    with pytest.raises(UserError, match=r"No model 'gpt9' for steps on cpu. Known: small\."):
        step.chosen(["gpt9"], "cpu")


def test_a_step_trains():
    built = step.build(step.arms(CPU, ["delayed"], ())[0], TINY, CPU)
    batch = TINY.batch_of("cpu")
    before = built.model(*batch).item()
    for _ in range(20):
        built.step()
    assert built.model(*batch).item() < before - 0.01
    assert all(parameter.grad is None for parameter in built.model.parameters())


BENCH = ["bench", "step", "--device", "cpu", "--recipe", "delayed", "--rounds", "6"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(step, "works", lambda device: {"small": replace(TINY, model="small")})


@pytest.mark.usefixtures("small")
def test_the_command_measures_each_recipe_beside_the_step_without_fp8(command, monkeypatch, capsys):
    monkeypatch.setenv("FP8STACK_CPU_BF16", "no")
    assert command(*BENCH, "--recipe", "mxfp8", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in rows] == ["fp32", "delayed", "mxfp8"]
    assert rows[0]["speedup"] == 1
    assert all(row["rounds"] == 6 and 0 < row["low_ms"] <= row["median_ms"] for row in rows)


@pytest.mark.usefixtures("small")
def test_the_commands_table_names_the_step_without_fp8(command, monkeypatch, capsys):
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")
    assert command(*BENCH) == 0
    table = capsys.readouterr().out
    assert "small, 2 x 32 tokens" in table
    assert "speed of bf16" in " ".join(table.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--recipe", "mxpf8"], "Did you mean 'mxfp8'"), (["--model", "gpt9"], "Known: small")],
)
def test_the_command_names_the_recipes_and_models_that_it_knows(flags, words, command, capsys):
    assert command("bench", "step", "--device", "cpu", *flags) == 2
    assert words in capsys.readouterr().err
