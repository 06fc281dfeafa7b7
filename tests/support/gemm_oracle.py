"""What a quantized linear must compute: float64 GEMMs on the bytes that the casts give."""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.conform import oracles
from fp8stack.precision import load_recipe
from tests.support.oracles import scale_of


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


# The oracle: bytes from the casts, decoded and multiplied in float64.


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One scale per block -> one per element, float64."""
    rows, columns = (torch.arange(n) // size for n, size in zip(shape, block, strict=True))
    return scales.double()[rows][:, columns]


def per_tensor(x: Tensor, format: str, scale: float) -> Tensor:
    inverse = np.float32(1) / np.float32(scale)
    return numerics.cast_to_fp8(x, float(scale), format).double() * float(inverse)


def quantized(recipe: str, x: Tensor, name: str, reduced: int, **options) -> Tensor:
    """What a GEMM that reduces `x` [rows, columns] over dimension `reduced` multiplies."""
    if recipe in ("delayed", "current"):
        which = "backward" if name == "grad_output" else "forward"
        hybrid = {"forward_format": "e4m3", "backward_format": "e5m2"}
        format = options.get(f"{which}_format", hybrid[f"{which}_format"])
        amax = max(float(x.abs().max()), options.get("eps", 0.0))
        scale = scale_of(amax, format, options.get("power_of_two", False))
        return per_tensor(x, format, 1.0 if recipe == "delayed" else scale)
    if recipe == "mxfp8":
        rounding = options.get("scale_rounding", "rceil")
        data, codes = numerics.quantize_mxfp8(x, reduced, "e4m3", rounding)
        block = (1, 32) if reduced == 1 else (32, 1)
        return data.double() * spread(codes.float(), block, x.shape)
    if recipe == "nvfp4":  # both Hadamard transforms of dw cancel, so the order of sums is not seen
        table = load_recipe(recipe).quantizers
        across = reduced == 0
        quantizer = table.across(name) if across else table.along(name)
        bits = None
        if quantizer.stochastic:
            drawn = options["draws"].bits(name, across, len(x))
            bits = partial(oracles.philox, drawn.seed, drawn.stream, 0)
        made = oracles.quantize(x.float().numpy(), quantizer, reduced, overflow=0.0, bits=bits)
        return torch.from_numpy(made.exact)
    if recipe == "rowwise":
        largest = x.abs().amax(reduced, keepdim=True).double().clamp_min(1e-12)
        scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
        data = (x.double() * scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return data.double() / scale
    block = (128, 128) if name == "weight" else (1, 128) if reduced == 1 else (128, 1)
    data, inverse = numerics.quantize_blocks(x, block, "e4m3", options.get("power_of_two", True))
    return data.double() * spread(inverse, block, x.shape)


def oracle(recipe: str, layer: nn.Linear, x: Tensor, dy: Tensor, **options) -> list[Tensor | None]:
    """y, dx, dw, db in float64."""
    w, rows = layer.weight.detach(), x.reshape(-1, layer.in_features)
    dy_rows = dy.reshape(-1, layer.out_features)

    def q(tensor: Tensor, name: str, reduced: int) -> Tensor:
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
