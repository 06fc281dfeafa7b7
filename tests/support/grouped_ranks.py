"""The work of each of two ranks with a grouped linear; a module that is quick to import."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from fp8stack.layers import fp8_state
from fp8stack.layers.fsdp import first_row, local_shard
from tests.support.average_gradients import average_gradients
from tests.support.backend_models import normal
from tests.support.grouped_models import IN, Grouped, ends_of

SIZES = [[[5, 0, 20, 7], [8, 8, 8, 8]], [[32, 0, 0, 0], [1, 2, 3, 26]]]  # of steps and ranks


def sharded(rank: int, recipe: str, groups: int) -> list[list[Tensor]]:
    """The outputs, FP8 state, weights and this rank's rows of the weights of a model under FSDP2,
    and of its twin, whose gradients are averaged by hand."""
    model = Grouped(recipe, groups=groups)
    twin = copy.deepcopy(model)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    results: list[list[Tensor]] = []
    for trained in (model, twin):
        optimizer: Any = torch.optim.SGD(trained.parameters(), lr=0.1)
        tensors = []
        for step, sizes in enumerate(SIZES):
            ends = ends_of([*sizes[rank], *[0] * (groups - 4)])
            y = trained(normal(32, IN, seed=2 * step + rank), ends)
            y.square().mean().backward()
            tensors.append(y.detach())
            if trained is twin:
                average_gradients(twin)
            optimizer.step()
            optimizer.zero_grad()
        tensors += fp8_state(trained).values()
        for parameter in trained.parameters():
            values: Any = parameter.detach()
            tensors.append(values.full_tensor() if trained is model else values)
        results.append(tensors)
    for parameter, weights in zip(model.parameters(), twin.parameters(), strict=True):
        rows, start = local_shard(parameter), first_row(parameter)
        results[0].append(rows.detach())
        results[1].append(weights.detach()[start : start + len(rows)])
    return results


def all_of(rank: int) -> dict[str, list[bool]]:
    """Whether each tensor of a sharded model is its twin's, by recipe."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    equal = {}
    for recipe, groups in {"delayed": 4, "mxfp8": 5, "fp32": 4}.items():
        pairs = zip(*sharded(rank, recipe, groups), strict=True)
        equal[recipe] = [torch.equal(tensor, expected) for tensor, expected in pairs]
    return equal
