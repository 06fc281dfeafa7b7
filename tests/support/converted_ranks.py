"""The work of each of two ranks with converted models; a module that is quick to import."""

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fp8stack import Hardware, UserError, convert, fp8_state, resolve
from tests.support.sharding import sharded, train

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
    wrapped = sharded(model, [*model] if nested else [], use_orig_params)
    losses = train(wrapped, x, rank, 0.1)
    return losses + train(twin, x, rank, 0.1, averages=True)


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
