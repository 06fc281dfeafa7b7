"""Ranks share amaxes. Two real ones (gloo) are told apart from what one process computes by the
rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
