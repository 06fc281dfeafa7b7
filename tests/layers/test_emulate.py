"""Emulated linears on CPUs that compute in bfloat16: exact products, float32 sums, one rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand
from fp8stack.layers import build_backend
from fp8stack.precision import Hardware, load_recipe, resolve
from fp8stack.precision.rules import shipped
from tests.support.cases import case

LOW = [name for name in shipped() if load_recipe(name).is_fp8]
QUICK = ("delayed", "rowwise", "block", "mxfp8", "nvfp4")


def built(
    recipe: str,
    *,
    bias: bool = True,
    groups: int = 0,
    dtype: str = "bf16",
) -> Any:
    """A layer 64 -> 96 that computes in `dtype`, of integers."""
    chosen = load_recipe(recipe, {"compute_dtype": dtype})
    plan = resolve(chosen, Hardware("cpu"), "emulate")
    grouped = {"layer": groups} if groups else {}
    plan = plan.for_layers({"layer": (64, 96)}, grouped=grouped)
    backend = build_backend(plan)
    layer: Any
    if groups:
        layer = backend.grouped_linear("layer", groups, 64, 96, bias)
    else:
        layer = backend.linear("layer", 64, 96, bias)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed))
    backend.attach(layer)
    return layer


def integers(*shape: int, seed: int) -> Tensor:
    """Integers of four bits, whose products have exact sums in float32."""
    return torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float()


def passed(layer: Any, *more: Any) -> dict[str, Tensor]:
    """The output, and the gradients of input and weight."""
    x = integers(80, 64, seed=5).requires_grad_()
    y = layer(x.bfloat16(), *more)
    y.backward(integers(80, 96, seed=6).bfloat16())
    assert x.grad is not None
    assert (y.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("recipe", [case(name, quick=name in QUICK) for name in LOW])
def test_a_cpu_gives_the_same_with_bf16_instructions_and_without(recipe, groups, monkeypatch):
    more = (torch.tensor([16, 16, 80], dtype=torch.int32),) * bool(groups)
    results = {}
    for instructions in ("yes", "no"):
        monkeypatch.setenv("FP8STACK_CPU_BF16", instructions)
        results[instructions] = passed(built(recipe, groups=groups), *more)
    # Powers of two change no sum. Other scales may be multiplied before or after it is rounded to
    # float32, which a CPU's GEMM decides.
    quantizers = load_recipe(recipe).quantizers
    assert quantizers is not None
    powers = all(q.delayed or q.scale in ("e8m0", "power_of_two") for q in quantizers.each.values())
    rtol = 0.0 if powers else 2**-7
    for name, value in results["yes"].items():
        atol = rtol * float(value.abs().max())
        torch.testing.assert_close(value, results["no"][name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("instructions", ["yes", "no"])
def test_outputs_are_rounded_once_and_weight_gradients_not_at_all(instructions, monkeypatch):
    """Against sums in float64 of the dequantized bytes; with powers of two as scales, so that all
    sums are exact."""
    monkeypatch.setenv("FP8STACK_CPU_BF16", instructions)
    layer = built("mxfp8")
    results = passed(layer)
    quantizers = load_recipe("mxfp8").quantizers
    assert quantizers is not None
    tensors: dict[Operand, Tensor] = {
        "input": integers(80, 64, seed=5),
        "weight": layer.weight.detach(),
        "grad_output": integers(80, 96, seed=6),
    }

    def exact(name: Operand, dim: int) -> Tensor:
        quantizer = quantizers.rowwise(name) if dim == 1 else quantizers.columnwise(name)
        assert isinstance(quantizer, Quantizer)
        quantized = numerics.quantize(tensors[name], quantizer, dim)
        return numerics.dequantize(quantized).double()

    assert set(tensors) == set(OPERANDS)
    y = exact("input", 1) @ exact("weight", 1).t() + layer.bias.detach().double()
    dx = exact("grad_output", 1) @ exact("weight", 0)
    dw = exact("grad_output", 0).t() @ exact("input", 0)
    assert torch.equal(results["y"], y.float().bfloat16())
    assert torch.equal(results["dx"], dx.float().bfloat16().float())
    assert torch.equal(results["dw"], dw.float())
    assert not torch.equal(results["dw"], dw.float().bfloat16().float())


@pytest.mark.parametrize("instructions", ["yes", "no"])
def test_a_scale_out_of_float32s_range_loses_no_nan_in_bf16(instructions, monkeypatch):
    monkeypatch.setenv("FP8STACK_CPU_BF16", instructions)
    layer = built("current", bias=False)
    with torch.no_grad():
        layer.weight.mul_(1e-30)
    x = integers(16, 64, seed=1) * 1e-30
    x[3, 4] = torch.nan
    y = layer(x.bfloat16())
    assert y[3].isnan().all()
    assert (y[:3] == 0).all()
    reference = built("current", bias=False, dtype="fp32")
    with torch.no_grad():
        reference.weight.mul_(1e-30)
    torch.testing.assert_close(
        y, reference(x.bfloat16().float()).bfloat16(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.full
def test_compiled_code_computes_in_bf16_as_eager_code_does(monkeypatch):
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")
    eager, compiled = built("current"), built("current")
    compiled.compile(fullgraph=True, dynamic=False)
    expected, results = passed(eager), passed(compiled)
    for name, value in expected.items():
        assert torch.equal(value, results[name]), name
