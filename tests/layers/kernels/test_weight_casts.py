"""The copies of many weights: shared scales, float64, and the code of their kernel."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fp8stack.analysis.conform.casts import as_operands, quantized
from fp8stack.analysis.conform.checks import equal
from fp8stack.analysis.conform.oracles import quantize
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.weight_casts import BatchedCast
from tests.support.cases import case
from tests.support.triton_code import blocks_per_sm, ptx_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FLOATS = (torch.float32, torch.bfloat16)
MX: dict[str, Any] = {"block": (1, 32), "scale": "e8m0"}


def interpreted_differences(device: str = "cpu") -> list[str]:
    """What differs from numpy of weights that share scales in any order, and of float64 weights,
    which are rounded to float32 first. Other bytes are rows of `fp8stack conform`."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((128, 128), (129, 65), (1, 200), (7, 5), (384, 256))
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors = [x * 10.0 ** torch.linspace(-30, 30, len(x))[:, None] for x in tensors]
    scales, places = torch.tensor([1.0, 3.7, 2.0**-20, math.inf]), [2, 0, 2, 3, 1]
    amaxes, quantizer = torch.tensor([0.0, 0.0, math.inf, 1e9]), Quantizer(format="e5m2")
    weights = BatchedCast([x.to(device) for x in tensors], quantizer, places)
    recorded = amaxes.to(device)
    weights.cast(scales.to(device), recorded)
    actual: dict[str, Any] = {"amaxes": recorded}
    expected: dict[str, Any] = {}
    for n, (x, place) in enumerate(zip(tensors, places, strict=True)):
        amaxes[place] = max(amaxes[place], x.abs().max())
        copies = [quantize(x.numpy(), quantizer, d, scale=float(scales[place])) for d in (1, 0)]
        _add(n, weights.copies[n], copies, quantizer, actual, expected)
    doubles = [x.double() * (1 + 2.0**-26) for x in tensors]  # between two float32 values
    for rules in (Quantizer(), Quantizer(block=(128, 128), scale="power_of_two"), Quantizer(**MX)):
        weights = BatchedCast([x.to(device) for x in doubles], rules)
        weights.cast()
        for n, x in enumerate(doubles):
            copies = [quantized(x.float(), rules, dim) for dim in (1, 0)]
            _add(f"{rules} {n}", weights.copies[n], copies, rules, actual, expected)
    wrong: list[str] = equal(actual, expected | {"amaxes": amaxes}).get("first", [])
    return wrong


def _add(
    name: Any, copies: Any, references: Any, quantizer: Quantizer, actual: Any, expected: Any
) -> None:
    for way, copy in zip(("rowwise", "columnwise"), copies, strict=True):
        assert copy.data.is_contiguous()
        actual |= {f"{name} {way}": copy.data, f"{name} {way} scales": copy.inv_scale.reshape(-1)}
    expected |= {f"{name} {k}": x for k, x in as_operands(references, quantizer).items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The constants of each launch, which is not made."""
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(
        weights,
        "launch_weights",
        lambda tiles, operands, variant, options: launches.append({"HOW": variant} | options),
    )
    return launches


# One form on one GPU, and one on a GPU whose conversions are inexact; the others are slow.
CODES = [
    case(
        *(capability, dtype, options),
        quick=(capability, dtype, options)
        in ((90, torch.float32, {"block": (128, 128)}), (89, torch.float32, {})),
    )
    for capability in (89, 90, 100, 120)
    for dtype in FLOATS
    for options in ({}, {"block": (128, 128)}, MX)
]


@needs_triton
@pytest.mark.parametrize(("capability", "dtype", "options"), CODES)
@pytest.mark.full
def test_a_gpus_code_stores_several_bytes_at_once_and_converts_exactly(
    capability, dtype, options, tmp_path, monkeypatch, launched
):
    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = [torch.zeros(256, 384, dtype=dtype)]
    batched_cast = BatchedCast(tensors, Quantizer(**options))
    batched_cast.cast(None if options else torch.ones(1), None if options else torch.zeros(1))
    constants = launched[0]
    constants["HOW"] = replace(constants["HOW"], exact=capability != 89)
    types = {"table": "*i64", "owners": "*i32", "scales": "*fp32", "amaxes": "*fp32"}
    chosen = {key: constants.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    text = ptx_of(triton_kernels.cast_weights, types, constants, capability, **chosen)
    stores = Counter(re.findall(r"st\.global\S*", text))
    # Bytes, and packed bytes of the transpose; inverse scales.
    assert stores["st.global.v4.b32"]
    scale_stores = "st.global.b8" if options == MX else "st.global.b32"
    assert stores.keys() - {"st.global.v2.b32", "st.global.v4.b32"} == {scale_stores}
    if options != MX:
        assert "div.rn.f32" in text
    assert blocks_per_sm(text, capability, tmp_path, chosen["num_warps"]) >= 3
    assert "div.full.f32" not in text
    assert "fma." not in text  # rounds the product
    assert ".ftz" not in text  # keeps subnormals
    if capability != 89:
        assert "cvt.rn.satfinite.e4m3x2.f32" in text
        assert ".f16x2" not in text  # rounds no second time


def variants_of(launched: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(launch["HOW"].scales, launch["HOW"].record) for launch in launched]


def test_a_launch_is_all_that_delayed_scaling_needs_and_current_scaling_needs_two(launched) -> None:
    tensors = [torch.ones(32, 48), torch.ones(16, 16)]
    BatchedCast(tensors, Quantizer(amax="delayed"), [3, 0]).cast(torch.ones(4), torch.zeros(4))
    assert variants_of(launched) == [("given", True)]
    launched.clear()
    BatchedCast(tensors, Quantizer()).cast()
    assert variants_of(launched) == [("none", True), ("current", False)]
    launched.clear()
    BatchedCast(tensors, Quantizer(block=(128, 128))).cast()
    BatchedCast(tensors, Quantizer(**MX)).cast()
    assert variants_of(launched) == [("squares", False), ("mx", False)]
