"""Ranks share amaxes. Two real ones (gloo) are told apart from what one process computes by the
rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8stack import Hardware, convert, fp8_state, load_recipe, resolve
from tests.faults.processes import in_ranks
from tests.support import sharing_ranks
from tests.support.sharing_ranks import BACKENDS, COUNTS, Result, batch


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return in_ranks(sharing_ranks.all_of, 2)


def differences(result: Result, expected: Result) -> list[str]:
    assert result.keys() == expected.keys()
    return [name for name in result if not np.array_equal(result[name], expected[name])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_end_with_the_same_weights_scales_and_histories(of_ranks, backend):
    """Each update takes the larger amax, whatever a rank does between its training passes."""
    first, second = (results[backend] for results in of_ranks)
    assert differences(first, second) == []
    assert all(np.isfinite(value).all() for value in first.values())
    moved = [
        max(batch(rank, step, micro_step).abs().max().item() for rank in (0, 1))
        for step, count in enumerate(COUNTS)
        for micro_step in range(count)
    ]
    window = first["0.input.amax_history"]
    assert window[-len(moved) :].tolist() == moved
    assert not window[: -len(moved)].any()
    assert first["0.input.scale"].item() == float(np.float32(448) / np.float32(max(moved)))
    assert (first["0.weight.amax_history"] > 0).sum() == len(COUNTS)  # once per step


@pytest.mark.parametrize("more", [0, 2])
def test_within_join_each_rank_has_its_own_amaxes_and_the_weights_agree(of_ranks, more):
    first, second = (results[f"join {more}"] for results in of_ranks)
    assert [
        name for name in differences(first, second) if not name.endswith(("scale", "history"))
    ] == []
    for rank, results in enumerate((first, second)):
        moved = [batch(rank, step, 0).abs().max().item() for step in range(3 + more * rank)]
        assert results["0.input.amax_history"][-len(moved) :].tolist() == moved


# Transformer Engine's rules, as its tests of delayed scaling state them


def te_update(
    history: np.ndarray, algorithm: str, largest: int, scale: np.float32
) -> tuple[np.ndarray, np.float32]:
    """The reference of tests/pytorch/test_recipe.py in TE 2; row 0 has what was recorded, and a
    tensor that recorded nothing keeps its scale."""
    if history[0] == 0:
        return history, scale
    amax = history.max() if algorithm == "max" else history[0]
    history = np.roll(history, -1)
    history[0] = 0
    return history, np.float32(largest) / np.float32(amax)


@pytest.mark.parametrize("backend", ["emulate", "torch"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_layers_scales_follow_transformer_engines_reference(length, algorithm, backend):
    options = {"history_length": length, "amax_algorithm": algorithm}
    plan = resolve(load_recipe("delayed", options), Hardware("cpu"), backend)
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(32, 48, bias=False)), plan)
    weight = model.get_parameter("0.weight")
    operands = ("input", "weight", "grad_output")
    histories = {name: np.zeros(length, np.float32) for name in operands}
    scales = {name: np.float32(1) for name in operands}
    generator = torch.Generator().manual_seed(1)
    for step in range(3 * length + 2):
        size = float(2 ** (step % 4))
        x, dy = (torch.randn(16, n, generator=generator) * size for n in (32, 48))
        operands_now = {"input": x, "weight": weight, "grad_output": dy}
        for name, tensor in operands_now.items():
            histories[name][0] = np.float32(tensor.detach().abs().max().item())
        model(x).backward(dy)
        for name in operands:
            largest = 57344 if name == "grad_output" else 448
            slot = histories[name], algorithm, largest, scales[name]
            histories[name], scales[name] = te_update(*slot)
        state = fp8_state(model)
        for name in operands:
            assert state[f"0.{name}.scale"].item() == scales[name], (step, name)
            if length > 1:
                assert state[f"0.{name}.amax_history"].tolist() == histories[name].tolist()
        with torch.no_grad():
            weight.mul_(0.5 if step % 3 else 3.0)
