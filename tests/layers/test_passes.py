"""Activation checkpointing where several forward passes come before a backward pass: gradients and
FP8 state are the same to the bit as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state, passes
from fp8stack.model.gpt import GPT
from tests.support.backend_models import (
    BACKENDS,
    LINEARS,
    checkpointed,
    filled,
    gpt,
    gradients,
    loss_of,
    same,
)
from tests.support.cases import case

pytestmark = pytest.mark.usefixtures("one_thread", "te_throughout")

Model = Callable[[int], Tensor]
WAYS = [None, False, True, "selective"]  # no checkpointing; whether it is reentrant


def together(loss: Model) -> None:
    """One backward pass, as contrastive losses have it."""
    (loss(0) * loss(1)).backward()


def in_order(loss: Model) -> None:
    """The order of a pipeline's stage."""
    for result in [loss(0), loss(1), loss(2)]:
        result.backward()


def newest_first(loss: Model) -> None:
    for result in reversed([loss(0), loss(1), loss(2)]):
        result.backward()


def one_forward_one_backward(loss: Model) -> None:
    begun = [loss(0), loss(1)]
    for step in (2, 3):
        begun.pop(0).backward()
        begun.append(loss(step))
    for result in begun:
        result.backward()


def twice(loss: Model) -> None:
    """The same pass, with another one's backward in between."""
    first, second = loss(0), loss(1)
    first.backward(retain_graph=True)
    second.backward()
    first.backward()


def with_evaluations(loss: Model) -> None:
    """A reference policy, and a pass in eval mode that is differentiated."""
    first = loss(0)
    with torch.no_grad():
        reference = loss(1)
    model.eval()
    quiet = loss(2)
    model.train()
    (first * reference).backward()
    quiet.backward()


model: GPT  # that runs now
ORDERS = [together, in_order, newest_first, one_forward_one_backward, twice, with_evaluations]


def trained(
    inner: GPT, order: Callable[[Model], None], way: bool | str | None
) -> dict[str, Tensor]:
    """Gradients and FP8 state of three steps, whose inputs need other scales each time."""
    global model
    model = checkpointed(inner, way) if isinstance(way, bool) else inner
    model.recompute = "selective" if way == "selective" else inner.recompute
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    results: dict[str, Tensor] = {}
    for step in range(3):
        first = 10 * step
        order(lambda micro_batch, first=first: loss_of(inner, first + micro_batch))  # type: ignore[misc]
        results |= {f"{step} gradient of {name}": g for name, g in gradients(inner).items()}
        results |= {f"{step} {name}": value for name, value in fp8_state(inner).items()}
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        case(backend, order, quick=backend == "emulate" or order is newest_first)
        for backend in BACKENDS
        for order in ORDERS
    ],
)
def test_checkpointing_changes_nothing_in_whatever_order_passes_come(backend, order):
    if backend == "te" and order is twice:
        pytest.skip("TE refuses a second backward pass")
    # torch refuses a second backward pass of what selective checkpointing runs again.
    selective = backend != "te" and order is not twice
    ways = [way for way in WAYS if way != "selective" or selective]
    plain, *recomputing = (trained(gpt("delayed", backend), order, way) for way in ways)
    for frugal in recomputing:
        assert frugal.keys() == plain.keys()
        assert all(torch.equal(frugal[name], plain[name]) for name in plain)


def test_a_block_that_runs_again_records_nothing_a_second_time():
    frugal = checkpointed(gpt(), False)
    losses = [loss_of(frugal, step) for step in range(3)]
    for loss in losses:
        loss.backward()
    assert {tuple(filled(frugal, path)) for path in LINEARS} == {(3, 1, 3)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_checkpointed_as_a_whole_trains_as_without(backend, reentrant):
    plain, recomputed = gpt("delayed", backend), gpt("delayed", backend)
    embedded = torch.ones((), requires_grad=True)  # which reentrant checkpointing asks for
    for step in range(4):
        loss_of(plain, step).backward()
        checkpoint(
            lambda factor, step=step: loss_of(recomputed, step) * factor,
            embedded,
            use_reentrant=reentrant,
        ).backward()
        assert same(gradients(plain), gradients(recomputed))
        assert same(fp8_state(plain), fp8_state(recomputed))
        if step % 2:
            for trainee in (plain, recomputed):
                torch.optim.SGD(trainee.parameters(), lr=0.3).step()
                trainee.zero_grad()


def test_a_backward_pass_through_two_models_runs_each_again_with_its_own_scales():
    plain, frugal = ([gpt(seed=s) for s in range(2)] for _ in range(2))
    for trainee in frugal:
        checkpointed(trainee, False)
    for models in (plain, frugal):
        for step in range(2):
            losses = [
                loss_of(trainee, 10 * step + micro_batch)
                for micro_batch in range(2)
                for trainee in models
            ]
            torch.stack(losses).prod().backward()
    for plain_model, frugal_model in zip(plain, frugal, strict=True):
        assert same(gradients(plain_model), gradients(frugal_model))
        assert same(fp8_state(plain_model), fp8_state(frugal_model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "order"),
    [
        (backend, order)
        for backend in ("emulate", "torch")
        for order in (together, in_order, newest_first)
    ],
)
def test_checkpointing_of_compiled_blocks_changes_nothing_either(backend, order):
    results = []
    for recompute in ("none", "block", "selective"):
        torch._dynamo.reset()
        compiled = gpt("delayed", backend)
        compiled.recompute = recompute
        compiled.compile_blocks("aot_eager")
        results.append(trained(compiled, order, None))
    plain, *frugal = results
    for tensors in frugal:
        assert all(torch.equal(tensors[name], plain[name]) for name in plain)
    torch._dynamo.reset()


class Inner(nn.Module):
    """A linear that checkpointing inside of checkpointing runs again."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_of_checkpointing_changes_nothing(reentrant):
    plain, nested = gpt(), gpt()
    for block in nested.blocks:
        block.mlp.up = Inner(block.get_submodule("mlp.up"))
    checkpointed(nested, reentrant)
    for trainee in (plain, nested):
        for step in range(2):
            trainee.zero_grad()  # else sums are in another order
            (loss_of(trainee, 10 * step) * loss_of(trainee, 10 * step + 1)).backward()
    expected, nested_gradients = gradients(plain).values(), gradients(nested).values()
    assert all(map(torch.equal, expected, nested_gradients))
    assert same(fp8_state(plain), fp8_state(nested))


def test_a_pass_that_is_too_long_ago_to_be_run_again_is_an_error(monkeypatch):
    monkeypatch.setattr(passes, "LIMIT", 2)
    frugal = checkpointed(gpt(), False)
    losses = [loss_of(frugal, step) for step in range(3)]
    losses[2].backward()
    losses[1].backward()
    with pytest.raises(UserError, match="after more than 2 others"):
        losses[0].backward()
