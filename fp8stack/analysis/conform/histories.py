"""Checks delayed scaling step by step: every implementation of amax histories against plain Python.

The model's layers have separate inputs, so that the rounding of a GEMM does not affect another
cast. TE's own history follows from its modules, recipe and update, without our code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.check_inputs import LinearOperands, amaxes, spiky_steps
from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    backend_for,
    mark_weights_changed,
    merged,
    plan_of,
    same_bits,
)
from fp8stack.common.formats import AmaxAlgorithm, Quantizer
from fp8stack.layers import Backend, fp8_state
from fp8stack.numerics import AmaxHistory
from fp8stack.precision import load_recipe

STEPS = 50
# Windows that spikes leave, one that they never leave, and the shortest possible.
LENGTHS = (1, 4, 16, 1024)
ALGORITHMS: tuple[AmaxAlgorithm, ...] = get_args(AmaxAlgorithm)
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
SHAPES = {"layers.0": (64, 32), "layers.1": (32, 48), "layers.2": (128, 16)}
ROWS = 32
WINDOW = 6  # of the models' histories
State = dict[str, Tensor]


def histories(context: Context) -> Iterator[Check]:
    """Check windows of amaxes and their scales after every step: ours, each backend's, and TE's."""
    for way in ("eager",) if context.quick else ("eager", "compiled"):
        yield Check(f"updates, {way}", partial(updates, context, way == "compiled"))
    for algorithm in ALGORITHMS:
        for backend, compiled in (("emulate", 0), ("torch", 0), ("te", 0), ("torch", 1)):
            if not (compiled and context.quick):
                way = f"{backend}{', compiled' if compiled else ''}"
                check = partial(our_history, context, backend, algorithm, bool(compiled))
                yield Check(f"fp8_state of {way}, {algorithm}", check)
    for length in LENGTHS:
        for algorithm in ALGORITHMS:
            for margin in (0, 1):
                check = partial(te_history, context, length, algorithm, margin)
                yield Check(f"TE's history of {length}, {algorithm}, margin {margin}", check)


def _state(scale: float, window: Sequence[float], name: str) -> State:
    """The entries of a slot in `fp8_state`."""
    history = torch.tensor(window, dtype=torch.float32)
    return {f"{name}.scale": torch.tensor(scale), f"{name}.amax_history": history}


def _advance(history: AmaxHistory, recorded: Tensor) -> None:
    for slot, amax in zip(history.slots, recorded.unbind(), strict=True):
        history.record(slot, amax)
    history.update()


def updates(context: Context, compiled: bool) -> Facts:
    """Check windows and scales of four slots after each of 40 updates."""
    recorded, results = amaxes(context.seed)[: 40 * 4].view(40, 4), {}
    formats = {"a": "e4m3", "b": "e5m2", "c": "e4m3", "d": "e5m2"}
    for length, margin, algorithm in ((8, 0, "max"), (3, 1, "most_recent"), (1, 0, "max")):
        kind: Any = {"history_length": length, "margin": margin, "amax_algorithm": algorithm}
        quantizers = {
            name: Quantizer(format=format, amax="delayed", **kind)
            for name, format in formats.items()
        }
        for step, facts in follow_updates(context, quantizers, recorded, compiled).items():
            results[f"{algorithm} of {length}, {step}"] = facts
    return merged(results)


def follow_updates(
    context: Context,
    quantizers: Mapping[str, Quantizer],
    recorded: Tensor,
    compiled: bool = False,
) -> dict[str, Facts]:
    """Compare the windows and scales of slots with these quantizers after each update, with the
    amaxes of a row of `recorded`, float32 [updates, slots]."""
    advance = context.compiled(_advance) if compiled else _advance
    history, results = AmaxHistory(quantizers, device=context.device), {}
    slots = {
        name: oracles.DelayedSlot(q.format, q.history_length, q.margin, q.amax_algorithm)
        for name, q in quantizers.items()
    }
    for step, amax in enumerate(recorded):
        advance(history, amax.to(context.device))
        for slot, value in zip(slots.values(), amax.tolist(), strict=True):
            slot.record(value)
            slot.update()
        results[f"update {step}"] = _same(history.state_dict(), slots)
    return results


def _same(actual: State, slots: dict[str, oracles.DelayedSlot]) -> Facts:
    """Compare the scales and windows of `fp8_state` with those of slots."""
    states = [_state(slot.scale, slot.window, name) for name, slot in slots.items()]
    return same_bits({n: (actual[n], value) for state in states for n, value in state.items()})


def te_history(context: Context, length: int, algorithm: AmaxAlgorithm, margin: int) -> Facts:
    """TE's scales and amax histories after each step."""
    context.need_te("delayed")
    slots = {n: oracles.DelayedSlot(f, length, margin, algorithm) for n, f in FORMATS.items()}
    steps = spiky_steps(STEPS, ROWS, 64, 32, context.seed)
    states = te_states(context.device, steps, length, algorithm, margin)
    results = {}
    for step, (operands, state) in enumerate(zip(steps, states, strict=True)):
        feed(slots, operands)
        results[f"step {step}"] = _same(state, slots)
    return merged(results)


def te_states(
    device: str, steps: list[LinearOperands], length: int, algorithm: AmaxAlgorithm, margin: int
) -> Iterator[State]:
    """The state of a TE linear after each step, with given operands, in the form of `fp8_state`."""
    te.forget()
    recipe = te.recipe(
        "delayed", margin=margin, amax_history_len=length, amax_compute_algo=algorithm
    )
    outputs, inputs = steps[0].w.shape
    layer = te.module("Linear", (inputs, outputs), torch.bfloat16, device, bias=False)
    for operands in steps:
        x, w, dy = (operand.to(device) for operand in operands)
        with torch.no_grad():
            layer.get_parameter("weight").copy_(w)
        te.run(layer, recipe, x, dy)
        state: State = {}
        for name, (scale, window) in te.scales_and_histories(layer).items():
            operand = name.removeprefix("gemm1.")
            state |= {f"{operand}.scale": scale, f"{operand}.amax_history": window}
        yield state
    te.forget()


def feed(slots: dict[str, oracles.DelayedSlot], operands: LinearOperands) -> None:
    """Give slots the amaxes of one step, and update them."""
    for slot, operand in zip(slots.values(), operands, strict=True):
        slot.record(float(oracles.amax(operand.float().numpy()).max()))
        slot.update()


class Separate(nn.Module):
    """Independent linears, each with an input of its own."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        linears = [backend.linear(name, *shape, True) for name, shape in SHAPES.items()]
        self.layers = nn.ModuleList(linears)
        backend.attach(self)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The output of each layer for its input."""
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def our_history(context: Context, backend: str, algorithm: AmaxAlgorithm, compiled: bool) -> Facts:
    """`fp8_state` after each step of a model. Some steps have two micro-batches, some an
    evaluation."""
    recipe = load_recipe("delayed", {"history_length": WINDOW, "amax_algorithm": algorithm})
    model = Separate(backend_for(plan_of(recipe, context, backend), SHAPES)).to(context.device)
    called = context.compiled(model) if compiled else model
    slots = {
        name: {
            o: oracles.DelayedSlot(format, WINDOW, 0, algorithm) for o, format in FORMATS.items()
        }
        for name in SHAPES
    }
    named = {
        f"{name}.{o}": slot
        for name, operand_slots in slots.items()
        for o, slot in operand_slots.items()
    }
    count = 26 if context.quick else STEPS  # each kind of step occurs once
    series = [
        spiky_steps(count, ROWS, *shape, seed=100 * context.seed + 10 * number)
        for number, shape in enumerate(SHAPES.values())
    ]
    results = {}
    for step, layers in enumerate(zip(*series, strict=True)):
        with torch.no_grad():
            for layer, operands in zip(model.layers, layers, strict=True):
                layer.get_parameter("weight").copy_(operands.w)
        mark_weights_changed(model)
        batches = [layers]
        if step % 7 == 3:  # other data, and the same weight, which is cast once
            cast = torch.zeros(1)
            batches.append(tuple(LinearOperands(x * 3, cast, dy * 0.5) for x, _, dy in layers))
        for batch in batches:
            _pass(called, batch, context.device)
            for name, operands in zip(SHAPES, batch, strict=True):
                feed(slots[name], operands)
        if step % 10 == 5 and not compiled:
            model.eval()
            with torch.no_grad():
                model([operands.x.to(context.device) * 100 for operands in layers])
            model.train()
        results[f"step {step}"] = _same(fp8_state(model), named)
    return merged(results)


def _pass(model: Callable[..., Any], layers: Any, device: str) -> None:
    inputs = [operands.x.to(device).detach().requires_grad_() for operands in layers]
    outputs = model(inputs)
    grads = [operands.dy.to(device, y.dtype) for operands, y in zip(layers, outputs, strict=True)]
    torch.autograd.backward(outputs, grads)
