"""The casts of a training step: tensors, dtypes, and how often.

Casts are listed in the order in which they run. Conversions within a GEMM or a cast to FP8 do not
count, nor do those inside Transformer Engine's modules, except its casts to FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Literal, get_args

from fp8stack.formats import OPERANDS, FormatName, Quantizer
from fp8stack.model.config import GPTConfig
from fp8stack.model.trace import Moved, Step
from fp8stack.planner.operations import held, name_of, trace_of
from fp8stack.precision import Plan

GRADIENT = ", gradient"
"""The suffix of a tensor's name where its gradient is cast back."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One tensor cast by the module at `path`, once per micro-batch or once per optimizer step."""

    path: str
    what: str
    source: str
    target: str
    runs: Literal["forward", "backward"] = "forward"
    per: Literal["micro-batch", "step"] = "micro-batch"

    @property
    def to_fp8(self) -> bool:
        """Whether the target is FP8, FP6 or FP4."""
        return self.target.split(" ")[0] in get_args(FormatName)


def casts_of(config: GPTConfig, plan: Plan) -> list[Cast]:
    """All casts of a training step without activation checkpointing, module by module."""
    made: list[Cast] = []
    for path, events in groupby(trace_of(config, plan).all_events(), key=attrgetter("path")):
        here = list(events)
        found = [cast for one in here if isinstance(one, Moved) for cast in _there_and_back(one)]
        if any(isinstance(one, Step) and one.name == "linear" for one in here):
            found += _quantized(plan, path)
            if plan.layer(path).fp8:  # the bias is cast after the operands
                found.sort(
                    key=lambda one: (one.to_fp8 and one.runs == "backward", one.what == "bias")
                )
        made += found
    return made


def _there_and_back(one: Moved) -> Iterator[Cast]:
    there = Cast(path=one.path, what=one.what, source=one.source, target=one.target)
    yield there
    if one.back:
        what, source, target = one.what + GRADIENT, one.target, one.source
        yield replace(there, what=what, source=source, target=target, runs="backward")


def _quantized(plan: Plan, path: str) -> Iterator[Cast]:
    """The casts of a linear to FP8, FP6 or FP4."""
    layer, dtype = plan.layer(path), held(plan.compute_dtype)
    quantizers = layer.quantizers
    for operand in OPERANDS if quantizers is not None else ():
        assert quantizers is not None
        what = operand.replace("grad_output", "output gradient")
        along, across = quantizers.along(operand), quantizers.across(operand)
        copies: dict[str, Quantizer | None] = {what: along}
        if across != "forward" and across != along:
            copies[f"{what} for {'dgrad' if operand == 'weight' else 'wgrad'}"] = across
        for copy, quantizer in copies.items():
            if quantizer is not None:
                yield Cast(
                    path=path,
                    what=copy,
                    source="fp32" if operand == "weight" else dtype,
                    target=name_of(plan, layer, quantizer, dtype),
                    runs="backward" if operand == "grad_output" else "forward",
                    # te and torch keep a quantized weight until an optimizer changes it.
                    per="step"
                    if operand == "weight" and plan.runs(layer) != "emulate"
                    else "micro-batch",
                )
