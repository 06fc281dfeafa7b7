"""Timing: arms take turns, medians and ratios have the intervals that they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.report import paired_ratio
from fp8stack.analysis.benchmark import timing
from fp8stack.analysis.benchmark.timing import interleaved, median_interval
from fp8stack.precision import Hardware
from tests.support.clock import Clock, timed


def test_a_timing_is_of_its_own_arm_and_of_the_timed_rounds_alone():
    clock = Clock()
    arms = {"a": clock.arm(9.0, 0.003, 0.001, 0.002), "b": clock.arm(0.004)}
    timings = interleaved(arms, rounds=3, warm_up=1, clock=clock)
    assert timings["a"].median_ms == pytest.approx(2)
    assert timings["a"].fastest_ms == pytest.approx(1)
    assert timings["b"].median_ms == pytest.approx(4)
    assert timing.ratio(timings["b"], timings["a"]) == pytest.approx(4.0)
    assert timings["a"].peak_memory_gib is None


def test_a_budget_cuts_rounds_short_but_leaves_enough_for_an_interval():
    clock = Clock()
    arms = {"a": clock.arm(100.0, 1.0)}
    times = interleaved(arms, rounds=50, warm_up=3, budget_s=20, clock=clock)["a"]
    # The first round, which compiles, is not counted; the warm-up stops after a tenth.
    assert times.rounds in (17, 18)
    assert clock.now == pytest.approx(120)
    times = interleaved({"a": clock.arm(1.0)}, rounds=50, warm_up=9, budget_s=2, clock=clock)["a"]
    assert times.rounds == timing.LEAST_ROUNDS
    assert clock.now == pytest.approx(120 + 2 + timing.LEAST_ROUNDS)


@pytest.mark.capability("D6")
def test_a_synchronized_arm_is_waited_for_on_a_gpu(monkeypatch):
    clock = Clock()

    def wait(device: str) -> None:
        clock.now += 0.5 if device == "cuda" else 0.0

    monkeypatch.setattr(timing, "wait_for", wait)
    monkeypatch.setattr(timing, "_peak_gib", lambda arm, device: 1.25)
    timings = interleaved({"a": clock.arm(1.0)}, rounds=2, warm_up=0, device="cuda", clock=clock)
    assert timings["a"].median_ms == pytest.approx(1500)
    assert timings["a"].peak_memory_gib == 1.25


@pytest.mark.parametrize("n", [6, 10, 25, 100])
def test_the_interval_encloses_the_median_as_often_as_it_says(n):
    """The chance by direct enumeration of the binomial; one sample further in is not enough."""
    low, high = median_interval([float(i) for i in range(1, n + 1)])
    k = int(low)
    assert high == n + 1 - k

    def coverage(k: int) -> float:
        return sum(math.comb(n, i) for i in range(k, n - k + 1)) / 2**n

    assert coverage(k) >= 0.95 > coverage(k + 1)


def test_what_slows_down_a_round_leaves_the_ratio_within_it():
    weather = [1.0, 3.0, 2.0, 9.0, 1.5, 4.0]
    timings = timed({"a": weather, "b": [1.25 * factor for factor in weather]}, rounds=6)
    assert paired_ratio(timings["b"], timings["a"]) == pytest.approx((1.25, 1.25, 1.25))
    assert timings["b"].samples_ms == pytest.approx([1250 * factor for factor in weather])


def test_the_interval_of_a_ratio_encloses_the_truth_as_often_as_it_says():
    """400 measurements of 40 rounds, a true median of 1.1: the share's standard error is 1 %."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        base = random.lognormal(0, 0.5, 40)
        slower = 1.1 * base * random.lognormal(0, 0.1, 40)
        timings = timed({"base": base.tolist(), "ours": slower.tolist()}, rounds=40)
        _, low, high = paired_ratio(timings["ours"], timings["base"])
        inside += low <= 1.1 <= high
    assert 0.93 <= inside / 400 <= 0.99


@pytest.mark.parametrize(
    ("capability", "name", "slug"),
    [
        ((9, 0), "NVIDIA H200", "h200"),
        ((9, 0), "NVIDIA H100 80GB HBM3", "h100"),
        ((8, 6), "NVIDIA RTX A4000", "nvidia-rtx-a4000"),
    ],
)
def test_a_gpu_has_a_short_name(capability, name, slug):
    assert timing.slug(Hardware("cuda", capability, name=name)) == slug
