"""Work that a GPU is given as a CUDA graph: a stand-in for those records operators and runs them
again on the same tensors, as a graph does, without Python in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.kernels import replay
from fp8stack.layers.kernels.replay import EAGER, Replayed
from fp8stack.numerics import AmaxHistory
from tests.support.recorded_graphs import Graph
from tests.support.small_loop import SmallLoop, changed

pytestmark = pytest.mark.usefixtures("one_thread")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were recorded."""
    recorded: list[Graph] = []

    @contextmanager
    def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        with graph:
            yield
        graph.put_back()
        recorded.append(graph)

    monkeypatch.setattr(replay, "records", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return recorded


def test_what_is_recorded_happens_once_per_call_and_anew_where_tensors_are_others(graphs) -> None:
    state = [torch.zeros(3)]

    def step() -> Tensor:
        state[0] += torch.where(state[0] > 1, 2.0, 1.0)
        return state[0].sum()

    replayed, sums = Replayed(step), []
    for _ in range(5):
        sums.append(float(replayed(CUDA, 0)))
    assert sums == [3, 6, 12, 18, 24]
    assert [graph.replays for graph in graphs] == [5 - EAGER]
    state[0] = torch.zeros(3)
    assert [float(replayed(CUDA, 1)) for _ in range(4)] == [3, 6, 12, 18]
    assert [graph.replays for graph in graphs] == [5 - EAGER, 4 - EAGER]


def test_a_graph_that_cannot_be_made_is_told_once_and_the_work_goes_on(graphs, monkeypatch) -> None:
    def refusing(graph: Graph, capture_error_mode: str) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refusing)
    count = torch.zeros(())
    replayed = Replayed(lambda: count.add_(1))
    for _ in range(EAGER):
        replayed(CUDA)
    with pytest.warns(UserWarning, match="not permitted"):
        replayed(CUDA)
    replayed(CUDA)
    assert count == EAGER + 2


def test_elsewhere_nothing_is_recorded() -> None:
    count = torch.zeros(())
    replayed = Replayed(lambda: count.add_(1))
    assert [float(replayed(torch.device("cpu"))) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("recipe", "clip_mode"),
    [("delayed", "adaptive"), ("current", "norm"),
     *(pytest.param(*pair, marks=pytest.mark.slow)
       for pair in (("delayed", "norm"), ("current", "adaptive")))],
)  # fmt: skip
@pytest.mark.full
def test_runs_whose_guard_is_recorded_are_those_of_eager_code_to_the_bit(
    recipe, clip_mode, tmp_path, request
):
    def trained(folder: str) -> SmallLoop:
        keys: dict[str, Any] = {"clip_mode": clip_mode, "accumulate": 2, "log_every": 3}
        keys["guard"] = {"window": 16, "warmup": 8}
        small = SmallLoop(tmp_path / folder, recipe, steps=40, **keys)
        small.spoil("", {10})
        small.spoil("blocks.0.mlp.up", {12}, 1e6)
        small.advance(10)
        if (delayed := small.run.delayed) is not None:
            delayed.history.scales[1] = torch.nan  # broken by itself
        small.advance(7)
        return small

    expected = trained("eager")
    graphs = request.getfixturevalue("graphs")
    recorded = trained("recorded")
    # Two graphs are the guard's; with two micro-batches, two more are for updates and for the
    # scales of weights.
    expected_replays = [32, 32, 17 - EAGER, 17 - EAGER] if recipe == "delayed" else [15]
    assert sorted(graph.replays for graph in graphs) == sorted(expected_replays)
    assert changed(expected.everything(), recorded.everything()) == []
    assert recorded.guard_events() == expected.guard_events()
    assert (10, "skip") in recorded.guard_events()
    assert recorded.loop.monitor.state() == expected.loop.monitor.state()


def test_an_update_of_the_history_that_is_recorded_is_the_update(graphs) -> None:
    delayed = DelayedScaling()
    quantizer = Quantizer(amax="delayed", history_length=3)
    delayed.add_layer("a", Quantizers(input=quantizer, weight=quantizer, grad_output=quantizer))
    delayed.attach(torch.nn.Linear(1, 1))
    plain = AmaxHistory(delayed.quantizers)
    for amax in (3.0, 5.0, 0.0, 2.0, 1.0, 4.0):
        for history in (delayed.history, plain):
            history.record("a.weight", amax)
            history.record("a.grad_output", 2 * amax)
        delayed.is_pending = True  # as a pass leaves it
        delayed.apply_pending_update()
        plain.update()
        assert torch.equal(delayed.history.history, plain.history)
        assert torch.equal(delayed.history.scales, plain.scales)
    assert [graph.replays for graph in graphs] == [6 - EAGER]
