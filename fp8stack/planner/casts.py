"""Where a step casts, from what to what and how often.

Counted are tensors. What a GEMM or a cast to FP8 does within itself is not a cast of its own, nor
is what Transformer Engine does inside its modules, apart from its casts to FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fp8stack.formats import OPERANDS, FormatName, Quantizer
from fp8stack.model.config import GPTConfig
from fp8stack.planner.operations import held, name_of
from fp8stack.precision import Plan

GRADIENT = ", gradient"
"""What stands behind the name of a tensor whose gradient is cast back."""


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
        """Whether it gives values of FP8, FP6 or FP4."""
        return self.target.split(" ")[0] in get_args(FormatName)


def casts_of(config: GPTConfig, plan: Plan) -> list[Cast]:
    """All casts of a training step without activation checkpointing, module by module."""
    made: list[Cast] = []
    dtype = held(plan.compute_dtype)
    for index in range(config.layers):
        path = f"blocks.{index}"
        made += _linear(plan, f"{path}.attention.qkv", "fp32", config.bias)
        made += _attention(f"{path}.attention", config, plan)
        made += _linear(plan, f"{path}.attention.output", dtype, config.bias)
        made += _there_and_back(path, "attention's output", dtype, "fp32")
        made += _linear(plan, f"{path}.mlp.up", "fp32", config.bias)
        made += _linear(plan, f"{path}.mlp.down", dtype, config.bias)
        made += _there_and_back(path, "mlp's output", dtype, "fp32")
    made += _linear(plan, "lm_head", "fp32", False)
    made += _there_and_back("loss", "logits", dtype, "fp32")
    return made


def _there_and_back(path: str, what: str, source: str, target: str) -> Iterator[Cast]:
    """A cast, and that of its gradient the other way; none if nothing changes."""
    if source != target:
        there = Cast(path=path, what=what, source=source, target=target)
        yield there
        yield replace(there, what=what + GRADIENT, source=target, target=source, runs="backward")


def _linear(plan: Plan, path: str, source: str, bias: bool) -> Iterator[Cast]:
    layer, dtype = plan.layer(path), held(plan.compute_dtype)
    quantizers = layer.quantizers
    if quantizers is None:
        yield from _there_and_back(path, "input", source, dtype)
        yield from _there_and_back(path, "weight", "fp32", dtype)
        if bias:
            yield from _there_and_back(path, "bias", "fp32", dtype)
        return
    who = plan.runs(layer)
    if who != "te":
        yield from _there_and_back(path, "input", source, dtype)
    for operand in OPERANDS:
        if operand == "grad_output" and bias and who == "torch" and dtype != "fp32":
            yield Cast(path=path, what="bias", source="fp32", target=dtype)
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
                    per="step" if operand == "weight" and who != "emulate" else "micro-batch",
                )


def _attention(path: str, config: GPTConfig, plan: Plan) -> Iterator[Cast]:
    dtype, inside = held(plan.compute_dtype), held(plan.attention)
    through = "fp32" if config.qk_norm or config.positions == "rope" else dtype
    for what in ("queries", "keys"):
        yield from _there_and_back(path, what, dtype, through)
        yield from _there_and_back(path, what, through, inside)
    yield from _there_and_back(path, "values", dtype, inside)
    yield from _there_and_back(path, "output", inside, dtype)
