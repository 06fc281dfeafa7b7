"""Severities of recipes for the shape of a model."""

from __future__ import annotations

import pytest

from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.severity import RecipeSeverity, bits_of, severity_of
from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe
from tests.support.study_recipes import BACKWARD_HIGH

LAW = laws.fitted()
GPT2 = load_config("gpt2-124m")


def severity(recipe: str, model: str = "gpt2-124m") -> RecipeSeverity:
    return severity_of(load_recipe(recipe), load_config(model), LAW)


@pytest.mark.parametrize("model", ["gpt2-124m", "llama-8b"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed"])
def test_a_shipped_recipe_has_its_own_severity_in_every_dense_model(recipe, model):
    result = severity(recipe, model)
    assert result.value == pytest.approx(LAW.severities[recipe])
    assert (result.share, result.head) == (pytest.approx(1), 0)
    assert (result.recipes, result.notes) == ((recipe,), ())


def test_layers_left_in_bf16_take_their_share_of_the_work(tmp_path):
    """A block of GPT-2 is 12 width^2, and an MLP's layer 4 width^2."""
    path = tmp_path / "mine.toml"
    path.write_text('like = "nvfp4"\nexclude = ["blocks.0.mlp.up", "blocks.1.*"]\n')
    result = severity(str(path))
    assert result.value == pytest.approx(1 - (4 + 12) / (12 * 12))
    assert result.share == pytest.approx(result.value)


@pytest.mark.parametrize(("model", "share"), [("gpt2-124m", 0.31), ("llama-8b", 0.07)])
def test_a_quantized_head_is_a_term_of_its_own(tmp_path, model, share):
    path = tmp_path / "mine.toml"
    path.write_text('like = "nvfp4"\nhead = true\n')
    result = severity(str(path), model)
    assert result.value == pytest.approx(1 + laws.fitted().head * result.head)
    assert result.head / (1 + result.head) == pytest.approx(share, abs=0.005)


def test_a_pass_has_the_severity_that_was_published_and_not_its_share_of_the_work():
    forward = severity(BACKWARD_HIGH)
    assert forward.share == pytest.approx(1 / 3)
    assert forward.value == pytest.approx(LAW.forward)
    backward = severity("nvfp4_forward_high")
    assert backward.value == pytest.approx(LAW.severities["nvfp4_forward_high"])


def test_the_forward_pass_of_one_recipe_and_the_backward_pass_of_another_add_up(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "mxfp6_e2m3"\nbackward = "nvfp4"\n')
    result = severity(str(path))
    assert result.value == pytest.approx(
        LAW.forward * LAW.severities["mxfp6_e2m3"] + (1 - LAW.forward)
    )
    assert "the share of each pass is NVFP4's" in " ".join(result.notes)


def test_an_unknown_backward_pass_counts_as_the_worst_of_its_bits():
    result = severity("rowwise_wgrad_hp")  # its weights are cast otherwise for dgrad
    worst = max(LAW.severities[name] for name in ("mxfp8", "rowwise", "block", "current"))
    expected = LAW.forward * LAW.severities["rowwise"] + (1 - LAW.forward) / 2 * worst
    assert result.value == pytest.approx(expected)
    assert "no source has its backward pass, which counts as current's" in result.notes


def test_an_amax_history_of_another_length_changes_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "delayed"\nhistory_length = 16\n')
    assert severity(str(path)).value == severity("delayed").value


def test_no_source_has_a_forward_pass_in_other_blocks(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "nvfp4"\n[input]\nblock = [1, 32]\n')
    assert severity(str(path)).value is None


def test_bits_are_those_of_the_wider_operand():
    for name, expected in {
        "nvfp4": (4, 4, 4),
        "mxfp6_e2m3": (6, 6, 6),
        "current": (8, 8, 8),
        "nvfp4_forward_high": (16, 4, 4),
        BACKWARD_HIGH: (4, 16, 16),
    }.items():
        assert tuple(bits_of(load_recipe(name).quantizers).values()) == expected
    assert set(bits_of(None).values()) == {16.0}


def test_a_backward_pass_of_fewer_bits_than_any_counts_as_the_worst_of_the_fewest(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "mxfp4"\n[grad_output]\nformat = "e2m0"\n[weight.dgrad]\nformat = "e2m0"\n'
    )
    assert bits_of(load_recipe(str(path)).quantizers)["dgrad"] == 3
    result = severity(str(path))
    assert result.value == pytest.approx(LAW.severities["mxfp4"], rel=0.5)
    assert "no source has its backward pass" in " ".join(result.notes)


def test_attention_in_fp8_is_left_out():
    recipe = load_recipe("delayed", {"attention": "delayed", "residual": "bf16"})
    assert severity_of(recipe, GPT2, LAW) == severity("delayed")
