"""`python -m bench law`: a law that is known is found again from simulated runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bench.quality import law, study_tables
from fp8stack.analysis.forecast.law import Law
from fp8stack.common.errors import UserError

TRUE = Law(
    forward=1.4, power=0.9, backward=0.12, deviation=0.12, parameters=(1e5, 9e5), ratio=(2, 8),
    largest=0.03, runs=100,
)  # fmt: skip


def cells(seed: int, count: int) -> list[law.Cell]:
    draw = np.random.default_rng(seed)
    drawn_cells = []
    for number in range(count):
        forward = 0.0 if number % 6 == 0 else float(10 ** draw.uniform(-3.5, -1.5))
        backward = float(10 ** draw.uniform(-3, -1.5))
        gap = TRUE.mean(forward, backward) * (1 + TRUE.deviation * draw.normal())
        error = 0.05 * gap
        drawn_cells.append(
            law.Cell(
                size="0.1M", ratio=8, recipe=law.FITTED[0], parameters=100_000, pairs=3,
                gap=gap + error * draw.normal(), error=error, forward=forward, backward=backward,
            )
        )  # fmt: skip
    return drawn_cells


def test_a_known_law_is_found_again_and_judged_as_it_is():
    fitted = law.fit(cells(0, 120))
    assert fitted.forward == pytest.approx(TRUE.forward, rel=0.35)
    assert fitted.power == pytest.approx(TRUE.power, rel=0.05)
    assert fitted.backward == pytest.approx(TRUE.backward, rel=0.15)
    assert fitted.deviation == pytest.approx(TRUE.deviation, rel=0.3)
    assert (fitted.parameters, fitted.ratio, fitted.runs) == ((100_000, 100_000), (8, 8), 360)
    judged = law.judge(fitted, cells(1, 400))
    assert judged.cells == judged.resolved == 400
    assert judged.median_error == pytest.approx(0.6745 * np.hypot(0.12, 0.05), rel=0.15)
    assert 0.86 < judged.covered < 0.95
    with pytest.raises(UserError, match="5 cells are too few for a law"):
        law.fit(cells(0, 5))


def runs() -> tuple[list[dict], list[dict]]:
    rows, measured = [], []
    for recipe, gap in (("fp32", 0.0), ("mxfp4", 0.04), ("block", 0.002)):
        for seed in range(4):
            rows.append({
                "design": study_tables.SHARED, "size": "0.1M", "ratio": 8, "recipe": recipe,
                "seed": seed, "cpu": "c", "parameters": 115_000,
                "val_loss": 1.5 + 0.1 * seed + gap * (1 + 0.1 * (-1) ** seed),
            })  # fmt: skip
        for name in ("a", "b"):
            place = {"name": name, "size": "0.1M", "ratio": 8, "recipe": recipe}
            measured.append(place | {"forward": gap / 2, "backward": 0.01})
    return rows, [row for row in measured if row["recipe"] != "fp32"]


def test_cells_are_means_over_pairs_and_models():
    by_recipe = {cell.recipe: cell for cell in law.cells_of(*runs())}
    assert by_recipe["mxfp4"].gap == pytest.approx(0.04)
    assert by_recipe["mxfp4"].forward == pytest.approx(0.02)
    assert (by_recipe["mxfp4"].fitted, by_recipe["block"].fitted) == (True, False)
    sum_of_squares = 0.004**2 * 4
    variances = [sum_of_squares / 3, sum_of_squares / 3 / 400]
    expected = ((sum_of_squares + 2 * np.mean(variances)) / 5 / 4) ** 0.5
    assert by_recipe["mxfp4"].error == pytest.approx(expected)


def test_the_page_tells_the_halves_apart():
    held_out = [law.Cell(**{**vars(cell), "size": law.LARGEST}) for cell in cells(2, 20)]
    page = law.page(TRUE, TRUE, cells(1, 30) + held_out)
    assert "| fitted | 30 | 30 |" in page
    assert "| held out | 20 | 20 |" in page
    assert f"| held out, {law.LARGEST} | 20 | 20 |" in page
    assert "gap = 1.400 KL^0.900 + 0.1200 e, within 12%" in page
    assert "are known less well than the law" not in page
    assert "90 % interval" not in page
    vague = [law.Cell(**{**vars(cell), "error": 10 * cell.error}) for cell in held_out]
    page = law.page(TRUE, TRUE, cells(1, 30) + vague)
    assert "Of 20 gaps held out, 20 are known less well than the law says them" in page
    assert "is therefore no test of the interval" in page
    short = [law.Cell(**{**vars(cell), "ratio": 2}) for cell in cells(3, 30)]
    page = law.page(TRUE, TRUE, cells(1, 400) + short)
    assert re.search(
        r"Fitted to 2 tokens per parameter alone, its 90 % interval holds (8[5-9]|9\d)% of the 400 "
        r"gaps at 8, the median error is \d%\.", page,
    )  # fmt: skip
    assert law.figure(TRUE, cells(1, 30))
