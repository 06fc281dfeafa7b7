"""Train a model under FSDP, for the tests' ranks; a module that is quick to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.support.average_gradients import average_gradients


def sharded(
    model: nn.Module, units: Sequence[nn.Module], use_orig_params: bool | None
) -> nn.Module:
    """A model whose `units` are sharded by themselves, on a CPU: under FSDP1 with
    `use_orig_params`, or under FSDP2 if that is None."""
    if use_orig_params is None:
        for module in (*units, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
        return model
    return FullyShardedDataParallel(
        model,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({type(unit) for unit in units}) if units else None,
        device_id=torch.device("cpu"),
    )


def train(
    model: nn.Module, inputs: Callable[[int], Tensor], rank: int, lr: float, averages: bool = False
) -> list[float]:
    """The losses of three steps of two micro-batches on this rank's `inputs` of a seed; `averages`
    the gradients of the ranks by hand."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(3):
        for micro_step in range(2):
            loss = model(inputs(10 * step + 2 * micro_step + rank)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if averages:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses
