"""A training step on this GPU waits for nothing: torch raises where the host would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8stack.layers import fp8_state
from fp8stack.layers.kernels import replay
from tests.conftest import metrics
from tests.gpu.machine import no_waiting, require_plan
from tests.support.small_loop import SmallLoop, changed

pytestmark = pytest.mark.gpu

ARMS = [("reference", "bf16"), ("reference", "fp16")]
ARMS += [("torch", recipe) for recipe in ("delayed", "current", "block", "mxfp8", "nvfp4")]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("backend", "recipe"), ARMS)
def test_a_training_step_waits_for_nothing(backend, recipe, compiled, tmp_path):
    require_plan(backend, recipe)
    small = SmallLoop(
        tmp_path / "r", recipe, width=128, backend=backend, compile=compiled, accumulate=2
    )
    small.advance(4)
    step = small.next_step()
    with no_waiting():
        loss, norm = step()
    assert loss.isfinite()
    assert norm.isfinite()


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_the_guards_cuda_graphs_do_what_its_operators_do(recipe, tmp_path, monkeypatch):
    states = []
    for name in ("graphs", "operators"):
        small = SmallLoop(tmp_path / name, recipe, width=128, log_every=3)
        small.spoil("", {9})
        small.advance(12)
        event_steps = torch.tensor([step for step, _ in small.guard_events()])
        states.append(small.everything() | {"event_steps": event_steps})
        recorded = small.loop.monitor._replayed_judge._graph is not None
        assert recorded == (name == "graphs")
        monkeypatch.setattr(replay, "records", lambda device: False)
    assert changed(*states) == []


def test_a_run_that_says_nothing_about_it_is_compiled(tmp_path: Path) -> None:
    require_plan("torch", "delayed")
    small = SmallLoop(tmp_path / "r", "delayed", width=128, backend="torch", compile=None)
    assert small.run.compiled
    small.advance(2)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_bad_step_between_two_looks_leaves_everything_as_it_was(recipe, tmp_path):
    small = SmallLoop(tmp_path / "r", recipe, width=128, log_every=10)
    small.run.model.register_forward_hook(
        lambda model, args, loss: loss * (float("nan") if small.run.step == 2 else 1.0)
    )
    small.advance(2)
    before = small.state() | fp8_state(small.run.model)
    small.advance()
    after = small.state() | fp8_state(small.run.model)
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    small.advance(7)
    events = [row for row in metrics(tmp_path / "r") if "event" in row]
    assert [(row["step"], row["event"]) for row in events] == [(3, "skip")]
