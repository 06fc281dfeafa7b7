"""`python -m bench false-alarms`: its rules on losses that are known, and the committed page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.quality import false_alarms

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"


def test_the_last_interval_of_a_comparison_is_that_of_its_rule():
    gaps = np.array([[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]])
    three = false_alarms.ends(gaps, seeds=3)
    assert (three.pairs[0], three.means[0]) == (3, pytest.approx(5 / 3))
    assert three.half_widths[0] == pytest.approx(4.302653 * np.std([1, 3, 1], ddof=1) / np.sqrt(3))
    assert (three.covers(2.0), three.covers(9.0)) == (1.0, 0.0)
    at_once = false_alarms.ends(gaps, until=9.0)
    assert (at_once.pairs[0], at_once.means[0]) == (4, 2.0)
    assert at_once.half_widths[0] == pytest.approx(4.540703 * np.std([1, 3, 1, 3], ddof=1) / 2)
    assert false_alarms.ends(gaps, until=0.01).pairs[0] == 6  # all there are


def test_runs_of_two_kinds_raise_alarms_and_runs_of_one_kind_do_not(monkeypatch):
    monkeypatch.setattr(false_alarms, "COMPARISONS", 300)
    losses = np.random.default_rng(0).normal(2.0, 0.01, 400)
    assert all(share <= 0.08 for _, _, share in false_alarms.alarms(losses))
    gaps = 100 * (losses[0::2] * 1.03 / losses[1::2] - 1)
    assert false_alarms.ends(gaps[None], until=0.5).covers(0.0) == 0.0


def test_the_committed_runs_of_one_recipe_raise_at_most_five_alarms_in_a_hundred():
    data = json.loads((RESULTS / "false-alarms.json").read_text())
    losses = np.array([row["val_loss"] for row in data["results"]])
    assert len(losses) == 2 * false_alarms.PAIRS
    gaps = 100 * (losses[0::2] / losses[1::2] - 1)
    assert gaps.std() > 0.2  # the noise of seeds, not of rounding
    for rule, _, share in false_alarms.alarms(losses):
        assert share <= (0.05 if "--until" in rule else 0.065)  # 5 % is what 95 % intervals allow
