"""Run folders of an earlier version (`pin_runs.py`), which this version reads and resumes."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fp8stack
from fp8stack.common import presets
from fp8stack.precision import recipe_from_json
from tests.conftest import metrics
from tests.training.pin_runs import MORE, PINNED, RUNS, STEPS, TEXT


@pytest.fixture(params=RUNS)
def pinned(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(PINNED / f"{request.param}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def test_every_recipe_has_a_pinned_run():
    shipped = {
        name
        for name in presets.training_recipes()
        if "like" not in presets.read("recipes", name)[1]
    }
    assert shipped <= set(RUNS)
    assert {file.name for file in PINNED.glob("*.xz")} == {f"{name}.tar.xz" for name in RUNS}


def test_it_goes_on_with_the_losses_of_the_version_that_wrote_it(pinned, command):
    before, plan = metrics(pinned), _plan(pinned)
    resumed = command(
        "pretrain", "--resume", str(pinned), "--data", str(TEXT), "--steps", str(MORE)
    )
    assert resumed == 0
    after = metrics(pinned)
    assert after[: len(before)] == before
    expected = json.loads((PINNED / "went_on.json").read_text())[pinned.name]
    assert len(expected) == MORE - STEPS
    for row in after[len(before) :]:
        # CPUs differ in the order of their sums, and a cast to FP8 makes that visible.
        assert row["loss"] == pytest.approx(expected[str(row["step"])], rel=1e-3)
    assert _plan(pinned) == plan


def test_its_weights_and_its_fp8_state_are_read_to_the_bit(pinned):
    folder = pinned / "checkpoints" / f"step-{STEPS:06d}"
    has_state = (folder / "fp8.safetensors").exists()
    recipe = json.loads((pinned / "plan.json").read_text())["recipe"]["name"]
    model = fp8stack.load(pinned, recipe=recipe if has_state else "fp32")
    loaded_state, saved = model.state_dict(), load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded_state[name][: len(saved[name])], saved[name]) for name in saved)
    if has_state:
        state, fp8 = fp8stack.fp8_state(model), load_file(folder / "fp8.safetensors")
        assert state.keys() == fp8.keys()
        assert all(torch.equal(state[name], fp8[name]) for name in fp8)


def _plan(run: Path) -> dict[str, Any]:
    """A run's plan without what follows from its number of steps or from its CPU, its recipe as
    this version writes it."""
    plan = json.loads((run / "plan.json").read_text())
    plan["recipe"] = recipe_from_json(plan["recipe"], "plan.json").to_json(words=False)
    return {key: value for key, value in plan.items() if key not in ("phases", "reasons", "native")}
