"""The references of `fp8stack conform` against ml_dtypes, and a matrix by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import extreme, fp32_values
from tests.support.oracles import MAX, decoded, every_value, nearest_codes


@pytest.mark.capability("B2")
@pytest.mark.parametrize("name", MAX)
def test_values_and_codes_are_those_of_ml_dtypes(name):
    grid = oracles.grid(name)
    np.testing.assert_array_equal(grid, decoded(name)[: len(grid)])
    assert grid[-1] == oracles.largest_of(name) == MAX[name]
    for x in (every_value(torch.bfloat16).float(), fp32_values(3).view(-1), extreme().view(-1)):
        for factor in (1.0, 2.0**-9, 2.0**40):
            scaled = (x * factor).numpy()
            np.testing.assert_array_equal(oracles.encode(scaled, name), nearest_codes(scaled, name))
    np.testing.assert_array_equal(oracles.decode(np.arange(len(grid)), name), grid)


def test_random_rounding_is_that_of_a_table_of_thirds():
    x = np.full(3, 1 + 0.125 / 4, np.float32)  # a quarter of the way from 1 to 1.125
    bits = np.array([0, 2**30 - 1, 2**30])
    np.testing.assert_array_equal(oracles.encode(x, "e4m3", bits), [0x39, 0x39, 0x38])
    np.testing.assert_array_equal(oracles.encode(-x, "e4m3", bits), [0xB9, 0xB9, 0xB8])
