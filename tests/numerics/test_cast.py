"""The FP8 cast and the per-tensor scale, to the bit, against ml_dtypes and by hand; every bfloat16,
float32's ties and scales of all magnitudes are in `fp8stack conform`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform.oracles import scale_of
from fp8stack.numerics import amax, cast_to_fp8, tensor_scale
from tests.support.oracles import (
    FLOAT_DTYPES,
    FLT_MAX,
    codes,
    default_dtype,
    every_value,
    fp8_codes,
    to_numpy,
)

FORMATS = ["e4m3", "e5m2"]
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = [1.0, 0.1, 448 / 3, 2.0**-20, 3e7, 2.0**127, FLT_MAX, 2.0**-140]


def cast_codes(x: torch.Tensor, scale: torch.Tensor | float, name: str) -> np.ndarray:
    return codes(cast_to_fp8(x, scale, name))


@pytest.mark.parametrize("name", FORMATS)
def test_every_float16_casts_as_ml_dtypes_does(name):
    x = every_value(torch.float16)  # every NaN too
    for scale in SCALES:
        expected = fp8_codes(to_numpy(x), scale, name)
        np.testing.assert_array_equal(cast_codes(x, scale, name), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_non_contiguous_tensor_casts_like_its_copy(dtype):
    base = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    base[0, 3], base[6, 1] = math.nan, math.inf
    before = base.clone()
    for view in VIEWS.values():
        x = view(base)
        expected = fp8_codes(np.ascontiguousarray(to_numpy(x)), 100.0, "e4m3")
        data = cast_to_fp8(x, 100.0, "e4m3")
        assert data.shape == x.shape
        np.testing.assert_array_equal(codes(data.contiguous()), expected)
    np.testing.assert_array_equal(to_numpy(base), to_numpy(before))


@pytest.mark.parametrize("name", FORMATS)
def test_a_0_dim_or_empty_tensor_keeps_its_shape(name):
    for shape in ((), (0,), (3, 0, 2)):
        data = cast_to_fp8(torch.full(shape, math.nan), 1.0, name)
        assert (data.shape, data.dtype) == (shape, FP8_DTYPES[name])
        assert (codes(data.reshape(-1)) == 0x7F).all()


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (1, 5), (6, 5)])
def test_a_scale_is_a_number_or_broadcast(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator)
    scale = 100 * torch.rand(shape, generator=generator)
    expected = fp8_codes(x.numpy(), scale.numpy(), "e4m3")
    np.testing.assert_array_equal(cast_codes(x, scale, "e4m3"), expected)
    if scale.numel() == 1:
        np.testing.assert_array_equal(cast_codes(x, scale.item(), "e4m3"), expected)


@pytest.mark.parametrize(
    ("name", "amax", "margin", "power_of_two", "expected"),
    [
        ("e4m3", 7.0, 0, False, 64.0),
        ("e4m3", 7.0, 2, False, 16.0),
        ("e5m2", 7.0, -1, False, 16384.0),
        ("e4m3", 448.0, 0, True, 1.0),
        ("e4m3", 449.0, 0, True, 0.5),
        ("e4m3", 1.0, 1, True, 128.0),
        ("e4m3", 2.0**-149, 0, False, FLT_MAX),
        ("e4m3", 2.0**-149, 0, True, 2.0**127),
        ("e4m3", 1.75 * 2.0**-119, 0, False, 2.0**127),
        *(("e4m3", amax, 3, power, 1.0) for amax in (0.0, math.inf) for power in (False, True)),
        ("e5m2", math.nan, 0, False, 1.0),
    ],
)
def test_hand_computed_scales(name, amax, margin, power_of_two, expected):
    scale = tensor_scale(amax, name, margin=margin, power_of_two=power_of_two)
    assert (scale.item(), scale.dtype, scale.shape) == (expected, torch.float32, ())
    if expected == FLT_MAX:
        assert tensor_scale(amax, overflow=65504.0) == 65504.0
        assert tensor_scale(amax, overflow=65504.0, power_of_two=True) == 32768.0


def test_scale_arithmetic_is_float32_whatever_torchs_default_dtype():
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            for amax in (11.0, torch.tensor(11.0, dtype=torch.float32)):
                scale = tensor_scale(amax)
                assert (scale.item(), scale.dtype) == (scale_of(11.0, "e4m3"), torch.float32)


@pytest.mark.capability("B10")
def test_int8_loses_93_percent_of_attentions_probabilities_and_e4m3_17():
    """Softmax over 384 keys of logits from N(0, 3^2), with one scale per tensor: docs/numerics.md
    has the shares that become zero."""
    logits = 3 * torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    x = torch.softmax(logits, dim=-1)
    scale = float(tensor_scale(amax(x), "e4m3"))
    e4m3_codes = cast_codes(x, scale, "e4m3")
    np.testing.assert_array_equal(e4m3_codes, fp8_codes(to_numpy(x), scale, "e4m3"))
    int8_codes = np.rint(to_numpy(x) / (to_numpy(x).max() / 127))
    assert np.mean(int8_codes == 0) == pytest.approx(0.933, abs=5e-4)
    assert np.mean(e4m3_codes == 0) == pytest.approx(0.172, abs=5e-4)


VIEWS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::3, 1::2],
    "permuted": lambda x: x.reshape(8, 6, 8).permute(2, 0, 1),
    "expanded": lambda x: x[0].expand(5, 8),
}


def test_other_formats_and_dtypes_are_refused():
    for name in ("bf16", "E4M3", ""):
        with pytest.raises(ValueError, match="No FP8 format"):
            cast_to_fp8(torch.ones(1), 1.0, name)
        hint = r"( Did you mean 'e4m3'\?)?"
        with pytest.raises(ValueError, match=rf"No format '{name}'\.{hint} Known: e4m3, .*e2m1"):
            tensor_scale(1.0, name)
    for dtype in (torch.float64, torch.int32):  # which would be rounded twice
        with pytest.raises(ValueError, match="is not quantized"):
            cast_to_fp8(torch.ones(1, dtype=dtype), 1.0)
