"""Weights that were loaded without their FP8 state: one warning, at the first pass."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.nn.utils import parametrizations, prune

from fp8stack import convert, delayed_scaling_of, fp8_state, load_fp8_state, load_recipe, resolve
from tests.support.backend_models import CPU, normal

pytestmark = pytest.mark.usefixtures("one_thread")


def fresh(recipe: str = "delayed", backend: str = "emulate") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return convert(model, resolve(load_recipe(recipe), CPU, backend))


def trained(recipe: str = "delayed") -> nn.Sequential:
    model = fresh(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(4 * normal(8, 32, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """The number of warnings since the last call."""
    caplog.set_level(logging.WARNING, logger="fp8stack")

    def count() -> int:
        messages = [r.getMessage() for r in caplog.records if r.name == "fp8stack"]
        caplog.clear()
        assert all("fp8stack.load_fp8_state(model, state)" in message for message in messages)
        return len(messages)

    return count


def run(model: nn.Module, train: bool = True) -> torch.Tensor:
    y: torch.Tensor = model.train(train)(normal(8, 32))
    if train:
        y.sum().backward()
    return y


@pytest.mark.parametrize("backend", ["emulate", "torch"])
@pytest.mark.parametrize("train", [True, False])
def test_weights_without_fp8_state_warn_once(backend, train, warnings):
    saved, model = trained(), fresh(backend=backend)
    model.load_state_dict(saved.state_dict())
    assert warnings() == 0  # the state may follow
    run(model, train)
    assert warnings() == 1
    run(model, train)
    model.load_state_dict(saved.state_dict())
    run(model, train)
    assert warnings() == 0


def test_draw_counters_are_fp8_state_too_and_recipes_without_any_do_not_warn(warnings):
    for recipe, expected in (("nvfp4", 1), ("mxfp8", 0), ("current", 0), ("bf16", 0), ("fp32", 0)):
        model = fresh(recipe)
        model.load_state_dict(trained(recipe).state_dict())
        run(model)
        assert warnings() == expected, recipe
        assert bool(fp8_state(model)) == bool(expected)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize("first", ["weights", "state"])
def test_state_that_is_loaded_before_or_after_the_weights_is_enough(recipe, first, warnings):
    saved, model = trained(recipe), fresh(recipe)
    if scaling := delayed_scaling_of(saved):
        scaling.apply_pending_update()
    if first == "state":
        load_fp8_state(model, fp8_state(saved))
    model.load_state_dict(saved.state_dict())
    if first == "weights":
        load_fp8_state(model, fp8_state(saved))
    assert torch.equal(run(model, train=False), run(saved, train=False))
    assert warnings() == 0
    model.load_state_dict(saved.state_dict())  # now other state may belong to them
    run(model)
    assert warnings() == 1


def into_parent(model: nn.Module, state: dict[str, Any]) -> None:
    parent = nn.ModuleDict({"body": model, "other": nn.Linear(2, 2)})
    parent.load_state_dict({f"body.{k}": v for k, v in state.items()}, strict=False)


def into_wrapper(model: nn.Module, state: dict[str, Any]) -> None:
    wrapped: Any = torch.compile(model, backend="eager")
    wrapped.load_state_dict({f"_orig_mod.{k}": v for k, v in state.items()})


def into_part(model: nn.Module, state: dict[str, Any]) -> None:
    model[2].load_state_dict({k: state[f"2.{k}"] for k in ("weight", "bias")})  # type: ignore[index]


def by_accelerate(model: nn.Module, state: dict[str, Any]) -> None:
    from accelerate import load_checkpoint_in_model

    with TemporaryDirectory() as folder:
        safetensors.torch.save_file(state, f"{folder}/model.safetensors")
        load_checkpoint_in_model(model, f"{folder}/model.safetensors")


WAYS: dict[str, Callable[..., Any]] = {
    "assigned": lambda model, state: model.load_state_dict(copy.deepcopy(state), assign=True),
    "one weight": lambda model, state: model.load_state_dict(
        {"0.weight": state["0.weight"], "x": torch.zeros(1)}, strict=False
    ),
    "parent": into_parent,
    "part": into_part,
    "wrapper": into_wrapper,
    "distributed checkpoint": lambda model, state: set_model_state_dict(model, state),
    "accelerate": by_accelerate,
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*process group")
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_noticed_whichever_way_they_are_loaded(way, warnings):
    model = fresh()
    WAYS[way](model, trained().state_dict())
    run(model)
    assert warnings() == 1


def test_what_holds_no_weight_of_an_fp8_layer_does_not_warn(warnings):
    model, saved = fresh(), trained().state_dict()
    model.load_state_dict({"0.bias": saved["0.bias"]}, strict=False)
    model.load_state_dict({"elsewhere": saved["0.weight"]}, strict=False)
    run(model)
    before = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    before.load_state_dict(saved)
    run(convert(before, resolve("delayed", CPU, "emulate")))
    run(pickle.loads(pickle.dumps(copy.deepcopy(trained()))))
    assert warnings() == 0


def test_a_part_that_is_called_by_itself_warns(warnings):
    model = fresh().eval()
    model.load_state_dict(trained().state_dict())
    model[0](normal(8, 32))
    assert warnings() == 1
    model(normal(8, 32))
    assert warnings() == 0


def test_a_copy_is_another_model(warnings):
    saved, model = trained(), fresh()
    model.load_state_dict(saved.state_dict())
    copied = copy.deepcopy(model)
    load_fp8_state(model, fp8_state(saved))
    run(model)
    assert warnings() == 0
    run(copied)
    assert warnings() == 1


@pytest.mark.parametrize("change", ["pruned", "weight norm"])
def test_weights_that_are_computed_are_noticed(change, warnings):
    model = fresh()
    if change == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.5)
    else:
        parametrizations.weight_norm(model[0])
    state = {name: value for name, value in model.state_dict().items() if name[0] == "0"}
    model.load_state_dict(state, strict=False)
    run(model)
    assert warnings() == 1
