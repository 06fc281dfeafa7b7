"""Severities of recipes for the shape of a model."""

from __future__ import annotations

import pytest

from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.severity import RecipeSeverity, severity_of
from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe
from tests.support.study_recipes import BACKWARD_HIGH

LAW = laws.fitted()


def severity(recipe: str, **overrides: object) -> RecipeSeverity:
    return severity_of(load_recipe(recipe, overrides), load_config("gpt2-124m"), LAW)


@pytest.mark.parametrize("recipe", sorted(LAW.severities))
def test_a_shipped_recipe_has_its_own_severity(recipe):
    result = severity(recipe)
    assert result.value == pytest.approx(LAW.severities[recipe])
    assert (result.recipes, result.reason) == ((recipe,), "")
    assert result.share == pytest.approx(2 / 3 if recipe == "nvfp4_forward_high" else 1)


def test_layers_left_in_bf16_take_their_share_of_the_work():
    """A block of GPT-2 is 12 width^2, and an MLP's layer 4 width^2."""
    result = severity("nvfp4", exclude=["blocks.0.mlp.up", "blocks.1.*"])
    assert result.value == pytest.approx(1 - (4 + 12) / (12 * 12))
    assert result.share == pytest.approx(result.value)


@pytest.mark.parametrize(
    ("recipe", "more", "reason"),
    [
        ("mxfp8", {"head": True}, "no source quantizes the head"),
        ("nvfp4", {"input": {"block": [1, 32]}}, "no source trains with its quantizers"),
        ("mxfp6_e2m3", {"backward": "nvfp4"}, "no source trains with its quantizers"),
        (BACKWARD_HIGH, {}, "no source trains with its quantizers"),
        ("rowwise_wgrad_hp", {}, "no source trains with its quantizers"),
    ],
)
def test_a_recipe_that_no_source_trains_with_has_no_severity(recipe, more, reason):
    result = severity(recipe, **more)
    assert (result.value, result.reason) == (None, reason)
