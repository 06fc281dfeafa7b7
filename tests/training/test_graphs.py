"""Training passes that are replayed as CUDA graphs, by a stand-in that records operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.training import graphs, step
from fp8stack.training.graphs import WARM_UP, obstacle
from tests.support.recorded_graphs import Graph, Recorder
from tests.support.small_loop import MIXTURE, SmallLoop, changed

STEPS = 12


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], type[Recorder]]]:
    """Turns recording on for the runs that follow, and returns the class of their recorders."""

    def turn_on() -> type[Recorder]:
        monkeypatch.setattr(graphs, "CudaRecorder", Recorder)
        monkeypatch.setattr(step, "obstacle", lambda run: "")
        return Recorder

    Recorder.graphs = []
    yield turn_on
    Recorder.graphs = []


def trained(folder: Path, recipe: str, **flags: Any) -> SmallLoop:
    """A run after `STEPS` steps. The weights of step 8 are spoilt, which the guard skips; telemetry
    samples some steps, and the run evaluates in between."""
    flags = {"telemetry_every": 5, "eval_every": 6, "log_every": 3} | flags
    small = SmallLoop(folder, recipe, steps=STEPS, **flags)
    small.advance(7)
    weight = next(small.run.model.blocks.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.inf
    small.advance()
    with torch.no_grad():
        weight.copy_(before)
    small.advance(STEPS - 8)
    return small


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4", "bf16", "fp16"])
@pytest.mark.full
def test_a_replayed_run_is_the_eager_run_to_the_bit(
    recipe: str, accumulate: int, tmp_path: Path, recorder: Callable[[], type[Recorder]]
) -> None:
    expected = trained(tmp_path / "eager", recipe, accumulate=accumulate)
    recorded = recorder().graphs
    replayed = trained(tmp_path / "replayed", recipe, accumulate=accumulate)
    # Steps in which telemetry samples operands run eagerly.
    telemetry = replayed.run.telemetry
    recordable = [
        number for number in range(1, STEPS + 1)
        if not (telemetry.sees_operands and telemetry.due(number, 1, STEPS))
    ]  # fmt: skip
    assert [graph.replays for graph in recorded] == [len(recordable) - WARM_UP] * accumulate
    assert changed(expected.everything(), replayed.everything()) == []
    assert replayed.guard_events() == expected.guard_events()
    assert (8, "skip") in replayed.guard_events()


def reads_on_the_host(self: DelayedScaling) -> None:
    if bool(self.weights.flag):
        UPDATE_SCALES(self)


def replaces_its_scales(self: DelayedScaling) -> None:
    UPDATE_SCALES(self)
    self.weight_scales = self.weight_scales.clone()


REFUSAL = "not permitted when stream is capturing"
UPDATE_SCALES = DelayedScaling._update_weight_scales


@pytest.mark.parametrize(
    ("fault", "warning"),
    [
        (reads_on_the_host, pytest.warns(UserWarning, match=REFUSAL)),
        (replaces_its_scales, nullcontext()),
    ],
)
@pytest.mark.full
def test_passes_that_cannot_be_recorded_are_eager(
    fault: Callable[..., None], warning: AbstractContextManager[object],
    tmp_path: Path, recorder: Callable[[], type[Recorder]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A pass that the host reads, and one whose addresses change each time."""
    expected = trained(tmp_path / "eager", "delayed", accumulate=2)
    recorded = recorder().graphs
    monkeypatch.setattr(DelayedScaling, "_update_weight_scales", fault)
    with warning:
        replayed = trained(tmp_path / "replayed", "delayed", accumulate=2)
    assert recorded == []
    assert changed(expected.everything(), replayed.everything()) == []


def test_a_recorded_pass_has_the_operators_of_the_eager_one(
    tmp_path: Path, recorder: Callable[[], type[Recorder]]
) -> None:
    recorded = recorder().graphs
    small = SmallLoop(tmp_path / "run", "delayed", steps=STEPS, telemetry_every=0)
    small.advance(WARM_UP)
    tokens_BT = small.tokens_of(WARM_UP + 1)
    with Graph() as eager:
        small.loop.train_step._run_pass(tokens_BT)
    eager.put_back()
    small.run.optimizer.zero_grad()
    small.run.backend.weights.mark_changed()
    small.run.backend.delayed.is_pending = False
    small.advance(2)
    (replayed,) = recorded
    assert replayed.operators == eager.operators


@pytest.mark.parametrize(
    ("recipe", "flags", "reason"),
    [
        ("bf16", {}, ""),
        ("bf16", {"cuda_graphs": False}, "cuda_graphs is false"),
        ("bf16", {"activation_checkpointing": "block"}, "blocks are recomputed"),
        ("bf16", MIXTURE, "the load of experts"),
    ],
)
def test_a_run_whose_passes_cannot_be_recorded_says_why(
    recipe: str, flags: dict[str, Any], reason: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = SmallLoop(tmp_path / "run", recipe, **flags).run
    assert "only GPUs of NVIDIA" in obstacle(run)
    monkeypatch.setattr(graphs, "records", lambda device: True)
    assert obstacle(run) == "training is not compiled"
    monkeypatch.setattr(type(run), "compiled", True)
    assert reason in obstacle(run)
    assert bool(reason) == bool(obstacle(run))
