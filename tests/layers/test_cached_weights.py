"""Weights that linears round once, for the tokens of a generation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fp8stack.layers import build_backend
from fp8stack.layers.emulate import EmulatedOperand
from fp8stack.layers.linear import LowPrecisionLayer
from fp8stack.layers.weight_cache import cached_weights
from fp8stack.model import sampling
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, load_recipe

SMALL = {"vocabulary": 64, "context": 32, "layers": 2, "width": 32, "heads": 2, "norm": "rmsnorm"}
EXPERTS = {"count": 4, "per_token": 2, "width": 32}
RECIPES: dict[str, dict[str, object]] = {
    "mxfp8": {},
    "nvfp4": {},
    "current": {"quantizer": {"format": "e3m4"}},
    "rowwise": {"weight": {"rounding": "stochastic"}},
    "delayed": {},
}


def model_in(recipe: str, experts: bool = False) -> GPT:
    config = GPTConfig.model_validate(SMALL | ({"experts": EXPERTS} if experts else {}))
    plan = plan_for(config, load_recipe(recipe, RECIPES[recipe]), Hardware("cpu"))
    torch.manual_seed(0)
    return GPT(config, build_backend(plan)).eval()


def tokens_of(model: GPT, count: int = 40) -> list[int]:
    return list(sampling.generate(model, [1, 2, 3], count, sampling.Sampling(), seed=0))


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.full
def test_a_generation_rounds_each_weight_once_and_gives_the_same_tokens(
    recipe, experts, monkeypatch
):
    model, rounded = model_in(recipe, experts), []
    exact = EmulatedOperand.cast

    def counting(quantizers, *arguments):
        if quantizers.name == "weight":
            rounded.append(quantizers)
        return exact(quantizers, *arguments)

    monkeypatch.setattr(EmulatedOperand, "cast", counting)
    tokens = tokens_of(model)
    count = len(rounded)
    assert count == len(set(map(id, rounded))) > 0
    monkeypatch.setattr(sampling, "cached_weights", lambda model: nullcontext())
    assert tokens_of(model) == tokens
    assert len(rounded) > 30 * count
    assert all("cast" not in vars(quantizers) for quantizers in rounded)


@pytest.mark.parametrize("experts", [{}, {"experts": EXPERTS}], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_weight_without_fp8_is_rounded_once_too(recipe, experts, monkeypatch) -> None:
    config = GPTConfig.model_validate(SMALL | experts)
    plan = plan_for(config, recipe, Hardware("cuda", (8, 0)))
    torch.manual_seed(0)
    model = GPT(config, build_backend(plan)).eval()
    rounded: list[Tensor] = []
    exact = LowPrecisionLayer.in_compute_dtype

    def noting(layer: LowPrecisionLayer, name: str) -> Tensor:
        parameter = exact(layer, name)
        if name == "weight":
            rounded.append(parameter)
        return parameter

    monkeypatch.setattr(LowPrecisionLayer, "in_compute_dtype", noting)
    tokens = tokens_of(model)
    linears = [m for m in model.modules() if isinstance(m, LowPrecisionLayer)]
    assert len({matrix.data_ptr() for matrix in rounded}) == len(linears) > 0
    assert not any(layer.casts for layer in linears)
    monkeypatch.setattr(sampling, "cached_weights", lambda model: nullcontext())
    assert tokens_of(model) == tokens


def test_a_weight_that_changes_within_is_rounded_again_and_gradients_are_not_affected() -> None:
    model, tokens = model_in("mxfp8"), torch.arange(8)[None]
    with cached_weights(model):
        with torch.no_grad():
            first = model(tokens)
            model.get_parameter("blocks.0.mlp.up.weight").mul_(2)
            second = model(tokens)
        model.train()
        loss = model(tokens).float().square().mean()
        loss.backward()
    with torch.no_grad():
        assert not torch.equal(first, second)
        assert torch.equal(model.eval()(tokens), second)
    assert model.get_parameter("blocks.0.mlp.up.weight").grad is not None
