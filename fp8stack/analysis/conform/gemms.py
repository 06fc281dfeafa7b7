"""Checks GEMMs of each backend and recipe, forward and backward, against exact operands.

The reference multiplies the operands of `oracles.quantize` in float64, so the remaining error is
rounding. A float32 sum of K products, in any order, is off by at most K 2^-24 of the sum
of their magnitudes, and the output is rounded once more, with a bias twice. Tensor cores add FP8
products with fewer bits: see `accumulation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.accumulation import EXACT_SUM, accumulation_error
from fp8stack.analysis.conform.check_inputs import QUANTIZED_RECIPES
from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    agreement_db,
    backend_for,
    mark_weights_changed,
    plan_of,
)
from fp8stack.analysis.conform.scale_layouts import STORED
from fp8stack.common.formats import FORMATS, FormatName, Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand, Quantizers
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales, scaled_gemm
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import MLP
from fp8stack.precision import Recipe, load_recipe

RECIPES = ("delayed", *QUANTIZED_RECIPES)
QUANTIZED_DB = 15.0  # for operands quantized after a norm; a wrong scale gives less than 10 dB
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# The number of steps of 32 products whose sum is added up in float32, with slow accumulation.
_PROMOTED = 4


class Shape(NamedTuple):
    """The rows and features of a linear, and whether it has a bias."""

    rows: int
    inputs: int
    outputs: int
    bias: bool

    def __str__(self) -> str:
        return f"{self.rows} x {self.inputs} -> {self.outputs}{' + bias' if self.bias else ''}"


LONG = {
    "current": (ScaleLayout.PER_TENSOR, ScaleLayout.PER_TENSOR),
    "rowwise": (ScaleLayout.PER_ROW, ScaleLayout.PER_ROW),
    "mxfp8": (ScaleLayout.MX, ScaleLayout.MX),
    "nvfp4": (ScaleLayout.NV, ScaleLayout.NV),
    "block": (ScaleLayout.ROWS, ScaleLayout.ROWS),
    "block forward": (ScaleLayout.ROWS, ScaleLayout.SQUARES),
}
QUICK = (Shape(48, 128, 256, True),)
SHAPES = (
    *QUICK,
    Shape(384, 512, 768, False),
    Shape(200, 256, 128, True),  # rows that no FP8 GEMM takes, so they are padded
    Shape(33, 50, 70, True),  # features that no FP8 GEMM takes
)
FUSED = GPTConfig(vocabulary=256, context=128, layers=1, width=256, heads=4)


def gemms(context: Context) -> Iterator[Check]:
    """Check products of long rows, with slow and fast accumulation, and linears by backend and
    recipe."""
    for recipe, (kind_a, kind_b) in LONG.items():
        name, alone = f"scales {kind_a.value} x {kind_b.value}", kind_a is ScaleLayout.PER_TENSOR
        formats: tuple[FormatName, ...] = ("e4m3", "e5m2") if alone else ("e4m3",)
        for format in ("e2m1",) if kind_a is ScaleLayout.NV else formats:
            for fast in (False, True) if alone else (False,):
                accumulation = f", {'fast' if fast else 'slow'} accumulation" if alone else ""
                check = partial(long_rows, context, recipe, format, fast)
                yield Check(f"{' x '.join(_formats(format))}, {name}{accumulation}", check)
    for shape in QUICK if context.quick else SHAPES:
        check = partial(linear, context, "bf16", "reference", shape)
        yield Check(f"bf16 by reference, {shape}", check)
        for recipe in RECIPES:
            for backend in ("te", "torch", "emulate"):
                check = partial(linear, context, recipe, backend, shape)
                yield Check(f"{recipe} by {backend}, {shape}", check)
    if context.quick:
        return
    for recipe in RECIPES[:4]:
        for backend in ("torch", "emulate"):
            check = partial(linear, context, recipe, backend, SHAPES[0], compiled=True)
            yield Check(f"{recipe} by {backend}, compiled, {SHAPES[0]}", check)
        for backend in ("te", "torch", "emulate"):
            check = partial(fused, context, recipe, backend)
            yield Check(f"norms and MLP in {recipe} by {backend}", check)


def within(actual: dict[str, Tensor], expected: dict[str, tuple[Tensor, Tensor]]) -> Facts:
    """Check that tensors are within their bounds: `{name: (value, bound)}`, float64. `worst` is the
    largest error as a share of its bound."""
    worst = {}
    for name, (value, bound) in expected.items():
        result = actual[name].detach().double().cpu()
        share = ((result - value).abs() / bound.clamp_min(1e-300)).nan_to_num(nan=np.inf)
        worst[name] = float(f"{float(share.max()):.3g}") if result.shape == value.shape else np.inf
    return {
        "holds": max(worst.values()) <= 1.0,
        "worst": {k: min(v, 1e9) for k, v in worst.items()},
    }


# scaled_gemm by itself


def _formats(format: FormatName) -> tuple[FormatName, FormatName]:
    """The formats of both operands: no GEMM takes two in E5M2."""
    return format, "e4m3" if format == "e5m2" else format


def long_rows(context: Context, recipe: str, format: FormatName, fast: bool) -> Facts:
    """Check products of positive operands with long sums, in which accumulation errors cannot
    cancel, scaled as in a recipe's weight gradient or forward pass: see `LONG`. With fast
    accumulation their bound is wide, so sums that lose nothing are checked as well."""
    plan_of(load_recipe(recipe.split()[0]), context, "torch")
    K, size = (1024 if context.quick else 8192), 128
    generator = np.random.default_rng(context.seed)
    operands, exact = [], []
    blocks = {  # rows and columns that share a scale
        ScaleLayout.PER_TENSOR: (size, K), ScaleLayout.PER_ROW: (1, K), ScaleLayout.MX: (1, 32),
        ScaleLayout.NV: (1, 16), ScaleLayout.ROWS: (1, 128), ScaleLayout.SQUARES: (128, 128),
    }  # fmt: skip
    for name, kind in zip(_formats(format), LONG[recipe], strict=True):
        # Codes of values from 2^-3 up to 2^2, and scales from 2^-3 to 2^3, exact in every format.
        first, last = np.searchsorted(oracles.grid(name), (2.0**-3, 2.0**2))
        codes: oracles.Array = generator.integers(first, last, (size, K), dtype=np.uint8)
        tall, wide = blocks[kind]
        scales = np.ldexp(1.0, generator.integers(-3, 4, (size // tall, K // wide)))
        spread = scales.repeat(tall, 0).repeat(wide, 1)
        exact.append(torch.from_numpy(oracles.decode(codes, name) * spread))
        upper_scale = None
        if kind is ScaleLayout.NV:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
            upper_scale = torch.tensor(0.75).to(context.device)
            exact[-1] *= 0.75
        held = torch.from_numpy(scales).to(STORED.get(kind, torch.float32)).to(context.device)
        packed = held.reshape(()) if kind is ScaleLayout.PER_TENSOR else pack_scales(held, kind)
        data = torch.from_numpy(codes).view(FORMATS[name].dtype or torch.uint8)
        operands.append(Scaled(data.to(context.device), packed, kind, upper_scale))
    dtype = torch.float32 if LONG[recipe][0] is ScaleLayout.PER_TENSOR else torch.bfloat16
    product = scaled_gemm(operands[0], operands[1], dtype, fast_accumulation=fast)
    value = exact[0] @ exact[1].t()
    bound = _bound(context, value, value, K, dtype)
    # The upper scale of NVFP4 is no power of two.
    powers = LONG[recipe][0] is not ScaleLayout.NV
    bound = bound + _core_error(context, exact[0], exact[1], fast, powers)
    results, expected = {"y": product}, {"y": (value, bound)}
    if fast:
        results["exact"], sums = _exact_sums(context, format, K, size)
        expected["exact"] = sums, torch.zeros_like(sums)
    return within(results, expected)


def _exact_sums(context: Context, format: FormatName, K: int, size: int) -> tuple[Tensor, Tensor]:
    """The product with fast accumulation of matrices of zeros and ones, whose sums are small enough
    to lose nothing, and the same product in float64: [size, size]."""
    generator = np.random.default_rng(context.seed + 1)
    operands, values = [], []
    for name in _formats(format):
        ones = generator.random((size, K)) < 0.5
        codes = np.searchsorted(oracles.grid(name), ones * 1.0).astype(np.uint8)
        values.append(torch.from_numpy(oracles.decode(codes, name)).double())
        data = torch.from_numpy(codes).view(FORMATS[name].dtype or torch.uint8).to(context.device)
        operands.append(Scaled(data, torch.ones((), device=context.device), ScaleLayout.PER_TENSOR))
    sums = values[0] @ values[1].t()
    assert float(sums.max()) < 2 * EXACT_SUM
    a, b = operands
    return scaled_gemm(a, b, torch.float32, fast_accumulation=True), sums


def _bound(
    context: Context, value: Tensor, magnitudes: Tensor, reduced: int, dtype: torch.dtype
) -> Tensor:
    """The error bound of a result `value`, whose products' magnitudes sum up to `magnitudes`, that
    was summed in float32."""
    share = (reduced + 8) * 2.0**-24
    if context.device == "cuda":
        share *= 4  # tensor cores may truncate
    return share * magnitudes + ROUNDOFF[dtype] * 1.01 * value.abs()


def _core_error(context: Context, a: Tensor, b: Tensor, fast: bool, powers: bool = False) -> Tensor:
    """The error that tensor cores add in `a @ b.t()`, see `accumulation_error`; 0 on a CPU. Scales
    are `powers` of two."""
    if context.device == "cpu":
        return a.new_zeros(())
    a, b = a.to(context.device), b.to(context.device)
    return accumulation_error(a, b, None if fast else _PROMOTED, exact=powers).cpu()


# One linear


def linear(
    context: Context,
    recipe: str | Recipe,
    backend: str,
    shape: Shape,
    compiled: bool = False,
    **overrides: Any,
) -> Facts:
    """Check y, dx, dw and db of a linear in FP8, FP6, FP4 or, for comparison, bf16. `overrides`
    change the recipe, if it is given by name."""
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    if backend == "te" and chosen.quantizers and chosen.quantizers.stochastic:
        # TE does not show its random bits.
        assert isinstance(recipe, str)
        chosen = load_recipe(recipe, overrides | {"grad_output": {"rounding": "nearest"}})
    plan = plan_of(chosen, context, backend)
    backend_of_layer = backend_for(plan, {"linear": shape[1:3]})
    quantizers = chosen.quantizers.each.values() if chosen.quantizers else ()
    tensors = _operands(shape, context.seed, not any(q.hadamard for q in quantizers))
    layer = backend_of_layer.linear("linear", *shape[1:])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(tensors[name])
    backend_of_layer.attach(layer)
    layer.to(context.device)
    x, dy = (tensors[name].to(context.device) for name in ("input", "grad_output"))
    called = context.compiled(layer) if compiled else layer
    passes = 3 if chosen.delayed else 1  # until the scales are found
    for _ in range(passes):
        results = one_pass(layer, called, x, {"y": dy})
    draws = getattr(getattr(layer, "operands", None), "draws", None)
    for name in ("weight", "bias")[: 1 + shape.bias]:
        results[f"d{name[0]}"] = results.pop(f"d {name}")
    expected = _expected(context, chosen, shape, tensors, draws, passes - 1, results, backend)
    return within(results, expected)


@lru_cache(maxsize=8)
def _operands(shape: Shape, seed: int, wide: bool) -> dict[str, Tensor]:
    """x, dy, weight and bias: eight-bit integers times powers of two. Columns of x and dy differ in
    magnitude: by 2^28 if `wide`, to reveal the direction of blocks, else by 2^6, which keeps the
    sums of a Hadamard transform exact."""
    generator = torch.Generator().manual_seed(seed + 5)
    sizes = {
        "input": (shape.rows, shape.inputs),
        "weight": (shape.outputs, shape.inputs),
        "grad_output": (shape.rows, shape.outputs),
        "bias": (shape.outputs,),
    }
    factors = {"input": 0, "weight": -6, "grad_output": -10, "bias": -6}
    operands = {
        name: (32 * torch.randn(size, generator=generator)).round().clamp(-255, 255)
        * 2.0 ** (factors[name] - 5)
        for name, size in sizes.items()
    }
    for name in ("input", "grad_output"):
        place = torch.arange(operands[name].shape[1])
        operands[name] *= 2.0 ** (5 * place % 29 - 14 if wide else place % 7 - 3)
    return {name: value.bfloat16() for name, value in operands.items()}


def one_pass(model: nn.Module, called: Any, x: Tensor, dys: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of one pass, by the names in `dys`, "dx", and the gradient of each parameter."""
    mark_weights_changed(model)
    x = x.detach().clone().requires_grad_()
    output = called(x)
    ys = dict(zip(dys, output if isinstance(output, tuple) else (output,), strict=True))
    torch.autograd.backward([*ys.values()], [dys[name].to(y.dtype) for name, y in ys.items()])
    assert x.grad is not None
    results = {name: y.detach() for name, y in ys.items()} | {"dx": x.grad}
    return results | _gradients(dict(model.named_parameters()))


def _gradients(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each parameter that has one."""
    return {f"d {name}": x.grad for name, x in parameters.items() if x.grad is not None}


def _expected(
    context: Context,
    recipe: Recipe,
    shape: Shape,
    tensors: dict[str, Tensor],
    draws: Any,
    counter: int,
    results: dict[str, Tensor],
    backend: str,
) -> dict[str, tuple[Tensor, Tensor]]:
    """y, dx, dw and db in float64, each with its error bound, of the pass `counter`."""
    x, w, dy = (
        [
            _quantized(recipe, tensors[name], name, columnwise, draws, counter)
            for columnwise in (False, True)
        ]
        for name in OPERANDS
    )
    products = {
        "y": (x[0], w[0].t(), shape.inputs),
        "dx": (dy[0], w[1], shape.outputs),
        "dw": (dy[1].t(), x[1], shape.rows),
    }
    bounded = {}
    bias = tensors["bias"].double() if shape.bias else torch.zeros(())
    for name, (a, b, reduced) in products.items():
        value, magnitudes = a @ b, a.abs() @ b.abs()
        if name == "y":
            value, magnitudes = value + bias, magnitudes + bias.abs()
        # TE's and torch's linears round dw to bfloat16, also if it is float32.
        dtype = results[name].dtype if backend in ("emulate", "torch") else torch.bfloat16
        bound = _bound(context, value, magnitudes, reduced, dtype)
        if backend in ("te", "torch"):
            bound = bound + _core_error(context, a, b.t(), fast=name == "y")
        if name == "y" and shape.bias:  # the product may be rounded before the bias is added
            bound = bound + ROUNDOFF[dtype] * (value.abs() + bias.abs())
        bounded[name] = value, bound
    if shape.bias:
        rows = tensors["grad_output"].double()
        value, magnitudes = rows.sum(0), rows.abs().sum(0)
        bound = _bound(context, value, magnitudes, shape.rows, dtype)
        bounded["db"] = value, bound
    return bounded


def _quantized(
    recipe: Recipe, x: Tensor, name: Operand, columnwise: bool, draws: Any, counter: int
) -> Tensor:
    """The values of an operand that a GEMM multiplies, in float64."""
    table = recipe.quantizers or Quantizers()
    chosen, dim = (table.columnwise(name), 0) if columnwise else (table.rowwise(name), 1)
    if chosen == "forward":
        chosen, dim = table.rowwise(name), 1
    if not isinstance(chosen, Quantizer):
        return x.double()
    scale = None
    if chosen.delayed:
        slot = oracles.DelayedSlot(chosen.format, 2, chosen.margin)
        slot.record(float(oracles.amax(x.float().numpy()).max()))
        slot.update()
        scale = slot.scale
    return multiplied(x, chosen, name, dim, draws, scale, counter)


def multiplied(
    x: Tensor,
    quantizer: Quantizer,
    name: Operand,
    dim: int,
    draws: Any,
    scale: float | None = None,
    counter: int = 0,
) -> Tensor:
    """The values of the operand `name` in a GEMM that reduces it over `dim`, in float64. `draws`
    are the layer's, in the pass `counter`; `scale` is delayed scaling's."""
    bits = None
    if quantizer.stochastic:
        drawn = draws.bits(name, dim == 0, len(x))
        bits = partial(oracles.philox, drawn.seed, int(drawn.stream), counter)
    values, largest = x.float().numpy(), torch.finfo(x.dtype).max
    quantized = oracles.quantize(values, quantizer, dim, overflow=largest, bits=bits, scale=scale)
    return torch.from_numpy(quantized.exact)  # Hadamard transforms of both operands cancel


# Norms and an MLP, which TE fuses


class NormsBeforeLinears(nn.Module):
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
        """The outputs of the linear and of the MLP."""
        qkv = self.backend.norm_linear(x, self.first, self.qkv)
        return qkv, self.backend.norm_mlp(x, self.second, self.mlp)


def fused(context: Context, recipe: str, backend: str) -> Facts:
    """Check outputs and gradients of the fused modules against those of plain torch in float32."""
    chosen, config, rows = load_recipe(recipe), FUSED, 256
    plan = plan_of(chosen, context, backend)
    shapes = {k: v for k, v in config.linear_shapes().items() if "qkv" in k or "mlp" in k}
    backend_for(plan, shapes)  # skips if a layer would not be in FP8
    plain = plan_of(load_recipe("fp32"), context, "reference")
    model, exact = (
        NormsBeforeLinears(build_backend(plan_of_model.for_layers(config.linear_shapes())), config)
        for plan_of_model in (plan, plain)
    )
    generator = torch.Generator().manual_seed(context.seed + 6)
    with torch.no_grad():
        parameters = dict(exact.named_parameters())
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_norm_weight else 0.03 * noise)
            parameters[name].copy_(parameter)
    x = torch.randn(rows, config.width, generator=generator)
    dys = {
        name: (torch.randn(rows, width, generator=generator) * 1e-3).to(context.device)
        for name, width in (("qkv", 3 * config.width), ("mlp", config.width))
    }
    model, exact, x = model.to(context.device), exact.to(context.device), x.to(context.device)
    for _ in range(3 if chosen.delayed else 1):
        results = one_pass(model, model, x, dys)
    expected = one_pass(exact, exact, x, dys)
    ratios = {name: agreement_db(results[name], value) for name, value in expected.items()}
    holds = all(value >= QUANTIZED_DB for value in ratios.values())
    return {"holds": holds, "unquantized_db": ratios}
