"""Evaluation between steps: no graph, no change of FP8 state, and the same training to the bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8stack
from fp8stack import GPT, build_backend, fp8_state, load_config
from fp8stack.model.config import plan_for
from fp8stack.precision import Hardware
from tests.support.cases import case
from tests.support.small_loop import SmallLoop, changed

TINY = {"layers": 1, "width": 128, "heads": 2, "mlp_width": 128, "context": 64}
WAYS = [
    *((recipe, "reference") for recipe in ("fp32", "bf16", "fp16")),
    *((recipe, "emulate") for recipe in ("delayed", "current", "block", "mxfp8")),
    *((recipe, "torch") for recipe in ("delayed", "current")),
]
MODES = (torch.no_grad, torch.inference_mode)


def gpt(recipe: str, backend: str) -> GPT:
    config = load_config("gpt-nano", TINY)
    plan = plan_for(config, recipe, Hardware("cpu"), backend)
    assert (plan.recipe.name, plan.backend) == (recipe, backend)
    return GPT(config, build_backend(plan))


def trained(model: GPT, evaluate: Callable[[GPT], None]) -> list[Tensor]:
    """Three steps of two micro-batches, with an evaluation before, within and after each."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    evaluate(model)
    for _ in range(3):
        for _ in range(2):
            tokens = torch.randint(256, (2, 33))
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.detach())
            evaluate(model)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(model)
    state = [value.clone() for value in fp8_state(model).values()]
    return [*losses, *state, *(p.detach().clone() for p in model.parameters())]


def evaluate(model: GPT, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """See that an evaluation leaves no graph, and the FP8 state as it was."""
    tokens = torch.arange(2 * 17).view(2, 17)
    before = {name: value.clone() for name, value in fp8_state(model).items()}
    saved: list[Tensor] = []
    model.eval()
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x), lambda x: x)
    with mode(), keep:
        logits, loss = model(tokens), model(tokens[:, :-1], tokens[:, 1:])
    model.train()
    assert not saved
    for result in (logits, loss):
        assert not result.requires_grad
        assert result.grad_fn is None
        assert result.isfinite().all()
    assert changed(before, fp8_state(model)) == []


@pytest.mark.capability("D8")
@pytest.mark.parametrize(
    ("recipe", "backend"), [case(*way, quick=way[0] == "delayed") for way in WAYS]
)
def test_evaluations_leave_no_graph_and_the_training_as_it_was(recipe, backend):
    expected = trained(gpt(recipe, backend), lambda model: None)
    for mode in MODES:
        losses = trained(gpt(recipe, backend), partial(evaluate, mode=mode))
        assert all(
            torch.equal(loss, expected_loss)
            for loss, expected_loss in zip(losses, expected, strict=True)
        )


@pytest.mark.capability("D8")
def test_a_loaded_model_gives_the_same_logits_in_every_mode(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", save_every=2)
    small.advance(2)
    small.loop.wait()
    tokens = torch.randint(256, (2, 16))
    with torch.no_grad():
        expected = small.run.model.eval()(tokens)
    model = fp8stack.load(tmp_path / "r", recipe="delayed")
    assert not model.training
    before = {name: value.clone() for name, value in fp8_state(model).items()}
    for mode in MODES * 2:
        with mode():
            logits = model(tokens)
        assert torch.equal(logits, expected)
        assert logits.grad_fn is None
    assert changed(before, fp8_state(model)) == []
