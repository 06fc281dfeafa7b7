"""Clipping: by the global norm, by entry, by what was usual; after unscaling, and nothing waits."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8stack.common.errors import UserError
from fp8stack.training.optim.chained import ChainedOptimizer
from fp8stack.training.optim.grad_clip import (
    FEWEST,
    NormHistory,
    adaptive_limit,
    clip_gradients,
    total_norm,
)
from fp8stack.training.optim.grad_scaler import LossScaler
from tests.conftest import metrics
from tests.support.backend_models import grad
from tests.support.small_loop import SmallLoop

CPU = torch.device("cpu")
INF = math.inf


def with_gradients(*scales: float) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer of some parameters that have gradients of these sizes."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(4, 3)) for _ in scales]
    for parameter, scale in zip(parameters, scales, strict=True):
        parameter.grad = torch.randn(4, 3, generator=generator) * scale
    return torch.optim.SGD(parameters), parameters


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    copies = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    assert len(copies) == len(parameters)
    return copies


@pytest.mark.capability("A11")
@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_the_global_norm_is_clipped_as_torch_does_it_to_the_bit(limit):
    optimizer, parameters = with_gradients(1.0, 3.0)
    _, torch_parameters = with_gradients(1.0, 3.0)
    norm = total_norm(clip_gradients(optimizer, limit))
    expected = nn.utils.clip_grad_norm_(torch_parameters, limit or INF)
    assert torch.equal(norm, expected)
    pairs = zip(gradients(parameters), gradients(torch_parameters), strict=True)
    assert all(torch.equal(clipped, torch_clipped) for clipped, torch_clipped in pairs)


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0, torch.tensor(0.5)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_that_the_optimizer_clips_as_it_takes_them_give_the_same_step(kind, limit):
    steps = []
    for as_taken in (False, True):
        _, parameters = with_gradients(1.0, 3.0)
        before = gradients(parameters)
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1, fused=True)
        for _ in range(2):
            norm = clip_gradients(optimizer, limit, as_taken=as_taken)
            untouched = all(map(torch.equal, gradients(parameters), before))
            assert untouched == (as_taken or limit in (0.0, 100.0))
            optimizer.step()
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient.clone()
        steps.append((norm, *(parameter.detach() for parameter in parameters)))
    for separate, fused in zip(*steps, strict=True):
        torch.testing.assert_close(separate, fused, rtol=1e-6, atol=1e-7)


@pytest.mark.capability("A11")
def test_by_value_each_entry_is_bounded_and_the_norm_told_is_that_before():
    optimizer, parameters = with_gradients(1.0, 3.0)
    before = torch.cat(gradients(parameters))
    norm = total_norm(clip_gradients(optimizer, 0.5, "value"))
    after = torch.cat(gradients(parameters))
    assert torch.equal(after, before.clamp(-0.5, 0.5))
    assert float(norm) == pytest.approx(float(before.norm()), rel=1e-6)
    clip_gradients(optimizer, 0.0, "value")
    assert torch.equal(torch.cat(gradients(parameters)), after)


def history_of(*norms: float, window: int = 100) -> NormHistory:
    """A window that has seen these norms."""
    window_norms = NormHistory(window, CPU)
    for norm in norms:
        window_norms.add(torch.tensor(norm), torch.tensor(True))
    return window_norms


@pytest.mark.capability("A11")
@pytest.mark.parametrize(("count", "percent"), [(10, 95.0), (57, 50.0), (250, 5.0)])
def test_the_limit_is_the_percentile_of_the_last_norms_as_numpy_has_it(count, percent):
    random = np.random.default_rng(count)
    values = np.exp(random.standard_normal(count)).astype(np.float32)
    limit = adaptive_limit(history_of(*values.tolist()), percent)
    expected = np.percentile(values[-100:].astype(np.float64), percent)
    assert float(limit) == pytest.approx(expected, rel=1e-6)


def test_the_adaptive_limit_is_the_ceiling_until_ten_norms_are_known_and_never_above():
    few, enough = history_of(*[5.0] * (FEWEST - 1)), history_of(*[5.0] * FEWEST)
    assert adaptive_limit(few, 95.0, ceiling=2.0) == adaptive_limit(enough, 95.0, ceiling=2.0) == 2
    assert (adaptive_limit(few, 95.0), adaptive_limit(enough, 95.0)) == (INF, 5)


def test_steps_that_are_not_good_and_norms_that_are_not_finite_leave_the_window_alone():
    norms = NormHistory(3, CPU)
    for norm, good in ((1.0, True), (2.0, False), (INF, True), (math.nan, True), (3.0, True)):
        norms.add(torch.tensor(norm), torch.tensor(good))
    assert norms.state() == [1, 3]
    shorter = NormHistory(1, CPU)
    shorter.load_state(norms.state())
    assert shorter.state() == [3]


@pytest.mark.capability("A11")
@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_gradients_that_are_still_scaled_are_refused(mode):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    scaler = LossScaler("cpu")
    limit = torch.tensor(1.0) if mode == "adaptive" else 1.0
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaled = grad(weight).clone()
        with pytest.raises(UserError, match=r"^Unscale first: .*scaler.unscale_\(optimizer\)"):
            clip_gradients(optimizer, limit, mode, scaler)
        assert torch.equal(grad(weight), scaled)
        scaler.unscale_(optimizer)
        norm = total_norm(clip_gradients(optimizer, limit, mode, scaler))
        assert float(norm) == pytest.approx(3**0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_several_optimizers_are_clipped_by_the_norm_of_all_gradients_but_those_that_overflow():
    (first, a), (second, b) = with_gradients(2.0), with_gradients(5.0)
    before = torch.cat(gradients([*a, *b]))
    norms = clip_gradients(ChainedOptimizer([first, second]), 1.0)
    assert float(total_norm(norms)) == pytest.approx(float(before.norm()), rel=1e-6)
    after = torch.cat(gradients([*a, *b]))
    torch.testing.assert_close(after, before / before.norm(), rtol=1e-5, atol=1e-6)
    (healthy, parameters), (alone, alone_parameters) = with_gradients(2.0), with_gradients(2.0)
    broken, (infinite,) = with_gradients(1.0)
    grad(infinite)[0, 0] = math.nan
    norms = clip_gradients(ChainedOptimizer([healthy, broken]), 1.0)
    assert norms.isfinite().tolist() == [True, False]
    assert not total_norm(norms).isfinite()
    clip_gradients(alone, 1.0)
    torch.testing.assert_close(gradients(parameters)[0], gradients(alone_parameters)[0])


def test_a_run_that_clips_adaptively_tells_the_norm_before_clipping_and_clips_by_the_window(
    tmp_path,
):
    small = SmallLoop(
        tmp_path / "r", "fp32", clip_mode="adaptive", clip_window=12, clip_percentile=50.0, clip=0.0
    )
    small.advance(13)
    usual = small.loop.monitor.norms
    assert usual is not None
    limit = float(adaptive_limit(usual, 50.0))
    clipped_norms: list[float] = []
    step = small.run.optimizer.step

    def watched() -> None:
        norms = [grad(parameter).norm() for parameter in small.run.model.parameters()]
        clipped_norms.append(float(torch.stack(norms).norm()))
        step()

    small.spoil("final_norm.weight", {14}, 5.0)
    with patch.object(small.run.optimizer, "step", watched):
        small.advance(1)
    rows = metrics(tmp_path / "r")
    expected = np.percentile([row["grad_norm"] for row in rows[1:13]], 50)
    assert limit == pytest.approx(expected, rel=1e-6)
    assert rows[-1]["grad_norm"] > limit
    assert clipped_norms == [pytest.approx(limit, rel=1e-5)]


@pytest.mark.full
def test_the_window_survives_a_resume_to_the_bit_and_a_skipped_step_leaves_it_alone(tmp_path):
    def spoilt(folder: Path) -> SmallLoop:
        small = SmallLoop(
            folder, "fp32", clip_mode="adaptive", clip_window=11, clip_percentile=30.0, clip=0.0,
            save_every=14, steps=18,
        )  # fmt: skip
        small.spoil("final_norm.weight", {5})
        return small

    through = spoilt(tmp_path / "through")
    through.advance(18)
    stopped = spoilt(tmp_path / "stopped")
    stopped.advance(14)
    resumed = stopped.resumed()
    resumed.advance(4)
    assert resumed.loop.monitor.norms.state() == through.loop.monitor.norms.state()
    after, expected = resumed.state(), through.state()
    assert [name for name in expected if not torch.equal(after[name], expected[name])] == []
    rows = [row["grad_norm"] for row in metrics(tmp_path / "through") if "lr" in row]
    assert rows[4] is None
    assert through.loop.monitor.norms.state() == pytest.approx(rows[-11:])
