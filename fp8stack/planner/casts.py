"""The casts of a training step: tensors, dtypes, and how often.

Casts are listed in the order in which they run. Conversions within a GEMM or a cast to FP8 do not
count, nor do those inside Transformer Engine's modules, except its casts to FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal, get_args

from fp8stack.formats import FormatName
from fp8stack.model.config import GPTConfig
from fp8stack.model.trace import Step
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
    for path, steps in groupby(trace_of(config, plan).all_steps(), key=attrgetter("path")):
        here = list(steps)
        found = [cast for one in here if one.name == "cast" for cast in _there_and_back(one)]
        if any(one.name == "linear" for one in here):
            found += _quantized(plan, path)
            if plan.layer(path).fp8:  # the bias is cast after the operands
                found.sort(
                    key=lambda one: (one.to_fp8 and one.runs == "backward", one.what == "bias")
                )
        elif plan.attention_precision == "mxfp8" and any(one.name == "attention" for one in here):
            found += _of_attention(path, plan)
        made += found
    return made


def _of_attention(path: str, plan: Plan) -> Iterator[Cast]:
    """The casts of attention in MXFP8, in blocks along a head's elements and along tokens."""
    source, target = plan.attention, "e4m3"
    for what in ("queries", "keys", "values", f"output{GRADIENT}"):
        runs: Literal["forward", "backward"] = "backward" if GRADIENT in what else "forward"
        for name in (what, f"{what}, along tokens"):
            yield Cast(path=path, what=name, source=source, target=target, runs=runs)


def _there_and_back(one: Step) -> Iterator[Cast]:
    (source,), target = one.operands, one.output
    yield Cast(path=one.path, what=one.what, source=source, target=target)
    if one.back:
        what = one.what + GRADIENT
        yield Cast(path=one.path, what=what, source=target, target=source, runs="backward")


def _quantized(plan: Plan, path: str) -> Iterator[Cast]:
    """The casts of a linear to FP8, FP6 or FP4."""
    layer, dtype = plan.layer(path), held(plan.compute_dtype)
    for place, quantizer in layer.quantizers.casts.items() if layer.quantizers else ():
        operand, _, gemm = place.partition(".")
        what = operand.replace("grad_output", "output gradient")
        is_weight = operand == "weight"
        yield Cast(
            path=path,
            what=f"{what} for {gemm}" if gemm else what,
            source="fp32" if is_weight else dtype,
            target=name_of(plan, layer, quantizer, dtype),
            runs="backward" if operand == "grad_output" else "forward",
            # te and torch keep a quantized weight until an optimizer changes it.
            per="step" if is_weight and plan.runs(layer) != "emulate" else "micro-batch",
        )
