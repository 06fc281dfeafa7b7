"""The law of loss gaps, and the published gaps that come with it."""

from __future__ import annotations

import csv
import itertools
import math
from importlib import resources

import pytest

from fp8stack.analysis.forecast import law as laws
from fp8stack.analysis.forecast.published import published

LAW = laws.fitted()


def test_a_gap_is_its_formula_and_its_interval_adds_the_three_uncertainties():
    gap = LAW.gap(80.0, 0.1)
    mean = 0.1 * LAW.level * 4**LAW.exponent
    terms = (
        LAW.deviation,
        LAW.exponent_deviation * math.log(4),
        LAW.severity_deviation * math.log(0.1),
    )
    factor = math.exp(LAW.quantile * math.sqrt(sum(term**2 for term in terms)))
    assert (gap.mean, gap.low, gap.high) == pytest.approx((mean, mean / factor, mean * factor))


def test_gaps_are_flat_above_the_cap_and_intervals_go_on_widening():
    gaps = [LAW.gap(ratio, 1.0) for ratio in (LAW.cap, 1000.0, 10_000.0)]
    assert gaps[0].mean == pytest.approx(gaps[1].mean)
    assert gaps[0].high < gaps[1].high < gaps[2].high


def test_the_upper_end_grows_with_the_severity():
    ends = [LAW.gap(20.0, severity).high for severity in (0.01, 0.08, 0.3, 1.0, 3.0)]
    assert all(first < second for first, second in itertools.pairwise(ends))
    assert LAW.gap(20.0, 0.0).high == 0


def test_extra_tokens_bring_a_baseline_as_far_as_the_gap():
    """Against a numerical integral of the slope."""
    extra = LAW.extra_tokens(20.0, 1.0) / 100
    steps = 20_000
    width = math.log1p(extra) / steps
    ratios = (20 * math.exp((step + 0.5) * width) for step in range(steps))
    fall = sum(LAW.slope * (ratio / 20) ** -LAW.decline * width for ratio in ratios)
    assert fall == pytest.approx(math.log(1.01), rel=1e-6)
    assert LAW.extra_tokens(500.0, 20.0) == 900.0


def test_every_published_row_says_whether_and_why_it_is_used():
    file = resources.files("fp8stack.analysis.forecast").joinpath("published.csv")
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 581
    uses = {"gap", "forward", "backward", "severity", "check", "no"}
    assert all(row["use"] in uses and row["reason"] and row["source"] for row in rows)
    assert len(published()) == sum(row["use"] != "no" for row in rows)
    for gap in published():
        assert gap.training
        assert 0 < gap.share <= 1
        assert gap.noise > 0
    for row in rows:
        if row["use"] != "no" and row["baseline"] and row["loss"]:
            percent = 100 * (float(row["loss"]) / float(row["baseline"]) - 1)
            assert percent == pytest.approx(float(row["gap_percent"]), abs=0.01)
