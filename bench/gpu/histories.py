"""Delayed scaling, step by step: TE's own, and our backends', against the one amax history.

TE's own means its modules and its recipe, and its update of the scales; nothing of ours in between.
Our backends get the same operands layer by layer, so that no GEMM's rounding reaches another cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.cases import (
    Case,
    Context,
    Facts,
    backend_for,
    mark_weights_changed,
    merged,
    plan_of,
    same_bits,
)
from bench.gpu.casts import need_te
from bench.gpu.inputs import Operands, spiky_steps
from bench.peers import te_raw
from fp8stack import numerics
from fp8stack.backends import Backend, fp8_state
from fp8stack.formats import AmaxAlgorithm
from fp8stack.numerics import AmaxHistory
from fp8stack.precision import Hardware, load_recipe

STEPS = 50
# Windows that spikes leave, one that they never leave, and the shortest.
LENGTHS = (1, 4, 16, 1024)
ALGORITHMS: tuple[AmaxAlgorithm, ...] = ("max", "most_recent")
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
SHAPES = {"layers.0": (64, 32), "layers.1": (32, 48), "layers.2": (128, 16)}
ROWS = 32
State = dict[str, Tensor]


def cases(context: Context) -> Iterator[Case]:
    """All of this section."""
    for length in LENGTHS:
        for algorithm in ALGORITHMS:
            for margin in (0, 1):
                check = partial(te_history, context, length, algorithm, margin)
                yield Case(f"TE's history of {length}, {algorithm}, margin {margin}", check)
    for algorithm in ALGORITHMS:
        for backend, compiled in (("emulate", 0), ("torch", 0), ("te", 0), ("torch", 1)):
            how = f"{backend}{', compiled' if compiled else ''}"
            check = partial(our_history, context, backend, algorithm, bool(compiled))
            yield Case(f"fp8_state of {how}, {algorithm}", check)


def te_history(context: Context, length: int, algorithm: AmaxAlgorithm, margin: int) -> Facts:
    """TE's scales and amax histories after each step, against ours fed with the same amaxes."""
    need_te(context, "delayed")
    te_raw.forget()
    recipe = te_raw.recipe(
        "delayed", margin=margin, amax_history_len=length, amax_compute_algo=algorithm
    )
    layer = te_raw.module("Linear", (64, 32), torch.bfloat16, context.device, bias=False)
    history = AmaxHistory(FORMATS, length=length, margin=margin, algorithm=algorithm)
    parts = {}
    for step, operands in enumerate(spiky_steps(STEPS, ROWS, 64, 32)):
        te_step(layer, recipe, operands, context.device)
        feed(history, operands)
        state, pairs = history.state_dict(), {}
        for name, (scale, amaxes) in te_raw.scales_and_histories(layer).items():
            operand = name.removeprefix("gemm1.")
            pairs[f"{operand}.scale"] = (scale, state[f"{operand}.scale"])
            pairs[f"{operand}.amax_history"] = (amaxes, state[f"{operand}.amax_history"])
        parts[f"step {step}"] = same_bits(pairs)
    te_raw.forget()
    return merged(parts)


def te_step(layer: nn.Module, recipe: Any, operands: Operands, device: str) -> dict[str, Tensor]:
    """One pass of a TE linear with the weight set to the step's."""
    x, w, dy = (operand.to(device) for operand in operands)
    with torch.no_grad():
        layer.get_parameter("weight").copy_(w)
    return te_raw.run(layer, recipe, x, dy)


def feed(history: AmaxHistory, operands: Operands) -> None:
    """Give a history the amaxes of one step, and update it."""
    for slot, operand in zip(FORMATS, operands, strict=True):
        history.record(slot, numerics.amax(operand))
    history.update()


class Separate(nn.Module):
    """Linears side by side, each with an input of its own."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        made = [backend.linear(name, *shape, True) for name, shape in SHAPES.items()]
        self.layers = nn.ModuleList(made)
        backend.attach(self)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The output of each layer for its input."""
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def our_history(context: Context, backend: str, algorithm: AmaxAlgorithm, compiled: bool) -> Facts:
    """The FP8 state of one of our backends after each step, against the emulator's on the CPU."""
    compiler = context.compiled if compiled else None
    found = states(context, backend, algorithm, compiler)
    expected = _reference(algorithm)
    parts = {}
    for step, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        pairs = {name: (ours[name], reference[name]) for name in reference}
        parts[f"step {step}"] = same_bits(pairs)
    return merged(parts)


@lru_cache
def _reference(algorithm: AmaxAlgorithm) -> list[State]:
    return states(Context(Hardware("cpu")), "emulate", algorithm)


def states(
    context: Context,
    backend: str,
    algorithm: AmaxAlgorithm,
    compiler: Callable[..., Any] | None = None,
) -> list[State]:
    """`fp8_state` after each of 50 steps; some have two micro-batches, some an evaluation."""
    recipe = load_recipe("delayed", {"history_length": 6, "amax_algorithm": algorithm})
    plan = plan_of(recipe, context, backend)
    model = Separate(backend_for(plan, SHAPES)).to(context.device)
    called = model if compiler is None else compiler(model)
    found = []
    for step, layers in enumerate(zip(*_series(), strict=True)):
        with torch.no_grad():
            for layer, operands in zip(model.layers, layers, strict=True):
                layer.get_parameter("weight").copy_(operands.w)
        mark_weights_changed(model)
        _pass(called, layers, context.device)
        if step % 7 == 3:
            _pass(called, [_halved(operands) for operands in layers], context.device)
        if step % 10 == 5 and compiler is None:
            _evaluate(model, layers, context.device)
        found.append({name: value.cpu() for name, value in fp8_state(model).items()})
    return found


def _series() -> list[list[Operands]]:
    """The operands of each layer in each step."""
    return [
        spiky_steps(STEPS, ROWS, *shape, seed=10 * number)
        for number, shape in enumerate(SHAPES.values())
    ]


def _halved(operands: Operands) -> Operands:
    """Another micro-batch: other data, the same weight."""
    return Operands(operands.x * 3, operands.w, operands.dy * 0.5)


def _pass(model: Callable[..., Any], layers: Any, device: str) -> None:
    inputs = [operands.x.to(device).requires_grad_() for operands in layers]
    outputs = model(inputs)
    grads = [operands.dy.to(device, y.dtype) for operands, y in zip(layers, outputs, strict=True)]
    torch.autograd.backward(outputs, grads)


def _evaluate(model: nn.Module, layers: Any, device: str) -> None:
    model.eval()
    with torch.no_grad():
        model([operands.x.to(device) * 100 for operands in layers])
    model.train()
