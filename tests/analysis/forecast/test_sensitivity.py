"""The sensitivity to a recipe, compared with quantized products written with `numerics` alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor, nn

from fp8stack.analysis.forecast.sensitivity import (
    OperandRecorder,
    Sensitivity,
    sensitivities,
    without_delay,
)
from fp8stack.common.formats import Quantizer
from fp8stack.layers import build_backend
from fp8stack.model.config import Experts, GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.numerics import dequantize, quantize
from fp8stack.precision import Hardware, load_recipe
from tests.support.study_recipes import BACKWARD_HIGH, NEAREST

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Hardware("cpu")
SHAPE = GPTConfig(
    vocabulary=64, context=32, layers=2, width=64, heads=2, mlp_width=64, norm="rmsnorm",
    activation="swiglu", positions="rope", bias=False, tied=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    gpt = GPT(SHAPE, build_backend(plan_for(SHAPE, "fp32", CPU)))
    for parameter in gpt.parameters():
        parameter.data.mul_(3)  # so that it says something
    return gpt.eval()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(0, 64, (6, 33), generator=torch.Generator().manual_seed(1))


def measured(model: GPT, windows: Tensor, *names: str) -> dict[str, Sensitivity]:
    recipes = {name: load_recipe(name) for name in names}
    return dict(sensitivities(model, recipes, windows, CPU, batch=8))


def log_probabilities(model: GPT, windows: Tensor) -> Tensor:
    with torch.no_grad():
        return model(windows[:, :-1], None).float().log_softmax(-1)


def divergence(first: Tensor, second: Tensor) -> float:
    """KL(first || second) of log-probabilities, by SciPy, the mean over tokens."""
    p, q = (np.exp(x.double().numpy()) for x in (first, second))
    return float(special.rel_entr(p, q).sum(-1).mean())


def as_quantized(x: Tensor, quantizer: Quantizer | None, dim: int = -1) -> Tensor:
    if quantizer is None:
        return x
    return dequantize(quantize(x.detach().float(), quantizer, dim=dim)).view_as(x)


def by_hand(model: GPT, windows: Tensor, quantizers: dict[str, tuple]) -> Tensor:
    """The model's log-probabilities with quantized operands in the products of some layers."""
    handles = []
    for path, layer in model.named_modules():
        if path in quantizers:
            assert isinstance(layer, nn.Linear)
            of_input, of_weight = quantizers[path]

            def product(
                module: nn.Module, inputs: tuple, result: Tensor, a: Quantizer = of_input,
                b: Quantizer = of_weight, layer: nn.Linear = layer,
            ) -> Tensor:  # fmt: skip
                x = inputs[0].reshape(-1, inputs[0].shape[-1])
                y = F.linear(as_quantized(x, a), as_quantized(layer.weight, b))
                return y.view_as(result)

            handles.append(layer.register_forward_hook(product))
    result = log_probabilities(model, windows)
    for handle in handles:
        handle.remove()
    return result


@pytest.mark.parametrize("name", ["current", "mxfp8", "mxfp6_e2m3", "nvfp4", "block"])
def test_the_forward_pass_is_measured_layer_by_layer_and_as_a_whole(name, model, windows):
    sensitivity = measured(model, windows, name)[name]
    table = load_recipe(name).quantizers
    assert table is not None
    assert sorted(sensitivity.layers) == sorted(p for p in SHAPE.linear_shapes() if p != "lm_head")
    reference = log_probabilities(model, windows)
    quantizers = (table.input, table.weight)
    all_quantized = by_hand(model, windows, dict.fromkeys(sensitivity.layers, quantizers))
    assert sensitivity.forward == pytest.approx(divergence(reference, all_quantized), rel=2e-3)
    for path in ("blocks.0.attention.qkv", "blocks.1.mlp.down"):
        alone = by_hand(model, windows, {path: quantizers})
        assert sensitivity.layers[path] == pytest.approx(divergence(reference, alone), rel=2e-3)
    assert sensitivity.forward == pytest.approx(sum(sensitivity.layers.values()), rel=0.25)


@pytest.mark.parametrize("name", ["current", "mxfp8", NEAREST])
def test_the_backward_pass_is_measured_by_the_errors_of_its_operands(name, model, windows):
    sensitivity = measured(model, windows, name)[name]
    table = load_recipe(name).quantizers
    assert table is not None
    operands: dict[str, Tensor] = {}
    layer = model.get_submodule("blocks.1.mlp.up")
    assert isinstance(layer, nn.Linear)
    handles = [
        layer.register_forward_hook(
            lambda module, inputs, y: operands.update(input=inputs[0].detach())
        ),
        layer.register_full_backward_hook(
            lambda module, dx, dy: operands.update(grad_output=dy[0])  # type: ignore[index]
        ),
    ]
    model(windows[:, :-1], windows[:, 1:]).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    operands["weight"] = layer.weight.detach()

    def error(operand: str, quantizer: Quantizer | str | None, dim: int) -> float:
        x = operands[operand].reshape(-1, operands[operand].shape[-1])
        if quantizer == "forward":
            quantizer, dim = getattr(table, operand), 1
        assert isinstance(quantizer, Quantizer)
        if quantizer.hadamard:
            return float("nan")  # of the transformed matrix, see `quantization_error`
        rounded = as_quantized(x, quantizer, dim)
        return float((rounded - x).double().square().sum() / x.double().square().sum())

    dgrad = error("grad_output", table.grad_output, 1) + error("weight", table.weight_dgrad, 0)
    if name == NEAREST:
        assert 0.5 * dgrad < sensitivity.backward_layers["blocks.1.mlp.up"] < 2 * dgrad
        return
    wgrad = error("grad_output", table.grad_output_wgrad, 0) + error("input", table.input_wgrad, 0)
    expected = (dgrad + wgrad) / 2
    assert sensitivity.backward_layers["blocks.1.mlp.up"] == pytest.approx(expected, rel=1e-4)
    total = sum(sensitivity.backward_layers[path] * work for path, work in sensitivity.work.items())
    assert sensitivity.backward == pytest.approx(total / sum(sensitivity.work.values()))


def test_the_error_of_experts_is_that_of_each_quantized_by_itself(windows):
    experts = Experts(count=6, per_token=1, width=32)
    config = SHAPE.model_copy(update={"layers": 1, "experts": experts})
    mixture = GPT(config, build_backend(plan_for(config, "fp32", CPU))).eval()
    path, quantizer = "blocks.0.mlp.experts.up", Quantizer(amax="current")
    operands = OperandRecorder.of(mixture, windows[:1], {path})
    weight = mixture.get_parameter(f"{path}.weight").detach()
    noise = torch.stack([as_quantized(x, quantizer) - x for x in weight]).double().square().sum()
    expected = float(noise / weight.double().square().sum())
    assert operands._error(path, "weight", quantizer, 1) == pytest.approx(expected, rel=1e-5)


def test_a_pass_that_is_not_quantized_costs_nothing(model, windows):
    by_recipe = measured(model, windows, "nvfp4_forward_high", BACKWARD_HIGH, "nvfp4")
    assert by_recipe["nvfp4_forward_high"].forward == 0
    assert set(by_recipe["nvfp4_forward_high"].layers.values()) == {0.0}
    assert by_recipe[BACKWARD_HIGH].backward == 0
    assert by_recipe["nvfp4"].forward == by_recipe[BACKWARD_HIGH].forward > 0
    assert by_recipe["nvfp4"].backward == by_recipe["nvfp4_forward_high"].backward > 0


def test_delayed_scaling_is_measured_as_current(model, windows):
    recipe = without_delay(load_recipe("delayed"))
    assert not recipe.delayed
    by_recipe = measured(model, windows, "delayed", "current")
    assert by_recipe["delayed"].forward == by_recipe["current"].forward


@pytest.mark.parametrize("attention", ["mxfp8", "delayed"])
def test_linear_layers_alone_are_measured_whatever_the_rest_is_in(model, windows, attention):
    alone = measured(model, windows, "mxfp8")["mxfp8"]
    changed = {"residual": "bf16", "attention": attention}
    recipes = {"first": load_recipe("mxfp8", changed), "mxfp8": load_recipe("mxfp8")}
    by_recipe = dict(sensitivities(model, recipes, windows, CPU, batch=8))
    for sensitivity in by_recipe.values():
        assert (sensitivity.forward, sensitivity.layers) == (alone.forward, alone.layers)


def test_nothing_of_the_model_is_changed(model, windows):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured(model, windows, "mxfp4")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    OperandRecorder.of(model, windows, ["blocks.0.mlp.up"])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_are_left_out_take_their_share_with_them(model, windows):
    sensitivity = measured(model, windows, "mxfp4")["mxfp4"]
    worst = max(sensitivity.layers, key=lambda path: sensitivity.layers[path])
    remaining = sensitivity.without([worst])
    assert worst not in remaining.layers
    share = sensitivity.layers[worst] / sum(sensitivity.layers.values())
    assert remaining.forward == pytest.approx(sensitivity.forward * (1 - share))
    removed = (
        sensitivity.backward_layers[worst]
        * sensitivity.work[worst]
        / sum(sensitivity.work.values())
    )
    assert remaining.backward == pytest.approx(sensitivity.backward - removed)
    none = sensitivity.without([*sensitivity.layers])
    assert (none.forward, none.backward) == (0, 0)


def test_a_recipe_of_few_layers_has_the_backward_error_of_the_whole_one_without_the_rest(
    model, windows
):
    recipes = {
        "all": load_recipe("mxfp8", {"head": True}),
        "few": load_recipe("mxfp8", {"exclude": ["*.mlp.down"], "head": True}),
    }
    by_recipe = dict(sensitivities(model, recipes, windows, CPU, batch=8))
    full, few = by_recipe["all"], by_recipe["few"]
    left_out = full.layers.keys() - few.layers.keys()
    assert left_out == {"blocks.0.mlp.down", "blocks.1.mlp.down"}
    assert 0 < few.backward < full.backward
    assert few.backward == pytest.approx(full.without(left_out).backward)


@pytest.mark.parametrize("vocabulary", [300, 40_000])
def test_vocabularies_that_are_padded_or_taken_in_parts_are_measured(vocabulary):
    """300 is no multiple of 32; the loss of 40,000 goes by parts of the logits."""
    shape = SHAPE.model_copy(update={"vocabulary": vocabulary, "width": 32, "layers": 1})
    backend = build_backend(plan_for(shape, "fp32", CPU))
    text = torch.randint(0, vocabulary, (2, 33))
    sensitivity = measured(GPT(shape, backend), text, "mxfp8")["mxfp8"]
    assert sensitivity.forward > 0
    assert sensitivity.backward > 0


def test_experts_are_measured_by_group_as_one_layer(windows):
    experts = {"count": 4, "per_token": 2, "width": 32}
    config = GPTConfig.model_validate(SHAPE.model_dump() | {"layers": 1, "experts": experts})
    mixture = GPT(config, build_backend(plan_for(config, "fp32", CPU))).eval()
    result = measured(mixture, windows, "mxfp8")["mxfp8"]
    up = "blocks.0.mlp.experts.up"
    assert result.work[up] == 2 * 64 * 64  # each token is multiplied by two experts of four
    assert 0 < result.layers[up] < result.forward
    assert 0 < result.backward_layers[up] < 1
