"""Any quantizer's bytes and scales against numpy, block after block, and ml_dtypes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import MXFP8, NVFP4, extreme, uneven, with_specials
from fp8stack.common.formats import FORMATS, FormatName, ScaleFormat, ScaleRounding
from fp8stack.numerics import (
    Quantizer,
    RandomBits,
    amax,
    dequantize,
    quantize,
    round_to,
)
from fp8stack.numerics.cast import encode
from fp8stack.numerics.error import quantization_error
from tests.support.cases import case
from tests.support.oracles import (
    BITS,
    FLOAT_DTYPES,
    MAX,
    codes,
    decoded,
    nearest_codes,
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
    numbers,
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


def assert_made_by_hand(x: torch.Tensor, quantizer: Quantizer, dim: int, **options) -> None:
    """The bytes, scales and values of a matrix, against the loop over its blocks."""
    before = x.clone()
    generator = generator_of(quantizer)
    quantized = quantize(x, quantizer, dim, generator, **options)
    np.testing.assert_array_equal(to_numpy(x), to_numpy(before))
    source = to_numpy(x)
    overflow = min(float(torch.finfo(x.dtype).max), oracles.FLT_MAX)
    drawn = None if generator is None else lambda *shape: generator.bits(*shape).numpy()
    reference = oracles.quantize(source, quantizer, dim, overflow=overflow, bits=drawn)
    if quantizer.hadamard:
        source = oracles.hadamard(source, quantizer.hadamard, dim)

    assert (quantized.quantizer, quantized.dim, quantized.shape) == (quantizer, dim, x.shape)
    assert bool(quantized.has_nan) == bool(np.isnan(source).any())
    assert (quantized.has_nan.dtype, quantized.has_nan.shape) == (torch.bool, ())
    assert (quantized.amax.dtype, quantized.amax.shape) == (torch.float32, ())
    assert quantized.amax == amax(torch.from_numpy(source))
    length = source.shape[dim]
    np.testing.assert_array_equal(unpacked(quantized.data, quantizer, dim, length), reference.codes)

    if quantizer.per_tensor:
        assert (quantized.scales.shape, quantized.scales.dtype) == ((), torch.float32)
        assert quantized.scales == reference.stored.item()
    else:
        assert quantized.scales.shape == reference.stored.shape
        scales = quantized.scales
        stored = codes(scales) if quantizer.scale == "e8m0" else scales.float().numpy()
        np.testing.assert_array_equal(stored, reference.stored)
    with np.errstate(all="ignore"):
        spread = reference.out
        if quantizer.scale == "e4m3":
            spread = spread * np.float32(quantized.amax) * np.float32(1 / 2688)
        values = decoded(quantizer.format)[reference.codes] * spread
    back = dequantize(quantized)
    assert back.dtype == torch.float32
    np.testing.assert_array_equal(back.numpy(), values)


def test_every_format_scale_and_rounding_is_among_the_tested_quantizers():
    tested = EVERY.values()
    assert {q.format for q in tested} > set(get_args(FormatName))
    assert {q.scale for q in tested} == set(get_args(ScaleFormat))
    for name in get_args(FormatName):
        assert any(q.format == name and q.scale == "e8m0" for q in tested)
    rules = {q.scale_rounding for q in tested if q.scale == "e8m0"}
    assert rules == set(get_args(ScaleRounding))


@pytest.mark.parametrize("name", EVERY)
def test_any_matrix_equals_the_loop_over_its_blocks(name):
    """Tails, specials, ties and every magnitude of float32, in every dtype and as a view."""
    x, ties = with_specials(uneven(75, 140)), numbers(uneven(75, 140))
    of_float32 = (x, extreme(), extreme() * 2.0**-126)
    for matrix in (*of_float32, x.bfloat16(), x.half(), ties.half().T, ties.bfloat16()[::2, 1::3]):
        for dim in (0, 1):
            assert_made_by_hand(matrix, EVERY[name], dim)
    for fill in (0.0, -0.0, math.nan):
        assert_made_by_hand(torch.full((20, 40), fill), EVERY[name], 1)


def test_an_empty_matrix():
    for quantizer, shape in itertools.product(EVERY.values(), ((0, 32), (32, 0))):
        quantized = quantize(torch.ones(shape), quantizer, 1, generator_of(quantizer))
        assert quantized.data.numel() == 0
        assert (quantized.amax, bool(quantized.has_nan)) == (0, False)
        assert dequantize(quantized).shape == shape
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


# FP8 in blocks


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_blocks_is_made_as_by_hand(name, dtype):
    matrices = (with_specials(uneven(75, 140)).to(dtype), extreme().to(dtype), uneven(70, 133).T)
    for x, dim in itertools.product(matrices, (0, 1)):
        assert_made_by_hand(x, RULES[name], dim)


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


# Scales from outside


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_scale_may_be_given(stochastic):
    x = uneven(40, 70)
    scale = torch.tensor(448 / 3)
    for amax_ in ("current", "delayed"):
        quantizer = Quantizer(amax=amax_, rounding="stochastic" if stochastic else "nearest")
        quantized = quantize(x, quantizer, 1, DRAWN if stochastic else None, scale=scale)
        scaled = to_numpy(x) * np.float32(448 / 3)
        bits = DRAWN.bits(40, 70).numpy()
        expected = oracles.encode(scaled, "e4m3", bits if stochastic else None)
        np.testing.assert_array_equal(codes(quantized.data), expected)
        assert quantized.scales == np.float32(1) / np.float32(448 / 3)
        assert quantized.amax == x.abs().max()


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


@pytest.mark.parametrize(
    "names",
    [
        case(("hadamard row",), quick=True),
        case(("nvfp4 16x16", "hadamard row"), quick=False),
        case(("stochastic nvfp4",), quick=False),
    ],
)
def test_compiled_code_makes_the_same_bytes(names):
    # inductor's code for a CPU knows no float8_e8m0fnu.
    torch.compiler.reset()
    x = with_specials(uneven(75, 140))
    chosen = [EVERY[name] for name in names]

    def quantize_all(x: torch.Tensor, generator: RandomBits) -> list[torch.Tensor]:
        outputs = []
        for quantizer in chosen:
            quantized = quantize(x, quantizer, 1, generator if quantizer.stochastic else None)
            outputs += [
                quantized.data.view(torch.uint8),
                quantized.scales.float(),
                quantized.amax,
                dequantize(quantized),
            ]
        return outputs

    compiled = torch.compile(quantize_all, fullgraph=True)(x, DRAWN)
    for output, compiled_output in zip(quantize_all(x, DRAWN), compiled, strict=True):
        np.testing.assert_array_equal(output.numpy(), compiled_output.numpy())
