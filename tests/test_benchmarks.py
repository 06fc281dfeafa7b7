"""The benchmarks run, measure what they say, and their committed results hold their bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_interleaved_arms_take_turns_and_the_warm_up_is_dropped() -> None:
    from bench.machine import interleaved

    order: list[str] = []
    arms = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = interleaved(arms, rounds=3)
    assert order == ["a", "b"] * 5
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_the_emulation_benchmark_measures_every_arm_of_a_small_shape() -> None:
    from bench import emulation

    result = emulation.measure(32, 64, 32, rounds=1)
    assert result["ratio"]["fp32"] == 1
    assert set(result["ratio"]) == {
        "fp32", *emulation.RECIPES, "torchao tensorwise", "torchao mxfp8",
    }  # fmt: skip
    assert "| 32 x 64 -> 32 | 1.00 |" in emulation.table([result])


def test_torchaos_linear_in_the_benchmark_computes_what_ours_does() -> None:
    """The peer is a peer: the same recipe, the same numbers."""
    import torch

    from bench import emulation

    theirs, ours = emulation.TorchaoMxfp8(64, 96), emulation.ours("mxfp8", 64, 96)
    ours.load_state_dict(theirs.state_dict())
    results = []
    for layer in (theirs, ours):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y) / 7)
        results.append((y.detach(), x.grad, layer.weight.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_committed_results_hold_their_bars() -> None:
    report = json.loads((ROOT / "bench/results/emulation.json").read_text())
    (result,) = [r for r in report["results"] if (r["in"], r["out"]) == (768, 3072)]
    for recipe, bar in report["bars"].items():
        assert result["ratio"][recipe] <= bar, recipe
    rows = json.loads((ROOT / "bench/results/recipes.json").read_text())["results"]
    for row in rows:
        assert abs(row["gap_percent"]) <= 1, row["recipe"]


def test_the_benchmarks_explain_themselves_and_refuse_unknown_scenarios() -> None:
    assert "emulation: " in _bench("--help").stdout
    assert "--steps" in _bench("recipes", "--help").stdout
    assert _bench("nonsense").returncode == 2


@pytest.mark.slow
def test_the_recipes_benchmark_trains_every_recipe(tmp_path: Path) -> None:
    done = _bench("recipes", "--steps", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "recipes.json").read_text())["results"]
    assert [row["recipe"] for row in rows] == [
        "fp32", "bf16", "delayed", "current", "block", "mxfp8",
    ]  # fmt: skip
    assert [row["fp8_gemms_per_step"] for row in rows] == [0, 0, 48, 48, 48, 48]
