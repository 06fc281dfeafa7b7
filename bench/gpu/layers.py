"""One layer's numbers: output and gradients against float64 GEMMs, as signal to noise in dB.

Against the same quantized operands a backend must be exact but for its sums and one rounding;
against unquantized ones the recipe's own error shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.cases import (
    Case,
    Context,
    Facts,
    backend_for,
    gradients,
    mark_weights_changed,
    plan_of,
    sqnr_db,
)
from fp8stack import numerics
from fp8stack.backends import Backend, build_backend
from fp8stack.formats import OPERANDS, Quantizer
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import MLP
from fp8stack.precision import Recipe, load_recipe

RECIPES = ("delayed", "current", "block", "mxfp8")
# Floors that tell right from wrong. One operand quantized by another rule is about 30 dB away, a
# wrong scale or layout below 10 dB; rounding to bfloat16 alone leaves more than 50 dB.
SAME_OPERANDS_DB = 38.0
BF16_DB = 45.0
QUANTIZED_DB = 15.0


class Shape(NamedTuple):
    """The rows and features of a linear, and whether it has a bias."""

    rows: int
    inputs: int
    outputs: int
    bias: bool

    def __str__(self) -> str:
        return f"{self.rows} x {self.inputs} -> {self.outputs}{' + bias' if self.bias else ''}"


SHAPES = (
    Shape(4096, 1024, 4096, True),
    Shape(2048, 768, 3072, False),
    Shape(1000, 512, 1536, True),  # rows that no FP8 GEMM takes: padded
)
FUSED = GPTConfig(vocabulary=256, context=128, layers=1, width=1024, heads=16)


def cases(context: Context) -> Iterator[Case]:
    """All of this section: the largest shape first, in every recipe."""
    for number, shape in enumerate(SHAPES[:1] if context.quick else SHAPES):
        yield Case(f"bf16 by reference, {shape}", partial(plain, context, shape))
        for recipe in RECIPES:
            for backend in ("te", "torch", "emulate"):
                check = partial(linear, context, recipe, backend, shape, False)
                yield Case(f"{recipe} by {backend}, {shape}", check)
            if number == 0:
                check = partial(linear, context, recipe, "torch", shape, True)
                yield Case(f"{recipe} by torch, compiled, {shape}", check)
    for recipe in RECIPES:
        for backend in ("te", "torch", "emulate"):
            check = partial(fused, context, recipe, backend, FUSED, 2048)
            yield Case(f"norms and MLP in {recipe} by {backend}", check)


# One linear


def linear(context: Context, recipe: str, backend: str, shape: Shape, compiled: bool) -> Facts:
    """An FP8 linear against float64 on quantized and on unquantized operands."""
    chosen = load_recipe(recipe)
    plan = plan_of(chosen, context, backend)
    made = backend_for(plan, {"linear": (shape.inputs, shape.outputs)})
    layer, x, dy = _prepared(context, made, shape)
    called = context.compiled(layer) if compiled else layer
    for _ in range(3 if chosen.delayed else 1):  # until the scales are found
        results = _once(layer, called, x, dy)
    exact = _products(layer, dy, (x, x, layer.weight, layer.weight, dy, dy))
    known = _products(layer, dy, quantized(chosen, x, layer.weight.detach(), dy))
    facts = {"quantized_db": _ratios(results, known), "unquantized_db": _ratios(results, exact)}
    holds = all(value >= SAME_OPERANDS_DB for value in facts["quantized_db"].values())
    return {"holds": holds, **facts}


def plain(context: Context, shape: Shape) -> Facts:
    """The bf16 linear that FP8 stands beside."""
    plan = plan_of(load_recipe("bf16"), context, "reference")
    made = backend_for(plan, {"linear": (shape.inputs, shape.outputs)})
    layer, x, dy = _prepared(context, made, shape)
    results = _once(layer, layer, x, dy)
    ratios = _ratios(results, _products(layer, dy, (x, x, layer.weight, layer.weight, dy, dy)))
    return {"holds": min(ratios.values()) >= BF16_DB, "unquantized_db": ratios}


def _prepared(context: Context, backend: Backend, shape: Shape) -> tuple[Any, Tensor, Tensor]:
    """The layer, x and dy: bfloat16 numbers whose rows and columns differ in magnitude."""
    generator = torch.Generator().manual_seed(5)
    layer = backend.linear("linear", shape.inputs, shape.outputs, shape.bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    x = torch.randn(shape.rows, shape.inputs, generator=generator)
    dy = torch.randn(shape.rows, shape.outputs, generator=generator) * 1e-3
    for operand in (x, dy):
        operand *= 2.0 ** (torch.arange(operand.shape[1]) % 7 - 3)
    backend.attach(layer)
    device = context.device
    return layer.to(device), x.bfloat16().to(device), dy.bfloat16().to(device)


def _once(layer: nn.Module, called: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx, dw and db of one pass."""
    mark_weights_changed(layer)
    x = x.detach().clone().requires_grad_()
    y = called(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    return found | {f"d{name[0]}": gradient for name, gradient in gradients(layer)}


def _products(layer: nn.Linear, dy: Tensor, operands: Sequence[Tensor]) -> dict[str, Tensor]:
    """y, dx, dw and db in float64, of operands as `quantized` gives them."""
    x_along, x_across, w_along, w_across, dy_along, dy_across = (x.double() for x in operands)
    with torch.no_grad():
        found = {
            "y": x_along @ w_along.t(),
            "dx": dy_along @ w_across,
            "dw": dy_across.t() @ x_across,
        }
        if layer.bias is not None:
            found |= {"y": found["y"] + layer.bias.double(), "db": dy.double().sum(0)}
        return found


def quantized(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """What the GEMMs multiply, by the casts alone: x, w and dy, each for a GEMM over its columns
    and for one over its rows; float64. In delayed scaling: once the amaxes are known."""
    assert recipe.quantizers is not None
    made = []
    for name, operand in zip(OPERANDS, (x, w, dy), strict=True):
        copies = recipe.quantizers.along(name), recipe.quantizers.across(name)
        for quantizer, dim in zip(copies, (1, 0), strict=True):
            assert isinstance(quantizer, Quantizer)
            scale = numerics.current_scale(numerics.amax(operand), quantizer)
            whole = scale if quantizer.delayed else None
            data = numerics.quantize(operand, quantizer, dim, scale=whole)
            made.append(numerics.dequantize(data).double())
    return made


def _ratios(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: sqnr_db(found[name], value) for name, value in expected.items()}


# Norms and an MLP, which TE fuses


class Norms(nn.Module):
    """A norm before a linear, and one before an MLP."""

    def __init__(self, backend: Backend, config: GPTConfig) -> None:
        super().__init__()
        self.backend = backend
        shapes, norm = config.linear_shapes(), (config.norm, config.width, config.norm_eps, True)
        self.first = backend.norm(*norm)
        name = "blocks.0.attention.qkv"
        self.qkv = backend.linear(name, *shapes[name], True)
        self.second = backend.norm(*norm)
        self.mlp = MLP(config, backend, "blocks.0.mlp")
        backend.attach(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The linear's output and the MLP's."""
        qkv = self.backend.norm_linear(x, self.first, self.qkv)
        return qkv, self.backend.norm_mlp(x, self.second, self.mlp)


def fused(context: Context, recipe: str, backend: str, config: GPTConfig, rows: int) -> Facts:
    """Outputs and gradients of the fused modules against unquantized float64."""
    chosen = load_recipe(recipe)
    plan = plan_of(chosen, context, backend)
    shapes = {k: v for k, v in config.linear_shapes().items() if "qkv" in k or "mlp" in k}
    backend_for(plan, shapes)  # skips where a layer would not be in FP8
    model = Norms(build_backend(plan.for_layers(config.linear_shapes())), config)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_norm_weight else 0.03 * noise)
    x = torch.randn(rows, config.width, generator=generator)
    outer = [
        torch.randn(rows, width, generator=generator) * 1e-3
        for width in (3 * config.width, config.width)
    ]
    model, x = model.to(context.device), x.to(context.device)
    outer = [part.to(context.device) for part in outer]
    for _ in range(3 if chosen.delayed else 1):
        results = _run_norms(model, x, outer)
    ratios = _ratios(results, _exact_norms(model, x, outer))
    holds = all(value >= QUANTIZED_DB for value in ratios.values())
    return {"holds": holds, "unquantized_db": ratios}


def _run_norms(model: nn.Module, x: Tensor, outer: list[Tensor]) -> dict[str, Tensor]:
    mark_weights_changed(model)
    x = x.detach().clone().requires_grad_()
    outputs = model(x)
    torch.autograd.backward(outputs, [dy.to(y.dtype) for dy, y in zip(outer, outputs, strict=True)])
    assert x.grad is not None
    found = {"qkv": outputs[0].detach(), "mlp": outputs[1].detach(), "dx": x.grad}
    return found | {f"d {name}": gradient for name, gradient in gradients(model)}


def _exact_norms(model: Norms, x: Tensor, outer: list[Tensor]) -> dict[str, Tensor]:
    """The same in float64, by plain torch."""
    wide = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    x = x.detach().double().requires_grad_()

    def norm(name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], wide[f"{name}.weight"], wide[f"{name}.bias"], 1e-5)

    def multiply(y: Tensor, name: str) -> Tensor:
        return F.linear(y, wide[f"{name}.weight"], wide[f"{name}.bias"])

    qkv = multiply(norm("first"), "qkv")
    hidden = F.gelu(multiply(norm("second"), "mlp.up"), approximate="tanh")
    mlp = multiply(hidden, "mlp.down")
    torch.autograd.backward([qkv, mlp], [part.double() for part in outer])
    assert x.grad is not None
    found = {"qkv": qkv.detach(), "mlp": mlp.detach(), "dx": x.grad}
    return found | {
        f"d {name}": value.grad for name, value in wide.items() if value.grad is not None
    }
