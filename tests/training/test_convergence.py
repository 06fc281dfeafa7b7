"""Every recipe learns as well as float32, over some hundred steps."""

from __future__ import annotations

import pytest

from tests.conftest import metrics
from tests.support.small_loop import SmallLoop

RECIPES = ("fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8", "rowwise")
AT_MOST = {"bf16": 1.0}  # percent of float32's loss
AT_MOST_OTHERS = 5.0


@pytest.mark.capability("D7")
@pytest.mark.slow
def test_every_recipe_ends_near_fp32_after_300_steps(tmp_path):
    """A small model; the last 50 losses are of the same batches in every recipe."""
    ends = {}
    for recipe in RECIPES:
        small = SmallLoop(tmp_path / recipe, recipe, width=128, steps=300, telemetry_every=0)
        small.advance(300)
        rows = [row for row in metrics(tmp_path / recipe) if "loss" in row and "lr" in row]
        losses = [row["loss"] for row in rows]
        assert len(losses) == 300
        assert all(loss is not None for loss in losses), recipe
        ends[recipe] = sum(losses[-50:]) / 50
    assert ends["fp32"] < 3.0  # of ln 256 = 5.5 before
    for recipe, end in ends.items():
        at_most = AT_MOST.get(recipe, AT_MOST_OTHERS)
        assert 100 * (end / ends["fp32"] - 1) <= at_most, recipe
