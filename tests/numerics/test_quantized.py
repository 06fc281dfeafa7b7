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

from fp8stack.analysis.conform import casts, oracles
from fp8stack.analysis.conform.check_inputs import MXFP8, NVFP4, uneven, with_specials
from fp8stack.analysis.conform.checks import equal
from fp8stack.common.formats import FormatName, ScaleRounding
from fp8stack.numerics import (
    Quantizer,
    RandomBits,
    amax,
    dequantize,
    fused,
    quantize,
    round_to,
)
from fp8stack.numerics.error import quantization_error
from fp8stack.numerics.rounding import rounding_of_both
from tests.support.casts import WAYS, cast_by
from tests.support.oracles import (
    FLOAT_DTYPES,
    FLT_MAX,
    STEADY,
    codes,
    decoded,
    to_numpy,
)
from tests.support.quantizers import (
    DRAWN,
    EVERY,
    RULES,
    STOCHASTIC,
    generator_of,
)


def assert_oracles(x: Tensor, quantizer: Quantizer) -> None:
    """The bytes, the values and the amax of a matrix are the oracle's, and the matrix stays."""
    before, source = x.clone(), to_numpy(x)
    seed, stream, counter = casts.DRAWN
    bits = RandomBits(seed, stream, torch.tensor(counter)) if quantizer.stochastic else None
    references = [casts.quantized(x, quantizer, dim) for dim in (1, 0)]
    call = casts.CastCall(x, quantizer, bits, None)
    for cast, layout in (
        (casts.by_quantize, casts.as_stored),
        (casts.by_numba, casts.as_multiplied),
    ):
        facts = equal(cast(call), layout(references, quantizer))
        assert facts["holds"], facts
    for dim, reference in zip((1, 0), references, strict=True):
        copy = quantize(x, quantizer, dim, bits)
        assert copy.scales.shape == (() if quantizer.per_tensor else reference.stored.shape)
        values = oracles.hadamard(source, quantizer.hadamard, dim) if quantizer.hadamard else source
        assert bool(copy.has_nan) == bool(np.isnan(values).any())
        assert copy.amax == amax(torch.from_numpy(values))
        with np.errstate(all="ignore"):
            spread = reference.out
            if quantizer.scale == "e4m3":
                spread = spread * np.float32(copy.amax) * np.float32(1 / 2688)
            values = decoded(quantizer.format)[reference.codes] * spread
        np.testing.assert_array_equal(dequantize(copy).numpy(), values)
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))


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
@given(matrices(), st.sampled_from(sorted(EVERY | RULES)), st.sampled_from(WAYS))
@pytest.mark.full
def test_any_matrix_has_the_oracles_bytes_and_values(x, name, way):
    with cast_by(way):
        assert_oracles(x, (EVERY | RULES)[name])


def test_an_empty_matrix():
    for quantizer, shape in itertools.product(EVERY.values(), ((0, 32), (32, 0))):
        quantized = quantize(torch.ones(shape), quantizer, 1, generator_of(quantizer))
        assert (quantized.amax, bool(quantized.has_nan)) == (0, False)
        assert dequantize(quantized).shape == shape
        rounded = round_to(torch.ones(shape), quantizer, 1, generator_of(quantizer))
        assert quantized.data.numel() == rounded.values.numel() == 0


@pytest.mark.parametrize("name", ["tensor", "row", "mxfp4", "nvfp4 16x16", "stochastic mxfp4"])
def test_more_dimensions_are_blocked_like_the_matrix_of_their_rows(name):
    quantizer, bits = EVERY[name], generator_of(EVERY[name])
    x = uneven(48, 100)
    flat = quantize(x, quantizer, -1, bits)
    if quantizer.turns:
        stacked = quantize(x[None].expand(2, 48, 100), quantizer)
        assert torch.equal(stacked.data[1], flat.data)
        return
    quantized = quantize(x.view(4, 12, 100), quantizer, -1, bits)
    assert torch.equal(dequantize(quantized).view(48, -1), dequantize(flat))
    first = quantize(x.view(4, 12, 100).movedim(2, 0), quantizer, 0, bits)
    if bits is None:
        assert torch.equal(dequantize(first).movedim(0, 2).reshape(48, -1), dequantize(flat))


# Rules that are told in numbers


def mx_code(amax: float, name: Any, rounding: ScaleRounding = "rceil") -> int:
    quantizer = replace(MXFP8, format=name, scale_rounding=rounding)
    return codes(quantize(torch.tensor([0.0, -amax]), quantizer).scales).item()


HAND_COMPUTED: dict[tuple[str, ScaleRounding], list[tuple[float, int]]] = {
    ("e4m3", "rceil"): [
        *((0.0, 0), (2.0**-149, 0)),  # and its product with 1/448 is zero
        *((448 * 2.0**-127, 0), (449 * 2.0**-127, 1)),  # 2^-127 exactly, a subnormal float
        *((448.0, 127), (448 + 2.0**-15, 128)),  # the next float
        *((FLT_MAX, 247), (math.inf, 254)),
    ],
    ("e5m2", "rceil"): [(57344.0, 127), (57345.0, 128), (1.0, 112)],
    ("e4m3", "floor"): [(2.0**-119, 0), (2.0**-118, 1), (511.0, 127), (512.0, 128)],
    ("e5m2", "floor"): [(65535.0, 127), (65536.0, 128)],
    ("e4m3", "even"): [(496 - 2.0**-15, 127), (496.0, 128), (FLT_MAX, 247)],  # halfway to 512
    ("e5m2", "even"): [(61439.0, 127), (61440.0, 128)],
}


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


def test_scale_code_255_is_nan():
    nan = torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert dequantize(quantize(torch.ones(3), MXFP8)._replace(scales=nan)).isnan().all()


# Both directions at once


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names",
    [("1x128", "128x128"), ("mxfp4", "mxfp4 32x32"), ("nvfp4", "nvfp4 16x16"), ("1x64", "1x64")],
    ids=" and ".join,
)
def test_quantizers_that_differ_in_their_blocks_round_in_one_pass(names, way, monkeypatch):
    rowwise, columnwise = (EVERY[name] for name in names)
    rule, called = rounding_of_both(rowwise, columnwise), Mock(wraps=fused.round)
    assert rule is not None
    for x in (with_specials(uneven(75, 140)), uneven(64, 64)):
        with cast_by(way):
            with monkeypatch.context() as patch:
                patch.setattr(fused, "round", called)
                at_once = rule.round(x)
            alone = (round_to(x, rowwise, 1), round_to(x, columnwise, 0))
        for rounded, expected in zip(at_once, alone, strict=True):
            torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    assert called.call_count == (0 if way == "expressions" else 2)


def test_quantizers_that_differ_in_more_do_not():
    for first, second in (
        *(("nvfp4", "hadamard nvfp4"), ("mxfp8", "tensor"), ("tensor", "mxfp8")),
        *((name, name) for name in ("tensor", "stochastic nvfp4", "hadamard nvfp4")),
        *(("mxfp4", "mxfp8"), ("mxfp4", "mxfp4 floor"), ("tensor", "tensor e5m2")),
        *(("stochastic nvfp4", "nvfp4"), ("row", "row e5m2"), ("tensor", "row")),
    ):
        assert rounding_of_both(EVERY[first], EVERY[second]) is None


# Scales from outside


def test_a_scale_may_be_given_in_current_scaling():
    x, scale = uneven(40, 70), torch.tensor(448 / 3)
    quantized = quantize(x, Quantizer(), 1, scale=scale)
    expected = oracles.encode(to_numpy(x) * np.float32(448 / 3), "e4m3")
    np.testing.assert_array_equal(codes(quantized.data), expected)
    assert quantized.scales == np.float32(1) / np.float32(448 / 3)
    assert round_to(x, Quantizer(), 1, scale=scale).factor == quantized.scales


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("needs a generator", (replace(NVFP4, rounding="stochastic"), 1), {}),
    ("'delayed' needs a scale", (Quantizer(amax="delayed"), 1), {}),
    ("takes no scale from outside", (NVFP4, 1), {"scale": torch.tensor(1.0)}),
    (r"shape \[4, 64\] has no dimension 2", (MXFP8, 2), {}),
    (r"shape \[4, 64\] has no dimension -3", (Quantizer(block="row"), -3), {}),
    ("a str is no Quantizer", ("mxfp8", 1), {}),
    # A float64 scale was read as float32 in memory by compiled casts.
    ("0-dim float32 tensor, not", (Quantizer(), 1), {"scale": torch.tensor(1.0).double()}),
    ("0-dim float32 tensor, not", (Quantizer(amax="delayed"), 1), {"scale": torch.ones(4, 1)}),
    ("0-dim float32 tensor, not", (Quantizer(), 1), {"scale": 2.0}),
    (
        "needs a generator with an int64 counter",
        (Quantizer(rounding="stochastic"), 1),
        {"generator": replace(DRAWN, counter=torch.tensor(3, dtype=torch.int32))},
    ),
]


@pytest.mark.parametrize(("message", "arguments", "options"), REFUSED)
@pytest.mark.parametrize("function", [quantize, round_to])
def test_arguments_that_do_not_fit_are_refused(function, message, arguments, options):
    with pytest.raises(ValueError, match=message):
        function(torch.ones(4, 64), *arguments, **options)


@pytest.mark.parametrize(("message", "arguments", "options"), REFUSED[:3])
def test_an_error_is_of_a_quantizer_with_all_that_it_needs(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        quantization_error(torch.ones(4, 64), arguments[0], **options)


@pytest.mark.parametrize("function", [quantize, round_to])
def test_what_is_no_tensor_to_quantize_is_refused(function):
    x = torch.ones(4, 64)
    for unsupported in (x.double(), x.int(), x.bool(), x.to(torch.float8_e4m3fn), x + 0j):
        with pytest.raises(ValueError, match=f"{unsupported.dtype} is not quantized"):
            function(unsupported, Quantizer(), 1)
    for wrong, quantizer, message in (
        (torch.tensor(1.0), Quantizer(), r"shape \[\]"),
        (x.tolist(), MXFP8, r"a list is not quantized. Give a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            function(wrong, quantizer, -1)
    with pytest.raises(ValueError, match="does not fit a tensor of one dimension"):
        quantize(torch.ones(16), replace(NVFP4, block=(16, 16)))
    with pytest.raises(ValueError, match="a tensor on the CPU is on meta"):
        round_to(x, Quantizer(), 1, scale=torch.ones((), device="meta"))
    with pytest.raises(ValueError, match="is no matrix"):
        round_to(torch.ones(2, 4, 64), NVFP4, 1)


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


def test_what_is_quantized_has_no_gradient():
    """It had the amax's gradient, which is not the gradient of the values."""
    x = uneven(75, 140).requires_grad_()
    for name in ("tensor", "row", "stochastic hadamard nvfp4"):
        quantized = quantize(x, EVERY[name], 1, generator_of(EVERY[name]))
        tensors = (quantized.data, quantized.scales, quantized.amax, dequantize(quantized))
        assert not any(tensor.requires_grad for tensor in tensors)
        assert not round_to(x, EVERY[name], 1, generator_of(EVERY[name])).values.requires_grad


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


@pytest.mark.full
def test_compiled_code_rounds_every_mantissa_as_eager_code_does():
    torch.compiler.reset()
    quantizers = [replace(MXFP8, format=name) for name in get_args(FormatName)]

    def rounded(x: Tensor) -> list[Tensor]:
        return [round_to(x, quantizer, 1).values for quantizer in quantizers]

    mantissas = (torch.arange(2**16, dtype=torch.int32)[:, None] << 7) + torch.tensor([0, 1, 127])
    compiled = torch.compile(rounded, fullgraph=True)
    for exponent in (110, 122, 124, 125, 126, 127):
        x = (mantissas.int() | exponent << 23).view(torch.float32).view(-1, 1).expand(-1, 2).clone()
        x[:, 1] = 0.99  # so that exponents below are small in their block
        for fast, eager in zip(compiled(x), rounded(x), strict=True):
            np.testing.assert_array_equal(fast.numpy(), eager.numpy())


@pytest.mark.capability("B6")
def test_hand_computed_codes_of_scales():
    for (name, rounding), table in HAND_COMPUTED.items():
        assert [mx_code(amax, name, rounding) for amax, _ in table] == [code for _, code in table]
