"""The work of each of two ranks that train a model in delayed scaling; a module that is quick to
import."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8stack import Hardware, convert, delayed_scaling_of, fp8_state, resolve

Result = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
BACKENDS = ["emulate", "torch"]
COUNTS = [2, 1, 3]
"""The number of micro-batches in each step."""


def batch(rank: int, step: int, micro_step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
    return torch.randn(8, 32, generator=generator) * (1 + micro_step + 2 * rank)


def wrapped(backend: str) -> tuple[nn.Module, DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plan = resolve("delayed", Hardware("cpu"), backend)
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedDataParallel(model), optimizer


def result(model: nn.Module) -> Result:
    """FP8 state and weights, as arrays, which outlive their process."""
    return {name: x.numpy().copy() for name, x in (fp8_state(model) | model.state_dict()).items()}


def steps(rank: int, backend: str) -> Result:
    """Rank 0 evaluates the model between its passes, and looks at the state."""
    model, ddp, optimizer = wrapped(backend)
    for step, count in enumerate(COUNTS):
        for micro_step in range(count):
            last = micro_step == count - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(batch(rank, step, micro_step)).square().mean().backward()
            if rank == 0:
                with torch.no_grad():
                    model.eval()(batch(rank, step, 9))
                model.train()
                fp8_state(model)
        optimizer.step()
        optimizer.zero_grad()
    scaling = delayed_scaling_of(model)
    assert scaling is not None
    scaling.apply_pending_update()
    return result(model)


def joined(rank: int, backend: str, more: int) -> Result:
    """Rank 1 has `more` batches than rank 0."""
    model, ddp, optimizer = wrapped(backend)
    with ddp.join():
        for step in range(3 + more * rank):
            ddp(batch(rank, step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return result(model)


def all_of(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    results: dict[str, Any] = {backend: steps(rank, backend) for backend in BACKENDS}
    for more in (0, 2):
        results[f"join {more}"] = joined(rank, "emulate", more)
    return results
