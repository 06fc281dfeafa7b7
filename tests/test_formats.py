"""Every fact in `FORMATS` against ml_dtypes, gfloat, numpy and torch."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_binary32,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_e8m0,
)

from fp8stack.formats import fp8_format
from fp8stack.numerics import FORMATS
from tests.support.oracles import ML_DTYPES, decoded

GFLOAT = {
    "e4m3": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
    "e8m0": format_info_ocp_e8m0,
    "bf16": format_info_bfloat16,
    "fp16": format_info_binary16,
    "fp32": format_info_binary32,
}
EIGHT_BITS = ["e4m3", "e5m2", "e8m0"]
TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours)[numbers], np.signbit(theirs)[numbers])


def decode_all(name: str, bits: int) -> np.ndarray:
    return np.array([FORMATS[name].decode(code) for code in range(2**bits)])


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_all_256_codes_decode_as_ml_dtypes_does(name):
    assert_same_bits(decode_all(name, 8), decoded(name))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_all_256_codes_decode_as_gfloat_does(name):
    theirs = [gfloat.decode_float(GFLOAT[name], code).fval for code in range(256)]
    assert_same_bits(decode_all(name, 8), np.array(theirs))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_65536_codes_decode_as_ml_dtypes_does(name):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = np.arange(2**16, dtype=np.uint16).view(ML_DTYPES[name]).astype(np.float64)
    assert_same_bits(decode_all(name, 16), theirs)


def fp32_codes() -> list[int]:
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    some = np.random.default_rng(0).integers(0, 2**32, 2000).tolist()
    return [code ^ sign for code in edges for sign in (0, 2**31)] + some


def test_fp32_codes_decode_as_numpy_does():
    codes = fp32_codes()
    theirs = np.array(codes, np.uint32).view(np.float32)
    assert_same_bits(np.array([FORMATS["fp32"].decode(code) for code in codes]), theirs)


def test_tf32_is_fp32_without_its_last_13_bits():
    codes = [code >> 13 for code in fp32_codes()]
    theirs = (np.array(codes, np.uint32) << 13).view(np.float32)
    assert_same_bits(np.array([FORMATS["tf32"].decode(code) for code in codes]), theirs)
    assert (FORMATS["tf32"].bits, FORMATS["tf32"].dtype) == (19, None)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_the_limits_are_those_of_ml_dtypes(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert ours.bits == theirs.bits
    assert ours.max == float(theirs.max)
    assert ours.min_normal == float(theirs.smallest_normal)
    assert ours.epsilon == float(theirs.eps)
    if name != "e8m0":  # which has no subnormals
        assert ours.min_subnormal == float(theirs.smallest_subnormal)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_the_dtype_and_the_limits_are_those_of_torch(name):
    ours = FORMATS[name]
    assert ours.dtype is TORCH_DTYPES[name]
    if name != "e8m0":
        theirs = torch.finfo(TORCH_DTYPES[name])
        assert (ours.bits, ours.max) == (theirs.bits, theirs.max)
        assert (ours.min_normal, ours.epsilon) == (theirs.smallest_normal, theirs.eps)


@pytest.mark.parametrize("name", GFLOAT)
def test_the_layout_is_that_of_gfloat(name):
    ours, theirs = FORMATS[name], GFLOAT[name]
    assert (ours.bias, ours.has_inf, ours.max) == (theirs.bias, theirs.num_infs > 0, theirs.max)
    assert ours.mantissa_bits == theirs.precision - 1
    assert (ours.sign_bits == 1) == theirs.is_signed


def test_compiled_code_reads_a_formats_facts_and_its_dtype_without_a_break():
    def cast(x: torch.Tensor) -> torch.Tensor:
        target = FORMATS["e5m2"]
        return x.clamp(target.min_normal, target.max).to(target.dtype)

    compiled = torch.compile(cast, backend="eager", fullgraph=True)
    x = torch.tensor([0.0, 1.0, 1e9])
    assert compiled(x).dtype is torch.float8_e5m2
    assert compiled(x).to(torch.float32).tolist() == [2.0**-14, 1.0, 57344.0]


@pytest.mark.parametrize(
    ("name", "largest", "min_normal", "min_subnormal", "max_code", "nans", "has_inf"),
    [
        ("e4m3", 448.0, 2**-6, 2**-9, 0x7E, [0x7F, 0xFF], False),
        ("e5m2", 57344.0, 2**-14, 2**-16, 0x7B, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], True),
        ("e8m0", 2.0**127, 2**-127, None, 0xFE, [0xFF], False),
    ],
)
def test_the_facts_of_the_specifications(
    name, largest, min_normal, min_subnormal, max_code, nans, has_inf
):
    facts = FORMATS[name]
    assert (facts.max, facts.max_code) == (largest, max_code)
    assert (facts.min_normal, facts.min_subnormal) == (min_normal, min_subnormal)
    assert (facts.nan_codes(), facts.has_inf) == (nans, has_inf)


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16():
    tf32 = FORMATS["tf32"]
    assert (tf32.max, tf32.min_normal) == ((2 - 2**-10) * 2.0**127, 2.0**-126)
    assert (tf32.epsilon, tf32.min_subnormal) == (2**-10, 2.0**-136)


def test_an_fp8_format_is_found_by_its_name_and_any_other_refused():
    for name in ("e4m3", "e5m2"):
        assert fp8_format(name) is FORMATS[name]
    for name in ("e8m0", "bf16", "E4M3", "e4m3fn", ""):
        with pytest.raises(ValueError, match=f"No FP8 format '{name}'.*e4m3, e5m2"):
            fp8_format(name)
