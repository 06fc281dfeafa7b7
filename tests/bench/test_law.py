"""`python -m bench law`: the fit, and a law that is known and found again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.cells import json_lines
from bench.quality import law
from fp8stack.analysis.forecast.law import Law, fitted

RESULTS = Path(law.__file__).parents[1] / "results" / "cpu"


@pytest.fixture(scope="module")
def gaps() -> law.Gaps:
    return law.study_gaps(json_lines(RESULTS / "study.jsonl"))


@pytest.fixture(scope="module")
def rows(gaps: law.Gaps) -> list[law.PublishedGap]:
    return law.published() + law.study_rows(gaps)


@pytest.fixture(scope="module")
def refitted(rows: law.Rows, gaps: law.Gaps) -> Law:
    return law.fit(rows, gaps)


def test_every_published_row_says_whether_and_why_it_is_used():
    rows = list(csv.DictReader(law.PUBLISHED.read_text(encoding="utf-8").splitlines()))
    uses = {"gap", "backward", "severity", "check", "no"}
    assert all(row["use"] in uses and row["reason"] and row["source"] for row in rows)
    used = [row for row in rows if row["use"] != "no"]
    assert len(law.published()) == len(used)
    for row in used:
        assert row["training"]
        assert 0 < float(row["share"]) <= 1
        assert float(row["noise_percent"]) > 0
        if row["baseline"] and row["loss"]:
            percent = 100 * (float(row["loss"]) / float(row["baseline"]) - 1)
            assert percent == pytest.approx(float(row["gap_percent"]), abs=0.01)


def test_the_law_that_comes_with_the_package_is_the_fit(refitted):
    shipped = fitted().model_dump()
    for name, value in refitted.model_dump().items():
        if isinstance(value, float):
            assert value == pytest.approx(shipped[name], rel=1e-4), name
    assert refitted.severities == pytest.approx(shipped["severities"], rel=1e-6)
    assert (refitted.sources, refitted.addresses) == (shipped["sources"], shipped["addresses"])


def row(ratio: float, percent: float) -> law.PublishedGap:
    rows = law.published()
    base = next(row for row in rows if (row.training, row.use) == (law.QUARTET, "gap"))
    return base._replace(ratio=ratio, percent=percent)


def test_a_known_growth_is_found_again():
    ratios = (10.0, 25.0, 100.0, 400.0, 800.0)
    exponent, cap = law.fit_growth([row(r, 2 * (min(r, 150.0) / 20) ** 0.3) for r in ratios])
    assert exponent == pytest.approx(0.3, rel=0.02)
    assert cap == pytest.approx(150.0, rel=0.02)


@pytest.mark.capability("D12")
def test_gaps_of_a_size_follow_from_the_other_sizes(rows):
    errors = law.size_errors(rows)
    assert len(errors) == 4
    assert all(growth < 0.08 < constant for growth, constant in errors.values())


@pytest.mark.full
def test_the_committed_page_is_the_fits_and_the_picture_is_drawn(rows, gaps, refitted):
    assert (RESULTS / "law.md").read_text(encoding="utf-8") == law.page(refitted, rows, gaps)
    assert law.figure(refitted, rows, gaps)
