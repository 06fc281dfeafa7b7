"""Times of a grouped linear and of a loop of linears over its groups, whose results are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.cost.emulation import Arm, linear_arm
from fp8stack.layers import build_backend
from fp8stack.precision import probe, resolve

LOOP = "loop of linears"


class GroupsSize(NamedTuple):
    """Groups of equally many rows."""

    groups: int
    rows: int
    inputs: int
    outputs: int


CPU_SIZES = [
    GroupsSize(8, 32, 64, 256),
    GroupsSize(8, 256, 256, 512),
    GroupsSize(8, 1024, 256, 512),
]


def case_of(recipe: str, size: GroupsSize) -> str:
    return f"{recipe}, {size.groups} groups of {size.rows} x {size.inputs} -> {size.outputs}"


class _Grouped(nn.Module):
    def __init__(self, recipe: str, size: GroupsSize) -> None:
        super().__init__()
        shapes = {"layer": (size.inputs, size.outputs)}
        plan = resolve(recipe, probe("cpu")).for_layers(shapes, grouped={"layer": size.groups})
        backend = build_backend(plan)
        self.layer = backend.grouped_linear("layer", size.groups, *shapes["layer"], bias=False)
        backend.attach(self)
        ends = torch.arange(1, size.groups + 1, dtype=torch.int32) * size.rows
        self.register_buffer("ends", ends)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, self.ends)
        return y


class _Loop(nn.Module):
    def __init__(self, recipe: str, size: GroupsSize) -> None:
        super().__init__()
        shapes = {f"layers.{group}": (size.inputs, size.outputs) for group in range(size.groups)}
        backend = build_backend(resolve(recipe, probe("cpu")).for_layers(shapes))
        self.layers = nn.ModuleList(
            backend.linear(path, *shape, bias=False) for path, shape in shapes.items()
        )
        backend.attach(self)

    def forward(self, x: Tensor) -> Tensor:
        groups = zip(self.layers, x.chunk(len(self.layers)), strict=True)
        return torch.cat([layer(rows) for layer, rows in groups])


def arms_of(recipe: str, size: GroupsSize) -> dict[str, Callable[[], Arm]]:
    """Builders of a forward and backward pass of both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.groups * size.rows, size.inputs, generator=generator).requires_grad_()
    dy = torch.randn(len(x), size.outputs, generator=generator) * 1e-3
    return {
        LOOP: partial(linear_arm, partial(_Loop, recipe, size), x, dy),
        "grouped": partial(linear_arm, partial(_Grouped, recipe, size), x, dy),
    }
