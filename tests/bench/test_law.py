"""`python -m bench law`: the checks of the law, and a law that is known and found again."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.cells import json_lines
from bench.quality import law, law_fit
from fp8stack.analysis.forecast.law import Law, fitted
from fp8stack.analysis.forecast.published import PublishedGap, published

RESULTS = Path(law.__file__).parents[1] / "results" / "cpu"


@pytest.fixture(scope="module")
def gaps() -> law_fit.Gaps:
    return law_fit.study_gaps(json_lines(RESULTS / "study.jsonl"))


@pytest.fixture(scope="module")
def refitted(gaps: law_fit.Gaps) -> Law:
    return law_fit.fit(published(), gaps)


def test_the_law_that_comes_with_the_package_is_the_fit(refitted):
    shipped = fitted()
    for name, value in vars(refitted).items():
        if isinstance(value, float):
            assert value == pytest.approx(getattr(shipped, name), rel=1e-4), name
    assert refitted.severities == pytest.approx(shipped.severities, rel=1e-6)
    assert refitted.sources == shipped.sources


@pytest.mark.capability("D12")
def test_at_least_five_of_six_training_setups_are_in_the_interval_of_the_others(gaps, refitted):
    checks = law.sources_left_out(published(), gaps, refitted)
    assert len(checks) == 6
    assert sum(check.holds for check in checks) >= 5


def test_the_published_gaps_of_fp8_are_in_their_interval(refitted):
    checks = law.fp8_points(published(), refitted)
    assert len(checks) == 2
    assert all(check.holds for check in checks)


def test_gaps_at_200m_follow_from_30m():
    """Within 8 % for NVFP4; for all recipes in both passes it is a little more."""
    assert statistics.median(law.errors_at_200m(published(), law.SMALL, "nvidia")) <= 0.08
    assert statistics.median(law.errors_at_200m(published(), law.SMALL)) <= 0.085
    assert statistics.median(law.errors_at_200m(published(), law.LARGE)) <= 0.08


def test_the_gaps_of_nanochats_2b_follow_from_quartet_ii():
    errors = law.nanochat_errors(published())
    assert len(errors) == 4
    assert max(errors) <= 0.15


def test_the_committed_predictions_are_of_every_recipe_and_size():
    """They stay as they were before the models were trained, whatever the law becomes."""
    predictions = json.loads((RESULTS / law.PREDICTIONS).read_text())["predictions"]
    places = {(row["parameters"], row["recipe"], row["share_of_steps"]) for row in predictions}
    shares = {(recipe, share) for recipe, shares in law.LADDER.items() for share in shares}
    assert places == {(size, *pair) for size in (10**6, 3 * 10**6, 10**7) for pair in shares}
    assert all(0 < row["low"] < row["mean"] < row["high"] for row in predictions)


def test_predictions_are_in_proportion_to_the_share_of_the_steps():
    rows = law.predictions(fitted())["predictions"]
    by_place = {(r["parameters"], r["recipe"], r["share_of_steps"]): r["mean"] for r in rows}
    assert by_place[10**6, "mxfp8", 0.75] / by_place[10**6, "mxfp8", 0.9] == pytest.approx(
        0.75 / 0.9, rel=1e-2
    )


def row(ratio: float, percent: float, **changes: object) -> PublishedGap:
    base = next(row for row in published() if (row.training, row.use) == ("Quartet II", "gap"))
    return replace(base, ratio=ratio, percent=percent, **changes)  # type: ignore[arg-type]


def test_a_known_curve_is_found_again():
    curve = law_fit.Curve(0.3, 150.0, {"a": 2.0, "b": 0.5})
    rows = [
        row(ratio, curve.percent(recipe, ratio), recipe=recipe)
        for recipe in curve.levels
        for ratio in (10.0, 25.0, 100.0, 400.0, 800.0)
    ]
    again = law_fit.fit_curve(rows)
    assert again.exponent == pytest.approx(0.3, rel=0.02)
    assert again.cap == pytest.approx(150.0, rel=0.02)
    assert again.levels == pytest.approx(curve.levels, rel=0.01)


def test_the_spread_of_training_setups_is_found_again_without_their_noise():
    draw = np.random.default_rng(0)
    levels = {}
    for number in range(400):
        level = 1.7 * math.exp(0.3 * draw.normal())
        noise = 0.4 * level * (number % 2)
        levels[str(number)] = law_fit.Level(
            max(0.2, level + noise * draw.normal()), max(noise, 1e-3)
        )
    mean, deviation = law_fit.between(levels)
    assert mean == pytest.approx(1.7, rel=0.05)
    assert deviation == pytest.approx(0.3, rel=0.1)


def test_a_severity_is_the_ratio_of_gaps_and_a_source_counts_once():
    gaps = {
        ("0.1M", ratio, recipe): law_fit.Level(percent, 0.01)
        for ratio, nvfp4 in ((2, 0.4), (8, 2.0))
        for recipe, percent in (("nvfp4", nvfp4), ("mxfp8", 0.08 * nvfp4))
    }
    assert law_fit.study_severities(gaps)["mxfp8"] == pytest.approx(0.08)
    to = [row(20.0, 2.0), row(40.0, 3.0)]
    assert law_fit.relative([row(20.0, 1.0), row(40.0, 6.0)], to) == pytest.approx(1.0)


def test_the_page_tells_what_was_left_out_and_the_picture_is_drawn(gaps, refitted):
    page = law.page(refitted, published(), gaps)
    assert "5 of 6 are in their interval" in page
    for name in law.MARKERS:
        assert f"| {name} |" in page
    assert "| Llama 3 8B, C4, mxfp8 |" in page
    assert law.figure(refitted, published(), gaps)
    drawn = {(recipe, training) for recipe, training, *_ in law.points(published(), gaps)}
    assert {("nvfp4", "NVIDIA 12B"), ("mxfp4", "NVIDIA 8B"), ("mxfp8", law_fit.STUDY)} <= drawn
