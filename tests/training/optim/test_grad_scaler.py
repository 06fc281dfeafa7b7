"""The loss scale of fp16: how it moves, its bounds, what it counts, what an overflow changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fp8stack.planning.run_config import RunConfig
from fp8stack.training.optim.grad_scaler import LossScaler, ScaleStatistics, build_scaler
from tests.conftest import metrics, refusal
from tests.support.backend_models import grad
from tests.support.small_loop import SmallLoop

INF = math.inf


class Loop:
    """A parameter in anyone's loop; a step overflows if that is asked for."""

    def __init__(self, scaler: LossScaler, fused: bool = True) -> None:
        self.scaler = scaler
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, fused=fused)

    def step(self, overflows: int = False) -> float:
        """One step; the scale after it."""
        loss = self.weight.sum() * (INF if overflows else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale()

    def state(self) -> list[Tensor]:
        moments = self.optimizer.state[self.weight].values()
        return [self.weight.detach().clone(), *(value.clone() for value in moments)]


@pytest.mark.capability("A2")
def test_the_scale_doubles_after_2000_clean_steps_from_the_last_overflow_which_halves_it():
    loop = Loop(build_scaler(RunConfig(), torch.device("cpu")))
    assert loop.step() == 65536
    loop.scaler.load_state_dict(loop.scaler.state_dict() | {"_growth_tracker": 1998})
    assert [loop.step(), loop.step(), loop.step(overflows=True)] == [65536, 131072, 65536]
    loop = Loop(LossScaler("cpu", first=8, interval=3))
    assert [loop.step(overflows) for overflows in (0, 0, 1, 0, 0, 0, 0)] == [8, 8, 4, 4, 4, 8, 8]


@pytest.mark.capability("A2")
def test_the_scale_stays_between_1_and_262144_also_where_it_is_set():
    loop = Loop(LossScaler("cpu", interval=1))
    assert [loop.step() for _ in range(5)] == [131072, 262144, 262144, 262144, 262144]
    assert [loop.step(overflows=True) for _ in range(20)][16:] == [2, 1, 1, 1]
    loop = Loop(LossScaler("cpu"))
    loop.step()
    loop.scaler.update(1e9)  # which is no step
    assert loop.scaler.statistics() == ScaleStatistics(steps=1, overflows=0, scale=262144)
    for broken in (0.0, math.nan, INF, -1.0):  # reset to the first scale
        loop.scaler.load_state_dict(loop.scaler.state_dict() | {"scale": broken})
        assert loop.step() == 65536


@pytest.mark.capability("A2", "A3")
def test_a_static_scale_stays_and_an_overflow_is_skipped_all_the_same():
    loop = Loop(LossScaler("cpu", interval=1, static=1024))
    loop.step()
    before = loop.state()
    assert [loop.step(overflows=True) for _ in range(3)] == [1024] * 3
    assert all(map(torch.equal, loop.state(), before))
    assert [loop.step() for _ in range(3)] == [1024] * 3
    assert not loop.scaler.is_dynamic
    assert loop.scaler.statistics().overflows == 3


@pytest.mark.capability("A2")
def test_growth_backoff_and_bounds_are_those_that_a_run_asks_for():
    config = RunConfig(
        first_loss_scale=2.0**20, loss_scale_interval=2, loss_scale_growth=4.0,
        loss_scale_backoff=0.125, min_loss_scale=2.0**12, max_loss_scale=2.0**23,
    )  # fmt: skip
    loop = Loop(build_scaler(config, torch.device("cpu")))
    scales = [math.log2(loop.step(overflows)) for overflows in (0, 0, 0, 0, 1, 1, 1, 1, 1)]
    assert scales == [20, 22, 22, 23, 20, 17, 14, 12, 12]
    assert loop.scaler.can_fall(loop.weight.sum()).item() is False


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"growth": 1.0}, "loss_scale_growth 1 is not above 1"),
        ({"backoff": 1.0}, "loss_scale_backoff 1 is not between 0 and 1"),
        ({"interval": 0}, "loss_scale_interval 0 is below 1"),
        ({"smallest": 8.0, "largest": 4.0}, "min_loss_scale 8 and max_loss_scale 4 are no range"),
    ],
)
def test_numbers_that_no_loss_scale_can_have_are_refused_by_name(wrong, expected):
    assert expected in refusal(LossScaler, "cpu", **wrong)


@pytest.mark.capability("A3")
def test_7_overflows_in_1000_steps_are_reported_as_a_rate_of_0_70_percent():
    loop = Loop(LossScaler("cpu"))
    for step in range(1000):
        loop.scaler.scale(loop.weight.sum())
        loop.weight.grad = torch.full((3,), INF if step % 142 == 100 else 1.0)
        loop.scaler.unscale_(loop.optimizer)
        loop.scaler.update()
    statistics = loop.scaler.statistics()
    assert (statistics.steps, statistics.overflows, statistics.rate) == (1000, 7, 0.007)
    assert str(statistics) == "loss scale 512, 7 of 1,000 steps overflowed (0.70 %)"
    assert LossScaler("cpu").statistics().rate == 0


def test_scale_and_counts_survive_a_state_dict_and_those_of_torch_alone_are_taken():
    loop = Loop(LossScaler("cpu", interval=5))
    for overflows in (0, 1, 0, 0):
        loop.step(overflows)
    restored = Loop(LossScaler("cpu", interval=5))
    restored.scaler.load_state_dict(loop.scaler.state_dict())
    assert restored.scaler.statistics() == loop.scaler.statistics()
    for trained_loop in (restored, loop):
        assert [trained_loop.step() for _ in range(3)] == [32768, 32768, 65536]
    assert restored.scaler.statistics() == ScaleStatistics(steps=7, overflows=1, scale=65536)
    torchs = torch.amp.GradScaler("cpu", init_scale=256).state_dict()
    restored.scaler.load_state_dict(torchs)
    assert restored.scaler.statistics() == ScaleStatistics(steps=0, overflows=0, scale=256)


@pytest.mark.capability("A3")
def test_a_run_in_fp16_counts_its_overflows_in_every_row_and_goes_on_counting_when_resumed(
    tmp_path,
):
    keys: dict[str, Any] = {"first_loss_scale": 1024.0, "loss_scale_interval": 3, "steps": 8}
    small = SmallLoop(tmp_path / "r", "fp16", save_every=4, **keys)
    small.spoil("final_norm.weight", {3}, INF)
    small.advance(4)
    resumed = small.resumed()
    resumed.spoil("final_norm.weight", {6}, INF)
    resumed.advance(4)
    rows = metrics(tmp_path / "r")
    assert [row["overflows"] for row in rows] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [row["loss_scale"] for row in rows] == [1024, 1024, 512, 512, 512, 256, 256, 256]
    assert resumed.run.scaler is not None
    assert resumed.run.scaler.statistics().steps == 8


@pytest.mark.capability("A8")
@pytest.mark.parametrize(
    ("keys", "steps", "event", "reason"),
    [
        ({"loss_scale": 128.0}, {2}, "skip", ""),  # and no warning of a low scale
        ({"first_loss_scale": 512.0}, {2, 4}, "loss_scale", "the loss scale is down to 128. "),
    ],
)
def test_an_overflow_is_told_where_the_scale_is_static_or_low(keys, steps, event, reason, tmp_path):
    small = SmallLoop(tmp_path / "r", "fp16", **keys)
    small.spoil("final_norm.weight", steps, INF)
    small.advance(5)
    rows = metrics(tmp_path / "r")
    (event_row,) = [row for row in rows if "event" in row]
    assert (event_row["step"], event_row["event"]) == (max(steps), event)
    assert event_row["why"].startswith(reason)
    scales = [row["loss_scale"] for row in rows if "loss" in row and "lr" in row]
    assert scales == ([128] * 5 if event == "skip" else [512, 256, 256, 128, 128])


def gradients_of_a_step(folder: Path, accumulate: int, recipe: str = "fp32") -> list[Tensor]:
    """The gradients of the first step, before clipping."""
    small = SmallLoop(folder, recipe, batch=8, accumulate=accumulate, clip=0.0)
    gradients: list[Tensor] = []
    scales: list[float] = []
    run = small.run
    run.model.register_forward_hook(
        lambda *_: scales.append(run.scaler.get_scale() if run.scaler else 1.0)
    )
    take = lambda: gradients.extend(grad(p).clone() for p in run.model.parameters())  # noqa: E731
    with patch.object(run.optimizer, "step", take):
        small.advance(1)
    run.folder.release()
    assert scales == [65536.0 if recipe == "fp16" else 1.0] * accumulate
    return gradients


@pytest.mark.capability("A10")
def test_micro_batches_give_the_gradients_of_the_full_batch_and_in_fp16_share_a_scale(tmp_path):
    full_batch = gradients_of_a_step(tmp_path / "whole", 1)
    accumulated = gradients_of_a_step(tmp_path / "parts", 4)
    for gradient, expected in zip(accumulated, full_batch, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 1e-2 for gradient in full_batch)
    (full,), (accumulated_row,) = (metrics(tmp_path / name) for name in ("whole", "parts"))
    for key in ("loss", "grad_norm"):
        assert accumulated_row[key] == pytest.approx(full[key], rel=1e-5)
    accumulated = gradients_of_a_step(tmp_path / "fp16", 4, "fp16")  # divided out once
    for gradient, expected in zip(accumulated, full_batch, strict=True):
        assert (gradient - expected).norm() / expected.norm() < 0.02


@pytest.mark.capability("A10")
def test_an_overflow_in_one_of_the_micro_batches_skips_the_step_and_halves_the_scale_once(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp16", batch=8, accumulate=4, first_loss_scale=1024.0)
    model, passes, scales = small.run.model, [0], list[float]()

    def count(*_: object) -> None:
        passes[0] += 1
        scales.append(small.run.scaler.get_scale())

    model.register_forward_pre_hook(count)
    # The second of the four micro-batches of the second step.
    weight = model.get_parameter("final_norm.weight")
    weight.register_hook(lambda g: g * (INF if passes[0] == 6 else 1.0))
    small.advance(1)
    before = small.state()
    small.advance(1)
    assert all(torch.equal(value, before[name]) for name, value in small.state().items())
    small.advance(1)
    assert scales == [1024] * 8 + [512] * 4
    assert small.run.scaler is not None
    assert small.run.scaler.statistics() == ScaleStatistics(steps=3, overflows=1, scale=512)
