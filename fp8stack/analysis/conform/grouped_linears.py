"""Checks that a grouped linear, such as the experts of a mixture, gives what a loop of linears over
its groups gives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    Skipped,
    agreement_db,
    backend_for,
    plan_of,
    same_bits,
)
from fp8stack.analysis.conform.gemms import RECIPES, one_pass
from fp8stack.layers import Backend, build_backend
from fp8stack.precision import load_recipe

ROWS = (48, 0, 33, 15)
"""The rows of each group."""
FEATURES = 128
EQUAL_DB = 45.0
"""The least agreement of sums in another order, rounded to bfloat16; the scale of another group
gives less than 10 dB."""


def grouped_linears(context: Context) -> Iterator[Check]:
    """Check y, dx, dw and db by recipe and backend."""
    for recipe in RECIPES:
        for backend in ("te", "torch", "emulate"):
            check = partial(equals_loop, context, recipe, backend)
            yield Check(f"{recipe} by {backend}", check)


class GroupsModel(nn.Module):
    """A model of one grouped linear."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.linear = backend.grouped_linear("linear", len(ROWS), FEATURES, FEATURES, True)
        backend.attach(self)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        ends = torch.tensor([*accumulate(ROWS)], dtype=torch.int32, device=x.device)
        y: Tensor = self.linear(x, ends)
        return y


class LoopModel(nn.Module):
    """A model of a linear for each group; one without rows does not run."""

    def __init__(self, backend: Backend, paths: list[str]) -> None:
        super().__init__()
        linears = [backend.linear(path, FEATURES, FEATURES, True) for path in paths]
        self.linears = nn.ModuleList(linears)
        backend.attach(self)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        pairs = zip(self.linears, torch.split(x, list(ROWS)), strict=True)
        return torch.cat([linear(rows.clone()) for linear, rows in pairs if len(rows)])


def equals_loop(context: Context, recipe: str, backend: str) -> Facts:
    """Compare a grouped linear with the loop: to the bit in the emulator on a CPU, else as sums in
    another order agree. Each group's rows have another magnitude."""
    chosen = load_recipe(recipe)
    if backend == "te" and chosen.quantizers and chosen.quantizers.stochastic:
        # TE does not show its random bits.
        chosen = load_recipe(recipe, {"grad_output": {"rounding": "nearest"}})
    plan = plan_of(chosen, context, backend)
    paths = [f"linear.{group}" for group in range(len(ROWS))]
    loop = LoopModel(backend_for(plan, dict.fromkeys(paths, (FEATURES, FEATURES))), paths)
    grouped = plan.for_layers({"linear": (FEATURES, FEATURES)}, grouped={"linear": len(ROWS)})
    if grouped.backend_of(grouped.layers[0]) != backend:
        raise Skipped(grouped.layers[0].why)
    model = GroupsModel(build_backend(grouped))
    generator = torch.Generator().manual_seed(context.seed + 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.mul_(2.0 ** torch.arange(len(ROWS)).view(-1, *[1] * (parameter.ndim - 1)))
        for group, linear in enumerate(loop.linears):
            for name, parameter in linear.named_parameters():
                parameter.copy_(model.linear.get_parameter(name)[group])
    magnitudes = 16.0 ** torch.arange(len(ROWS)).repeat_interleave(torch.tensor(ROWS))[:, None]
    sizes = sum(ROWS), FEATURES
    x, dy = (torch.randn(sizes, generator=generator) / magnitudes for _ in range(2))
    x, dy = x.to(context.device), dy.to(context.device)
    for network in (model, loop):
        network.to(context.device)
    results: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for _ in range(3 if chosen.delayed else 1):  # until the scales are found
        results = one_pass(model, model, x, {"y": dy})
        expected = one_pass(loop, loop, x, {"y": dy})
    pairs = {name: (results[name], expected[name]) for name in ("y", "dx")}
    for name in ("weight", "bias"):
        gradient = results[f"d linear.{name}"]
        none = torch.zeros_like(gradient[0])
        of_loop = [expected.get(f"d linears.{group}.{name}", none) for group in range(len(ROWS))]
        pairs[f"d{name[0]}"] = gradient, torch.stack(of_loop)
    if backend == "emulate" and context.device == "cpu":
        return same_bits(pairs)
    ratios: dict[str, Any] = {name: agreement_db(*pair) for name, pair in pairs.items()}
    return {"holds": min(ratios.values()) >= EQUAL_DB, "agreement_db": ratios}
