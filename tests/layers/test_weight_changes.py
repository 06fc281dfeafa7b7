"""Changes of weights that nothing tells of are noticed; micro-batches of a step share a cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8stack import convert, fp8_state, resolve
from fp8stack.layers import load_fp8_state
from fp8stack.layers import weight_changes as weights
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
from tests.support.backend_models import (
    LINEARS,
    filled,
    gpt,
    grad,
    history,
    linear,
    loss_of,
    normal,
    same,
    train,
)
from tests.support.cases import case

pytestmark = pytest.mark.usefixtures("one_thread", "te_throughout")
RATE = 0.3
SOME = [("delayed", "emulate"), *((r, b) for r in ("delayed", "current") for b in ("torch", "te"))]
SOME += [("rowwise", "torch"), ("mxfp8", "te")]
QUICK = [("delayed", "emulate"), ("delayed", "torch"), ("mxfp8", "te")]


def counted(model: nn.Module) -> None:
    """A change that torch counts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(grad(parameter), alpha=-RATE)


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(grad(parameter), alpha=-RATE)


def copied(model: nn.Module) -> None:
    """The way in which averages of weights are put in place."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.detach().add(grad(parameter), alpha=-RATE))


def shared_memory(model: nn.Module) -> None:
    """The way of other processes and libraries."""
    for parameter in model.parameters():
        alias = torch.from_dlpack(parameter.detach())
        alias.add_(grad(parameter), alpha=-RATE)


CHANGES = [by_data, copied, shared_memory]


@pytest.fixture(params=["known", "not known"])
def values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether values were changed is known before a pass, as on a CPU, or the device knows."""
    if request.param == "not known":
        monkeypatch.setattr(weights, "_is_plain_on_cpu", lambda weight: False)


@pytest.mark.parametrize("accumulate", [case(n, quick=n == 2) for n in (1, 2)])
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [case(*way, quick=way in QUICK) for way in SOME],
)
@pytest.mark.full
def test_a_change_that_nothing_tells_of_trains_as_one_that_torch_counts(
    values, recipe, backend, accumulate
):
    expected = history(gpt(recipe, backend), 4, accumulate, counted)
    for change in CHANGES:
        assert same(history(gpt(recipe, backend), 4, accumulate, change), expected)


@pytest.mark.parametrize(("recipe", "backend"), [case(*way, quick=way in QUICK) for way in SOME])
def test_hooks_that_update_in_the_backward_pass_train_as_steps_after_it(values, recipe, backend):
    hooked, plain = gpt(recipe, backend), gpt(recipe, backend)

    def update(parameter: torch.Tensor) -> None:
        parameter.data.add_(grad(parameter), alpha=-RATE)
        parameter.grad = None

    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(4):
        losses = []
        for model in (hooked, plain):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        counted(plain)
        plain.zero_grad()
    assert same(fp8_state(hooked), fp8_state(plain))


@pytest.mark.parametrize(("recipe", "backend"), [case(*way, quick=way in QUICK) for way in SOME])
def test_weights_that_change_between_micro_batches_are_cast_anew_though_an_optimizer_steps(
    values, recipe, backend
):
    """Sharpness-aware minimization does so."""
    losses = []
    for change in (counted, by_data):
        model = gpt(recipe, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(3):
            loss_of(model, step).backward()
            change(model)
            loss = loss_of(model, step)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("backend", ["emulate", "torch", "te"])
def test_micro_batches_of_a_step_record_their_weight_once(values, backend):
    model = gpt("delayed", backend)
    train(model, range(3), accumulate=3)
    assert {filled(model, path)[1] for path in LINEARS} == {3}


def casts(model: GPT) -> int:
    """The number of times that weights were quantized for training."""
    return int(model.backend.weights.generation)


@pytest.mark.parametrize(("recipe", "backend"), [way for way in SOME if way[1] != "emulate"])
def test_micro_batches_share_a_cast_where_values_are_known_or_nobody_else_changes_them(
    monkeypatch, recipe, backend
):
    model = gpt(recipe, backend)
    train(model, range(2), accumulate=3)
    assert casts(model) == 2
    monkeypatch.setattr(weights, "_is_plain_on_cpu", lambda weight: False)
    train(model, range(2), accumulate=3)
    assert casts(model) == 2 + 6
    for step in range(3):  # no backward pass, so no change
        loss_of(model, step)
    assert casts(model) == 2 + 6 + 1
    model.backend.weights.only_tracked_changes = True
    train(model, range(2), accumulate=3)
    assert casts(model) <= 2 + 6 + 1 + 2


def changed_and_fresh(recipe: str, backend: str) -> tuple[GPT, GPT]:
    """A model whose weights changed by `.data` after a step, and a new one with these weights."""
    model, fresh = gpt(recipe, backend), gpt(recipe, backend)
    loss_of(model, 0).backward()
    by_data(model)
    fresh.load_state_dict(model.state_dict())
    return model, fresh


@pytest.mark.parametrize(("recipe", "backend"), [way for way in SOME if way[1] != "emulate"])
def test_a_pass_for_evaluation_sees_values_that_nothing_told_of(recipe, backend):
    model, fresh = changed_and_fresh(recipe, backend)
    if model.backend.delayed is not None:  # an evaluation alone updates no scale
        model.backend.delayed.apply_pending_update()
    load_fp8_state(fresh, fp8_state(model))
    model.backend.weights.mark_changed()
    with torch.no_grad():
        assert loss_of(model, 1).item() == loss_of(fresh, 1).item()


@pytest.mark.parametrize(("recipe", "backend"), [("current", "torch"), ("current", "te")])
def test_a_part_that_is_called_by_itself_sees_them_too(recipe, backend):
    model, fresh = changed_and_fresh(recipe, backend)
    x = normal(16, 32)
    up, fresh_up = (parent.get_submodule("blocks.0.mlp.up") for parent in (model, fresh))
    assert torch.equal(up(x), fresh_up(x))


def test_a_weight_stored_the_other_way_round_is_cast_anew():
    layers = [linear("current", 32, 48, backend="torch")[0] for _ in range(2)]
    for layer in layers:
        assert isinstance(layer, QuantizedLinear)
        layer.transposed = True
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    x = normal(6, 32)
    for layer, change in zip(layers, (counted, by_data), strict=True):
        layer(x).square().sum().backward()
        change(layer)
    assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_values_of_every_dtype_are_compared(dtype):
    plan = resolve("delayed", Hardware("cpu"), "emulate")
    model = convert(nn.Sequential(nn.Linear(32, 48)).to(dtype), plan)
    for step in range(3):
        model(normal(6, 32).to(dtype)).square().sum().backward()
        for parameter in model.parameters():
            parameter.data.mul_(2)
        assert filled(model[0], "0")[1] == step + 1
