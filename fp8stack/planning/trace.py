"""A trace of one training pass of a GPT on tensors without memory: its operators with the bytes and
dtypes that each reads and writes, and the bytes that the model saves for the backward pass. The
plan's operations and casts, the estimate of memory and the roofline follow from it.

The model is built from its plan's layers and run forward, and backward where the caller needs it.
Nothing is allocated or computed, so a trace of any model takes a fraction of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fp8stack.common.errors import UserError
from fp8stack.model import gpt
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.planning import meta
from fp8stack.planning.steps import TracedStep, merged_steps
from fp8stack.planning.tracer import Operator, Tracer, section_of
from fp8stack.precision import Hardware, Plan


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A pass of a model of some blocks.

    Attributes:
        kinds: the indices of the planned blocks that each traced block stands for.
        operators: in order.
        values: the bytes of the values that operators read and write, inputs of the pass and
            outputs of operators, by number.
        lasting: the numbers of the gradients that the optimizer reads.
        activations: the bytes that each section saves for the backward pass: a block, "loss" (with
            the head), or "" for all else; without `weight_copies`.
        weight_copies: the bytes of copies of weights for the GEMMs of one micro-batch, likewise.
        fp8_weights: the bytes of cached FP8 weights of all layers.
    """

    kinds: tuple[tuple[int, ...], ...]
    operators: list[Operator]
    values: list[int]
    lasting: Set[int]
    activations: Counter[str]
    weight_copies: Counter[str]
    fp8_weights: int

    def selective(self, section: str) -> int:
        """The bytes of a section's outputs of GEMMs and attention, which "selective" also saves."""
        saved = (x for x in self.operators if x.is_saved and section_of(x.path) == section)
        return sum(self.values[number] for operator in saved for number in operator.writes)

    def all_steps(self) -> Iterator[TracedStep]:
        """Yield the steps of the forward pass of a model with all planned blocks, in order."""
        steps = merged_steps(operator.step for operator in self.operators)
        in_blocks = [at for at, step in enumerate(steps) if step.path.startswith("blocks.")]
        first, last = in_blocks[0], in_blocks[-1] + 1
        yield from steps[:first]
        traced = {index: f"blocks.{at}" for at, kind in enumerate(self.kinds) for index in kind}
        for index, section in sorted(traced.items()):
            for step in steps[first:last]:
                if section_of(step.path) == section:
                    yield replace(step, path=step.path.replace(section, f"blocks.{index}", 1))
        yield from steps[last:]


def trace(
    config: GPTConfig,
    plan: Plan,
    sequences: int,
    context: int,
    *,
    gathers: bool = False,
    blocks: tuple[int, ...] | None = None,
    backward: bool = False,
) -> Trace:
    """Trace a micro-batch on one rank.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        sequences: per micro-batch.
        context: tokens per sequence.
        gathers: whether each pass gathers weights from the ranks (FSDP2).
        blocks: the indices of the plan's blocks to run, in order; None: the first of each kind.
        backward: whether to run the backward pass too, with attention in one kernel and the loss in
            one chunk; else with the loss in two chunks at most.

    Raises:
        UserError: a tensor has more bytes than 64 bits can count.
    """
    kinds = meta.kinds_of(plan) if blocks is None else tuple((index,) for index in blocks)
    other_gpu, slow = plan.hardware.other_gpu, plan.hardware.slow_scaled_mm
    hardware = Hardware(other_gpu=other_gpu, slow_scaled_mm=slow)
    traced = replace(plan, asked="", reasons=(), hardware=hardware)
    rows, chunk = sequences * context, losses.chunk_rows(config.vocabulary)
    if backward:
        chunk = rows
    elif rows > chunk:
        chunk = -(-rows // 256) * 128  # two chunks save as much as many
    try:
        return _traced(config, traced, kinds, sequences, context, gathers, backward, chunk)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
    weights = 4 * config.parameters() / 2**30
    raise UserError(
        f"No machine holds a model of width {config.width} and {sequences} x {context} tokens: "
        f"its weights take {weights:,.0f} GiB. Use smaller sizes."
    )


@lru_cache(maxsize=128)
def _traced(
    config: GPTConfig,
    plan: Plan,
    kinds: tuple[tuple[int, ...], ...],
    sequences: int,
    context: int,
    gathers: bool,
    backward: bool,
    chunk: int,
) -> Trace:
    blocks_plan = meta.blocks_like(plan, [first for first, *_ in kinds])
    changes: dict[str, object] = {"layers": len(kinds), "context": context}
    if config.experts is not None:
        dense = sum(not config.has_experts(first) for first, *_ in kinds)
        changes["experts"] = config.experts.model_copy(update={"first_dense": dense})
    small = config.model_copy(update=changes)
    composed = not backward and meta.composes_attention(config, plan)
    with meta.without_memory(plan):
        model = gpt.GPT(small, meta.backend_of(blocks_plan), seed=None)
        model.loss.chunk_rows = chunk
        if gathers:
            meta.gather_weights(model, model.backend)
        tracer = Tracer(model, blocks_plan, composed=composed)
        tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
        with tracer.recording():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            activations, weight_copies = tracer.saved()
            if backward:
                loss.backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        lasting = {number for gradient in gradients for number in tracer.value_numbers(gradient)}
        blocks_of = {f"blocks.{at}": len(indices) for at, indices in enumerate(kinds)}
        cached = tracer.cached_weights().items()
        return Trace(
            kinds=kinds,
            operators=tracer.operators,
            values=tracer.values,
            lasting=lasting,
            activations=activations,
            weight_copies=weight_copies,
            fp8_weights=sum(blocks_of.get(section, 1) * size for section, size in cached),
        )
