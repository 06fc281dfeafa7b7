"""Models of one grouped linear, and of the loop of linears that it equals."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.layers import build_backend
from tests.support.backend_models import SHIPPED, grad, normal, planned

RECIPES = [name for name, recipe in SHIPPED.items() if recipe.is_fp8]
PLAIN = [name for name, recipe in SHIPPED.items() if not recipe.is_fp8 and name != "tf32"]
IN, OUT = 72, 40  # no multiples of 32


class Grouped(nn.Module):
    """A model of one grouped linear."""

    def __init__(
        self,
        recipe: str,
        bias: bool = True,
        groups: int = 4,
        *,
        size: tuple[int, int] = (IN, OUT),
        **options: Any,
    ) -> None:
        super().__init__()
        name = options.pop("backend", "reference" if recipe in PLAIN else "emulate")
        plan = planned(recipe, name, **options)
        self.plan = plan.for_layers({"up": size}, grouped={"up": groups})
        backend = build_backend(self.plan)
        torch.manual_seed(0)
        self.up: Any = backend.grouped_linear("up", groups, *size, bias)
        backend.attach(self)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.up(x, ends)


class Loop(nn.Module):
    """Linears at the paths of the groups of `grouped`, with copies of its parameters."""

    def __init__(self, recipe: str, grouped: Grouped, **options: Any) -> None:
        super().__init__()
        layer = grouped.up
        paths = [f"up.{group}" for group in range(layer.groups)]
        name = options.pop("backend", "reference" if recipe in PLAIN else "emulate")
        plan = planned(recipe, name, **options).for_layers(dict.fromkeys(paths, (IN, OUT)))
        backend = build_backend(plan)
        linears: list[Any] = []
        for path in paths:
            linears.append(backend.linear(path, IN, OUT, layer.bias is not None))
        with torch.no_grad():
            for group, linear in enumerate(linears):
                linear.weight.copy_(layer.weight[group])
                if layer.bias is not None:
                    linear.bias.copy_(layer.bias[group])
        self.up: Any = nn.ModuleList(linears)
        backend.attach(self)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if type(self.up[0]) is nn.Linear:
            x = x.float()
        places = pairwise([0, *ends.tolist()])
        outputs = [
            linear(x[start:stop].clone())
            for linear, (start, stop) in zip(self.up, places, strict=True)
        ]
        return torch.cat(outputs)

    def stacked(self, name: str) -> Tensor:
        """The gradients of a parameter."""
        return torch.stack([grad(linear.get_parameter(name)) for linear in self.up])


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)


def passed(
    model: Any,
    sizes: list[int],
    dtype: torch.dtype,
    seed: int = 0,
    size: tuple[int, int] = (IN, OUT),
) -> list[Tensor]:
    """The output of a pass that trains, and the gradient of its input."""
    x = normal(sum(sizes), size[0], seed=seed).to(dtype).requires_grad_()
    y = model(x, ends_of(sizes))
    y.backward(normal(*y.shape, seed=seed + 1).to(y.dtype))
    return [y.detach(), grad(x)]
