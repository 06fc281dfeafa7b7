"""A rank of test_state.py, started by torchrun: FSDP2 resumes from torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp8stack import fp8_state
from tests.integrations.loops import RECIPES, adamw, converted, train
from tests.integrations.test_fp8_state import load, save
from tests.support.backend_models import same


def sharded(recipe: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = converted(nn.Sequential(*blocks), recipe)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model, adamw(model)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(16, 32, generator=generator)
    loss: Tensor = (model(x) - x.flip(-1)).square().mean()
    return loss


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    for recipe in RECIPES:
        straight = sharded(recipe, seed=0)
        train(*straight, range(3), loss_of)
        save(*straight, f"{folder}/{recipe}")
        resumed = sharded(recipe, seed=1)
        load(*resumed, f"{folder}/{recipe}")
        later = range(3, 6), loss_of
        assert train(*resumed, *later) == train(*straight, *later)
        assert same(fp8_state(resumed[0]), fp8_state(straight[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
