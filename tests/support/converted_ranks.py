"""The work of each of two ranks with converted models; a module that is quick to import."""

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import distribute_tensor

from fp8stack import Hardware, UserError, convert, fp8_state, resolve
from tests.support.average_gradients import average_gradients

# use_orig_params of FSDP1, or None for FSDP2; the backend; whether each block is a unit of its own
WRAPS = [(True, "torch", False), (False, "torch", True), (False, "torch", False),
         (True, "emulate", True), (None, "torch", True)]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def converted(*modules: nn.Module, backend: str = "emulate", **options: Any) -> nn.Sequential:
    return convert(nn.Sequential(*modules), resolve("delayed", Hardware("cpu"), backend), **options)


def x(seed: int = 0) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def fsdp(rank: int, use_orig_params: bool | None, backend: str, nested: bool) -> list[float]:
    """The losses of three steps of two micro-batches under FSDP, then the losses of its twin,
    whose gradients are averaged by hand."""
    torch.manual_seed(0)
    model = converted(Block(), Block(), backend=backend)
    twin = copy.deepcopy(model)
    if use_orig_params is None:
        for module in (*model, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
        wrapped: nn.Module = model
    else:
        policy = ModuleWrapPolicy({Block}) if nested else None
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=cpu
        )
    losses = []
    for trained in (wrapped, twin):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(3):
            for micro_step in range(2):
                loss = trained(x(10 * step + 2 * micro_step + rank)).square().mean()
                loss.backward()
                losses.append(loss.item())
            if trained is twin:
                average_gradients(twin)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def stage(rank: int, group: Any) -> str:
    """Two passes of a rank whose layers differ from the other rank's: the error, or "it runs"."""
    before = [nn.Identity() for _ in range(rank)]  # so that the layers have other names
    model = converted(*before, Block(), amax_group=group)
    try:
        for _ in range(2):
            model(x()).sum().backward()
    except UserError as error:
        return str(error)
    return "it runs" if all(v.any() for v in fp8_state(model).values()) else "no amaxes"


def tensor_parallel(rank: int) -> str:
    """The error for a weight that is sharded over the ranks."""
    block = Block()
    model = converted(block)
    rows = distribute_tensor(block.up.weight.detach(), dist.init_device_mesh("cpu", (2,)))
    block.up.weight = nn.Parameter(rows)
    try:
        model(x())
    except UserError as error:
        return str(error)
    return ""


def all_of(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    alone = [dist.new_group([member]) for member in range(2)][rank]
    return {
        "fsdp": [fsdp(rank, *wrap) for wrap in WRAPS],
        "stages": stage(rank, "world"),
        "own group": stage(rank, alone),
        "tensor parallel": tensor_parallel(rank),
    }
