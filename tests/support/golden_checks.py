"""What fp8stack makes of a golden file's inputs, against what the file says TE made of them.

Bytes, scales and histories to the bit; what went through a GEMM by signal to noise, in dB.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bench.gpu.cases import mark_weights_changed, same_bits, sqnr_db
from fp8stack import numerics
from fp8stack.backends import Backend, build_backend, fp8_state
from fp8stack.numerics import AmaxHistory
from fp8stack.precision import Hardware, load_recipe, resolve

SLOTS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# One linear has the same operands as TE's, and differs in sums and one rounding. Behind a norm or
# an activation a few operands round to the next FP8 value, which costs more.
LINEAR_DB, FUSED_DB = 40.0, 20.0
NEAR = 0.02  # relative, of an amax or a scale that follows a norm or an activation

Case = dict[str, Any]
Tensors = dict[str, Tensor]


def load(path: Path) -> tuple[dict[str, Any], Tensors]:
    """A golden file's description and tensors."""
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["description"])
        return description, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check(case: Case, tensors: Tensors) -> None:
    """Recompute one case and compare; an AssertionError says what differs."""
    prefix = f"{case['name']}/"
    fields = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    assert fields, f"the file has no tensors of {case['name']}"
    CHECKS[case["kind"]](case, fields, tensors)


def equal(found: Tensor, expected: Tensor, what: str) -> None:
    facts = same_bits({what: (_bytes(found), _bytes(expected))})
    assert facts["holds"], facts


def near_db(found: Tensor, expected: Tensor, least: float, what: str) -> None:
    ratio = sqnr_db(found.double(), expected.double())
    assert ratio >= least, f"{what}: {ratio} dB, which is not {least}"


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _cast(case: Case, fields: Tensors, tensors: Tensors) -> None:
    x = tensors[case["input"]]
    for place, scale in enumerate(fields["scales"]):
        found = numerics.cast_to_fp8(x, scale, case["format"])
        equal(found, fields["bytes"][place], f"bytes of scale {float(scale):g}")
        equal(numerics.inverse(scale), fields["inverses"][place], "inverse")
        equal(numerics.amax(x), fields["amax"][place], "amax")


def _history(case: Case, fields: Tensors, tensors: Tensors) -> None:
    history = AmaxHistory(
        SLOTS, length=case["length"], margin=case["margin"], algorithm=case["algorithm"]
    )
    operands = [tensors[f"inputs/steps {name}"] for name in ("x", "w", "dy")]
    for step, scales in enumerate(fields["scales"]):
        for slot, series in zip(SLOTS, operands, strict=True):
            history.record(slot, numerics.amax(series[step]))
        history.update()
        equal(history.scales, scales, f"scales after step {step}")
    state = history.state_dict()
    found = torch.stack([state[f"{slot}.amax_history"] for slot in SLOTS], dim=1)
    equal(found, fields["histories"], "histories")


def _current(case: Case, fields: Tensors, tensors: Tensors) -> None:
    x, format = tensors[case["input"]], case["format"]
    scale = numerics.tensor_scale(
        numerics.amax(x), format, power_of_two=case["power_of_two"], eps=case["eps"]
    )
    equal(numerics.inverse(scale), fields["inverse"], "inverse")
    equal(numerics.cast_to_fp8(x, scale, format), fields["bytes"], "bytes")


def _block(case: Case, fields: Tensors, tensors: Tensors) -> None:
    x, power_of_two = tensors[case["input"]], case["power_of_two"]
    ways = {"along": (128, 128)} if case["square"] else {"along": (1, 128), "across": (128, 1)}
    for way, block in ways.items():
        data, inverse = numerics.quantize_blocks(x, block, "e4m3", power_of_two)
        equal(inverse, fields[f"scales {way}"], f"scales {way}")
        equal(data, fields[f"bytes {way}"], f"bytes {way}")


def _mxfp8(case: Case, fields: Tensors, tensors: Tensors) -> None:
    x = tensors[case["input"]]
    for way, dim in (("along", 1), ("across", 0)):
        data, codes = numerics.quantize_mxfp8(x, dim)
        equal(codes, fields[f"scales {way}"], f"scales {way}")
        equal(data, fields[f"bytes {way}"], f"bytes {way}")


# Modules


class Chain(nn.Module):
    """What a TE module is in one piece: a norm if it has one, then one or two linears."""

    activation = "gelu_tanh"

    def __init__(self, kind: str, weights: Tensors, backend: Backend) -> None:
        super().__init__()
        self.kind, self.backend = kind, backend
        names = ("fc1_", "fc2_") if kind == "LayerNormMLP" else ("",)
        shapes = [weights[f"{name}weight"].shape for name in names]
        made = [
            backend.linear(f"gemm{place}", inputs, outputs, True)
            for place, (outputs, inputs) in enumerate(shapes, start=1)
        ]
        self.names = {}
        for place, (name, linear) in enumerate(zip(names, made, strict=True), start=1):
            setattr(self, f"gemm{place}", linear)
            self.names |= {f"{name}weight": linear.weight, f"{name}bias": linear.bias}
        if kind != "Linear":
            self.norm = backend.norm("layernorm", shapes[0][1], 1e-5, True)
            norm = {"layer_norm_weight": self.norm.weight, "layer_norm_bias": self.norm.bias}
            self.names |= norm
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
    prefix = f"inputs/{kind} "
    given = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    overrides = {"history_length": case["history_length"]} if scaling == "delayed" else {}
    plan = resolve(load_recipe(scaling, overrides), Hardware("cpu"), "emulate")
    plan = dataclasses.replace(plan, compute_dtype=case["dtype"])
    weights = {k: v for k, v in given.items() if v.ndim == 2 and k not in ("x", "dy")}
    shapes = {
        f"gemm{place}": (weight.shape[1], weight.shape[0])
        for place, weight in enumerate(weights.values(), start=1)
    }
    model = Chain(kind, given, build_backend(plan.for_layers(shapes, heads=())))
    dtype = DTYPES[case["dtype"]]
    for factor in case["factors"]:
        before = {name: value.clone() for name, value in fp8_state(model).items()}
        mark_weights_changed(model)
        x = (given["x"].to(dtype) * factor).requires_grad_()
        y = model(x)
        y.backward((given["dy"].to(dtype) * factor).to(y.dtype))
    found = {"y": y.detach(), "dx": x.grad}
    found |= {f"d {name}": parameter.grad for name, parameter in model.names.items()}
    least = LINEAR_DB if kind == "Linear" else FUSED_DB
    for name, value in found.items():
        near_db(value, fields[name], least, name)
    _module_state(case, fields, fp8_state(model))
    _module_weight(case, fields, given, before)


def _module_state(case: Case, fields: Tensors, state: Tensors) -> None:
    """Scales and histories: to the bit where nothing was computed before the cast."""
    for name, expected in fields.items():
        what, _, slot = name.partition(" ")
        if what not in ("scale", "amax_history"):
            continue
        found = state[f"{slot}.{what}"]
        last = "gemm2" if case["module"] == "LayerNormMLP" else "gemm1"
        given = ("gemm1.weight", "gemm2.weight", f"{last}.grad_output")
        if case["module"] == "Linear" or slot in given:
            equal(found, expected, name)
        else:
            torch.testing.assert_close(found, expected, rtol=NEAR, atol=0.0)


def _module_weight(case: Case, fields: Tensors, given: Tensors, before: Tensors) -> None:
    """The bytes of the weight in the last step, if TE showed them."""
    if "weight bytes" not in fields:
        return
    weight, scaling = given["weight"], case["scaling"]
    if scaling == "mxfp8":
        data = numerics.quantize_mxfp8(weight, 1)[0]
    elif scaling == "block":
        data = numerics.quantize_blocks(weight, (128, 128))[0]
    else:
        scale = before.get("gemm1.weight.scale", numerics.tensor_scale(numerics.amax(weight)))
        data = numerics.cast_to_fp8(weight, scale)
        equal(numerics.inverse(scale), fields["weight inverse"], "weight inverse")
    equal(data, fields["weight bytes"], "weight bytes")


CHECKS: dict[str, Callable[[Case, Tensors, Tensors], None]] = {
    "cast": _cast,
    "history": _history,
    "current": _current,
    "block": _block,
    "mxfp8": _mxfp8,
    "module": _module,
}
