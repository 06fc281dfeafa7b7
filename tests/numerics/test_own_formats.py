"""Elements of formats of one's own, `eXmY`: every value, tie and limit against exact fractions."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fp8stack.common.formats import quantized_format
from fp8stack.numerics import AmaxHistory, Quantizer, quantize, round_to
from fp8stack.numerics.cast import encode, round_to_format
from tests.support.casts import WAYS, cast_by
from tests.support.oracles import OWN_FORMATS, values_by_definition


def nearest_code(x: float, name: str) -> int:
    """The code of the nearest value by exact fractions; ties to the even mantissa, or without
    mantissa bits to the larger power of two. It saturates."""
    values = values_by_definition(name)
    half = len(values) // 2
    finite = [Fraction(value) for value in values[:half] if math.isfinite(value)]
    if math.isnan(x):
        return 127 if half == 128 else half - 1
    sign = half if math.copysign(1, x) < 0 else 0
    if abs(x) >= finite[-1]:
        return sign + len(finite) - 1
    size = abs(Fraction(x))
    below = bisect_right(finite, size) - 1
    down, up = size - finite[below], finite[below + 1] - size
    odd = below > 0 if name.endswith("m0") else below % 2 == 1
    return sign + below + (up < down or (up == down and odd))


def inputs(name: str) -> torch.Tensor:
    """Every value and tie, their neighbours in float32, and what is beyond the format's range."""
    target = quantized_format(name)
    values = torch.tensor([target.decode(code) for code in range(target.max_code + 1)])
    ties = (values[1:] + values[:-1]) / 2
    largest, least = target.max, float(target.min_subnormal or 0)
    limits = [largest * factor for factor in (1.01, 1.25, 1.5, 2.0, 1e6)]
    limits += [least / 4, least * 0.75, 1e-45, 2.0**-126, math.inf, math.nan]
    near = torch.cat([values, ties])
    up = torch.nextafter(near, torch.full_like(near, math.inf))
    x = torch.cat([near, up, torch.nextafter(near, -up), torch.tensor(limits)])
    return torch.cat([x, -x])


@pytest.mark.capability("B1")
@pytest.mark.parametrize("name", OWN_FORMATS)
@pytest.mark.full
def test_every_value_tie_and_limit_rounds_as_exact_fractions_do(name: str) -> None:
    target, x = quantized_format(name), inputs(name)
    codes = [nearest_code(number, name) for number in x.tolist()]
    np.testing.assert_array_equal(encode(x, target).numpy(), codes)
    values = np.array(values_by_definition(name), np.float32)[codes]
    values[x.isnan().numpy()] = np.nan
    np.testing.assert_array_equal(round_to_format(x, target).numpy(), values)


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_random_rounding_goes_away_from_zero_by_the_exact_share_of_the_step(name: str) -> None:
    target = quantized_format(name)
    x = inputs(name)
    x = x[(x.abs() <= target.max) & ((x == 0) | (x.abs() > 2.0**-140))]
    finite = [Fraction(v) for v in values_by_definition(name)[: target.max_code + 1]]
    below = [bisect_right(finite, abs(Fraction(number))) - 1 for number in x.tolist()]
    thresholds, signs = [], x.signbit().numpy() * (1 << target.bits - 1)
    for number, code in zip(x.tolist(), below, strict=True):
        above = min(code + 1, target.max_code)
        step = finite[above] - finite[code] or Fraction(1)
        thresholds.append(math.ceil((abs(Fraction(number)) - finite[code]) / step * 2**32))
    limits = torch.tensor(thresholds)
    for bits, away in ((limits - 1, limits > 0), (limits, torch.zeros_like(limits))):
        drawn = encode(x, target, bits.clamp(min=0)).numpy()
        np.testing.assert_array_equal(drawn, np.array(below) + away.numpy() + signs)


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_in_powers_of_two_is_never_zero_nor_subnormal(way: str) -> None:
    """A maximum below 4 over float32's maximum is subnormal. With 2^-126 the largest saturate."""
    row = [torch.finfo(torch.float32).max, -(2.0**127), 2.0**126, 0.0]
    x = torch.tensor([row]).repeat(3, 8)
    for name, scaled in {"e1m6": (3.9375, -2.0, 1.0, 0.0), "e1m2": (3.5, -2.0, 1.0, 0.0)}.items():
        quantizer = Quantizer(format=name, block=(1, 32), scale="power_of_two")
        expected = np.array([scaled], np.float32).repeat(3, 0) * np.float32(2.0**126)
        assert (quantize(x, quantizer).scales == 2.0**126).all()
        with cast_by(way):
            np.testing.assert_array_equal(
                round_to(x, quantizer, 1).values.numpy(), np.tile(expected, 8)
            )


def test_delayed_scaling_brings_an_amax_to_the_maximum_of_ones_own_format() -> None:
    history = AmaxHistory({"x": "e3m4", "y": Quantizer(format="e2m5", amax="delayed", margin=1)})
    for slot in ("x", "y"):
        history.record(slot, torch.tensor(31.0))
    history.update()
    assert [history.scale(slot).item() for slot in ("x", "y")] == [0.5, np.float32(3.9375 / 2 / 31)]


def test_a_nan_is_reported_where_a_format_has_no_code_for_it() -> None:
    x = torch.tensor([[1.0, math.nan, math.inf, -math.inf] * 8])
    quantizer = Quantizer(format="e3m3", block=(1, 32), scale="e8m0")
    quantized = quantize(x, quantizer)
    assert bool(quantized.has_nan)
    largest = quantized_format("e3m3").max_code
    assert quantized.data[0, 1:4].tolist() == [largest, largest, largest | 1 << 6]
    assert round_to(x, quantizer, 1).values.isnan().tolist() == x.isnan().tolist()
    with_nan = quantize(x, replace(quantizer, format="e3m4"))
    assert (with_nan.data[0, 1].item(), bool(with_nan.has_nan)) == (0x7F, True)
