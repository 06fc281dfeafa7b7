"""The norms of the gradients, for each part of a model.

A part is the weight of a linear, of experts or of an embedding, or all parameters of a norm. A
block is a part as well, with all its parameters, including biases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8stack.layers.fsdp import local_shard
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.model.converted_experts import linears_of

FIGURES = ("norm", "ratio", "zeros")
_BLOCK = re.compile(r"(.*?\.\d+)\.")


class Flow(NamedTuple):
    """Sums over the gradients of a model in one step: the module paths of the parts, the number of
    elements of each, and the sums, float64 [parts, 3], on the device: the squares of the gradient,
    the squares of the weights, and the zeros in the gradient."""

    paths: list[str]
    elements: list[int]
    sums: Tensor


@torch.no_grad()
def look(model: nn.Module) -> Flow | None:
    """Return sums over the current gradients of `model`, without a GPU sync; None if no parameter
    is trained. A missing gradient counts as zeros.

    If ranks shard the parameters (FSDP2), all ranks call this, and their sums are added up.
    """
    parameter_indices: dict[str, list[int]] = {}
    parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for path in _paths_of(model, name):
                parameter_indices.setdefault(path, []).append(len(parameters))
            parameters.append(parameter)
    if not parameters:
        return None
    weights = [local_shard(parameter.detach()) for parameter in parameters]
    gradients = [
        torch.zeros_like(weight) if parameter.grad is None else local_shard(parameter.grad)
        for parameter, weight in zip(parameters, weights, strict=True)
    ]
    squares = [
        torch.stack(torch._foreach_norm(tensors)).double().square()
        for tensors in (gradients, weights)
    ]
    zeros = torch.stack([grad.numel() - torch.count_nonzero(grad) for grad in gradients])
    sums = torch.stack([*squares, zeros.double()], dim=1)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        dist.all_reduce(sums)
    # Not `sums[places]`: a list of places would be copied to the device, which waits for it.
    rows_of = sums.unbind()
    rows = [
        torch.stack([rows_of[at] for at in places]).sum(dim=0)
        for places in parameter_indices.values()
    ]
    elements = [
        sum(parameters[at].numel() for at in places) for places in parameter_indices.values()
    ]
    return Flow(list(parameter_indices), elements, torch.stack(rows))


def figures(flow: Flow, sums: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """A dictionary for each part, from `flow.sums` as numbers: `part`, its path; `norm` of the
    gradient; `ratio`, that norm over the norm of the weights; and `zeros`, the fraction of exact
    zeros in the gradient. Norms and ratios that are not finite are None."""
    rows = []
    for path, count, (gradient, weight, zeros) in zip(flow.paths, flow.elements, sums, strict=True):
        norm = math.sqrt(gradient) if math.isfinite(gradient) else None
        ratio = norm / math.sqrt(weight) if norm is not None and 0 < weight < math.inf else None
        rows.append({"part": path, "norm": norm, "ratio": ratio, "zeros": zeros / count})
    return rows


def _paths_of(model: nn.Module, name: str) -> list[str]:
    """The parts that the parameter `name` belongs to."""
    path, _, kind = name.rpartition(".")
    block = _BLOCK.match(name)
    paths = [block[1]] if block else []
    owner = model.get_submodule(path)
    experts = [linear.stored for linear in linears_of(owner)]  # several weights in one module
    biases = {weight.bias for weight in experts}
    if isinstance(owner, nn.Linear | GroupedLinear):
        biases.add("bias")
    if kind in biases:
        return paths  # some biases have no gradient by design, such as the keys' bias
    keys = {weight.key for weight in experts}
    return [*paths, name if kind in keys - {"weight"} else path]
