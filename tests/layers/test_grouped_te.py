"""Grouped linears by Transformer Engine on a stand-in: its source, and the emulator's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers import fp8_state
from fp8stack.layers.grouped_te import TEGroupedLinear
from tests.support import grouped_models
from tests.support.backend_models import RECIPES, grad, machine, normal, same
from tests.support.grouped_models import Grouped, ends_of
from tests.support.te.te_stand_in import GroupedLinear

IN, OUT = 128, 256
SIZES = [[5, 0, 20, 7], [16, 16, 0, 32], [0, 0, 0, 9], [0, 0, 0, 0]]


def grouped(recipe: str, backend: str, **options: Any) -> Grouped:
    return Grouped(recipe, backend=backend, hardware=machine(recipe), size=(IN, OUT), **options)


def passed(model: Grouped, sizes: list[int], seed: int) -> list[Tensor]:
    return grouped_models.passed(model, sizes, torch.float32, seed, (IN, OUT))


@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4"])
def test_outputs_and_gradients_follow_the_emulators(te, recipe) -> None:
    models = [grouped(recipe, backend) for backend in ("te", "emulate")]
    assert isinstance(models[0].up, TEGroupedLinear)
    for seed, sizes in enumerate(SIZES):
        results = []
        for model in models:
            model.zero_grad()
            tensors = passed(model, sizes, seed)
            parameters = [grad(parameter).clone() for parameter in model.parameters()]
            results.append([*tensors, *parameters])
        for number, (tensor, expected) in enumerate(zip(*results, strict=True)):
            drawn = recipe == "nvfp4" and number  # gradients, by other random bits
            tolerance = 0.2 if drawn else 0.01
            assert (tensor - expected).norm() <= tolerance * expected.norm()
        for parameter in models[0].parameters():
            for group, size in enumerate(sizes):
                assert (grad(parameter)[group] != 0).any() == (size > 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_state_is_the_emulators_to_the_bit(te, accumulate) -> None:
    models = [grouped("delayed", backend, history_length=3) for backend in ("te", "emulate")]
    for step in range(6):
        for micro_batch in range(accumulate):
            for model in models:
                passed(model, SIZES[(step + micro_batch) % 4], 7 * step + micro_batch)
            assert same(*map(fp8_state, models))
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = normal(*parameter.shape, seed=index + step)
            optimizer.step()
            optimizer.zero_grad()
    assert list(models[0].state_dict()) == list(models[1].state_dict()) == ["up.weight", "up.bias"]


def test_each_operand_has_the_place_that_transformer_engine_gives_it(te) -> None:
    model = grouped("delayed", "te")
    passed(model, [16, 0, 16, 16], 0)
    model.up.delayed.apply_pending_update()
    module = model.up.core.module
    assert isinstance(module, GroupedLinear)
    for group in range(4):
        for operand, (key, place) in {
            "input": ("scaling_fwd", 3 * group),
            "weight": ("scaling_fwd", 3 * group + 1),
            "grad_output": ("scaling_bwd", 2 * group),
        }.items():
            scale = module.fp8_meta[key].scale[place]
            assert scale == model.up.delayed.scale(f"up.{group}.{operand}")
            # A weight keeps its scale until it changes.
            assert (scale != 1) == (group != 1 and operand != "weight")


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_are_quantized_once_for_each_optimizer_step(te, recipe) -> None:
    model = grouped(recipe, "te")
    for _ in range(2):
        for _ in range(2):
            passed(model, SIZES[0], 0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert sum(name.endswith("weight") for _, name in te.casts) == 2 * 4
    assert model.up.backend.fp8_gemms() == 4 * 3
    assert te.gemms == 4 * 3 * 4  # of each group


def test_rows_are_padded_only_where_groups_need_it(te) -> None:
    model = grouped("delayed", "te")
    passed(model, [16, 0, 32, 16], 0)
    passed(model, [16, 1, 32, 16], 0)
    assert [call.shape for call in te.calls] == [(64, IN), (80, IN)]


def test_a_nan_that_transformer_engine_would_hide_shows_in_its_group(te) -> None:
    model = grouped("nvfp4", "te")
    x = normal(32, IN)
    x[3, 5] = torch.nan
    y = model(x, ends_of([16, 0, 16, 0]))
    assert not y[3].isfinite().any()
    assert y[16:].isfinite().all()
