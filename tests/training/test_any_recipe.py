"""Recipes are data: those that ship, and one that no code knows, train, are seen and resume."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fp8stack.analysis.benchmark.step_timing import FP8, QUANTIZED
from fp8stack.precision import load_recipe
from tests.faults.processes import difference
from tests.training.pin_runs import SHAPE, TEXT

FLAGS = [
    "--model", "shape.toml", "--data", str(TEXT), "--batch", "4", "--device", "cpu", "--seed", "5",
    "--save-every", "3", "--eval-every", "6", "--set", "sample_tokens=0", "--set", "eval_windows=2",
    "--set", "telemetry_every=3", "--set", "warmup_steps=2", "--lr", "1e-2",
]  # fmt: skip
MINE = """
description = "FP6 weights, FP4 inputs, gradients by rows, some layers in delayed scaling"
[quantizer]
format = "e2m1"
block = [1, 16]
scale = "power_of_two"
[weight]
format = "e2m3"
block = [16, 16]
[grad_output]
format = "e5m2"
block = "row"
rounding = "stochastic"
[[layers]]
match = "*.mlp.down"
recipe = "delayed"
history_length = 4
[[layers]]
match = "head"
recipe = "mxfp8"
grad_output = "none"
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("shape.toml").write_text(SHAPE)
    Path("mine.toml").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize(
    "recipe",
    [
        "./mine.toml",
        *(pytest.param(name, marks=pytest.mark.slow) for name in QUANTIZED if name not in FP8),
    ],
)
@pytest.mark.full
def test_a_run_cut_off_goes_on_to_the_bit(recipe, in_folder, command):
    for out in ("whole", "cut"):
        assert command("pretrain", "--recipe", recipe, "--steps", "6", "--out", out, *FLAGS) == 0
    shutil.rmtree(in_folder / "cut" / "checkpoints" / "step-000006")
    assert command("pretrain", "--resume", "cut") == 0
    assert difference(in_folder / "cut", in_folder / "whole") == ""
    table = load_recipe(recipe).tables
    if any(q.stochastic for quantizers in table for q in quantizers.each.values()):
        state = load_file(in_folder / "cut/checkpoints/step-000006/fp8.safetensors")
        assert {int(v) for key, v in state.items() if key.endswith(".draws")} == {6}


@pytest.mark.full
def test_telemetry_plan_estimate_and_report_know_a_recipe_that_no_code_knows(
    in_folder, command, capsys
):
    options = ("--telemetry-every", "3", "--what-if", "nvfp4,mxfp6_e2m3,rowwise")
    assert (
        command(
            "pretrain", "--recipe", "./mine.toml", "--steps", "3", "--out", "r", *FLAGS, *options
        )
        == 0
    )
    rows = [
        json.loads(line) for line in (in_folder / "r" / "telemetry.jsonl").read_text().splitlines()
    ]
    of = {(row["layer"], row["operand"]): row for row in rows if row.get("what_if") is False}
    assert of["blocks.0.mlp.up", "weight"]["format"] == "e2m3"
    assert of["blocks.0.mlp.down", "weight"]["format"] == "e4m3"
    assert 0 <= of["blocks.0.mlp.up", "input"]["zero_blocks"] <= 1
    tried = {row["recipe"] for row in rows if row.get("what_if")}
    assert tried == {"nvfp4", "mxfp6_e2m3", "rowwise"}
    capsys.readouterr()
    for words in (["plan"], ["estimate"]):
        assert command(*words, "--model", "shape.toml", "--recipe", "./mine.toml") == 0
    assert "e2m3" in capsys.readouterr().out
    assert command("show", "r") == 0
    assert "blocks.0.mlp.up" in capsys.readouterr().out
