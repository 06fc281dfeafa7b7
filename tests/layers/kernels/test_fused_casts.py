"""Casts of an activation's output or gradient: the operators on a CPU, and their kernel in Triton's
interpreter against numpy, and its code. See `tests/support/triton_code.py` for how."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8stack.analysis.conform.casts import as_operands, named
from fp8stack.analysis.conform.checks import equal
from fp8stack.analysis.conform.oracles import quantize
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import fused_casts
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_blocks, cast_product, product_amax
from tests.support.cases import case
from tests.support.oracles import codes, decoded, fp8_codes, to_numpy
from tests.support.triton_code import blocks_per_sm, launched_on_a_cpu, ptx_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE = 3.7
Range = tuple[np.ndarray, np.ndarray]
"""The least and the largest right value, elementwise."""


def make_product(
    name: str, shape: tuple[int, int], dtype: torch.dtype, backward: bool
) -> FusedInput:
    """A product of both signs, with NaN, infinities and zeros; its last element is the amax."""
    generator = torch.Generator().manual_seed(len(name) + shape[0])
    rows, columns = shape
    x = torch.randn(rows, columns * (2 if name == "swiglu" else 1), generator=generator) * 4
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-6, 60.0, -60.0])
    row = x[rows // 2]
    row[: min(8, len(row) // 2)] = special[: min(8, len(row) // 2)]
    dy = torch.randn(shape, generator=generator)
    x[-1, -1], dy[-1, -1] = 9.0, 50.0
    return FusedInput(name, x.to(dtype), dy.to(dtype) if backward else None)


def moved(product: FusedInput, device: str) -> FusedInput:
    dy = None if product.dy is None else product.dy.to(device)
    return product._replace(x=product.x.to(device), dy=dy)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 or float32 values rounded to `dtype`."""
    with np.errstate(all="ignore"):
        return to_numpy(torch.from_numpy(x.astype(np.float32)).to(dtype))


def expected(product: FusedInput) -> Range:
    """The range of right values, computed in float64 and rounded where eager code rounds. Half its
    width, the error of exp, erf and divisions, is 2^-20 of the largest term; 0 for casts and
    ReLU^2."""
    dtype, name = product.x.dtype, product.name
    x = to_numpy(product.x).astype(np.float64)
    dy = None if product.dy is None else to_numpy(product.dy).astype(np.float64)
    with np.errstate(all="ignore"):
        if name == "cast":
            exact = x.astype(np.float32)
            return exact, exact
        if name == "relu2":
            positive = np.where(x <= 0, 0, x)
            exact = positive * positive if dy is None else np.where(x <= 0, 0, dy * 2 * positive)
            return (rounded(exact, dtype),) * 2
        if name == "swiglu":
            return swiglu(x, dy, dtype)
        near = x * _SHARES[name](x) if dy is None else dy * _SLOPES[name](x)
        error = 2.0**-20 * np.abs(x if dy is None else dy)
        error = np.where(np.isfinite(error), error, 0)
        return rounded(near - error, dtype), rounded(near + error, dtype)


def swiglu(x: np.ndarray, dy: np.ndarray | None, dtype: torch.dtype) -> Range:
    gate, value = np.split(x, 2, axis=1)
    share = 1 / (1 + np.exp(-gate))
    error = np.where(np.isfinite(gate), 2.0**-20 * np.abs(gate), 0)
    ends = [rounded(gate / (1 + np.exp(-gate)) + side * error, dtype) for side in (-1, 1)]
    products = [rounded(end * (value if dy is None else dy), dtype) for end in ends]
    first = np.minimum(*products), np.maximum(*products)
    if dy is None:
        return first
    upper = rounded(dy * value, dtype).astype(np.float64)
    error = np.where(np.isfinite(upper), 2.0**-20 * np.abs(upper), 0)
    near = upper * share * (1 + gate * (1 - share))
    of_gate = [rounded(near + side * error, dtype) for side in (-1, 1)]
    low, high = (np.concatenate(pair, axis=1) for pair in zip(of_gate, first, strict=True))
    return low, high


def _pdf(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _cdf(x: np.ndarray) -> np.ndarray:
    return (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _tanh_share(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _tanh_slope(x: np.ndarray) -> np.ndarray:
    share = _tanh_share(x)
    inner = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return share + x * share * (1 - share) * inner


_SHARES = {"gelu": _cdf, "gelu_tanh": _tanh_share}
_SLOPES = {"gelu": lambda x: _cdf(x) + x * _pdf(x), "gelu_tanh": _tanh_slope}


def exact_gates(shape: tuple[int, int]) -> FusedInput:
    """A backward pass of SwiGLU whose sigmoids are 0, 1/2 or 1, so that its result is exact."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape[0], 2 * shape[1], generator=generator)
    gates = torch.tensor([0.0, 100.0, -200.0])
    x[:, : shape[1]] = gates[torch.randint(3, shape, generator=generator)]
    dy = torch.randn(shape, generator=generator) * 10.0 ** torch.linspace(-9, 9, shape[0])[:, None]
    dy[0, 0] = math.nan
    return FusedInput("swiglu", x.bfloat16(), dy.bfloat16())


def differences(names: tuple[str, ...], device: str = "cpu") -> list[str]:
    """The cases in which a cast differs from numpy."""
    wrong: list[str] = []
    shapes = ((1, 16), (7, 5), (129, 65), (144, 80))
    for name, backward in itertools.product(names, (False, True)):
        for place, shape in enumerate(shapes):
            dtype = DTYPES[place % 3] if place else torch.bfloat16
            for format in ("e4m3", "e5m2")[place % 2 :]:
                product = make_product(name, shape, dtype, backward)
                wrong += cast_differences(product, moved(product, device), format)
    return wrong + block_differences(device)


def cast_differences(product: FusedInput, on_device: FusedInput, format: Any) -> list[str]:
    case_name = f"{product.name} {tuple(product.shape)} {product.x.dtype} "
    case_name += f"{product.dy is not None} {format}: "
    scale = torch.tensor([1.0, SCALE], device=on_device.x.device)[1]
    cast = cast_product(on_device, scale, format, columnwise=True, record=True, sums=True)
    data_only = cast_product(on_device, scale, format, columnwise=False, record=False, sums=False)
    low, high = expected(product)
    data, transposed = codes(cast.data.cpu()), codes(cast.transposed.cpu())
    sizes = [np.max(np.abs(end), where=~np.isnan(end), initial=0) for end in (low, high)]
    amaxes = {"amax": cast.amax.item(), "amax alone": product_amax(on_device).item()}
    with np.errstate(all="ignore"):
        bounds = [decoded(format)[fp8_codes(end, SCALE, format)] for end in (low, high)]
        sums, error = cast.sums.cpu().numpy(), 2.0**-20 * np.abs(high).sum(0)
        near = low.astype(np.float64).sum(0) - error <= sums
        near &= sums <= high.astype(np.float64).sum(0) + error
        special = ~np.isfinite(low + high).all(0)
    values = decoded(format)[data]
    same = {
        "data": (bounds[0] <= values) & (values <= bounds[1]) | np.isnan(values),
        "NaN": np.isnan(values) == np.isnan(low),
        "transpose": transposed == data.T,
        "alone": codes(data_only.data.cpu()) == data,
        "sums": near | special,
        **{key: min(sizes) <= value <= max(sizes) for key, value in amaxes.items()},
    }
    if product.name in ("cast", "relu2"):
        same["bytes"] = data == fp8_codes(low, SCALE, format)
    if [data_only.transposed, data_only.amax, data_only.sums] != [None] * 3:
        same["what is not wanted"] = False
    return [case_name + key for key, right in same.items() if not np.all(right)]


def block_differences(device: str) -> list[str]:
    """The cases in which a cast by blocks differs from numpy: of products that are exact, of sizes
    that do not divide into tiles, and of layouts. Other bytes are rows of `fp8stack conform`."""
    blocks = Quantizer(block=(1, 128), scale="power_of_two")
    mx = Quantizer(block=(1, 32), scale="e8m0")
    mx_even = Quantizer(format="e5m2", block=(1, 32), scale="e8m0", scale_rounding="even")
    tiny = FusedInput("cast", torch.full((128, 128), 1e-38))
    cases = [(tiny, blocks), (exact_gates((128, 256)), blocks), (exact_gates((160, 96)), mx)]
    cases += [(make_product("relu2", (128, 128), DTYPES[0], True), blocks)]
    cases += [(make_product("relu2", (64, 160), DTYPES[0], True), mx_even)]
    return [line for case in cases for line in block_cast_differences(*case, device)]


def block_cast_differences(product: FusedInput, quantizer: Quantizer, device: str) -> list[str]:
    cast = cast_blocks(moved(product, device), quantizer, columnwise=True, sums=True)
    values, limit = expected_exactly(product), float(torch.finfo(product.x.dtype).max)
    references = [quantize(values, quantizer, dim, overflow=limit) for dim in (1, 0)]
    copies = (cast.data, cast.inv_scale), (cast.transposed, cast.columnwise_inv_scale)
    case_name = f"blocks of {product.name} {tuple(product.shape)}: "
    actual = named(*copies)
    facts = equal(actual, as_operands(references, quantizer))
    wrong = [case_name + line for line in facts.get("first", [])]
    return wrong + [
        case_name + "layout" for _, inverse in copies if not inverse.t().is_contiguous()
    ]


def expected_exactly(product: FusedInput) -> np.ndarray:
    """`expected`, of an `exact_gates` too."""
    if product.name != "swiglu" or product.dy is None:
        return expected(product)[0]
    gate, value = np.split(to_numpy(product.x), 2, axis=1)
    share = np.where(gate > 0, 1, np.where(gate < 0, 0, 0.5)).astype(np.float32)
    dy = to_numpy(product.dy)
    of_gate = rounded(dy * value, product.x.dtype) * (share * (1 + gate * (1 - share)))
    exact = np.concatenate([of_gate, dy * np.where(gate > 0, gate, gate * 0)], axis=1)
    return rounded(exact, product.x.dtype)


# On a CPU


def test_activations_gradients_are_autograds_to_the_bit():
    for name, dtype in itertools.product(ACTIVATIONS, DTYPES):
        product = make_product(name, (17, 40), dtype, True)
        x = product.x.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(ACTIVATIONS[name](x), x, product.dy)
        torch.testing.assert_close(product.values(), by_autograd, rtol=0, atol=0, equal_nan=True)


def test_operators_without_a_kernel_cast_what_torch_computes():
    assert differences(("relu2", "swiglu")) == []


@pytest.mark.parametrize("name", ["cast", "swiglu", "gelu"])
def test_the_operators_are_as_torch_wants_them(name):
    product = make_product(name, (33, 32), torch.bfloat16, name != "cast")
    scale, operators = torch.tensor(SCALE), torch.ops.fp8stack
    torch.library.opcheck(operators.product_amax.default, tuple(product))
    for outputs in itertools.product((False, True), repeat=3):
        arguments = (*product, scale, "e4m3", *outputs)
        torch.library.opcheck(
            operators.cast_product.default, arguments, test_utils="test_faketensor"
        )
        for kind in ("float32", "e8m0"):
            blocks = (*product, "e4m3", kind, "rceil", 0.0, *outputs[1:])
            operator = operators.cast_product_blocks.default
            torch.library.opcheck(operator, blocks, test_utils="test_faketensor")


def test_a_trace_has_the_shapes_of_what_the_kernel_gives(monkeypatch):
    monkeypatch.setattr(fused_casts, "has_kernel", lambda device: True)
    with FakeTensorMode():
        x, dy, scale = torch.empty(256, 384), torch.empty(256, 192), torch.empty(())
        operators = torch.ops.fp8stack
        outputs = operators.cast_product("swiglu", x, dy, scale, "e4m3", True, True, True)
        assert [output.shape for output in outputs] == [(256, 384), (384, 256), (24,), (4, 384)]
        for kind, scales, high in (
            ("float32", [(3, 256), (2, 384)], 2),
            ("e8m0", [(3072,), (3072,)], 4),
        ):
            fields = "e4m3", kind, "rceil", 0.0
            outputs = operators.cast_product_blocks("cast", x, None, *fields, True, True)
            shapes = [(256, 384), (384, 256), *scales, (high, 384)]
            assert [output.shape for output in outputs] == shapes
        assert operators.product_amax("swiglu", x, None).shape == (12,)
        for rows, columns, tiles in ((1, 1, 1), (64, 64, 1), (129, 130, 9), (0, 9, 1)):
            x = torch.empty(rows, columns)
            outputs = operators.cast_product("cast", x, None, scale, "e4m3", True, True, False)
            shapes = [(rows, columns), (columns, rows), (tiles,), (0,)]
            assert [output.shape for output in outputs] == shapes


# The kernel


@launched_on_a_cpu()
def interpreted_differences() -> list[str]:
    """`differences` of the kernel itself, where Triton interprets it."""
    return differences(tuple(ACTIVATIONS))


# The code of one GPU, and of one whose conversions are inexact; the others are slow.
QUICK = {
    ("gelu_tanh", True, "given", 90),
    ("swiglu", True, "mx", 100),
    ("relu2", False, "rows", 89),
}
ARMS = [("cast", False), *((name, backward) for name in ACTIVATIONS for backward in (False, True))]
CODES = [
    case(*(capability, name, backward, scaled), quick=(name, backward, scaled, capability) in QUICK)
    for capability in (89, 90, 100, 120)
    for name, backward in ARMS
    for scaled in ("given", "rows", "mx")
]


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("capability", "name", "backward", "scaled"), CODES)
def test_a_gpus_code_stores_several_bytes_at_once_and_leaves_room_for_other_blocks(
    capability, name, backward, scaled, tmp_path, monkeypatch
):
    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(256, 256, dtype=torch.bfloat16)
    product = FusedInput(name, x, x if backward else None)
    format = "e5m2" if backward and scaled == "given" else "e4m3"
    quantizer = {
        "given": Quantizer(format=format),
        "rows": Quantizer(format=format, block=(1, 128)),
        "mx": Quantizer(format=format, block=(1, 32), scale="e8m0"),
    }[scaled]
    record, exact = scaled == "given", capability != 89
    variant = fused_casts.product_variant(product, quantizer, exact, sums=backward, record=record)
    types = {"x": "*bf16", "dy": "*bf16", "scale": "*fp32", "data": "*u8", "transposed": "*u8"}
    types |= dict.fromkeys(("inverse", "columnwise_inverse", "amaxes", "sums"), "*fp32")
    if scaled == "mx":
        types |= dict.fromkeys(("inverse", "columnwise_inverse"), "*u8")
    types |= {"rows": "i32", "width": "i32"}
    options = fused_casts.launch_options(quantizer)
    text = ptx_of(triton_kernels.cast_product, types, {"HOW": variant}, capability, **options)
    stores = Counter(re.findall(r"st\.global\S*", text))
    # Codes of rows, and packed codes of columns; then scales, sums and an amax.
    packed = "st.global.v2.b64" if scaled == "rows" else "st.global.v4.b32"
    assert stores["st.global.v2.b32"]
    assert stores[packed]
    scale_stores = {"st.global.b32", "st.global.b8"} if scaled == "mx" else {"st.global.b32"}
    assert stores.keys() - {"st.global.v2.b32", packed} <= scale_stores
    assert blocks_per_sm(text, capability, tmp_path, options["num_warps"]) >= 3
    loads = Counter(re.findall(r"ld\.global\S*", text))
    assert set(loads) <= {"ld.global.v4.b32", "ld.global.b32"}
    if name != "gelu":  # whose erf does both
        assert "fma." not in text
        assert ".ftz" not in text
    if capability != 89:
        assert f"cvt.rn.satfinite.{format}x2.f32" in text
        assert ".f16x2" not in text  # rounds no second time
        # What eager code rounds, once.
        assert bool(re.search(r"(cvt|mul)\.rn\.bf16", text)) == (name != "cast")
    if scaled == "rows":
        assert "div.rn.f32" in text
