"""Activation checkpointing in delayed scaling: gradients and FP8 state are the same to the bit as
without it, also where evaluations come in between; another training pass in between is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state
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

pytestmark = pytest.mark.usefixtures("one_thread", "te_throughout")

WAYS = [None, False, True, "selective"]  # no checkpointing; whether it is reentrant


def recomputing(backend: str, way: bool | str | None) -> GPT:
    model = gpt("delayed", backend)
    model.recompute = "selective" if way == "selective" else model.recompute
    return checkpointed(model, way) if isinstance(way, bool) else model


def ways(backend: str) -> list[bool | str | None]:
    return [way for way in WAYS if backend != "te" or way != "selective"]


def trained(model: GPT) -> dict[str, Tensor]:
    """Gradients and FP8 state of two steps of two passes, with evaluations in between: of a
    reference policy, and of a pass in eval mode that is differentiated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    results: dict[str, Tensor] = {}
    for step in range(2):
        for micro_batch in (10 * step, 10 * step + 1):
            first = loss_of(model, micro_batch)
            assert same(fp8_state(model), fp8_state(model))  # a look changes nothing
            with torch.no_grad():
                reference = loss_of(model, micro_batch + 2)
            model.eval()
            quiet = loss_of(model, micro_batch + 3)
            model.train()
            (first * reference).backward()
            quiet.backward()
        results |= {f"{step} gradient of {name}": g for name, g in gradients(model).items()}
        results |= {f"{step} {name}": value for name, value in fp8_state(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.full
def test_checkpointing_changes_nothing_with_evaluations_in_between(backend):
    plain, *frugal = (trained(recomputing(backend, way)) for way in ways(backend))
    for results in frugal:
        assert same(results, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_does_not_run_again_after_another_training_pass(backend):
    for way in ways(backend):
        model = recomputing(backend, way)
        losses = [loss_of(model, step) for step in range(2)]
        losses[1].backward()
        if way is None:
            losses[0].backward()
            continue
        with pytest.raises(UserError, match=r"Call backward\(\) before"):
            losses[0].backward()
        loss_of(model, 2).backward()
        assert {tuple(filled(model, path)) for path in LINEARS} == {(3, 1, 2)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_checkpointed_as_a_whole_trains_as_without(backend):
    plain, recomputed = gpt("delayed", backend), gpt("delayed", backend)
    for step in range(4):
        loss_of(plain, step).backward()
        checkpoint(loss_of, recomputed, step, use_reentrant=False).backward()
        assert same(gradients(plain), gradients(recomputed))
        assert same(fp8_state(plain), fp8_state(recomputed))
        if step % 2:
            for trainee in (plain, recomputed):
                torch.optim.SGD(trainee.parameters(), lr=0.3).step()
                trainee.zero_grad()


def test_reentrant_checkpointing_of_the_whole_model_is_refused():
    model, factor = gpt(), torch.ones((), requires_grad=True)  # which torch asks for
    loss = checkpoint(lambda x: loss_of(model, 0) * x, factor, use_reentrant=True)
    with pytest.raises(UserError, match="use_reentrant=False"):
        loss.backward()
    loss_of(model, 1).backward()
    assert filled(model) == [1, 1, 1]


def test_a_backward_pass_through_two_models_runs_each_again():
    plain, frugal = ([gpt(seed=s) for s in range(2)] for _ in range(2))
    for trainee in frugal:
        checkpointed(trainee, False)
    for models in (plain, frugal):
        for step in range(2):
            torch.stack([loss_of(trainee, step) for trainee in models]).prod().backward()
    for plain_model, frugal_model in zip(plain, frugal, strict=True):
        assert same(gradients(plain_model), gradients(frugal_model))
        assert same(fp8_state(plain_model), fp8_state(frugal_model))
