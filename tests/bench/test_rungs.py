"""The section of `python -m bench study` about larger models."""

from __future__ import annotations

from bench.quality import rungs, study, study_tables
from bench.quality.rungs import HALF
from bench.quality.study_tables import SCRATCH


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
