"""What a quantized linear must compute: float64 GEMMs on what `conform`'s oracle quantizes."""

from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.conform.gemms import multiplied
from fp8stack.formats import Operand, Quantizer, ScaleFormat
from fp8stack.precision import load_recipe


def normal(*shape, seed=0, std=1.0):
    """Normally distributed, the columns of different magnitudes, so that blocks differ."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return x * 2.0 ** (torch.arange(shape[-1]) % 7 - 3)


def run(layer, x, dy, forward=None):
    """y, dx, dw, db of one forward and backward pass; `forward` is called in place of `layer`."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x) if forward is None else forward(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


def quantized(
    recipe: str, x: Tensor, name: Operand, reduced: int, draws: Any = None, **options: Any
) -> Tensor:
    """What a GEMM that reduces `x` [rows, columns] over dimension `reduced` multiplies."""
    gradient = name == "grad_output"
    direction = "backward" if gradient else "forward"
    power: ScaleFormat = "float32"
    if options.get("power_of_two", recipe == "block"):
        power = "power_of_two"
    if recipe in ("delayed", "current"):  # delayed: before the first update
        format = options.get(f"{direction}_format", "e5m2" if gradient else "e4m3")
        quantizer = Quantizer(format=format, scale=power, eps=options.get("eps", 0.0))
    elif recipe == "mxfp8":
        rounding = options.get("scale_rounding", "rceil")
        quantizer = Quantizer(block=(1, 32), scale="e8m0", scale_rounding=rounding)
    elif recipe == "block":
        quantizer = Quantizer(block=(128 if name == "weight" else 1, 128), scale=power)
    elif recipe == "rowwise":
        quantizer = Quantizer(block="row", scale="power_of_two")
    else:
        table = load_recipe(recipe).quantizers
        assert table is not None
        found = table.along(name) if reduced else table.across(name)
        assert isinstance(found, Quantizer)
        quantizer = found
    scale = 1.0 if recipe == "delayed" else None
    return multiplied(x, quantizer, name, reduced, draws, scale)


def oracle(recipe: str, layer: nn.Linear, x: Tensor, dy: Tensor, **options) -> list[Tensor | None]:
    """y, dx, dw, db in float64."""
    w, rows = layer.weight.detach(), x.reshape(-1, layer.in_features)
    dy_rows = dy.reshape(-1, layer.out_features)

    def q(tensor: Tensor, name: Operand, reduced: int) -> Tensor:
        return quantized(recipe, tensor, name, reduced, **options)

    y = q(rows, "input", 1) @ q(w, "weight", 1).T
    dx = q(dy_rows, "grad_output", 1) @ q(w, "weight", 0)
    dw = q(dy_rows, "grad_output", 0).T @ q(rows, "input", 0)
    db = None
    if layer.bias is not None:
        y, db = y + layer.bias.detach().double(), dy_rows.double().sum(0)
    return [y.reshape(dy.shape), dx.reshape(x.shape), dw, db]


def assert_all_close(got, expected, tolerance=1e-5):
    names = ["y", "dx", "dw", "db"][: len(got)]
    for name, one, other in zip(names, got, expected, strict=True):
        assert (one is None) == (other is None), name
        if other is not None:
            assert one.shape == other.shape, name
            assert (one - other).abs().max() <= tolerance * other.abs().max(), name
