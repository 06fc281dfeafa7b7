"""The operators that a step runs outside of the blocks on a GPU, counted on a CPU."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack.layers import fused_mlp, weight_cache
from fp8stack.layers import torch as torch_backend
from fp8stack.layers import weight_changes as backend_weights
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.numerics.operators import EAGER
from fp8stack.training import step
from fp8stack.training.optim.grad_clip import clip_gradients
from tests.support import small_loop

pytestmark = pytest.mark.full

# Operators that return views or memory that is not filled in.
NOTHING = {
    *("detach", "alias", "view", "_unsafe_view", "as_strided", "select", "slice", "expand", "t"),
    *("transpose", "permute", "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "diagonal"),
    *("_reshape_alias", "lift_fresh", "set_", "is_same_size"),
    *("profiler::_record_function_enter_new", "profiler::_record_function_exit"),
}


class Calls(TorchDispatchMode):
    """Counts calls by operator while `counting`. An operator of fp8stack counts as the operators
    that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("fp8stack::"):
            with self:
                eager = EAGER.get(name.removeprefix("fp8stack::")) or OPDEFS[name]._init_fn
                return eager(*args, **(kwargs or {}))
        self.counts[name] += self.counting and name not in NOTHING
        return func(*args, **(kwargs or {}))


@contextmanager
def outside_of_blocks(run: Any, mode: Calls) -> Iterator[None]:
    """Count outside of the blocks of a run, the loss and their backward passes: the model's hooks,
    embeddings, the guard, clipping and the optimizer."""
    depth, backward = [0], run.accelerator.backward

    def enter(levels: int) -> None:
        depth[0] += levels
        mode.counting = depth[0] == 0

    def hidden(loss: Tensor) -> None:
        enter(1)
        backward(loss)
        enter(-1)

    with ExitStack() as stack:
        for module in (*run.model.blocks, run.model.loss):
            stack.enter_context(module.register_forward_pre_hook(lambda *_: enter(1)))
            stack.enter_context(module.register_forward_hook(lambda *_: enter(-1)))
        stack.enter_context(patch.object(run.accelerator, "backward", hidden))
        stack.enter_context(mode)
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Kernels and CUDA graphs are counted, and not launched; weights are cast layer by layer and
    graphs' work is done uncounted instead."""
    mode = Calls()

    def replayed(self: Replayed, device: torch.device, key: object = None) -> object:
        mode.counts["graph"] += 1
        before, mode.counting = mode.counting, False
        result = self._function()
        mode.counting = before
        return result

    def launched(*_: object) -> None:
        mode.counts["weights"] += 1

    def clip(*args: Any, **options: Any) -> Any:
        return clip_gradients(*args, **options | {"as_taken": True})

    monkeypatch.setattr(Replayed, "__call__", replayed)
    for module in (fused_mlp, torch_backend, weight_cache):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    monkeypatch.setattr(weights, "launch_weights", launched)
    monkeypatch.setattr(step, "clip_gradients", clip)
    return mode


def test_outside_of_its_blocks_a_step_of_192_fp8_linears_runs_few_operators(
    as_on_a_gpu: Calls, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [setting for setting in small_loop.SETS if "layers" not in setting]
    monkeypatch.setattr(small_loop, "SETS", [*sets, "model_overrides.layers=48"])
    # Else every optimizer's step tells the models of other tests, too; and below, until Python
    # collects it, the one that was traced for the estimate of memory.
    monkeypatch.setattr(backend_weights, "_WATCHES", WeakSet())
    keys: dict[str, Any] = {"backend": "torch", "log_every": 100, "steps": 100}
    small = small_loop.SmallLoop(tmp_path / "r", "delayed", **keys)
    gc.collect()
    small.advance(2)
    as_on_a_gpu.counts.clear()
    with outside_of_blocks(small.run, as_on_a_gpu):
        small.loop.train_step(*next(small.tokens))
    counts = as_on_a_gpu.counts
    assert counts["graph"] == 4  # begin, scales of weights, update of the history, verdict
    assert counts["weights"] == 1
    assert (counts["_foreach_norm"], counts["_fused_adamw_"]) == (1, 2)
    assert counts.total() <= 26, counts
