"""The values that an emulated GEMM multiplies, against the bytes of `quantize`, per quantizer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8stack.analysis.conform.check_inputs import (
    MXFP8,
    NVFP4,
    extreme,
    fp32_values,
    uneven,
    with_specials,
)
from fp8stack.common.formats import FormatName
from fp8stack.numerics import (
    Quantizer,
    RandomBits,
    Rounded,
    dequantize,
    fused,
    quantize,
    round_to,
)
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.quantized import Quantized
from fp8stack.numerics.rounding import rounding, rounding_of_both
from tests.support.casts import WAYS, cast_by
from tests.support.oracles import (
    BITS,
    FLOAT_DTYPES,
    STEADY,
    decoded,
    every_value,
    fp8_codes,
    to_numpy,
)
from tests.support.quantizers import (
    DRAWN,
    EVERY,
    HADAMARD,
    MXFP4,
    PLAIN,
    RULES,
    generator_of,
    numbers,
)

# One quantizer of each way through the code; compiling takes seconds each.
COMPILED = [
    "mxfp8",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *("stochastic mxfp6 e3m2 floor", "128x128"),
            *("1x128", "nvfp4 16x16", "mxfp4", "mxfp4 even", "mxfp8 e5m2 floor", "1x64"),
            *("tensor e5m2", "row", "mxfp6 e2m3", "fp6 power of two"),
            *("nvfp4", "hadamard nvfp4", "hadamard tensor", "stochastic tensor e5m2"),
            *("stochastic row e5m2", "stochastic hadamard nvfp4"),
        )
    ),
]


Expected = tuple[np.ndarray, Tensor | None]


def values_of_bytes(x: Tensor, quantizer: Quantizer, dim: int, **options) -> Expected:
    """Values and factor from the bytes."""
    quantized = quantize(x, quantizer, dim, generator_of(quantizer), **options)
    unscaled = quantized._replace(scales=torch.ones_like(quantized.scales))
    if quantizer.blocks is None:
        values = dequantize(unscaled)
        factor = quantized.scales.reshape(-1 if quantized.scales.ndim else ())
    elif quantizer.scale == "e4m3":
        values = dequantize(two_levels(quantized))
        factor = quantized.amax * float(np.float32(1 / 2688))
    else:
        values, factor = dequantize(quantized), None
    source = hadamard(x, quantizer.hadamard, dim) if quantizer.hadamard else x
    return torch.where(source.isnan(), math.nan, values).numpy(), factor


def two_levels(quantized: Quantized) -> Quantized:
    """The same blocks with the E4M3 scale alone, as float32."""
    quantizer = replace(quantized.quantizer, scale="float32")
    return quantized._replace(scales=quantized.scales.float(), quantizer=quantizer)


def assert_same(rounded: Rounded, expected: Expected) -> None:
    """Equal values and factors; NaN equals NaN, and +0 equals -0."""
    assert rounded.values.dtype == torch.float32
    assert rounded.values.is_contiguous()
    np.testing.assert_array_equal(rounded.values.numpy(), expected[0])
    if expected[1] is None:
        assert rounded.factor is None
    else:
        assert (rounded.factor.dtype, rounded.factor.shape) == (torch.float32, expected[1].shape)
        np.testing.assert_array_equal(rounded.factor.numpy(), np.asarray(expected[1]))


@pytest.fixture(params=WAYS)
def way(request):
    with cast_by(request.param):
        yield


@pytest.mark.parametrize("name", EVERY)
def test_the_values_are_those_of_the_bytes(name):
    quantizer, generator = EVERY[name], generator_of(EVERY[name])
    x = uneven(75, 140)
    matrices = (with_specials(x), extreme(), extreme() * 2.0**-126, numbers(x).T, x[::2, 3:])
    for matrix, dim in itertools.product(matrices, (0, 1)):
        before, expected = matrix.clone(), values_of_bytes(matrix, quantizer, dim)
        for way in WAYS:
            with cast_by(way):
                assert_same(round_to(matrix, quantizer, dim, generator), expected)
                counted_back = round_to(matrix, quantizer, dim - 2, generator)
            assert_same(counted_back, expected)
        np.testing.assert_array_equal(to_numpy(matrix), to_numpy(before))
    halves = itertools.product((torch.bfloat16, torch.float16), (x, with_specials(x), x[:64, :128]))
    for dtype, matrix in halves:
        half = matrix.to(dtype)
        assert_same(round_to(half, quantizer, 1, generator), values_of_bytes(half, quantizer, 1))
    for shape, dim in itertools.product([(0, 32), (32, 0), (1, 1), (0, 0)], (0, 1)):
        x = torch.full(shape, -3.3)
        rounded = round_to(x, quantizer, dim, generator)
        if 0 not in shape:
            assert_same(rounded, values_of_bytes(x, quantizer, dim))
        assert rounded.values.numel() == (0 if 0 in shape else max(1, quantizer.hadamard))
        if quantizer.block == "row":
            assert rounded.factor.shape == (shape[1 - dim],)


EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)


@pytest.mark.parametrize("name", EVERY)
def test_one_sweep_rounds_every_bfloat16_to_the_bfloat16_of_the_values_of_the_bytes(name):
    quantizer, generator = EVERY[name], generator_of(EVERY[name])
    for dim in (0, 1):
        values, factor = values_of_bytes(EVERY_BFLOAT16, quantizer, dim)
        halves = torch.from_numpy(values).bfloat16().float().numpy()
        (rounded,) = rounding(quantizer, [dim]).round(EVERY_BFLOAT16, generator, bf16=True)
        assert rounded.values.dtype == torch.bfloat16
        assert_same(rounded._replace(values=rounded.values.float()), (halves, factor))


# Both directions at once


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
                assert_same(rounded, (alone.values.numpy(), alone.factor))


def test_short_rows_in_a_tile_that_is_wider_equal_those_of_one_result():
    x = uneven(64, 64).bfloat16()
    quantizers = Quantizer(block=(1, 32)), Quantizer(block=(128, 128))  # a tile has 128 columns
    for rounded, quantizer, dim in zip(round_both(x, *quantizers), quantizers, (1, 0), strict=True):
        alone = round_to(x, quantizer, dim)
        assert_same(rounded, (alone.values.numpy(), alone.factor))


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


@pytest.mark.parametrize("name", ["tensor", "stochastic tensor"])
def test_a_scale_may_be_given(name):
    quantizer, generator = EVERY[name], generator_of(EVERY[name])
    x = uneven(75, 140)
    for amax in ("current", "delayed"):
        quantizer = replace(quantizer, amax=amax)
        for scale in (torch.tensor(448 / 3), torch.tensor(2.0**-10)):
            rounded = round_to(x, quantizer, 0, generator, scale=scale)
            assert_same(rounded, values_of_bytes(x, quantizer, 0, scale=scale))
    small = torch.tensor(1e-3) / x.abs().max()
    rounded = round_to(x, quantizer, 1, generator, scale=small)
    assert_same(rounded, values_of_bytes(x, quantizer, 1, scale=small))


# Draws


@pytest.mark.parametrize(
    "name", ["stochastic mxfp4", "stochastic tensor e5m2", "stochastic row e5m2"]
)
def test_draws_depend_on_the_place_alone(name):
    quantizer = EVERY[name]
    x = uneven(96, 64)
    x[:, 0] = 1e4  # one amax for the tensor and for each part
    unsplit = round_to(x, quantizer, 1, DRAWN)
    for way in WAYS:
        with cast_by(way):
            again = round_to(x, quantizer, 1, DRAWN)
        assert torch.equal(again.values, unsplit.values)
    for cut in (32, 33, 95):
        above = round_to(x[:cut], quantizer, 1, DRAWN)
        below = round_to(x[cut:], quantizer, 1, replace(DRAWN, first_row=torch.tensor(cut)))
        assert torch.equal(torch.cat([above.values, below.values]), unsplit.values)


def test_a_generator_does_not_change_what_is_rounded_to_the_nearest():
    x = uneven(64, 64)
    for name, quantizer in (PLAIN | HADAMARD).items():
        with_generator, without = round_to(x, quantizer, 1, DRAWN), round_to(x, quantizer, 1)
        assert torch.equal(with_generator.values, without.values), name


# Any matrix


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


@STEADY
@given(
    matrices(),
    st.sampled_from(sorted(EVERY | RULES)),
    st.sampled_from([0, 1]),
    st.sampled_from(WAYS),
)
def test_any_matrix_rounds_to_the_values_of_its_bytes(x, name, dim, way):
    quantizer = (EVERY | RULES)[name]
    with cast_by(way):
        rounded = round_to(x, quantizer, dim, generator_of(quantizer))
    assert_same(rounded, values_of_bytes(x, quantizer, dim))


# FP8 with one scale, and in blocks


@pytest.mark.parametrize("scale", [1.0, 0.1, 448 / 3, 2.0**-20, 3e7, 2.0**127])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_16_bit_value_and_every_tie_rounds_as_ml_dtypes_casts(format, scale):
    quantizer = Quantizer(format=format)
    for x in (every_value(torch.bfloat16), every_value(torch.float16), fp32_values()):
        expected = decoded(format)[fp8_codes(to_numpy(x), scale, format)]
        for way in WAYS:
            with cast_by(way):
                rounded = round_to(x.reshape(1, -1), quantizer, 1, scale=torch.tensor(scale))
            np.testing.assert_array_equal(rounded.values.view(x.shape), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_blocks_gives_the_values_of_its_bytes(name, dtype):
    quantizer = RULES[name]
    for x in (with_specials(uneven(75, 140)).to(dtype), extreme().to(dtype)):
        expected = {dim: values_of_bytes(x, quantizer, dim) for dim in (0, 1)}
        for way in WAYS:
            with cast_by(way):
                separate = [round_to(x, quantizer, dim) for dim in (1, 0)]
                at_once = rounding(quantizer, [1, 0]).round(x)
            for rowwise, columnwise in (separate, at_once):
                assert_same(rowwise, expected[1])
                assert_same(columnwise, expected[0])


# Compiled


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_gives_the_values_of_eager_code(name):
    torch.compiler.reset()
    quantizer = EVERY[name]

    def rounded(x: Tensor, generator: RandomBits | None) -> tuple[Rounded, Rounded]:
        return round_both(x, quantizer, quantizer, (generator, generator))

    compiled = torch.compile(rounded, fullgraph=True, dynamic=False)
    for counter in (3, 2**35):
        generator = replace(DRAWN, counter=torch.tensor(counter))
        for x in (with_specials(uneven(75, 140)), extreme()[:, :140]):
            x = torch.cat([x, x])[:75]
            for fast, eager in zip(compiled(x, generator), rounded(x, generator), strict=True):
                np.testing.assert_array_equal(fast.values.numpy(), eager.values.numpy())
                if eager.factor is not None:
                    np.testing.assert_array_equal(fast.factor.numpy(), eager.factor.numpy())


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
