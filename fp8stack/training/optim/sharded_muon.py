"""Muon for parameters that FSDP2 shards by rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from fp8stack.layers.fsdp import local_shard


class ShardedMuon(Muon):
    """torch's Muon with the same results, for DTensors that are sharded by rows over one mesh.

    Each matrix has an owner among the ranks. The other ranks send the owner their rows of the
    momentum, in bfloat16, to which Muon rounds it; the owner orthogonalizes the full matrix and
    sends the rows back. The ranks own matrices in turn, so that each orthogonalizes its share.
    (With DTensors, torch's Muon would gather the operands of every GEMM. The private functions are
    torch 2.13's; delete this class when torch's Muon distributes matrices.)
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            ranks = parameters[0].device_mesh.size() if parameters else 1
            for start in range(0, len(parameters), ranks):
                self._update(parameters[start : start + ranks], group)

    def _update(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """Update parameters with an owner each: the first one is rank 0's."""
        mesh = parameters[0].device_mesh
        ranks: Any = mesh.get_group()
        rank, momenta = mesh.get_local_rank(), [self._momentum(p, group) for p in parameters]
        gathered: list[Tensor] = []
        works = []
        for owner, momentum in enumerate(momenta):
            into = [torch.empty_like(momentum) for _ in range(mesh.size())] if owner == rank else []
            gathered = into or gathered
            works.append(
                dist.gather(momentum, into or None, group=ranks, group_dst=owner, async_op=True)
            )
        for work in works:
            work.wait()
        shards: list[Tensor] = []
        if gathered:
            full = torch.cat(gathered)[: len(parameters[rank])]
            coefficients = group["ns_coefficients"], group["ns_steps"], group["eps"]
            update = _zeropower_via_newtonschulz(full, *coefficients)
            rows = len(gathered[0])
            filled = F.pad(update, (0, 0, 0, mesh.size() * rows - len(update)))
            shards = [*torch.split(filled.contiguous(), rows)]
        works = [
            dist.scatter(
                momentum,
                shards if owner == rank else None,
                group=ranks,
                group_src=owner,
                async_op=True,
            )
            for owner, momentum in enumerate(momenta)
        ]
        for work in works:
            work.wait()
        for parameter, update in zip(parameters, momenta, strict=True):
            weight, lr = local_shard(parameter), group["lr"]
            weight.mul_(1 - lr * group["weight_decay"])
            rate = _adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
            weight.add_(update[: len(weight)], alpha=-rate)

    def _momentum(self, parameter: DTensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of this rank's rows. Returns what Muon orthogonalizes, bfloat16 [rows
        of the largest shard, columns], filled up with zeros."""
        assert isinstance(parameter.grad, DTensor)
        state, beta = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, gradient = local_shard(state["momentum_buffer"]), local_shard(parameter.grad)
        buffer.lerp_(gradient, 1 - beta)
        update = gradient.lerp(buffer, beta) if group["nesterov"] else buffer
        missing = -(-len(parameter) // parameter.device_mesh.size()) - len(update)
        return F.pad(update.bfloat16(), (0, 0, 0, missing)).contiguous()
