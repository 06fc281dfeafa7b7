"""The launches of a step on a GPU outside of the blocks, counted on a CPU."""

from __future__ import annotations

import gc
from weakref import WeakSet

import pytest
import torch
from torch import nn

from fp8stack.layers import fused_mlp, weight_cache
from fp8stack.layers import torch as torch_backend
from fp8stack.layers import weight_changes as backend_weights
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.model.config import load_config
from fp8stack.training import step
from fp8stack.training.optim.grad_clip import clip_gradients
from tests.support import small_loop
from tests.support.launches import Launches, launches, outside_of_blocks

SIZE = 1024 * 1024
AS_TAKEN = {"as_taken": True}


@pytest.mark.parametrize(("as_taken", "expected"), [(False, 40), (True, 36)])
def test_clipping_and_adamw_pass_over_so_many_bytes_per_parameter(as_taken, expected) -> None:
    """The norm reads 4. AdamW reads weight, gradient and moments, 16, and writes all but the
    gradient, 12; that as well, 4, where it is given a scale for it. Clipping before reads and
    writes 8."""
    parameter = nn.Parameter(torch.ones(1024, 1024))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    mode = Launches(watched=SIZE)
    for _ in range(2):
        parameter.grad = torch.ones(1024, 1024)
        mode.passed.clear()
        with mode:
            clip_gradients(optimizer, 1.0, as_taken=as_taken)
            optimizer.step()
    assert sum(mode.passed.values()) == expected * SIZE, mode.passed


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels and CUDA graphs are counted, and not launched; weights are cast layer by layer and
    graphs' work is done uncounted instead."""
    mode = Launches()

    def replayed(self: Replayed, device: torch.device, key: object = None) -> object:
        mode.counts["graph"] += 1
        before, mode.counting = mode.counting, False
        result = self._function()
        mode.counting = before
        return result

    def launched(*_: object) -> None:
        mode.counts["weights"] += 1

    monkeypatch.setattr(Replayed, "__call__", replayed)
    for module in (fused_mlp, torch_backend, weight_cache):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    monkeypatch.setattr(weights, "launch_weights", launched)
    monkeypatch.setattr(
        step, "clip_gradients", lambda *args, **options: clip_gradients(*args, **options | AS_TAKEN)
    )
    return mode


@pytest.mark.full
def test_outside_of_its_blocks_a_step_of_192_fp8_linears_launches_few_kernels(
    as_on_a_gpu, tmp_path, monkeypatch
) -> None:
    """Of torch's norm and AdamW it has as few as this small model, 4; at 1.5B parameters they
    launch 21 more."""
    sets = [setting for setting in small_loop.SETS if "layers" not in setting]
    monkeypatch.setattr(small_loop, "SETS", [*sets, "model_overrides.layers=48"])
    # Else every optimizer's step tells the models of other tests, too; and below, until Python
    # collects it, the one that was traced for the estimate of memory.
    monkeypatch.setattr(backend_weights, "_WATCHES", WeakSet())
    small = small_loop.SmallLoop(
        tmp_path / "r", "delayed", backend="torch", log_every=100, steps=100
    )
    gc.collect()
    small.advance(2)
    as_on_a_gpu.counts.clear()
    with outside_of_blocks(small.run, as_on_a_gpu):
        small.loop.train_step(*next(small.tokens))
    counts = as_on_a_gpu.counts
    assert counts["graph"] == 4  # begin, scales of weights, update of the history, verdict
    assert counts["weights"] == 1
    assert counts["_foreach_norm"] + counts["_fused_adamw_"] == 4
    assert counts.total() <= 27, counts


def test_torchs_norm_and_adamw_launch_25_kernels_at_1_5b_parameters() -> None:
    config = load_config("gpt2-1.5b")
    shapes = config.parameter_shapes(config.vocabulary).values()
    every = [torch.empty(shape, device="meta") for shape in shapes]
    groups = [x for x in every if x.ndim >= 2], [x for x in every if x.ndim < 2]
    adamw = sum(launches("_fused_adamw_", [group] * 5) for group in groups)
    assert launches("_foreach_norm", [every]) + adamw == 25
