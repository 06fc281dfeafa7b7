"""The work of each of two ranks with converted experts."""

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fp8stack import convert
from tests.support.average_gradients import average_gradients
from tests.support.backend_models import normal
from tests.support.expert_loops import WIDTH, Model, experts_of


def losses(rank: int) -> list[tuple[list[float], list[float]]]:
    """The losses of three steps of two micro-batches under FSDP2 and both kinds of FSDP1, each with
    the losses of a twin whose gradients are averaged by hand."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = []
    for use_orig_params in (None, True, False):
        model = convert(Model(experts_of("GptOssExperts")), "delayed")
        twin = copy.deepcopy(model)
        wrapped: nn.Module = model
        if use_orig_params is None:
            for module in (model.experts, model):
                fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
        else:
            wrapped = FullyShardedDataParallel(
                model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
        results.append((train(wrapped, rank, False), train(twin, rank, True)))
    return results


def train(model: nn.Module, rank: int, averages: bool) -> list[float]:
    """The losses of a rank; `averages` the gradients of the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values = []
    for step in range(3):
        for micro_step in range(2):
            x = normal(32, WIDTH, seed=10 * step + 2 * micro_step + rank)
            loss = model(x).square().mean()
            loss.backward()
            values.append(loss.item())
        if averages:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return values
