"""The rows of amax histories: windows and scales after every step against plain Python, alone and
in each backend.

The expected state follows from the operands alone: the amaxes of one step give the scales of the
next, and a cast with those scales changes nothing that a later scale depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import LinearOperands, amaxes, spiky_steps
from fp8stack.analysis.conform.checks import (
    Context,
    Results,
    Row,
    backend_for,
    mark_weights_changed,
    plan_of,
)
from fp8stack.common.formats import AmaxAlgorithm, Quantizer
from fp8stack.layers import Backend, fp8_state
from fp8stack.numerics import AmaxHistory
from fp8stack.precision import load_recipe

STEPS = 50
ALGORITHMS: tuple[AmaxAlgorithm, ...] = get_args(AmaxAlgorithm)
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
SHAPES = {"layers.0": (64, 32), "layers.1": (32, 48), "layers.2": (128, 16)}
ROWS = 32
WINDOW = 6  # of the models' histories


State = Mapping[str, Tensor]
Steps = tuple[Any, list[list[list[float]]]]
"""The data of a history, and of each step the amaxes of all slots in each of its updates."""


def histories(context: Context) -> Iterator[Row]:
    """Updates with given amaxes, of a recipe's quantizers or of several kinds; and the state of a
    model after each step."""
    if context.recipe is not None:
        rules = [q for table in context.recipe.tables for q in table.each.values() if q.delayed]
        if rules:
            yield _updates(context, list(dict.fromkeys(rules)))
        return
    kinds: tuple[tuple[int, AmaxAlgorithm, int], ...]
    kinds = ((8, "max", 0), (3, "most_recent", 1), (1, "max", 0))
    rules = [_delayed(format, *kind) for kind in kinds for format in ("e4m3", "e5m2")]
    yield _updates(context, rules)
    if not context.quick:
        yield _updates(context, rules, compiled=True)
    for algorithm in ALGORITHMS:
        for backend in ("emulate", "torch", "te"):
            yield _model(context, backend, algorithm)
        if not context.quick:
            yield _model(context, "torch", algorithm, compiled=True)


def _delayed(format: str, length: int, algorithm: AmaxAlgorithm, margin: int = 0) -> Quantizer:
    rules: dict[str, Any] = {"history_length": length, "amax_algorithm": algorithm}
    return Quantizer(format=format, amax="delayed", margin=margin, **rules)


def _row(
    name: str,
    quantizers: Mapping[str, Quantizer],
    run: Callable[[Any], Iterator[State]],
    inputs: Callable[[], Steps],
) -> Row:
    """A row of the states that `run` yields after each step, by the names of `fp8_state`."""

    def expected(case: Steps) -> Iterator[State]:
        slots = {
            name: oracles.DelayedSlot(q.format, q.history_length, q.margin, q.amax_algorithm)
            for name, q in quantizers.items()
        }
        for updates in case[1]:
            for update in updates:
                for slot, amax in zip(slots.values(), update, strict=True):
                    slot.record(amax)
                    slot.update()
            state: dict[str, Tensor] = {}
            for slot_name, slot in slots.items():
                state[f"{slot_name}.scale"] = torch.tensor(slot.scale)
                state[f"{slot_name}.amax_history"] = torch.tensor(slot.window).float()
            yield state

    def by_step(states: Iterator[State]) -> Results:
        return {
            f"step {n}: {k}": x.clone() for n, state in enumerate(states) for k, x in state.items()
        }

    return Row(
        "histories",
        name,
        lambda case: by_step(run(case[0])),
        lambda case: by_step(expected(case)),
        lambda: [("", inputs())],
    )


def _amaxes(operands: Iterable[Tensor]) -> list[float]:
    return [oracles.amax(x.float().numpy()).item() for x in operands]


def _updates(context: Context, rules: Sequence[Quantizer], compiled: bool = False) -> Row:
    """A slot of each quantizer, updated 40 times."""
    quantizers = {f"slot {n}": quantizer for n, quantizer in enumerate(rules)}

    def advance(history: AmaxHistory, recorded: Tensor) -> None:
        for slot, amax in zip(history.slots, recorded.unbind(), strict=True):
            history.record(slot, amax)
        history.update()

    def run(recorded: Tensor) -> Iterator[State]:
        history = AmaxHistory(quantizers, device=context.device)
        call = context.compiled(advance) if compiled else advance
        for amax in recorded:
            call(history, amax.to(context.device))
            yield history.state_dict()

    def inputs() -> Steps:
        recorded = amaxes(context.seed)[: 40 * len(rules)].view(40, len(rules))
        return recorded, [[update] for update in recorded.tolist()]

    return _row(f"updates, {'compiled' if compiled else 'eager'}", quantizers, run, inputs)


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


def _model(context: Context, backend: str, algorithm: AmaxAlgorithm, compiled: bool = False) -> Row:
    """`fp8_state` after each step of a model. Some steps have two micro-batches, some an
    evaluation."""
    recipe = load_recipe("delayed", {"history_length": WINDOW, "amax_algorithm": algorithm})
    quantizers = {
        f"{layer}.{operand}": _delayed(format, WINDOW, algorithm)
        for layer, (operand, format) in product(SHAPES, FORMATS.items())
    }

    def inputs() -> Steps:
        model = Separate(backend_for(plan_of(recipe, context, backend), SHAPES))
        count = 26 if context.quick else STEPS  # each kind of step occurs once
        series = [
            spiky_steps(count, ROWS, *shape, seed=100 * context.seed + 10 * number)
            for number, shape in enumerate(SHAPES.values())
        ]
        steps = [[list(operands)] for operands in zip(*series, strict=True)]
        for batches in steps[3::7]:  # other data, and the same weight, which is cast once
            no_weight = torch.zeros(1)
            batches.append([LinearOperands(x * 3, no_weight, dy * 0.5) for x, _, dy in batches[0]])
        recorded = [
            [_amaxes(x for operands in batch for x in operands) for batch in batches]
            for batches in steps
        ]
        return (model.to(context.device), steps), recorded

    def run(case: tuple[Separate, list[list[list[LinearOperands]]]]) -> Iterator[State]:
        model, steps = case
        called = context.compiled(model) if compiled else model
        for step, batches in enumerate(steps):
            with torch.no_grad():
                for layer, operands in zip(model.layers, batches[0], strict=True):
                    layer.get_parameter("weight").copy_(operands.w)
            mark_weights_changed(model)
            for batch in batches:
                outputs = called([o.x.to(context.device).requires_grad_() for o in batch])
                grads = [o.dy.to(y) for o, y in zip(batch, outputs, strict=True)]
                torch.autograd.backward(outputs, grads)
            if step % 10 == 5 and not compiled:
                model.eval()
                with torch.no_grad():
                    model([operands.x.to(context.device) * 100 for operands in batches[0]])
                model.train()
            yield fp8_state(model)

    name = f"fp8_state of {backend}{', compiled' * compiled}, {algorithm}"
    return _row(name, quantizers, run, inputs)
