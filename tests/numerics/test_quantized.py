"""Quantized tensors by hand, as views and in any shape; what is refused; and random rounding. The
bytes and values of matrices by every quantizer are in test_conform.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import MXFP8, NVFP4, uneven, with_specials
from fp8stack.common.formats import FORMATS, FormatName, ScaleFormat, ScaleRounding
from fp8stack.numerics import (
    Quantized,
    Quantizer,
    RandomBits,
    Rounded,
    amax,
    dequantize,
    fused,
    quantize,
    round_to,
)
from fp8stack.numerics.cast import encode
from fp8stack.numerics.error import quantization_error
from fp8stack.numerics.rounding import rounding_of_both
from fp8stack.numerics.scales import scales_of
from tests.support.casts import WAYS, cast_by
from tests.support.oracles import (
    BITS,
    FLOAT_DTYPES,
    FLT_MAX,
    MAX,
    STEADY,
    codes,
    decoded,
    nearest_codes,
    rceil_code,
    to_numpy,
)
from tests.support.quantizers import (
    DRAWN,
    EVERY,
    HADAMARD,
    MXFP4,
    PLAIN,
    RULES,
    STOCHASTIC,
    generator_of,
)

SMALL_FORMATS = [name for name in get_args(FormatName) if BITS[name] < 8]


def unpacked(data: torch.Tensor, quantizer: Quantizer, dim: int, length: int) -> np.ndarray:
    """The codes, one to an element."""
    if quantizer.element_bits == 8:
        return codes(data)
    packed = np.moveaxis(data.numpy(), dim, -1)
    nibbles = np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:-1], -1)
    assert not nibbles[..., length:].any()
    return np.moveaxis(nibbles[..., :length], -1, dim)


def reference_of(x: Tensor, quantizer: Quantizer, dim: int) -> oracles.QuantizedMatrix:
    """The oracle's copy, with the bits of `DRAWN`."""
    overflow = min(float(torch.finfo(x.dtype).max), oracles.FLT_MAX)
    drawn = (lambda *shape: DRAWN.bits(*shape).numpy()) if quantizer.stochastic else None
    return oracles.quantize(to_numpy(x), quantizer, dim, overflow=overflow, bits=drawn)


def assert_oracles(x: Tensor, quantizer: Quantizer, dim: int) -> None:
    """The bytes and the values of a matrix are the oracle's, and the matrix is left alone."""
    before, generator = x.clone(), generator_of(quantizer)
    reference = reference_of(x, quantizer, dim)
    quantized = quantize(x, quantizer, dim, generator)
    length = reference.codes.shape[dim]
    np.testing.assert_array_equal(unpacked(quantized.data, quantizer, dim, length), reference.codes)
    e8m0 = quantizer.scale == "e8m0"
    scales = codes(quantized.scales) if e8m0 else quantized.scales.float().numpy()
    np.testing.assert_array_equal(scales.reshape(-1), reference.stored.reshape(-1))
    for rounded in (
        round_to(x, quantizer, dim, generator),
        round_to(x, quantizer, dim - 2, generator),
    ):
        np.testing.assert_array_equal(rounded.values.numpy(), reference.values)
        if rounded.factor is not None:
            np.testing.assert_array_equal(rounded.factor.reshape(-1), reference.factor.reshape(-1))
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))


def test_every_format_scale_and_rounding_is_among_the_tested_quantizers():
    tested = EVERY.values()
    assert {q.format for q in tested} > set(get_args(FormatName))
    assert {q.scale for q in tested} == set(get_args(ScaleFormat))
    for name in get_args(FormatName):
        assert any(q.format == name and q.scale == "e8m0" for q in tested)
    rules = {q.scale_rounding for q in tested if q.scale == "e8m0"}
    assert rules == set(get_args(ScaleRounding))


@pytest.mark.parametrize("name", EVERY)
def test_a_view_and_what_belongs_to_its_bytes(name):
    quantizer = EVERY[name]
    x = with_specials(uneven(75, 140))
    for matrix in (x.bfloat16()[::2, 1::3], x.half().T, torch.full((20, 40), math.nan)):
        assert_oracles(matrix, quantizer, 1)
        quantized = quantize(matrix, quantizer, 0, generator_of(quantizer))
        reference = reference_of(matrix, quantizer, 0)
        source = to_numpy(matrix)
        if quantizer.hadamard:
            source = oracles.hadamard(source, quantizer.hadamard, 0)
        assert (quantized.quantizer, quantized.dim, quantized.shape) == (quantizer, 0, matrix.shape)
        assert bool(quantized.has_nan) == bool(np.isnan(source).any())
        assert quantized.amax == amax(torch.from_numpy(source))
        shape = () if quantizer.per_tensor else reference.stored.shape
        assert quantized.scales.shape == shape
        with np.errstate(all="ignore"):
            spread = reference.out
            if quantizer.scale == "e4m3":
                spread = spread * np.float32(quantized.amax) * np.float32(1 / 2688)
            values = decoded(quantizer.format)[reference.codes] * spread
        np.testing.assert_array_equal(dequantize(quantized).numpy(), values)


@st.composite
def matrices(draw) -> Tensor:
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    spread = draw(st.sampled_from([0, 3, 20, 120]))
    x = np.ldexp(
        random.standard_normal((rows, columns)), random.integers(-spread, spread + 1, (rows, 1))
    ).astype(np.float32)
    if draw(st.booleans()):
        x = (np.round(x * 8) / 8).astype(np.float32)
    x[random.random(x.shape) < draw(st.sampled_from([0, 0.3]))] = 0
    for special in draw(st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 2e-45]))):
        x[random.integers(rows), random.integers(columns)] = special
    matrix = torch.from_numpy(x).to(draw(st.sampled_from(FLOAT_DTYPES)))
    return matrix.T if draw(st.booleans()) else matrix


@pytest.mark.capability("B6")
@STEADY
@given(
    matrices(),
    st.sampled_from(sorted(EVERY | RULES)),
    st.sampled_from([0, 1]),
    st.sampled_from(WAYS),
)
@pytest.mark.full
def test_any_matrix_has_the_oracles_bytes_and_values(x, name, dim, way):
    with cast_by(way):
        assert_oracles(x, (EVERY | RULES)[name], dim)


def test_an_empty_matrix():
    for quantizer, shape in itertools.product(EVERY.values(), ((0, 32), (32, 0))):
        quantized = quantize(torch.ones(shape), quantizer, 1, generator_of(quantizer))
        assert quantized.data.numel() == 0
        assert (quantized.amax, bool(quantized.has_nan)) == (0, False)
        assert dequantize(quantized).shape == shape
        assert (
            round_to(torch.ones(shape), quantizer, 1, generator_of(quantizer)).values.numel() == 0
        )
        if quantizer.block == "row":
            assert quantized.scales.shape == (shape[0], 1)


@pytest.mark.parametrize("name", [*PLAIN, *HADAMARD])
def test_more_dimensions_are_blocked_like_the_matrix_of_their_rows(name):
    quantizer = EVERY[name]
    x = uneven(48, 100)
    if quantizer.blocks is not None and quantizer.blocks[0] > 1:
        three = x[None].expand(2, 48, 100)
        quantized, flat = quantize(three, quantizer), quantize(x, quantizer)
        assert torch.equal(quantized.data[1], flat.data)
    else:
        quantized, flat = quantize(x.view(4, 12, 100), quantizer), quantize(x, quantizer)
        assert torch.equal(
            quantized.data.reshape(48, -1).view(torch.uint8), flat.data.view(torch.uint8)
        )
        assert torch.equal(dequantize(quantized).view(48, -1), dequantize(flat))
        first = quantize(x.view(4, 12, 100).movedim(2, 0), quantizer, 0)
        assert torch.equal(dequantize(first).movedim(0, 2).reshape(48, -1), dequantize(flat))


def test_stochastic_rows_of_more_dimensions_draw_like_their_matrix():
    x, quantizer = uneven(48, 100), replace(MXFP4, rounding="stochastic")
    quantized = quantize(x.view(4, 12, 100), quantizer, -1, DRAWN)
    assert torch.equal(quantized.data.view(48, -1), quantize(x, quantizer, -1, DRAWN).data)


# Rules that are told in numbers


def test_the_codes_of_e2m1_and_its_ties():
    exact = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5: 6}
    x = torch.tensor([*exact, *ties, 7, math.inf, math.nan])
    expected = torch.tensor([*range(8), *ties.values(), 7, 7, 7], dtype=torch.uint8)
    assert torch.equal(encode(x, FORMATS["e2m1"], None), expected)
    minus = expected + 8
    minus[-1] = 7  # NaN has no sign
    assert torch.equal(encode(-x, FORMATS["e2m1"], None), minus)  # -0 is code 8


@pytest.mark.parametrize("name", BITS)
def test_every_mantissa_rounds_as_ml_dtypes_casts_it(name):
    # All high bits, with low bits that make a tie, or just not.
    mantissas = (torch.arange(2**16, dtype=torch.int32)[:, None] << 7) + torch.tensor([0, 1, 127])
    for exponent in (118, 124, 125, 126, 127, 129, 131):
        x = (mantissas.int() | exponent << 23).view(torch.float32)
        rounded = encode(x, FORMATS[name], None)
        assert np.array_equal(rounded.numpy(), nearest_codes(x.numpy(), name))


@pytest.mark.parametrize("name", BITS)
def test_random_rounding_is_exact_at_the_edge_of_every_draw(name):
    """The bits just below the threshold and just not, of values everywhere in the format."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator) * 2.0 ** torch.randint(
        -12, 6, (200_000,), generator=generator
    )
    grid = decoded(name)
    grid = np.sort(grid[np.isfinite(grid) & (grid >= 0)]).astype(np.float64)
    size = np.minimum(np.abs(x.numpy().astype(np.float64)), MAX[name])
    below = np.searchsorted(grid, size, side="right") - 1
    gap = np.where(below + 1 < len(grid), np.append(grid, 2 * grid[-1])[below + 1] - grid[below], 1)
    threshold = torch.from_numpy(np.ceil((size - grid[below]) / gap * 2.0**32).astype(np.int64))
    for bits in (threshold - 1, threshold, threshold + 1):
        bits = bits.clamp(0, 2**32 - 1)
        rounded = encode(x, FORMATS[name], bits)
        assert np.array_equal(rounded.numpy(), oracles.encode(x.numpy(), name, bits.numpy()))
    up = encode(x, FORMATS[name], (threshold - 1).clamp(min=0)).int() & 0x7F >> 8 - BITS[name]
    down = encode(x, FORMATS[name], threshold.clamp(max=2**32 - 1)).int() & 0x7F >> 8 - BITS[name]
    assert ((up - down)[threshold > 0] == 1).all()
    assert ((up - down)[threshold == 0] == 0).all()


def test_two_codes_to_a_byte_with_the_even_element_in_the_low_half():
    x = torch.tensor([[0.5, -6.0, 3.0], [1.0, 6.0, -0.0]])
    quantized = quantize(x, MXFP4, 1)
    assert quantized.data.tolist() == [[0xF1, 0x05], [0x72, 0x08]]
    assert codes(quantized.scales).tolist() == [[127], [127]]
    quantized = quantize(x.T.contiguous(), MXFP4, 0)
    assert quantized.data.tolist() == [[0xF1, 0x72], [0x05, 0x08]]


def test_nvfp4_by_hand():
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([6.0, 3.0, -1.4, 0.2])
    x[1, 16:18] = torch.tensor([-0.5, 0.1])
    quantized = quantize(x, NVFP4, 1)
    # g = 2688 / 6 = 448; the first block's scale is 6 * (448 / 6) = 448, the last's 37.33 -> 36.
    assert quantized.scales.float().tolist() == [[448.0, 0.0], [0.0, 36.0]]
    assert unpacked(quantized.data, NVFP4, 1, 32)[0, :4].tolist() == [7, 5, 11, 0]
    # -0.5 * 448 / 36 = -6.2 is clamped; 0.1 * 448 / 36 = 1.24 -> 1
    assert unpacked(quantized.data, NVFP4, 1, 32)[1, 16:18].tolist() == [15, 2]
    back = dequantize(quantized)
    assert back[0, :3].tolist() == pytest.approx([6.0, 3.0, -1.5])
    assert back[1, 16:18].tolist() == pytest.approx([-6 * 36 / 448, 36 / 448])


def mxfp8_in(name: Any, rounding: ScaleRounding = "rceil") -> Quantizer:
    return Quantizer(format=name, block=(1, 32), scale="e8m0", scale_rounding=rounding)


def mx_code(amax: float, name: str, rounding: ScaleRounding) -> int:
    quantized = quantize(torch.tensor([0.0, -amax]), mxfp8_in(name, rounding))
    return codes(quantized.scales).item()


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


@pytest.mark.capability("B6")
@pytest.mark.parametrize(("name", "rounding"), HAND_COMPUTED)
def test_hand_computed_codes(name, rounding):
    table = HAND_COMPUTED[name, rounding]
    assert [mx_code(amax, name, rounding) for amax, _ in table] == [code for _, code in table]


@pytest.mark.capability("B6")
@STEADY
@given(
    st.floats(0, width=32, exclude_min=True, allow_infinity=False),
    st.sampled_from(["e4m3", "e5m2"]),
)
def test_rceil_is_the_smallest_power_of_two_not_below_amax_over_fp8_max(amax, name):
    assert mx_code(amax, name, "rceil") == rceil_code(amax, name)


@pytest.mark.parametrize("shape", [(40, 3, 65), (2, 33, 2, 34), (70,)])
def test_blocks_run_along_any_dimension_with_a_short_last_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dim in range(-len(shape), len(shape)):
        data, scales = quantize(x, MXFP8, dim)[:2]
        rows = x.numpy().swapaxes(dim, -1)
        reference = oracles.quantize(rows.reshape(-1, shape[dim]), MXFP8, 1)
        expected = reference.codes.reshape(rows.shape).swapaxes(dim, -1)
        expected_scales = reference.stored.reshape(*rows.shape[:-1], -1).swapaxes(dim, -1)
        np.testing.assert_array_equal(codes(data), expected)
        np.testing.assert_array_equal(codes(scales), expected_scales)


def stored(data: torch.Tensor, scales: torch.Tensor, quantizer: Quantizer, dim: int) -> Quantized:
    """Bytes and scales from elsewhere."""
    unknown, no_nan = torch.tensor(math.nan), torch.tensor(False)
    return Quantized(data, scales, unknown, quantizer, dim, data.shape, no_nan)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_dequantized_mxfp8_is_the_exact_product(name, dim):
    data = torch.arange(256, dtype=torch.uint8).reshape(4, 64).repeat(12, 1)
    scales = torch.arange(2 * (64 if dim == 0 else 48), dtype=torch.uint8) * 2
    scales = scales.reshape((2, 64) if dim == 0 else (48, 2))
    power = np.repeat(scales.numpy().astype(int) - 127, 32, axis=dim)[:48, :64]
    with np.errstate(over="ignore"):  # 448 * 2^127
        expected = np.ldexp(decoded(name)[data.numpy()], power)
    data = data.view(FORMATS[name].dtype or torch.uint8)
    values = dequantize(stored(data, scales.view(torch.float8_e8m0fnu), mxfp8_in(name), dim))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), expected)


def test_scale_code_255_is_nan():
    nan = torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    not_a_number = stored(torch.ones(3).to(torch.float8_e4m3fn), nan, mxfp8_in("e4m3"), 0)
    assert dequantize(not_a_number).isnan().all()


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


# Both directions at once


def assert_same(rounded: Rounded, expected: Rounded) -> None:
    np.testing.assert_array_equal(rounded.values.numpy(), expected.values.numpy())
    assert (rounded.factor is None) == (expected.factor is None)
    if rounded.factor is not None and expected.factor is not None:
        np.testing.assert_array_equal(rounded.factor.numpy(), expected.factor.numpy())


def round_both(
    x: Tensor,
    rowwise: Quantizer,
    columnwise: Quantizer,
    generators: tuple[RandomBits | None, RandomBits | None] = (None, None),
) -> tuple[Rounded, Rounded]:
    """For GEMMs over the columns and over the rows, in one pass where the quantizers are alike."""
    at_once = rounding_of_both(rowwise, columnwise)
    if at_once is not None:
        rounded_along, rounded_across = at_once.round(x)
        return rounded_along, rounded_across
    return round_to(x, rowwise, 1, generators[0]), round_to(x, columnwise, 0, generators[1])


PAIRS = [
    *((name, name) for name in (*PLAIN, *HADAMARD)),
    *(("1x128", "128x128"), ("mxfp4", "mxfp4 32x32"), ("nvfp4", "nvfp4 16x16"), ("1x64", "1x64")),
    *(("nvfp4", "hadamard nvfp4"), ("mxfp8", "tensor"), ("tensor", "mxfp8"), ("mxfp4", "mxfp8")),
    *(("mxfp4", "mxfp4 floor"), ("tensor", "tensor e5m2"), ("stochastic nvfp4", "nvfp4")),
    *(("stochastic mxfp4", "stochastic hadamard mxfp4"), ("row", "row e5m2"), ("tensor", "row")),
    *(("stochastic tensor", "stochastic tensor"), ("stochastic nvfp4 16x16", "nvfp4 16x16")),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_both_directions_equal_one_after_the_other(pair):
    rowwise, columnwise = (EVERY[name] for name in pair)
    generators = (DRAWN, replace(DRAWN, stream=9))
    matrices = (uneven(75, 140), with_specials(uneven(75, 140)), uneven(64, 128).bfloat16())
    for x, way in itertools.product(matrices, WAYS):
        with cast_by(way):
            pair_at_once = round_both(x, rowwise, columnwise, generators)
            for rounded, quantizer, dim in zip(
                pair_at_once, (rowwise, columnwise), (1, 0), strict=True
            ):
                alone = round_to(x, quantizer, dim, generators[1 - dim])
                assert_same(rounded, alone)


def test_short_rows_in_a_tile_that_is_wider_equal_those_of_one_result():
    x = uneven(64, 64).bfloat16()
    quantizers = Quantizer(block=(1, 32)), Quantizer(block=(128, 128))  # a tile has 128 columns
    for rounded, quantizer, dim in zip(round_both(x, *quantizers), quantizers, (1, 0), strict=True):
        alone = round_to(x, quantizer, dim)
        assert_same(rounded, alone)


def test_alike_quantizers_share_their_passes(monkeypatch):
    x = uneven(64, 128)
    called = Mock(wraps=fused.round)
    monkeypatch.setattr(fused, "round", called)
    for rowwise, columnwise in (
        (MXFP8, MXFP8),
        (NVFP4, NVFP4),
        (MXFP4, MXFP4),
        (NVFP4, replace(NVFP4, block=(16, 16))),
    ):
        called.reset_mock()
        round_both(x, rowwise, columnwise)
        called.assert_called_once()


# Scales from outside


def test_a_scale_may_be_given_in_current_scaling():
    x, scale = uneven(40, 70), torch.tensor(448 / 3)
    quantized = quantize(x, Quantizer(), 1, scale=scale)
    expected = oracles.encode(to_numpy(x) * np.float32(448 / 3), "e4m3")
    np.testing.assert_array_equal(codes(quantized.data), expected)
    assert quantized.scales == np.float32(1) / np.float32(448 / 3)
    assert round_to(x, Quantizer(), 1, scale=scale).factor == quantized.scales


@pytest.mark.parametrize("function", [quantize, round_to, quantization_error])
def test_what_is_missing_is_asked_for(function):
    def of(quantizer: Quantizer, **options) -> None:
        function(torch.ones(16, 16), quantizer, dim=1, **options)

    with pytest.raises(ValueError, match="needs a generator"):
        of(replace(NVFP4, rounding="stochastic"))
    with pytest.raises(ValueError, match="'delayed' needs a scale"):
        of(Quantizer(amax="delayed"))
    with pytest.raises(ValueError, match="takes no scale from outside"):
        of(NVFP4, scale=torch.tensor(1.0))


def test_a_square_block_needs_a_matrix():
    with pytest.raises(ValueError, match="does not fit a tensor of one dimension"):
        quantize(torch.ones(16), replace(NVFP4, block=(16, 16)))


@pytest.mark.parametrize("function", [quantize, round_to])
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4", "rowwise"])
def test_what_is_no_tensor_to_quantize_is_refused(function, name):
    """A dimension out of range was taken modulo, float64 rounded twice, and integers too."""
    quantizer = {
        "current": Quantizer(),
        "mxfp8": Quantizer(block=(1, 32), scale="e8m0"),
        "nvfp4": NVFP4,
        "rowwise": Quantizer(block="row"),
    }[name]
    x = torch.ones(4, 64)
    for dim in (2, -3, 5):
        with pytest.raises(ValueError, match=rf"shape \[4, 64\] has no dimension {dim}"):
            function(x, quantizer, dim)
    for unsupported in (x.double(), x.int(), x.bool(), x.to(torch.float8_e4m3fn), x + 0j):
        with pytest.raises(ValueError, match=f"{unsupported.dtype} is not quantized"):
            function(unsupported, quantizer, 1)
    with pytest.raises(ValueError, match=r"shape \[\]"):
        function(torch.tensor(1.0), quantizer, -1)
    with pytest.raises(ValueError, match=r"a list is not quantized. Give a tensor"):
        function(x.tolist(), quantizer, 1)
    with pytest.raises(ValueError, match=r"a str is no Quantizer"):
        function(x, name, 1)


@pytest.mark.parametrize("function", [quantize, round_to])
def test_a_scale_is_one_float32(function):
    """A float64 scale was read as float32 in memory by compiled casts."""
    x = torch.ones(4, 64)
    for quantizer, scale in itertools.product(
        (Quantizer(), Quantizer(amax="delayed")),
        (2.0, torch.ones(1), torch.ones(4, 1), torch.tensor(1.0).double(), torch.tensor(1)),
    ):
        with pytest.raises(ValueError, match="scale is a 0-dim float32 tensor, not"):
            function(x, quantizer, 1, scale=scale)


def test_a_scale_on_another_device_is_refused_in_place_of_a_read_of_its_address():
    for quantizer in (Quantizer(), Quantizer(amax="delayed")):
        with pytest.raises(ValueError, match="a tensor on the CPU is on meta"):
            round_to(torch.ones(4, 64), quantizer, 1, scale=torch.ones((), device="meta"))


@pytest.mark.parametrize("function", [quantize, round_to])
def test_a_counter_is_int64(function):
    """Compiled casts read eight bytes."""
    quantizer, counter = Quantizer(rounding="stochastic"), torch.tensor(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs a generator with an int64 counter"):
        function(torch.ones(4, 64), quantizer, 1, replace(DRAWN, counter=counter))


def test_rounding_needs_a_matrix():
    for x in (torch.ones(64), torch.ones(2, 4, 64)):
        with pytest.raises(ValueError, match="is no matrix"):
            round_to(x, NVFP4, 1)


def test_scales_of_other_blocks_are_refused():
    """They were spread over the wrong elements."""
    x = torch.randn(4, 64)
    quantized = quantize(x, Quantizer(block=(1, 32), scale="power_of_two"))
    for block in ((1, 128), (32, 32), (1, 16)):
        quantizer = replace(quantized.quantizer, block=block)
        with pytest.raises(ValueError, match=r"Scales of shape \[4, 2\] do not belong"):
            dequantize(quantized._replace(quantizer=quantizer))
    quantized = quantize(x, MXFP8)
    scales = quantized.scales
    for wrong, dim in ((scales, 0), (scales[:, :1], 1), (scales[:2], 1)):
        with pytest.raises(ValueError, match="do not belong"):
            dequantize(quantized._replace(scales=wrong, dim=dim))
    with pytest.raises(ValueError, match=r"float8_e8m0fnu.*torch.float32"):
        dequantize(quantized._replace(scales=scales.float()))


@pytest.mark.parametrize("name", EVERY)
def test_what_is_quantized_has_no_gradient(name):
    """It had the amax's gradient, which is not the gradient of the values."""
    x = uneven(75, 140).requires_grad_()
    quantized = quantize(x, EVERY[name], 1, generator_of(EVERY[name]))
    assert not any(
        tensor.requires_grad for tensor in (quantized.data, quantized.scales, quantized.amax)
    )
    assert not dequantize(quantized).requires_grad


# Stochastic rounding as a whole


@pytest.mark.parametrize("name", STOCHASTIC)
def test_draws_do_not_depend_on_how_rows_are_split_and_change_with_the_counter(name):
    quantizer = STOCHASTIC[name]
    x = uneven(64, 128)
    if quantizer.per_tensor or quantizer.scale == "e4m3":
        x[::16, 0] = 3e4  # the same amax in all parts
        x[::16, 1:] = 0
    unsplit = quantize(x, quantizer, 1, DRAWN)
    again = quantize(x, quantizer, 1, DRAWN)
    assert np.array_equal(codes(unsplit.data), codes(again.data))
    for first in (torch.tensor(16), 16):
        halves = [
            quantize(x[:16], quantizer, 1, DRAWN),
            quantize(x[16:], quantizer, 1, replace(DRAWN, first_row=first)),
        ]
        joined = np.concatenate([codes(half.data) for half in halves])
        assert np.array_equal(joined, codes(unsplit.data))
    redrawn = quantize(x, quantizer, 1, replace(DRAWN, counter=torch.tensor(4)))
    assert not np.array_equal(codes(redrawn.data), codes(unsplit.data))


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_random_rounding_is_unbiased_at_every_value_tried(name):
    """A million draws of each: within 4 standard errors of the value itself."""
    grid = decoded(name)[: 1 << BITS[name] - 1]
    tried = [(grid[i] * (1 - f) + grid[i + 1] * f) for i in (0, 1, 2, 5) for f in (0.01, 0.3, 0.77)]
    tried += [2.0**-20, -0.3, -MAX[name] * 0.9, MAX[name]]
    bits = RandomBits(5, 6, torch.tensor(7)).bits(1000, 1000)
    table = torch.from_numpy(decoded(name))
    for value in tried:
        x = torch.full((1000, 1000), float(value))
        drawn = table[encode(x, FORMATS[name], bits).int()].double()
        error = drawn.std() / 1000
        assert abs(drawn.mean() - x[0, 0].double()) <= 4 * error, value


def test_it_is_unbiased_through_the_scales_of_a_block():
    x = uneven(1, 64, seed=5).expand(20_000, 64)
    for quantizer in (MXFP4, NVFP4):
        quantized = quantize(x, replace(quantizer, rounding="stochastic"), 1, DRAWN)
        drawn = dequantize(quantized).double()
        # NVFP4's scale is rounded: what exceeds its 6 is cut off, not rounded.
        limit = drawn.abs().max(0)[0]
        inside = x[0].double().abs() < limit
        error = drawn.std(0) / 20_000**0.5
        assert inside.sum() > 40
        assert ((drawn.mean(0) - x[0].double()).abs() <= 4.5 * error + 1e-6 * limit)[inside].all()


def test_a_generator_does_not_change_what_is_rounded_to_the_nearest():
    x = uneven(64, 64)
    for name, quantizer in (PLAIN | HADAMARD).items():
        with_generator, without = round_to(x, quantizer, 1, DRAWN), round_to(x, quantizer, 1)
        assert torch.equal(with_generator.values, without.values), name


@pytest.mark.full
def test_compiled_code_rounds_every_mantissa_as_eager_code_does():
    torch.compiler.reset()
    quantizers = [
        Quantizer(format=name, block=(1, 32), scale="e8m0")
        for name in get_args(FormatName)
        if BITS[name] < 8
    ]

    def rounded(x: Tensor) -> list[Tensor]:
        return [round_to(x, quantizer, 1).values for quantizer in quantizers]

    mantissas = (torch.arange(2**16, dtype=torch.int32)[:, None] << 7) + torch.tensor([0, 1, 127])
    compiled = torch.compile(rounded, fullgraph=True)
    for exponent in (110, 122, 124, 125, 126, 127):
        x = (mantissas.int() | exponent << 23).view(torch.float32).view(-1, 1).expand(-1, 2).clone()
        x[:, 1] = 0.99  # so that exponents below are small in their block
        for fast, eager in zip(compiled(x), rounded(x), strict=True):
            np.testing.assert_array_equal(fast.numpy(), eager.numpy())
