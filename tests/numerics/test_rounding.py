"""The float32 path of an emulated GEMM against the exact casts, and against numpy itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8stack.numerics import (
    cast_to_fp8,
    dequantize_blocks,
    dequantize_mxfp8,
    quantize_blocks,
    quantize_mxfp8,
    round_to_blocks,
    round_to_fp8,
    round_to_mxfp8,
)
from tests.support.casts import WAYS, cast_by
from tests.support.oracles import (
    FLOAT_DTYPES,
    FLT_MAX,
    MAX_CODE,
    STEADY,
    blocked,
    decoded,
    every_value,
    fp8_codes,
    mxfp8,
    to_numpy,
)

FORMATS = ["e4m3", "e5m2"]
BLOCKS = [(1, 128), (128, 1), (128, 128)]
SCALES = [1.0, 0.1, 448 / 3, 2.0**-20, 3e7, 2.0**127]
names = st.sampled_from(FORMATS)


def assert_same(ours: Tensor, theirs: Tensor | np.ndarray) -> None:
    """Equal values, NaN equal to NaN, and no telling +0 from -0."""
    assert ours.dtype == torch.float32
    assert ours.is_contiguous()
    np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs))


def assert_rounds_like_the_cast(x: Tensor, scale: float, name: str) -> None:
    before = x.clone()
    factor = torch.tensor(scale)
    assert_same(round_to_fp8(x, factor, name), cast_to_fp8(x, factor, name).to(torch.float32))
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))


def assert_rounds_like_mxfp8(x: Tensor, dim: int, name: str, rule: str) -> None:
    before = x.clone()
    exact = dequantize_mxfp8(*quantize_mxfp8(x, dim, name, rule), dim)
    for both in ([dim], [0, 1]):
        values = round_to_mxfp8(x, both, name, rule)[both.index(dim % 2) if len(both) > 1 else 0]
        assert_same(values, exact)
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))


def assert_rounds_like_blocks(x: Tensor, block: tuple, name: str, power_of_two: bool) -> None:
    before = x.clone()
    exact = dequantize_blocks(*quantize_blocks(x, block, name, power_of_two), block)
    for blocks in ([block], [block, (1, 128), (128, 1)]):
        assert_same(round_to_blocks(x, blocks, name, power_of_two)[0], exact)
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal values whose magnitude differs by up to 2^20 from element to element."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * 2.0 ** random.integers(-10, 11, (rows, columns))
    return torch.from_numpy(x.astype(np.float32))


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Up to 70 x 300, each row of its own magnitude, with zero rows, ties, inf and NaN."""
    rows, columns = draw(st.integers(0, 70)), draw(st.integers(0, 300))
    exponents = draw(st.lists(st.integers(-149, 126), min_size=1, max_size=4))
    if draw(st.booleans()):  # magnitudes that stay on the fast path
        exponents = [exponent // 2 for exponent in exponents]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    mantissas = random.standard_normal((rows, columns))
    if draw(st.booleans()):  # few bits make many ties
        mantissas = np.round(mantissas * 32) / 32
    x = np.ldexp(mantissas, random.choice(exponents, rows)[:, None]).astype(np.float32)
    x[random.random(rows) < 0.2] = 0
    specials = st.lists(st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 2e-45]))
    for special in draw(specials) if x.size else []:
        x[random.integers(rows), random.integers(columns)] = special
    whole = torch.from_numpy(x).to(draw(st.sampled_from(FLOAT_DTYPES)))
    return whole.T if draw(st.booleans()) else whole


ways = st.sampled_from(WAYS)


# round_to_fp8


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_16_bit_value_rounds_as_ml_dtypes_casts(name, dtype, scale):
    x = every_value(dtype)
    expected = decoded(name)[fp8_codes(to_numpy(x), scale, name)]
    assert_same(round_to_fp8(x, torch.tensor(scale), name), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_ties_round_to_the_even_code_and_their_neighbours_to_the_nearest(name):
    values = decoded(name)[: MAX_CODE[name] + 1]
    tie = (values[:-1] + values[1:]) / 2
    above, below = np.nextafter(tie, np.float32(np.inf)), np.nextafter(tie, np.float32(0))
    even = values[np.arange(len(tie)) + np.arange(len(tie)) % 2]
    for x, expected in ((tie, even), (above, values[1:]), (below, values[:-1])):
        assert_same(round_to_fp8(torch.from_numpy(x), torch.ones(()), name), expected)
        assert_same(round_to_fp8(torch.from_numpy(-x), torch.ones(()), name), -expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_random_float32_bits_round_like_the_cast(name, scale):
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    assert_rounds_like_the_cast(torch.from_numpy(bits.view(np.float32)), scale, name)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (13, 29), (2, 3, 4, 5)], ids=str)
def test_any_shape_rounds_like_the_cast(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with cast_by("many tiles"):
        assert_rounds_like_the_cast(x, 100.0, "e4m3")
        if x.ndim == 2:
            assert_rounds_like_the_cast(x[::2, 1::3], 3.0, "e4m3")


# round_to_mxfp8


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_every_bfloat16_value_in_a_block_of_its_like_rounds_to_its_mxfp8_value(name, dim):
    # Neighbours share a block, so the blocks have every magnitude there is.
    x = every_value(torch.bfloat16).reshape(2048, 32)
    data, scales = mxfp8(to_numpy(x), 1, name)
    with np.errstate(over="ignore"):
        expected = np.ldexp(decoded(name)[data], scales.astype(int) - 127)
    for part in (slice(None), slice(300, 600), slice(1400, 1700)):  # all; the fast path only
        matrix, wanted = x[part], expected[part]
        (ours,) = round_to_mxfp8(matrix.T if dim == 0 else matrix, [dim], name)
        assert_same(ours, wanted.T if dim == 0 else wanted)


@pytest.mark.parametrize("special", [math.inf, math.nan, 2.0**-149, 2.0**-110, 2.0**110, 3.4e38])
@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_extreme_element_leaves_all_other_blocks_as_they_were(dim, rule, special):
    x = uneven(70, 70)
    (usual,) = round_to_mxfp8(x, [dim], "e4m3", rule)
    block = (slice(32, 64), slice(5, 6)) if dim == 0 else (slice(5, 6), slice(32, 64))
    x[block] = 0
    x[block][0, 0] = special
    (ours,) = round_to_mxfp8(x, [dim], "e4m3", rule)
    exact = dequantize_mxfp8(*quantize_mxfp8(x, dim, "e4m3", rule), dim)
    assert_same(ours, exact)
    ours[block] = usual[block]
    assert_same(ours, usual)


# round_to_blocks


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_round_as_a_numpy_loop_casts_them(name, block, power_of_two, dtype):
    x = uneven(150, 300).to(dtype)
    x[:128, :128] = 0
    data, inv_scale = blocked(to_numpy(x), block, name, power_of_two, torch.finfo(dtype).max)
    spread = np.kron(inv_scale, np.ones(block, np.float32))[:150, :300]
    assert_same(round_to_blocks(x, [block], name, power_of_two)[0], decoded(name)[data] * spread)


@STEADY
@given(matrices(), st.floats(2.0**-149, FLT_MAX, width=32), names, ways)
def test_any_matrix_rounds_like_the_cast(x, scale, name, way):
    with cast_by(way):
        assert_rounds_like_the_cast(x, scale, name)


rules = st.sampled_from(["rceil", "floor", "even"])


@STEADY
@given(matrices(), st.sampled_from([0, 1, -1, -2]), names, rules, ways)
def test_any_matrix_rounds_to_its_mxfp8_values(x, dim, name, rule, way):
    with cast_by(way):
        assert_rounds_like_mxfp8(x, dim, name, rule)


@STEADY
@given(matrices(), st.sampled_from(BLOCKS), names, st.booleans(), ways)
def test_any_matrix_rounds_to_its_block_values(x, block, name, power_of_two, way):
    with cast_by(way):
        assert_rounds_like_blocks(x, block, name, power_of_two)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_matrix_of_many_tiles_rounds_like_the_cast(dtype, way):
    x = uneven(513, 601).to(dtype)
    with cast_by(way):
        assert_rounds_like_the_cast(x, 50.0, "e4m3")
        assert_rounds_like_mxfp8(x, 0, "e4m3", "rceil")
        assert_rounds_like_blocks(x, (128, 128), "e4m3", True)


@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_blocks_may_be_asked_for_at_once(way):
    x = uneven(150, 300)
    with cast_by(way):
        for block, found in zip(BLOCKS * 2, round_to_blocks(x, BLOCKS * 2), strict=True):
            assert_same(found, round_to_blocks(x, [block])[0])


def test_an_unknown_format_is_refused():
    x = torch.ones(32, 32)
    with pytest.raises(ValueError, match="No FP8 format 'fp8'"):
        round_to_fp8(x, torch.ones(()), "fp8")
    with pytest.raises(ValueError, match="No FP8 format 'fp8'"):
        round_to_mxfp8(x, [1], "fp8")
    with pytest.raises(ValueError, match="No FP8 format 'fp8'"):
        round_to_blocks(x, [(1, 128)], "fp8")
    with pytest.raises(ValueError, match="No scale rounding 'ceil'"):
        round_to_mxfp8(x, [1], "e4m3", "ceil")
