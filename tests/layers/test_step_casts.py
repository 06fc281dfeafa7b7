"""Biases, and weights without FP8, cast once for all micro-batches of an optimizer step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8stack.layers.linear import LowPrecisionLayer
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
from tests.support.backend_models import adam, gpt, gradients, loss_of, same, train

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS = {"experts": {"count": 4, "per_token": 2, "width": 32}}
MODELS = [("bf16", "reference", {}), ("current", "torch", {}), ("bf16", "reference", EXPERTS)]
HOPPER = Hardware("cuda", (9, 0))  # whose FP8 models have a head in bf16


def pair(recipe: str, backend: str, shape: dict[str, object]) -> tuple[GPT, GPT]:
    """A model that casts its parameters once per step, and one that casts them in each pass."""
    shared, plain = (gpt(recipe, backend, shape, hardware=HOPPER) for _ in range(2))
    shared.backend.weights.only_tracked_changes = True
    return shared, plain


def layers_of(model: nn.Module) -> list[LowPrecisionLayer]:
    return [layer for layer in model.modules() if isinstance(layer, LowPrecisionLayer)]


def step(model: GPT) -> None:
    train(model, [5], accumulate=2)


def load(model: GPT) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def scale_weight(model: GPT) -> None:
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(2)


def replace_weight(model: GPT) -> None:
    weight = model.get_parameter("lm_head.weight")
    model.get_submodule("lm_head").weight = nn.Parameter(weight.detach() * 2)


def update_by_data(model: GPT) -> None:
    """As some optimizers do."""

    class ByData(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)

    loss_of(model, 3).backward()
    optimizer = ByData(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [step, load, scale_weight, replace_weight, update_by_data]


def passes(model: GPT) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the gradients of two micro-batches."""
    losses = []
    for micro_batch in (11, 12):
        loss = loss_of(model, micro_batch)
        loss.backward()
        losses.append(loss.item())
    by_name = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    return losses, by_name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("recipe", "backend", "shape"), MODELS, ids=["bf16", "fp8", "experts"])
@pytest.mark.full
def test_no_change_leaves_a_stale_copy_and_nothing_else_differs(recipe, backend, shape, compiled):
    torch._dynamo.reset()
    models = pair(recipe, backend, shape)
    for model in models if compiled else ():
        model.compile_blocks("aot_eager")
    for change in CHANGES:
        before = [passes(model) for model in models]
        for model in models:
            change(model)
        after = [passes(model) for model in models]
        for (losses, by_name), (expected_losses, expected) in (before, after):
            assert losses == expected_losses, change
            assert same(by_name, expected), change
        assert before[0][0] != after[0][0], change
        with torch.no_grad():
            evaluated = [loss_of(model.eval(), 1).item() for model in models]
        assert evaluated[0] == evaluated[1], change
        for model in models:
            model.train()


@pytest.mark.parametrize(("recipe", "backend", "shape"), MODELS, ids=["bf16", "fp8", "experts"])
def test_micro_batches_share_the_copies(recipe, backend, shape, monkeypatch):
    shared, plain = pair(recipe, backend, shape)
    parameters: list[Tensor] = []
    exact = LowPrecisionLayer.in_compute_dtype

    def noting(layer: LowPrecisionLayer, name: str) -> Tensor:
        parameter = exact(layer, name)
        parameters.append(parameter)
        return parameter

    monkeypatch.setattr(LowPrecisionLayer, "in_compute_dtype", noting)
    optimizer = adam(shared)
    train(shared, range(3), optimizer, accumulate=4)
    assert len({x.data_ptr() for x in parameters}) * 4 <= len(parameters)
    assert all(layer.casts for layer in layers_of(shared))
    train(plain, range(3), accumulate=4)
    assert not any(layer.casts for layer in layers_of(plain))


def test_biases_are_cast_for_scaled_gemms_and_not_for_others() -> None:
    """GEMMs on the emulator's values may add the bias in float32."""
    b200 = Hardware("cuda", (10, 0))
    scaled, _ = pair("current", "torch", {})
    plain = gpt("nvfp4_forward_high", "torch", {}, hardware=b200)
    plain.backend.weights.only_tracked_changes = True
    for model, names in ((scaled, {"bias"}), (plain, set())):
        loss_of(model, 1)
        quantized = [layer for layer in layers_of(model) if layer.in_fp8]
        assert {frozenset(layer.casts) for layer in quantized} == {frozenset(names)}
    for layer in (layer for layer in layers_of(scaled) if layer.in_fp8):
        expected = layer.get_parameter("bias").bfloat16()
        assert torch.equal(layer.casts["bias"].copies, expected)


def test_a_pass_whose_weights_change_before_its_backward_pass_keeps_its_copies() -> None:
    shared, plain = pair("bf16", "reference", {})
    results = []
    for model in (shared, plain):
        loss = loss_of(model, 1)
        scale_weight(model)
        loss_of(model, 2)
        loss.backward()
        results.append(gradients(model))
    assert same(*results)
