"""The work of each of two ranks with converted experts."""

import copy
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from fp8stack import convert
from tests.support.backend_models import normal
from tests.support.expert_loops import WIDTH, Model, experts_of
from tests.support.sharding import sharded, train


def losses(rank: int) -> list[tuple[list[float], list[float]]]:
    """The losses of three steps of two micro-batches under FSDP2 and both kinds of FSDP1, each with
    the losses of a twin whose gradients are averaged by hand."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = []
    for use_orig_params in (None, True, False):
        model = convert(Model(experts_of("GptOssExperts")), "delayed")
        twin = copy.deepcopy(model)
        units = [model.experts] if use_orig_params is None else []
        wrapped = sharded(model, units, use_orig_params)
        results.append((train(wrapped, x, rank, 0.01), train(twin, x, rank, 0.01, averages=True)))
    return results


def x(seed: int) -> Tensor:
    """The input of a micro-batch."""
    return normal(32, WIDTH, seed=seed)
