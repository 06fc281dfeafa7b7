"""The results of a quantized linear by an oracle: float64 GEMMs of what `conform` quantizes."""

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform.gemms import multiplied
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand
from fp8stack.precision import load_recipe


def normal(*shape, seed=0, std=1.0):
    """Normally distributed numbers; columns differ in magnitude, so that blocks do."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return x * 2.0 ** (torch.arange(shape[-1]) % 7 - 3)


def run(layer, x, dy, forward=None):
    """y, dx, dw, db of one forward and backward pass; `forward` is called in place of `layer`."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x) if forward is None else forward(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


def quantized(recipe: str, x: Tensor, name: Operand, reduced: int) -> Tensor:
    """The operand of a GEMM that reduces `x` [rows, columns] over dimension `reduced`; in delayed
    scaling before the first update."""
    table = load_recipe(recipe).quantizers
    assert table is not None
    quantizer = table.rowwise(name) if reduced else table.columnwise(name)
    assert isinstance(quantizer, Quantizer)
    scale = 1.0 if recipe == "delayed" else None
    return multiplied(x, quantizer, name, reduced, None, scale)


def oracle(recipe: str, layer: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    """y, dx, dw, db in float64."""
    w, rows = layer.weight.detach(), x.reshape(-1, layer.in_features)
    dy_rows = dy.reshape(-1, layer.out_features)
    y = quantized(recipe, rows, "input", 1) @ quantized(recipe, w, "weight", 1).T
    dx = quantized(recipe, dy_rows, "grad_output", 1) @ quantized(recipe, w, "weight", 0)
    dw = quantized(recipe, dy_rows, "grad_output", 0).T @ quantized(recipe, rows, "input", 0)
    db = None
    if layer.bias is not None:
        y, db = y + layer.bias.detach().double(), dy_rows.double().sum(0)
    return [y.reshape(dy.shape), dx.reshape(x.shape), dw, db]


def assert_all_close(got, expected, tolerance=1e-5):
    names = ["y", "dx", "dw", "db"][: len(got)]
    for name, result, exact in zip(names, got, expected, strict=True):
        assert (result is None) == (exact is None), name
        if exact is not None:
            assert result.shape == exact.shape, name
            assert (result - exact).abs().max() <= tolerance * exact.abs().max(), name
