"""`python -m bench study`: its jobs, its tables of runs, and a tiny study, stopped half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fp8stack
from bench.cells import json_lines
from bench.quality import study, study_tables
from fp8stack.training.checkpoint import reader
from tests.support.small_loop import changed

ROOT = Path(study.__file__).parents[2]


def row(recipe: str, seed: int, loss: float | None, **more: Any) -> dict[str, Any]:
    usual = {
        "name": f"{recipe}-{seed}", "design": study_tables.SHARED, "size": "0.1M", "ratio": 2,
        "recipe": recipe, "seed": seed, "cpu": "a CPU", "parameters": 100, "tokens": 200,
        "val_loss": loss, "seconds": 1.0, "curve": [[1, 3.0], [2, 2.0], [3, 1.0]],
        "operand_errors": {} if recipe == "fp32" else {"input": 0.01, "weight": 0.001},
    }  # fmt: skip
    return usual | more


def law(parameters: int, tokens: int) -> float:
    return float(5.0 * parameters**-0.1 * tokens**-0.05)


def ladder(factor: float) -> list[dict[str, Any]]:
    """Runs whose fp32 losses follow a power law, and of a recipe that is `factor` above."""
    rows = []
    for size, parameters in (("0.1M", 100), ("0.3M", 300)):
        for ratio in (2, 8):
            loss = law(parameters, ratio * parameters)
            more = {"size": size, "ratio": ratio, "parameters": parameters}
            more["tokens"] = ratio * parameters
            for seed in range(3):
                rows.append(row("fp32", seed, loss, **more))
                rows.append(row("mxfp4", seed, loss * (factor + 0.001 * (seed - 1)), **more))
    return rows


def test_the_page_says_what_is_there_and_what_is_missing(tmp_path):
    rows = [*ladder(1.02), row("current", 0, None, name="lost")]
    page = study_tables.write(rows, tmp_path)
    assert "| mxfp4 | +2.00 ± 0.25 (3) |" in page
    assert "Not done: lost." in page
    assert "fp32 computes in fp32; recipes, where they do not quantize, in fp32." in page
    wide = study_tables._dtypes([*rows, row("mxfp8", 0, 2.0, compute_dtype="bf16")])
    assert wide.endswith("in bf16 or fp32.")
    assert "The loss falls as N^-0.100 here." in page
    assert json.loads((tmp_path / "study.json").read_text())["facts"]["runs"] == len(rows)
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert study_tables.write([], tmp_path)  # before the first run is done


@pytest.mark.full
def test_the_committed_runs_are_known_to_the_study():
    """A new key of recipes or models does not train them again."""
    planned = study.jobs([*study.SIZES, *study.RUNGS], Path("corpus"))
    by_name = {job.name: job for job in planned}
    rows = json_lines(ROOT / "bench" / "results" / "cpu" / "study.jsonl")
    assert len(rows) > 900
    assert [r["key"] for r in rows] == [by_name[r["name"]].content(r["cpu"]) for r in rows]


@pytest.mark.capability("D7")
def test_what_is_committed_says_that_eight_bits_cost_little():
    """Four bits in the forward pass cost most."""
    committed = json.loads((ROOT / "bench" / "results" / "cpu" / "study.json").read_text())
    cells = [cell for cell in committed["cells"] if cell["gap"]["samples"] >= 3]
    eight = [cell for cell in cells if cell["recipe"] in ("mxfp8", "rowwise", "block", "current")]
    assert len(eight) >= 4
    assert all(cell["gap"]["mean"] < 1.0 for cell in eight)
    ladder = [cell for cell in cells if cell["recipe"] in study.LADDER]
    for place in {(c["size"], c["ratio"]) for c in ladder if c["recipe"] == "nvfp4"}:
        cell_group = [cell for cell in ladder if (cell["size"], cell["ratio"]) == place]
        worst = max(cell_group, key=lambda cell: cell["gap"]["mean"])["recipe"]
        assert "fp4" in worst, place


@pytest.mark.parametrize(("recipe", "branches"), [("mxfp4", True), ("delayed", False)])
@pytest.mark.full
def test_a_run_begins_with_the_steps_that_it_shares(recipe, branches, tmp_path, monkeypatch):
    """The steps are trained once, in the float32 run. Delayed scaling begins before they end."""
    monkeypatch.setattr(study.Job, "steps", 12)
    keys = {"save_every": 3, "eval_every": 3, "telemetry_every": 3, "data": str(Path(__file__))}
    run, base = (study.Job(size=study.TINY, ratio=1, recipe=r, seed=0) for r in (recipe, "fp32"))
    assert (run.shared_steps, base.shared_steps) == (3, 3)
    (alone, shared) = (tmp_path / "alone", tmp_path / "shared")
    fp8stack.pretrain(
        out=str(shared / base.name), resume=study.beginning(base, shared),
        **base.keys | keys | {"keep_every": 3},
    )  # fmt: skip
    first = shared / base.name / "checkpoints/step-000003"
    assert study.beginning(run, shared) == (str(first) if branches else "auto")
    assert study.beginning(run, alone) == study.beginning(base, shared) == "auto"
    tensors = []
    for runs in (alone, shared):
        fp8stack.pretrain(
            out=str(runs / run.name), resume=study.beginning(run, runs), **run.keys | keys
        )
        assert study.beginning(run, runs) == "auto"
        tensors.append(reader.load(runs / run.name / "checkpoints/step-000012").tensors)
    for group in tensors[0]:
        assert changed(tensors[0][group], tensors[1][group]) == []
    figures = [study._figures(run, runs / run.name, "a CPU", 0, 1.0) for runs in (alone, shared)]
    assert figures[0] == figures[1]
