"""The norms of the gradients of each part of a model.

A part is the weight of a linear or of an embedding, or all that a norm holds; a block is a part as
well, with everything in it, biases included.
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

from fp8stack.backends.fsdp import local_shard

FIGURES = ("norm", "ratio", "zeros")
_BLOCK = re.compile(r"(.*?\.\d+)\.")


class Flow(NamedTuple):
    """The gradients of a model at one moment: module paths, how many numbers each part has, and, on
    the device, float64 [parts, 3]: the sums of the squares of the gradient and of the weights, and
    how many entries of the gradient are zero."""

    parts: list[str]
    elements: list[int]
    sums: Tensor


@torch.no_grad()
def look(model: nn.Module) -> Flow | None:
    """Return sums over the current gradients of `model`, without a GPU sync; None if nothing in it
    is trained. A missing gradient counts as zeros.

    Where ranks share the parameters out (FSDP2), all ranks call this: their sums are added up.
    """
    of_parts: dict[str, list[int]] = {}
    parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for part in _parts_of(model, name):
                of_parts.setdefault(part, []).append(len(parameters))
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
    rows = [sums[places].sum(dim=0) for places in of_parts.values()]
    elements = [sum(parameters[at].numel() for at in places) for places in of_parts.values()]
    return Flow(list(of_parts), elements, torch.stack(rows))


def figures(flow: Flow, sums: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """A dictionary for each part, from `flow.sums` as numbers: `part`, `norm` of the gradient,
    `ratio` of it to the norm of the weights, and `zeros`, the share of exact zeros in it; null for
    what is no number."""
    found = []
    for part, count, (gradient, weight, zeros) in zip(flow.parts, flow.elements, sums, strict=True):
        norm = math.sqrt(gradient) if math.isfinite(gradient) else None
        ratio = norm / math.sqrt(weight) if norm is not None and 0 < weight < math.inf else None
        found.append({"part": part, "norm": norm, "ratio": ratio, "zeros": zeros / count})
    return found


def _parts_of(model: nn.Module, name: str) -> list[str]:
    """The parts that the parameter `name` belongs to."""
    path, _, kind = name.rpartition(".")
    block = _BLOCK.match(name)
    parts = [block[1]] if block else []
    if kind == "bias" and isinstance(model.get_submodule(path), nn.Linear):
        return parts  # some have no gradient by nature, such as that of keys
    return [*parts, path]
