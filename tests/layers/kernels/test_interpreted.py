"""Kernels in Triton's interpreter, in one process for all, which takes seconds to start: what each
test module finds to differ from numpy, or from computing layer by layer."""

from __future__ import annotations

import pytest

from tests.support.triton_code import interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.full

WORK = (
    "tests.analysis.conform.conform_faults:interpreted_rows",
    "tests.layers.kernels.test_variants:interpreted_differences",
    "tests.layers.kernels.test_fused_casts:interpreted_differences",
    "tests.layers.kernels.test_weight_casts:interpreted_differences",
)
ALL = (
    "tests.analysis.conform.conform_faults:long_interpreted_rows",
    "tests.analysis.conform.conform_faults:interpreted_faults",
    "tests.layers.test_batched_casts:interpreted_differences",
)


@pytest.mark.parametrize("work", [WORK, pytest.param(ALL, marks=pytest.mark.slow)])
def test_the_interpreted_kernels_differ_in_nothing(work):
    assert interpreted(*work) == {function: [] for function in work}
