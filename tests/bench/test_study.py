"""`python -m bench study`: its jobs, its tables of runs, and a tiny study, stopped half-way."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp8stack
from bench import runner, timing_lock
from bench.cells import json_lines
from bench.quality import corpus, study, study_tables
from fp8stack.common.errors import UserError
from fp8stack.training.checkpoint import reader
from tests.support.run_folders import write_lines
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


def test_every_cell_has_its_gap_and_the_model_that_would_be_as_good():
    """A gap of 2 % where the loss falls as N^-0.1: (1.02)^(-10) of the parameters."""
    cells = study_tables.cells_of(ladder(1.02))
    assert len(cells) == 4
    for cell in cells:
        assert cell.gap.mean == pytest.approx(2.0)
        assert cell.gap.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
        assert cell.multiplier == pytest.approx(1.02**-10)
        assert cell.multiplier is not None
        assert cell.multiplier_range is not None
        low, high = cell.multiplier_range
        assert low < cell.multiplier < high
        assert cell.errors == {"input": pytest.approx(0.01), "weight": pytest.approx(0.001)}
    assert study_tables.loss_slope(ladder(1.0)[:2]) is None


def test_pairs_are_of_one_seed_on_one_kind_of_cpu():
    rows = [row("fp32", 0, 2.0), row("mxfp8", 0, 2.1), row("mxfp8", 1, 2.2)]
    rows += [row("fp32", 1, 2.0, cpu="another"), row("current", 0, None)]
    cells = study_tables.cells_of(rows)
    assert [(cell.recipe, cell.gap.samples) for cell in cells] == [("mxfp8", 1)]
    assert cells[0].gap.half_width is None


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


def test_the_designs_are_compared_by_the_spread_of_their_gaps():
    rows = []
    for seed in range(4):
        for design, spread in (("plain", 0.01), ("first tenth in fp32", 0.002)):
            loss = 2.0 * (1 + spread * (-1) ** seed)
            rows.append(row("current", seed, loss, design=design))
        rows.append(row("fp32", seed, 2.0, design="plain"))
    page = study_tables.page(
        [], rows, {"runs": 1, "hours of one core": 1, "machines": [], "not done": []}
    )
    sd = np.std([1, -1, 1, -1], ddof=1)
    assert f"| plain | 0.1M, 2 tokens | current | +0.00 ± {1.591 * sd:.2f} | {sd:.3f} | 4 |" in page
    assert (
        f"| first tenth in fp32 | 0.1M, 2 tokens | current | +0.00 ± 0.37 | {0.2 * sd:.3f} | 4 |"
        in page
    )
    assert "| mean of the last 3 evaluations | 0.1M, 2 tokens | current | +0.00 ± 0.00 |" in page


def test_pairs_that_differ_in_rounding_have_their_own_table():
    rows = []
    for seed, gap in enumerate((0.001, -0.001, 0.003)):
        for design, loss in (("plain", 2.0), (study_tables.AA, 2.0 * (1 + gap))):
            rows.append(row("fp32", seed, loss, design=design))
    text = "\n".join(study_tables.rounding(rows))
    assert "| 0.1M, 2 tokens | 0.2000 | 0.3000 | 3 |" in text
    assert study_tables.rounding(rows[:1]) == []


@pytest.mark.full
def test_jobs_cover_the_ladder_breadth_first_and_are_told_apart_by_their_content():
    jobs = study.jobs([*study.SIZES])
    contents = [job.content("a CPU") for job in jobs]
    assert len(set(contents)) == len(jobs) == len({job.name for job in jobs})
    assert contents[0] != jobs[0].content("another CPU")
    ladder = {
        (job.size, job.ratio, job.recipe) for job in jobs if job.design == study_tables.SHARED
    }
    assert len(ladder) == 2 * (2 * (1 + 14) + 10) + 7
    assert {job.steps for job in jobs if (job.size, job.ratio) == ("0.9M", 8)} == {7179}
    cell_jobs = [
        job for job in jobs if (job.size, job.ratio, job.design) == ("0.1M", 2, study_tables.SHARED)
    ]
    assert [job.seed for job in cell_jobs] == sorted(job.seed for job in cell_jobs)
    keys = next(job.keys for job in cell_jobs if job.recipe == "mxfp4")
    assert keys["phases"][0] == {"name": "shared", "recipe": "fp32", "until": 0.25}


@pytest.mark.full
def test_the_committed_runs_are_known_to_the_study():
    """A new key of recipes or models does not train them again."""
    planned = study.jobs([*study.SIZES, *study.RUNGS], Path("corpus"))
    by_name = {job.name: job for job in planned}
    rows = json_lines(ROOT / "bench" / "results" / "cpu" / "study.jsonl")
    assert len(rows) > 900
    assert [r["key"] for r in rows] == [by_name[r["name"]].content(r["cpu"]) for r in rows]


@pytest.mark.full
def test_pairs_of_another_kind_of_cpu_are_not_made_again():
    jobs = study.jobs(["0.1M"])
    by_name = {job.name: job for job in jobs}
    assert study.left_of(jobs, [], "here") == jobs

    def rows_of(*names: str) -> list[dict[str, str]]:
        return [{"key": by_name[name].content("there"), "cpu": "there"} for name in names]

    # A pair, half a pair, a float32 run alone; one of two designs that share a float32 run.
    rows = rows_of("0.1M-2-fp32-seed0", "0.1M-2-mxfp4-seed0", "0.1M-2-nvfp4-seed1")
    rows += rows_of("0.1M-1-fp32-seed0-plain", "0.1M-1-fp32-seed0-gradients-in-two-parts")
    rows += rows_of("0.1M-1-fp32-seed1-plain", "0.1M-8-fp32-seed0")
    rows += rows_of("0.1M-8-current-seed0-first-half-in-fp32")
    unneeded = {
        "0.1M-2-mxfp4-seed0", "0.1M-1-fp32-seed0-plain", "0.1M-1-fp32-seed0-gradients-in-two-parts",
        "0.1M-8-current-seed0-first-half-in-fp32",
    }  # fmt: skip
    remaining = study.left_of(jobs, rows, "here")
    assert remaining == [job for job in jobs if job.name not in unneeded]
    # If all pairs of a seed are done there, its float32 run is not needed here either.
    rows += rows_of(
        *(name for name in by_name if name.startswith("0.1M-2-") and name.endswith("seed0"))
    )
    unneeded |= {name for name in by_name if name.startswith("0.1M-2-") and name.endswith("seed0")}
    remaining = study.left_of(jobs, rows, "here")
    assert remaining == [job for job in jobs if job.name not in unneeded]


def test_errors_of_operands_are_means_without_the_first_step_that_was_sampled(tmp_path):
    rows = [
        {"step": step, "layer": "a", "operand": "input", "sqnr_db": db}
        for step, db in ((10, 0.0), (20, 20.0), (30, 30.0))
    ]
    write_lines(tmp_path / "t.jsonl", rows)
    assert study.operand_errors(tmp_path / "t.jsonl") == {"input": pytest.approx(0.0055)}


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


def command(out: Path, *words: str) -> list[str]:
    options = ["--tiny", "--workers", "1", "--out", str(out), "--runs", str(out / "runs"), *words]
    return [sys.executable, "-m", "bench", "study", *options]


@pytest.mark.capability("D11")
@pytest.mark.slow
def test_a_study_that_is_stopped_goes_on_where_it_was(tmp_path):
    tmpdir = tmp_path / "tmp"  # where no other process measures times
    tmpdir.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmpdir)}
    process = subprocess.Popen(command(tmp_path), cwd=ROOT, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    results, deadline = tmp_path / "study.jsonl", time.monotonic() + 600
    while not (results.exists() and results.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=600)
    assert "stopping: the same command goes on" in printed
    done = json_lines(results)
    assert 1 <= len(done) < 4
    with results.open("a") as file:
        file.write('{"key": "half a li')  # as a kill leaves it
    again = subprocess.run(command(tmp_path), cwd=ROOT, env=environment, text=True,
                           capture_output=True, timeout=600)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert f"{4 - len(done)} runs are to do, {len(done)} are there" in again.stdout
    rows = json_lines(results)
    assert sorted((result_row["recipe"], result_row["seed"]) for result_row in rows) == [
        ("fp32", 0), ("fp32", 1), ("mxfp4", 0), ("mxfp4", 1)
    ]  # fmt: skip
    assert "| mxfp4 | " in (tmp_path / "study.md").read_text()
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == [
        "tiny-1-fp32-seed0", "tiny-1-fp32-seed1",
    ]  # fmt: skip


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


def test_an_unknown_size_is_refused(capsys):
    with pytest.raises(UserError, match=r"--sizes 7B: there are 0.1M, 0.3M, 0.9M, 1M, 3M, 10M."):
        runner.run("study", ["--sizes", "7B", "--out", "/tmp"])


def test_who_measures_times_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(timing_lock, "PATH", tmp_path / "lock")
    assert not timing_lock.held_by_another()
    with timing_lock.timing(), timing_lock.timing():
        assert timing_lock.held_by_another()
    assert not timing_lock.held_by_another()


def test_the_corpus_is_one_package_to_the_byte(tmp_path):
    (tmp_path / corpus.NAME).write_text('{"sha256": "another"}')
    with pytest.raises(UserError, match=r"holds another corpus than linux-source-6\.1 "):
        corpus.require(tmp_path)
    (tmp_path / corpus.NAME).unlink()
    (tmp_path / f"{corpus.PACKAGE}_{corpus.VERSION}_all.deb").write_bytes(b"another")
    with pytest.raises(UserError, match="its SHA-256 is another one"):
        corpus.require(tmp_path)


def test_the_time_of_all_starts_of_a_run_counts(tmp_path):
    assert study._spent(tmp_path / "run", 2.0) == 2.0
    assert study._spent(tmp_path / "run", 0.5) == 2.5


def test_a_name_that_no_option_knows_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        runner.run("emulation", ["--parts", "steps"])
    assert "No part 'steps'" in capsys.readouterr().err
