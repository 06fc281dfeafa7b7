"""What a recipe does to a model, held to quantized products written out with `numerics` alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor, nn

from fp8stack.backends import build_backend
from fp8stack.forecast.sensitivity import (
    Operands,
    Sensitivity,
    divergence,
    log_probabilities,
    sensitivities,
    without_delay,
)
from fp8stack.formats import Quantizer
from fp8stack.model.config import GPTConfig, plan_for
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
    made = GPT(SHAPE, build_backend(plan_for(SHAPE, "fp32", CPU)))
    for parameter in made.parameters():
        parameter.data.mul_(3)  # so that it says something
    return made.eval()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(0, 64, (6, 33), generator=torch.Generator().manual_seed(1))


def measured(model: GPT, windows: Tensor, *names: str) -> dict[str, Sensitivity]:
    recipes = {name: load_recipe(name) for name in names}
    return dict(sensitivities(model, recipes, windows, CPU, batch=8))


def as_quantized(x: Tensor, quantizer: Quantizer | None, dim: int = -1) -> Tensor:
    if quantizer is None:
        return x
    return dequantize(quantize(x.detach().float(), quantizer, dim=dim)).view_as(x)


def by_hand(model: GPT, windows: Tensor, quantizers: dict[str, tuple]) -> Tensor:
    """The model's log-probabilities with some layers' products taken of quantized operands."""
    handles = []
    for path, layer in model.named_modules():
        if path in quantizers:
            assert isinstance(layer, nn.Linear)
            of_input, of_weight = quantizers[path]

            def product(
                own: nn.Module, given: tuple, result: Tensor, a: Quantizer = of_input,
                b: Quantizer = of_weight, layer: nn.Linear = layer,
            ) -> Tensor:  # fmt: skip
                x = given[0].reshape(-1, given[0].shape[-1])
                y = F.linear(as_quantized(x, a), as_quantized(layer.weight, b))
                return y.view_as(result)

            handles.append(layer.register_forward_hook(product))
    found = log_probabilities(model, windows)
    for handle in handles:
        handle.remove()
    return found


def test_divergence_is_that_of_scipy():
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 3, 5, 7))
    p, q = (special.softmax(logits, axis=-1) for logits in (one, other))
    expected = special.rel_entr(p, q).sum(-1).mean()
    ours = divergence(*(F.log_softmax(torch.tensor(x), -1) for x in (one, other)))
    assert float(ours.mean()) == pytest.approx(expected)
    assert float(divergence(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))) == 0


@pytest.mark.parametrize("name", ["current", "mxfp8", "mxfp6_e2m3", "nvfp4", "block"])
def test_the_forward_pass_is_measured_layer_by_layer_and_as_a_whole(name, model, windows):
    found = measured(model, windows, name)[name]
    table = load_recipe(name).quantizers
    assert table is not None
    assert sorted(found.layers) == sorted(p for p in SHAPE.linear_shapes() if p != "lm_head")
    reference = log_probabilities(model, windows)
    own = (table.input, table.weight)
    whole = by_hand(model, windows, dict.fromkeys(found.layers, own))
    assert found.forward == pytest.approx(float(divergence(reference, whole).mean()), rel=2e-3)
    for path in ("blocks.0.attention.qkv", "blocks.1.mlp.down"):
        alone = by_hand(model, windows, {path: own})
        assert found.layers[path] == pytest.approx(
            float(divergence(reference, alone).mean()), rel=2e-3
        )
    assert found.forward == pytest.approx(sum(found.layers.values()), rel=0.25)


@pytest.mark.parametrize("name", ["current", "mxfp8", NEAREST])
def test_the_backward_pass_is_measured_by_the_errors_of_its_operands(name, model, windows):
    found = measured(model, windows, name)[name]
    table = load_recipe(name).quantizers
    assert table is not None
    seen: dict[str, Tensor] = {}
    layer = model.get_submodule("blocks.1.mlp.up")
    assert isinstance(layer, nn.Linear)
    handles = [
        layer.register_forward_hook(lambda own, given, y: seen.update(input=given[0].detach())),
        layer.register_full_backward_hook(
            lambda own, dx, dy: seen.update(grad_output=dy[0])  # type: ignore[index]
        ),
    ]
    model(windows[:, :-1], windows[:, 1:]).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    seen["weight"] = layer.weight.detach()

    def error(operand: str, quantizer: Quantizer | str | None, dim: int) -> float:
        x = seen[operand].reshape(-1, seen[operand].shape[-1])
        if quantizer == "forward":
            quantizer, dim = getattr(table, operand), 1
        assert isinstance(quantizer, Quantizer)
        if quantizer.hadamard:
            return float("nan")  # of the transformed matrix, see `quantization_error`
        rounded = as_quantized(x, quantizer, dim)
        return float((rounded - x).double().square().sum() / x.double().square().sum())

    dgrad = error("grad_output", table.grad_output, 1) + error("weight", table.weight_dgrad, 0)
    if name == NEAREST:
        assert 0.5 * dgrad < found.backward_layers["blocks.1.mlp.up"] < 2 * dgrad
        return
    wgrad = error("grad_output", table.grad_output_wgrad, 0) + error("input", table.input_wgrad, 0)
    expected = (dgrad + wgrad) / 2
    assert found.backward_layers["blocks.1.mlp.up"] == pytest.approx(expected, rel=1e-4)
    total = sum(found.backward_layers[path] * size for path, size in found.sizes.items())
    assert found.backward == pytest.approx(total / sum(found.sizes.values()))


def test_a_pass_that_is_not_quantized_costs_nothing(model, windows):
    found = measured(model, windows, "nvfp4_forward_high", BACKWARD_HIGH, "nvfp4")
    assert found["nvfp4_forward_high"].forward == 0
    assert set(found["nvfp4_forward_high"].layers.values()) == {0.0}
    assert found[BACKWARD_HIGH].backward == 0
    assert found["nvfp4"].forward == found[BACKWARD_HIGH].forward > 0
    assert found["nvfp4"].backward == found["nvfp4_forward_high"].backward > 0


def test_delayed_scaling_is_measured_as_current(model, windows):
    recipe = without_delay(load_recipe("delayed"))
    assert not recipe.delayed
    found = measured(model, windows, "delayed", "current")
    assert found["delayed"].forward == found["current"].forward


@pytest.mark.parametrize("attention", ["mxfp8", "delayed"])
def test_linear_layers_alone_are_measured_whatever_the_rest_is_in(model, windows, attention):
    alone = measured(model, windows, "mxfp8")["mxfp8"]
    changed = {"residual": "bf16", "attention": attention}
    recipes = {"first": load_recipe("mxfp8", changed), "mxfp8": load_recipe("mxfp8")}
    both = dict(sensitivities(model, recipes, windows, CPU, batch=8))
    for one in both.values():
        assert (one.forward, one.layers) == (alone.forward, alone.layers)


def test_nothing_of_the_model_is_changed(model, windows):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured(model, windows, "mxfp4")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    Operands.of(model, windows, ["blocks.0.mlp.up"])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_are_left_out_take_their_share_with_them(model, windows):
    found = measured(model, windows, "mxfp4")["mxfp4"]
    worst = max(found.layers, key=lambda path: found.layers[path])
    rest = found.without([worst])
    assert worst not in rest.layers
    share = found.layers[worst] / sum(found.layers.values())
    assert rest.forward == pytest.approx(found.forward * (1 - share))
    gone = found.backward_layers[worst] * found.sizes[worst] / sum(found.sizes.values())
    assert rest.backward == pytest.approx(found.backward - gone)
    none = found.without([*found.layers])
    assert (none.forward, none.backward) == (0, 0)


@pytest.mark.parametrize("vocabulary", [300, 40_000])
def test_vocabularies_that_are_padded_or_taken_in_parts_are_measured(vocabulary):
    """300 is no multiple of 32; the loss of 40,000 goes by parts of the logits."""
    shape = SHAPE.model_copy(update={"vocabulary": vocabulary, "width": 32, "layers": 1})
    backend = build_backend(plan_for(shape, "fp32", CPU))
    text = torch.randint(0, vocabulary, (2, 33))
    found = measured(GPT(shape, backend), text, "mxfp8")["mxfp8"]
    assert found.forward > 0
    assert found.backward > 0
