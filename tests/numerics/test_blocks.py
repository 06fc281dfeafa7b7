"""MXFP8 and block scaling by hand, and of any shape; test_quantized.py has any matrix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8stack.analysis.conform import oracles
from fp8stack.common.formats import ScaleRounding
from fp8stack.numerics import Quantized, Quantizer, dequantize, quantize
from fp8stack.numerics.scales import scales_of
from tests.support.oracles import (
    FLT_MAX,
    STEADY,
    codes,
    decoded,
    rceil_code,
)

FORMATS = ["e4m3", "e5m2"]
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
positive_floats = st.floats(0, width=32, exclude_min=True, allow_infinity=False)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mxfp8_in(name: Any, rounding: ScaleRounding = "rceil") -> Quantizer:
    return Quantizer(format=name, block=(1, 32), scale="e8m0", scale_rounding=rounding)


BLOCKS = Quantizer(block=(1, 128), scale="power_of_two")


def mx_code(amax: float, name: str, rounding: ScaleRounding) -> int:
    quantized = quantize(torch.tensor([0.0, -amax]), mxfp8_in(name, rounding))
    return codes(quantized.scales).item()


# MXFP8


HAND_COMPUTED = {
    ("e4m3", "rceil"): [
        (0.0, 0),
        (2.0**-149, 0),  # and its product with 1/448 is zero
        (448 * 2.0**-127, 0),  # 2^-127 exactly, a subnormal float
        (449 * 2.0**-127, 1),
        (448 * 2.0**-126, 1),
        (449 * 2.0**-126, 2),
        (1.0, 119),
        (224.0, 126),
        (225.0, 127),
        (448.0, 127),
        (448 + 2.0**-15, 128),  # the next float
        (512.0, 128),
        (2.0**127, 246),
        (FLT_MAX, 247),
        (math.inf, 254),
    ],
    ("e5m2", "rceil"): [(57344.0, 127), (57345.0, 128), (1.0, 112)],
    ("e4m3", "floor"): [
        *((0.0, 0), (2.0**-149, 0), (2.0**-119, 0), (2.0**-118, 1), (1.0, 119)),
        *((449.0, 127), (511.0, 127), (512.0, 128), (FLT_MAX, 246)),
    ],
    ("e5m2", "floor"): [(65535.0, 127), (65536.0, 128)],
    ("e4m3", "even"): [
        *((0.0, 0), (480.0, 127), (496 - 2.0**-15, 127)),
        (496.0, 128),  # halfway to 512
        *((1.0, 119), (1.9375, 120), (FLT_MAX, 247)),
    ],
    ("e5m2", "even"): [(61439.0, 127), (61440.0, 128)],
}


@pytest.mark.parametrize(("name", "rounding"), HAND_COMPUTED)
def test_hand_computed_codes(name, rounding):
    table = HAND_COMPUTED[name, rounding]
    assert [mx_code(amax, name, rounding) for amax, _ in table] == [code for _, code in table]


@STEADY
@given(positive_floats, st.sampled_from(FORMATS))
def test_rceil_is_the_smallest_power_of_two_not_below_amax_over_fp8_max(amax, name):
    assert mx_code(amax, name, "rceil") == rceil_code(amax, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((32,), 0),
        ((70,), -1),
        ((1,), 0),
        ((33, 64), 0),
        ((33, 64), 1),
        ((5, 31), -1),
        ((40, 3, 65), 0),
        ((3, 40, 65), 1),
        ((3, 40, 65), -1),
        ((2, 33, 2, 34), -3),
        ((2, 3, 2, 95), 3),
    ],
)
def test_blocks_run_along_the_chosen_dimension_with_a_short_last_one(shape, dim, name):
    x = normal(*shape) * 2.0 ** (3 * normal(*shape, seed=1))
    data, scales = quantize(x, mxfp8_in(name), dim)[:2]
    rows = x.numpy().swapaxes(dim, -1)
    reference = oracles.quantize(rows.reshape(-1, shape[dim]), mxfp8_in(name), 1)
    expected = reference.codes.reshape(rows.shape).swapaxes(dim, -1)
    expected_scales = reference.stored.reshape(*rows.shape[:-1], -1).swapaxes(dim, -1)
    assert (data.dtype, data.shape) == (FP8_DTYPES[name], shape)
    assert (scales.dtype, scales.shape) == (torch.float8_e8m0fnu, expected_scales.shape)
    assert scales.shape[dim] == math.ceil(shape[dim] / 32)
    np.testing.assert_array_equal(codes(data), expected)
    np.testing.assert_array_equal(codes(scales), expected_scales)


def stored(data: torch.Tensor, scales: torch.Tensor, quantizer: Quantizer, dim: int) -> Quantized:
    """Bytes and scales from elsewhere."""
    unknown, no_nan = torch.tensor(math.nan), torch.tensor(False)
    return Quantized(data, scales, unknown, quantizer, dim, data.shape, no_nan)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_mxfp8_is_the_exact_product(name, dim):
    data = torch.arange(256, dtype=torch.uint8).reshape(4, 64).repeat(12, 1)
    scales = torch.arange(2 * (64 if dim == 0 else 48), dtype=torch.uint8) * 2
    scales = scales.reshape((2, 64) if dim == 0 else (48, 2))
    power = np.repeat(scales.numpy().astype(int) - 127, 32, axis=dim)[:48, :64]
    with np.errstate(over="ignore"):  # 448 * 2^127
        expected = np.ldexp(decoded(name)[data.numpy()], power)
    data = data.view(FP8_DTYPES[name])
    values = dequantize(stored(data, scales.view(torch.float8_e8m0fnu), mxfp8_in(name), dim))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), expected)


def test_scale_code_255_is_nan():
    nan = torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    not_a_number = stored(torch.ones(3).to(torch.float8_e4m3fn), nan, mxfp8_in("e4m3"), 0)
    assert dequantize(not_a_number).isnan().all()


# 1x128 and 128x128 blocks


def test_the_rows_of_more_dimensions_are_blocked_alike():
    x = normal(2, 3, 200)
    data, inv_scale = quantize(x, BLOCKS)[:2]
    flat, flat_inverse = oracles.quantize(x.reshape(6, 200).numpy(), BLOCKS, 1)[:2]
    np.testing.assert_array_equal(codes(data), flat.reshape(2, 3, 200))
    np.testing.assert_array_equal(inv_scale.numpy(), flat_inverse.reshape(2, 3, 2))
    np.testing.assert_array_equal(codes(quantize(x[0, 0], BLOCKS).data), flat[0])


@pytest.mark.parametrize(
    ("dtype", "scale", "truncated"),
    [
        (torch.float32, FLT_MAX, 2.0**127),
        (torch.bfloat16, (2 - 2**-7) * 2.0**127, 2.0**127),
        (torch.float16, 65504.0, 32768.0),
    ],
    ids=str,
)
def test_an_overflowed_scale_becomes_the_maximum_of_the_inputs_dtype(dtype, scale, truncated):
    amax = torch.tensor([2.0**-130, 7.0])
    exact = Quantizer(block=(1, 128), scale="float32")
    for quantizer, expected in ((exact, scale), (replace(exact, scale="power_of_two"), truncated)):
        assert scales_of(amax, quantizer, dtype).into.tolist() == [expected, 64.0]


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)], ids=str)
def test_an_empty_tensor_has_no_blocks(shape):
    for quantizer in (mxfp8_in("e4m3"), BLOCKS):
        quantized = quantize(torch.ones(shape), quantizer)
        assert (quantized.data.shape, quantized.scales.numel()) == (shape, 0)
