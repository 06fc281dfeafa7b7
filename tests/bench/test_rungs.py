"""The section of `python -m bench study` about larger models."""

from __future__ import annotations

from typing import Any

from bench.quality import rungs, study, study_tables
from bench.quality.rungs import HALF
from bench.quality.study_tables import SCRATCH, SHARED


def row(recipe: str, seed: int, loss: float, design: str, ratio: int = 20) -> dict[str, Any]:
    return {
        "size": "3M", "ratio": ratio, "recipe": recipe, "seed": seed, "design": design,
        "cpu": "a CPU", "val_loss": loss, "parameters": 3_000_000,
        "curve": [[100, loss + 1], [200, loss]],
    }  # fmt: skip


def rows_of(gaps: list[float]) -> list[dict[str, Any]]:
    """A pair for each gap, in percent."""
    rows = []
    for seed, gap in enumerate(gaps):
        rows.append(row("fp32", seed, 2.0, SHARED))
        rows.append(row("nvfp4", seed, 2.0 * (1 + gap / 100), SCRATCH))
    return rows


def verdict_of(gaps: list[float]) -> str:
    predicted = {("3M", 20, "nvfp4", SCRATCH): (1.0, 2.0)}
    return next(
        line for line in "\n".join(rungs.section(rows_of(gaps), predicted)).splitlines()
        if "nvfp4" in line
    )  # fmt: skip


def test_a_cell_is_judged_by_the_prediction_made_before():
    assert verdict_of([]).endswith("| 1.00 to 2.00 |  | 0 | not trained yet |")
    assert verdict_of([1.5]).endswith("| +1.50 | 1 | cannot tell |")
    assert verdict_of([0.5, 1.5, 2.5]).endswith("| 3 | cannot tell |")
    assert verdict_of([0.9, 1.0, 0.95]).endswith("| agrees |")
    assert verdict_of([2.5, 2.6, 2.55]).endswith("| missed |")


def test_every_cell_of_a_larger_model_was_predicted():
    predicted = rungs.predictions()
    jobs = study.jobs([*study.RUNGS])
    cells = {
        (job.size, job.ratio, job.recipe, job.design) for job in jobs
        if job.recipe != study_tables.BASELINE
    }  # fmt: skip
    assert cells == predicted.keys()
    assert all(0 < low < high for low, high in predicted.values())
    low, high = predicted["1M", 20, "nvfp4", SCRATCH]
    assert predicted["1M", 20, "nvfp4", HALF] == (low / 2, high / 2)
    for design, share in rungs.SHARES.items():
        assert study.DESIGNS[design]["shared"] == 1 - share
