"""The bars of convergence: what is committed keeps them, and the benchmark judges by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import runner
from bench.quality import convergence
from bench.quality.convergence import bars
from tests.conftest import metrics
from tests.support.small_loop import SmallLoop

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"
ALL = {"fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8"}


def row(arm: str, gap: float | None, nonfinite: int = 0) -> dict:
    return {"case": "500 steps", "arm": arm, "gap_percent": gap, "nonfinite": nonfinite}


def test_what_is_committed_keeps_its_bars():
    """500 steps of every recipe, and the 300 steps with three seeds of `fp8stack compare`."""
    found = json.loads((RESULTS / "convergence.json").read_text())
    assert {each["arm"] for each in found["results"]} == ALL
    assert found["settings"]["steps"] >= 500
    assert found["bars"] == bars(found["results"])
    assert all(bar["holds"] for bar in found["bars"])
    compared = json.loads((RESULTS / "compare.json").read_text())
    assert compared["config"]["steps"] >= 300
    for each in compared["recipes"]:
        gap = 0.0 if each["recipe"] == "fp32" else each["gap_percent"]["mean"]
        assert gap <= convergence.AT_MOST.get(each["recipe"], convergence.AT_MOST_OTHERS)


@pytest.mark.parametrize(
    "missed",
    [row("bf16", 1.1), row("mxfp8", 5.5), row("delayed", None), row("fp32", None, nonfinite=1)],
)
def test_a_recipe_that_misses_its_bar_is_found(missed):
    found = [row("fp32", None), row("bf16", 0.9), row("current", -2.0), row("block", 4.9)]
    assert [bar["holds"] for bar in bars([*found, missed])] == [True] * 4 + [False]


@pytest.mark.slow
def test_every_recipe_ends_near_fp32_after_300_steps(tmp_path):
    """On a small model; the last 50 losses are those of the same batches in every recipe."""
    ends = {}
    for recipe in sorted(ALL):
        small = SmallLoop(tmp_path / recipe, recipe, width=128, steps=300, telemetry_every=0)
        small.advance(300)
        rows = [each for each in metrics(tmp_path / recipe) if "loss" in each and "lr" in each]
        found = [each["loss"] for each in rows]
        assert len(found) == 300
        assert all(loss is not None for loss in found), recipe
        ends[recipe] = sum(found[-50:]) / 50
    assert ends["fp32"] < 3.0  # of ln 256 = 5.5 before
    for recipe, end in ends.items():
        at_most = convergence.AT_MOST.get(recipe, convergence.AT_MOST_OTHERS)
        assert 100 * (end / ends["fp32"] - 1) <= at_most, recipe


@pytest.mark.slow
def test_the_benchmark_trains_every_recipe_and_judges_it(tmp_path):
    words = ["--tiny", "--steps", "30", "--recipes", "fp32,delayed", "--runs", str(tmp_path / "r")]
    found = runner.measured(convergence, "convergence", words)
    assert [each["arm"] for each in found["results"]] == ["fp32", "delayed"]
    assert all(each["val_loss"] > 0 for each in found["results"])
    assert "| delayed |" in convergence.table(found)
    assert convergence.figure(found).axes
