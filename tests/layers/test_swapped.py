"""Layers of one model in another, compared with the model whose layers they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8stack.layers import build_backend
from fp8stack.layers.swapped import swapped
from fp8stack.model.config import Experts, GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, load_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=2)
EXPERTS = GPTConfig(
    vocabulary=64, context=16, layers=1, width=32, heads=2, activation="swiglu", norm="rmsnorm",
    positions="rope", bias=False, experts=Experts(count=4, per_token=2, width=32),
)  # fmt: skip
TOKENS = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))


def model(recipe: str, config: GPTConfig = DENSE, seed: int = 0) -> GPT:
    plan = plan_for(config, load_recipe(recipe), Hardware("cpu"))
    return GPT(config, build_backend(plan), seed=seed).eval()


def logits(of: GPT) -> Tensor:
    with torch.no_grad():
        result: Tensor = of(TOKENS)
    return result


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", ["mxfp8", "served:fp8_dynamic", "nvfp4"])
def test_with_all_linears_of_another_recipe_a_model_computes_what_that_recipe_does(recipe, config):
    plain, quantized = model("fp32", config), model(recipe, config)
    before, expected = logits(plain), logits(quantized)
    assert not torch.equal(before, expected)
    paths = [layer.name for layer in quantized.backend.plan.layers]
    with swapped(plain, quantized, paths):
        assert torch.equal(logits(plain), expected)
    with swapped(quantized, plain, paths):
        assert torch.equal(logits(quantized), before)
    assert torch.equal(logits(plain), before)
    assert torch.equal(logits(quantized), expected)


def test_one_layer_has_the_weights_and_the_dtype_that_it_has_in_the_other_model():
    plain, quantized = model("fp32"), model("bf16", seed=1)
    path = "blocks.1.mlp.up"
    inputs: list[Tensor] = []
    handle = plain.get_submodule(path).register_forward_hook(lambda _, x, y: inputs.append(x[0]))
    logits(plain)
    handle.remove()
    outputs: list[Tensor] = []
    with swapped(plain, quantized, [path]):
        plain.get_submodule(path).register_forward_hook(lambda _, x, y: outputs.append(y))
        logits(plain)
    of_layer = [quantized.get_parameter(f"{path}.{name}") for name in ("weight", "bias")]
    x, w, b = (tensor.detach().bfloat16() for tensor in (inputs[0], *of_layer))
    torch.testing.assert_close(
        outputs[0], torch.nn.functional.linear(x, w, b).float(), rtol=0, atol=0
    )


def test_a_model_has_its_own_layers_again_after_an_error():
    plain, quantized = model("fp32"), model("mxfp8")
    modules = dict(plain.named_modules())
    names = list(plain.state_dict())
    with pytest.raises(AttributeError), swapped(plain, quantized, ["lm_head", "blocks.0.nothing"]):
        pass
    with pytest.raises(ZeroDivisionError), swapped(plain, quantized, ["blocks.0.mlp.down"]):
        _ = 1 / 0
    assert dict(plain.named_modules()) == modules
    assert list(plain.state_dict()) == names
