"""Every fact in `FORMATS` against ml_dtypes, gfloat, numpy and torch."""

from __future__ import annotations

import math
from typing import get_args

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloats

from fp8stack.common.formats import FormatName, fp8_format, named_format, quantized_format
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.numerics import FORMATS, Quantizer
from tests.support.oracles import BITS, MAX, ML_DTYPES, OWN_FORMATS, decoded, values_by_definition

GFLOAT = {
    "e4m3": gfloats.format_info_ocp_e4m3, "e5m2": gfloats.format_info_ocp_e5m2,
    "e8m0": gfloats.format_info_ocp_e8m0, "bf16": gfloats.format_info_bfloat16,
    "fp16": gfloats.format_info_binary16, "fp32": gfloats.format_info_binary32,
}  # fmt: skip
TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu,
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
}  # fmt: skip


def assert_same_bits(name: str, codes: list[int] | range, expected: np.ndarray) -> None:
    """Check that the codes decode to the expected numbers, including the signs of zeros."""
    format = named_format(name)
    assert format is not None
    decoded_values = np.array([format.decode(code) for code in codes])
    np.testing.assert_array_equal(decoded_values, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(
        np.signbit(decoded_values)[numbers], np.signbit(expected)[numbers]
    )


@pytest.mark.capability("B1")
@pytest.mark.parametrize("name", [*get_args(FormatName), "e8m0"])
@pytest.mark.full
def test_the_codes_of_every_format_of_an_operand_decode_as_the_references_do(name):
    codes = range(2 ** BITS.get(name, 8))
    assert_same_bits(name, codes, decoded(name))
    info = getattr(gfloats, f"format_info_ocp_{name}")
    gfloat_values = [gfloat.decode_float(info, code).fval for code in codes]
    assert_same_bits(name, codes, np.array(gfloat_values))
    assert name == "e8m0" or (FORMATS[name].bits, FORMATS[name].max) == (BITS[name], MAX[name])


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_the_codes_of_every_format_of_ones_own_are_those_of_its_definition(name):
    format, values = quantized_format(name), values_by_definition(name)
    assert (format.name, 2**format.bits) == (name, len(values))
    half = len(values) // 2
    for code, value in enumerate(values):
        assert format.decode(code) == value or (math.isnan(format.decode(code)) and value != value)
        assert np.signbit(format.decode(code)) == (code >= half) or math.isnan(value)
    finite = [value for value in values[:half] if math.isfinite(value)]
    assert finite == sorted(finite)
    assert (format.max_code, format.max) == (len(finite) - 1, finite[-1])
    assert (format.min_subnormal, format.has_inf) == (finite[1], math.inf in values)
    assert format.has_nan == any(map(math.isnan, values)) == (format.bits == 8)
    normal = values[2**format.mantissa_bits]
    assert (format.min_normal, format.dtype, format.is_shipped) == (normal, None, False)
    assert format.epsilon == 2.0**-format.mantissa_bits


def test_shipped_names_keep_their_meaning_and_no_other_name_is_a_format():
    for name in get_args(FormatName):
        assert quantized_format(name) is FORMATS[name]
        assert FORMATS[name].is_shipped
    assert (quantized_format("e4m3").max, quantized_format("e4m3").has_inf) == (448.0, False)
    for name, meant in {"E3M4": "e3m4", "float8_e4m3fn": "e4m3", "e2m1x": "e2m1"}.items():
        with pytest.raises(ValueError, match=f"No format '{name}'. Did you mean '{meant}'. Known"):
            Quantizer(format=name)
    for name in ("e9m9", "e0m3", "e3m5", "e8m0", "e03m4", "m4", "bf16", ""):
        with pytest.raises(ValueError, match=f"No format '{name}'. Known: e4m3, .* such as e3m4"):
            Quantizer(format=name)
    assert [fp8_format(name) for name in ("e4m3", "e5m2")] == [FORMATS["e4m3"], FORMATS["e5m2"]]
    for name in ("e8m0", "e4m3fn"):
        with pytest.raises(ValueError, match=f"No FP8 format '{name}'.*e4m3, e5m2"):
            fp8_format(name)


def is_bf16(values: np.ndarray) -> bool:
    """Whether bfloat16 represents float64 values exactly, by ml_dtypes."""
    rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return bool((rounded == values).all())


@pytest.mark.parametrize("name", [*get_args(FormatName), *OWN_FORMATS])
def test_what_bfloat16_represents_follows_from_the_values_of_a_format(name):
    """Times the scales of blocks: powers of two, E4M3's, and a float32 of 24 bits."""
    finite = np.array([v for v in decoded(name).astype(np.float64) if math.isfinite(v)])
    power = Quantizer(format=name, block=(1, 32), scale="e8m0")
    assert power.exact_in_bf16
    assert is_bf16(finite)
    assert is_bf16(np.outer(finite, 2.0 ** np.arange(-20, 20)))
    quotient = Quantizer(format=name, block=(1, 32))
    assert not quotient.exact_in_bf16
    assert not is_bf16(finite * float(np.float32(1 / 3)))
    if name == "e2m1":
        scales = decoded("e4m3").astype(np.float64)
        assert Quantizer(format=name, block=(1, 16), scale="e4m3").exact_in_bf16
        assert is_bf16(np.outer(finite, scales[~np.isnan(scales)]))


@pytest.mark.parametrize("name", [*get_args(FormatName), *OWN_FORMATS])
def test_one_scale_for_a_tensor_needs_8_bits_and_sums_within_float32(name):
    fits = quantized_format(name).max ** 2 * 2**20 < FORMATS["fp32"].max
    if quantized_format(name).bits == 8 and fits:
        assert Quantizer(format=name, block="row").exact_in_bf16
    else:
        assert quantized_format(name).bits < 8 or name == "e7m0"
        with pytest.raises(ValueError, match=f"format = '{name}' needs a block such as"):
            Quantizer(format=name)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_65536_codes_decode_as_ml_dtypes_does(name):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = np.arange(2**16, dtype=np.uint16).view(ML_DTYPES[name]).astype(np.float64)
    assert_same_bits(name, range(2**16), expected)


def test_fp32_codes_decode_as_numpy_does_and_tf32_is_fp32_without_its_last_13_bits():
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    codes = np.random.default_rng(0).integers(0, 2**32, 2000).tolist()
    codes += [code ^ sign for code in edges for sign in (0, 2**31)]
    assert_same_bits("fp32", codes, np.array(codes, np.uint32).view(np.float32))
    codes = [code >> 13 for code in codes]
    assert_same_bits("tf32", codes, (np.array(codes, np.uint32) << 13).view(np.float32))
    tf32 = FORMATS["tf32"]
    assert (tf32.bits, tf32.dtype) == (19, None)
    assert (tf32.max, tf32.min_normal) == ((2 - 2**-10) * 2.0**127, 2.0**-126)
    assert (tf32.epsilon, tf32.min_subnormal) == (2**-10, 2.0**-136)


@pytest.mark.capability("B1")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_the_limits_and_the_layout_are_those_of_ml_dtypes_torch_and_gfloat(name):
    format, finfo = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    limits = (format.bits, format.max, format.min_normal, format.epsilon)
    assert limits == (finfo.bits, finfo.max, finfo.smallest_normal, finfo.eps)
    assert format.dtype is TORCH_DTYPES[name]
    if name == "e8m0":
        assert (format.min_subnormal, format.max_code) == (None, 0xFE)
    else:
        assert format.min_subnormal == finfo.smallest_subnormal
        torchs = torch.finfo(format.dtype)
        assert limits == (torchs.bits, torchs.max, torchs.smallest_normal, torchs.eps)
    gfloats = GFLOAT[name]
    assert (format.bias, format.has_inf) == (gfloats.bias, gfloats.num_infs > 0)
    assert (format.max, format.mantissa_bits) == (gfloats.max, gfloats.precision - 1)
    assert (format.sign_bits == 1) == gfloats.is_signed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scale", "foo", "No scale 'foo'. Known: float32, power_of_two, e8m0, e4m3"),
        ("amax", "static", "No amax 'static'. Known: current, delayed"),
        ("hadamard", 8, "No hadamard '8'. Known: 0, 16, 32"),
        ("block", 32, "No block 32. Known: tensor, row"),
        ("block", (1, 33), r"No block \[1, 33\]. Known: tensor, row"),
        ("block", (1, 32.0), r"No block \[1, 32.0\]. Known: tensor, row"),
        ("block", "1x32", r"No block '1x32'. Known: tensor, row, \[1, 16\]"),
        ("margin", 1.5, "margin is a whole number"),
        ("eps", "1", "eps is a number from 0"),
    ],
)
def test_a_quantizer_with_an_unknown_value_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Quantizer(**{field: value})


def test_the_quantizers_of_some_gemms_keep_the_forward_values_that_these_take():
    x, w = Quantizer(block="row"), Quantizer(block="tensor")
    table = Quantizers(input=x, weight=w, grad_output=w, weight_dgrad=w, input_wgrad="forward")
    assert table.only(["fprop", "dgrad", "wgrad"]) == table
    assert table.only(["dgrad"]) == Quantizers(grad_output=w, weight_dgrad=w)
    assert table.only(["wgrad"]) == Quantizers(input=x, input_wgrad="forward")
    assert table.only([]) == Quantizers()
