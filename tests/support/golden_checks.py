"""Compares fp8stack's results for a golden file's inputs with the file's, which TE computed.

Bytes, scales and histories must be the same to the bit, by `fp8stack conform`; results of a GEMM
must have a signal-to-noise ratio, in dB.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.analysis.conform.check_inputs import MXFP8
from fp8stack.analysis.conform.checks import equal as equal_bits
from fp8stack.analysis.conform.checks import mark_weights_changed
from fp8stack.analysis.conform.golden import COMPUTE, fields_of, golden_row, load
from fp8stack.layers import Backend, build_backend, fp8_state
from fp8stack.numerics.error import sqnr_db
from fp8stack.precision import Hardware, load_recipe, resolve

__all__ = ["check", "load"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# One linear has the same operands as TE's, and differs in sums and one rounding. Behind a norm or
# an activation a few operands round to the next FP8 value, which costs more.
LINEAR_DB, FUSED_DB = 40.0, 20.0
NEAR = 0.02  # relative, of an amax or a scale that follows a norm or an activation

Case = dict[str, Any]
Tensors = dict[str, Tensor]


def check(case: Case, tensors: Tensors) -> None:
    """Recompute one case and compare; an AssertionError says what differs."""
    if case["kind"] in COMPUTE:
        facts = golden_row(case, tensors, "TE").compare()
        assert facts["holds"], facts
    else:
        _module(case, fields_of(f"{case['name']}/", tensors), tensors)


def equal(actual: Tensor, expected: Tensor, name: str) -> None:
    facts = equal_bits({name: actual}, {name: expected})
    assert facts["holds"], facts


def near_db(actual: Tensor, expected: Tensor, least: float, name: str) -> None:
    noise = (actual.double() - expected.double()).square().sum()
    ratio = sqnr_db(float(expected.double().square().sum()), float(noise))
    assert not noise or (ratio or 0.0) >= least, f"{name}: {ratio} dB, which is not {least}"


# Modules


class Chain(nn.Module):
    """The layers of one TE module: a norm if it has one, then one or two linears."""

    activation = "gelu_tanh"
    gemm1: nn.Module
    gemm2: nn.Module

    def __init__(self, kind: str, weights: Tensors, backend: Backend) -> None:
        super().__init__()
        self.kind, self.backend = kind, backend
        names = ("fc1_", "fc2_") if kind == "LayerNormMLP" else ("",)
        shapes = [weights[f"{name}weight"].shape for name in names]
        linears = [
            backend.linear(f"gemm{place}", inputs, outputs, True)
            for place, (outputs, inputs) in enumerate(shapes, start=1)
        ]
        self.names: dict[str, nn.Parameter] = {}
        for place, (name, linear) in enumerate(zip(names, linears, strict=True), start=1):
            setattr(self, f"gemm{place}", linear)
            self.names |= {f"{name}{suffix}": p for suffix, p in linear.named_parameters()}
        if kind != "Linear":
            self.norm = backend.norm("layernorm", shapes[0][1], 1e-5, True)
            self.names |= {f"layer_norm_{suffix}": p for suffix, p in self.norm.named_parameters()}
        with torch.no_grad():
            for name, parameter in self.names.items():
                parameter.copy_(weights[name])
        backend.attach(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm1(x if self.kind == "Linear" else self.norm(x.float()))
        if self.kind != "LayerNormMLP":
            return y
        return self.gemm2(nn.functional.gelu(y, approximate="tanh"))


def _module(case: Case, fields: Tensors, tensors: Tensors) -> None:
    kind, scaling = case["module"], case["scaling"]
    inputs = fields_of(f"inputs/{kind} ", tensors)
    overrides = {"history_length": case["history_length"]} if scaling == "delayed" else {}
    plan = resolve(load_recipe(scaling, overrides), Hardware("cpu"), "emulate")
    plan = dataclasses.replace(plan, compute_dtype=case["dtype"])
    weights = {k: v for k, v in inputs.items() if v.ndim == 2 and k not in ("x", "dy")}
    shapes = {
        f"gemm{place}": (weight.shape[1], weight.shape[0])
        for place, weight in enumerate(weights.values(), start=1)
    }
    model = Chain(kind, inputs, build_backend(plan.for_layers(shapes, heads=())))
    dtype = DTYPES[case["dtype"]]
    for factor in case["factors"]:
        before = {name: value.clone() for name, value in fp8_state(model).items()}
        mark_weights_changed(model)
        x = (inputs["x"].to(dtype) * factor).requires_grad_()
        y = model(x)
        y.backward((inputs["dy"].to(dtype) * factor).to(y.dtype))
    results = {"y": y.detach(), "dx": x.grad}
    results |= {f"d {name}": parameter.grad for name, parameter in model.names.items()}
    least = LINEAR_DB if kind == "Linear" else FUSED_DB
    for name, value in results.items():
        near_db(value, fields[name], least, name)
    _module_state(case, fields, fp8_state(model))
    _module_weight(case, fields, inputs, before)


def _module_state(case: Case, fields: Tensors, state: Tensors) -> None:
    """Scales and histories: to the bit where nothing was computed before the cast."""
    for name, expected in fields.items():
        key, _, slot = name.partition(" ")
        if key not in ("scale", "amax_history"):
            continue
        actual = state[f"{slot}.{key}"]
        last = "gemm2" if case["module"] == "LayerNormMLP" else "gemm1"
        exact_slots = ("gemm1.weight", "gemm2.weight", f"{last}.grad_output")
        if case["module"] == "Linear" or slot in exact_slots:
            equal(actual, expected, name)
        else:
            torch.testing.assert_close(actual, expected, rtol=NEAR, atol=0.0)


def _module_weight(case: Case, fields: Tensors, inputs: Tensors, before: Tensors) -> None:
    """The bytes of the weight in the last step, if TE showed them."""
    if "weight bytes" not in fields:
        return
    weight, scaling = inputs["weight"], case["scaling"]
    if scaling == "mxfp8":
        data = numerics.quantize(weight, MXFP8).data
    elif scaling == "block":
        squares = numerics.Quantizer(block=(128, 128), scale="power_of_two")
        data = numerics.quantize(weight, squares).data
    else:
        scale = before.get("gemm1.weight.scale", numerics.tensor_scale(numerics.amax(weight)))
        data = numerics.cast_to_fp8(weight, scale)
        equal(numerics.inverse(scale), fields["weight inverse"], "weight inverse")
    equal(data, fields["weight bytes"], "weight bytes")
