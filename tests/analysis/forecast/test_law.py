"""The law of loss gaps."""

from __future__ import annotations

import math

import pytest

from fp8stack.analysis.forecast import law as laws

LAW = laws.fitted()


@pytest.mark.parametrize(
    ("parameters", "ratio", "exponent"),
    [(3e7, 80.0, 1.0), (2e8, 80.0, 1.0), (math.sqrt(2e8 * 1e9), 80.0, 0.5), (1e9, 80.0, 0.0),
     (8e9, 80.0, 0.0), (8e9, 5.0, 1.0), (3e7, 5.0, 1.0)],
)  # fmt: skip
def test_a_gap_is_its_formula_and_its_interval_adds_the_three_uncertainties(
    parameters, ratio, exponent
):
    gap = LAW.gap(parameters, ratio, 0.1)
    mean = 0.1 * LAW.level * (ratio / 20) ** (exponent * LAW.exponent)
    terms = (
        LAW.deviation,
        LAW.exponent_deviation * math.log(ratio / 20),
        LAW.severity_deviation * math.log(0.1),
    )
    factor = math.exp(LAW.quantile * math.sqrt(sum(term**2 for term in terms)))
    assert (gap.mean, gap.low, gap.high) == pytest.approx((mean, mean / factor, mean * factor))


def test_extra_tokens_bring_a_baseline_as_far_as_the_gap():
    """Against a numerical integral of the slope."""
    extra = LAW.extra_tokens(20.0, 1.0) / 100
    steps = 20_000
    width = math.log1p(extra) / steps
    ratios = (20 * math.exp((step + 0.5) * width) for step in range(steps))
    fall = sum(LAW.slope * (ratio / 20) ** -LAW.decline * width for ratio in ratios)
    assert fall == pytest.approx(math.log(1.01), rel=1e-6)
    assert LAW.extra_tokens(500.0, 20.0) == 900.0
