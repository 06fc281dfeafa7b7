"""One linear, timed in several plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8stack.analysis.benchmark import layer_timing
from fp8stack.analysis.benchmark.layer_timing import side_by_side
from fp8stack.analysis.benchmark.timing import Timing
from fp8stack.layers.weight_changes import WeightChanges
from fp8stack.precision import Hardware, Plan, load_recipe, resolve

CPU = Hardware("cpu")
SHAPE = (16, 32, 48)
MEDIAN_MS = {"bf16": 24.0, "recipe": 16.0}


def plans_on_a_cpu(recipe: Any) -> dict[str, Plan]:
    return {"bf16": resolve("bf16", CPU), "recipe": resolve(recipe, CPU, "torch")}


class Recorder:
    """Runs each arm once, in place of a clock, and returns times of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, str]] = []
        self.gemms: dict[str, list[tuple[int, ...]]] = {}

    def __call__(self, arms, *, rounds, device):
        self.calls.append((list(arms), rounds, device))
        real, gemms = torch._scaled_mm, []

        def counted(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
            gemms.append((a.shape[0], a.shape[1], b.shape[1]))
            return real(a, b, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_scaled_mm", counted)
            for name, arm in arms.items():
                gemms.clear()
                arm()
                self.gemms[name] = list(gemms)
        return {
            name: Timing(median_ms=ms, low_ms=ms / 2, high_ms=ms * 2, fastest_ms=ms / 4, rounds=1)
            for name, ms in MEDIAN_MS.items()
        }


def timed(recipe: Any, recorder: Any, shape: tuple[int, int, int] = SHAPE) -> dict[str, Timing]:
    plans = plans_on_a_cpu(recipe)
    return side_by_side(plans, shape, True, rounds=7, compiled=False, measure=recorder)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_time_is_of_one_of_the_linears_that_are_measured_together(recipe: str) -> None:
    recorder = Recorder()
    times = timed(recipe, recorder)
    assert recorder.calls == [(["bf16", "recipe"], 7, "cpu")]
    timing = times["recipe"]
    assert (timing.median_ms, timing.low_ms) == (2.0, 1.0)
    assert (timing.high_ms, timing.fastest_ms) == (4.0, 0.5)
    assert times["bf16"].median_ms == 3.0


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_one_arm_multiplies_in_fp8_forward_and_backward_and_the_other_does_not(recipe: str) -> None:
    recorder = Recorder()
    timed(recipe, recorder)
    assert recorder.gemms["bf16"] == []
    # y, dx and dw of eight linears
    assert sorted(set(recorder.gemms["recipe"])) == [(16, 32, 48), (16, 48, 32), (48, 16, 32)]
    assert len(recorder.gemms["recipe"]) == 24


def test_layers_that_the_recipe_leaves_out_are_measured_as_well() -> None:
    changes = {"exclude": ("*",), "exclude_first_blocks": 1}
    recorder = Recorder()
    timed(load_recipe("current").model_copy(update=changes), recorder)
    assert len(recorder.gemms["recipe"]) == 24


def test_weights_are_quantized_again_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = []
    real = WeightChanges.mark_changed

    def mark(changes: WeightChanges) -> None:
        marks.append(changes)
        real(changes)

    monkeypatch.setattr(WeightChanges, "mark_changed", mark)
    passes: list[bool] = []

    def measure(arms, *, rounds, device):
        for _ in range(3):
            marks.clear()
            arms["recipe"]()
            passes.append(bool(marks))
        return Recorder()(arms, rounds=rounds, device=device)

    timed("delayed", measure)
    assert passes == [True] * 3


def test_large_layers_are_measured_fewer_at_a_time() -> None:
    assert layer_timing._copies((1024, 768, 768)) == 8
    assert layer_timing._copies((8192, 4096, 28672)) == 2
    assert layer_timing._copies((8192, 4096, 128256)) == 1


@pytest.mark.slow
def test_compiled_layers_are_measured_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "_copies", lambda shape: 1)
    times = side_by_side(plans_on_a_cpu("delayed"), (16, 32, 32), False, rounds=6, compiled=True)
    assert times["recipe"].median_ms > 0
